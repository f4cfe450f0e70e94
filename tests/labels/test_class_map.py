"""Which of the annotator's classes a class folder is."""

import pytest
import timm
import torch

from alltokens.errors import UserError
from alltokens.labels.class_map import AnnotatorClasses, match_classes, own_classes, resolve_class_map, spelled_out

IMAGENETTE = {
    "n01440764": 0, "n02102040": 217, "n02979186": 482, "n03000684": 491, "n03028079": 497,
    "n03394916": 566, "n03417042": 569, "n03425413": 571, "n03445777": 574, "n03888257": 701,
}  # fmt: skip
ENGLISH = (
    "tench", "English springer", "cassette player", "chain saw", "church",
    "French_horn", "garbage-truck", "gas pump", "golf ball", "parachute",
)  # fmt: skip


@pytest.fixture(scope="module")
def imagenet():
    return AnnotatorClasses.of(timm.create_model("test_resnet"))


def test_wordnet_ids_english_words_and_numbered_folders_are_found(imagenet):
    expected = tuple((at,) for at in IMAGENETTE.values())
    assert match_classes(tuple(IMAGENETTE), imagenet).members == expected
    assert match_classes(ENGLISH, imagenet).members == expected
    numbered = [f"{at:03}.{name}" for at, name in enumerate(ENGLISH)]
    assert match_classes(numbered, imagenet).members == expected
    both = [f"{wnid}_{name}" for wnid, name in zip(IMAGENETTE, ENGLISH, strict=True)]
    assert match_classes(both, imagenet).members == expected
    assert str(match_classes(("n01440764", "tench dog n02102040"), imagenet)) == "n01440764=0, tench dog n02102040=217"


def test_all_of_imagenet_is_its_own_map_and_other_orders_are_not(imagenet):
    assert match_classes(imagenet.names, imagenet).own
    turned = match_classes(imagenet.names[::-1], imagenet)
    assert not turned.own
    assert turned.members[0] == (999,)


def test_the_usual_word_goes_before_rarer_ones_and_doubt_is_an_error(imagenet):
    (tub,) = match_classes(("tub",), imagenet).members[0]
    assert imagenet.synonyms[tub][0] == "tub"  # and not the bathtub, which is called so too
    with pytest.raises(UserError, match=r"'crane' may be several.*n02012849.*n03126707"):
        match_classes(("crane", "tench"), imagenet)
    with pytest.raises(UserError, match=r"no class called 'abyssinian', 'cat' and.*--class-map own|no class called"):
        match_classes(("abyssinian", "cat", "tench"), imagenet)
    with pytest.raises(UserError, match="'tench' and 'n01440764' would both be the annotator's class 0 n01440764"):
        match_classes(("tench", "n01440764"), imagenet)


def test_a_written_map_takes_numbers_names_and_several(imagenet):
    written = {"fish": ["tench", 1], "dog": "n02102040", "church": 497}
    mapped = spelled_out(written, imagenet, ("church", "dog", "fish"))
    assert mapped.members == ((497,), (217,), (0, 1))
    assert spelled_out(written, imagenet).names == ("fish", "dog", "church")
    for wrong, message in (
        ({"fish": 1}, "says nothing of 'church', 'dog'"),
        ({**written, "cat": 3}, "unknown class in the class map 'cat'"),
        ({**written, "dog": "wolfhund"}, "'wolfhund' is no class of it"),
        ({**written, "dog": "crane"}, "several of the annotator's classes"),
        ({**written, "dog": 1000}, "0 to 999, got 1000"),
        ({**written, "dog": []}, "one class at least"),
        ({**written, "dog": True}, "expected a number or a name"),
        ({**written, "dog": 1}, "'dog' and 'fish' would both be"),
    ):
        with pytest.raises(UserError, match=message):
            spelled_out(wrong, imagenet, ("church", "dog", "fish"))


def test_merging_keeps_scores_and_adds_probabilities():
    scores = torch.randn(2, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    annotator = AnnotatorClasses(6, tuple("abcdef"), ((),) * 6)
    single = match_classes(("e", "b"), annotator).merging()(scores)
    assert torch.equal(single, scores[:, [4, 1]])
    several = spelled_out({"first": ["a", "c", "d"], "second": "f"}, annotator).merging()(scores)
    expected = torch.stack([scores[:, [0, 2, 3]].exp().sum(1).log(), scores[:, 5]], 1)
    torch.testing.assert_close(several, expected)
    assert torch.equal(own_classes(annotator).merging()(scores), scores)


def test_auto_wants_classes_and_names(imagenet):
    assert resolve_class_map(None, imagenet, ()).own
    assert not resolve_class_map(None, imagenet, ("tench", "church")).own
    assert resolve_class_map("own", imagenet, ("tench", "church")).names == imagenet.names
    with pytest.raises(UserError, match="no classes"):
        resolve_class_map("auto", imagenet, ())
    with pytest.raises(UserError, match="have no names"):
        match_classes(("a", "b"), AnnotatorClasses.of(timm.create_model("test_resnet", num_classes=7)))
    with pytest.raises(UserError, match=r"3 class names for an annotator of 1000"):
        AnnotatorClasses.of(timm.create_model("test_resnet"), ("a", "b", "c"))
