"""What is found out about pictures: the right classes, the right mixes, and what to say where nothing can be found."""

import pytest
import timm
import torch
from PIL import Image

import alltokens as at
from alltokens.data.scenes import SCENE_CLASSES, render_scenes
from alltokens.data.transforms import EvalTransform
from alltokens.explain import Explainer, explain, open_subject
from alltokens.explain.findings import class_number, draw_plan, follow_mix, looks, measured_error, patch_size, resized
from alltokens.explain.pictures import NamedPictures
from alltokens.explain.subject import Subject
from tests.explain.test_maps import lvvit, swin, vit

NAMES = ("cat", "dog", "house", "tree", "7")


def subject_of(net, size=16, names=NAMES, name="tiny"):
    return Subject(name, net.eval(), EvalTransform(size, crop_fraction=1.0), names, None)


@pytest.fixture
def folder(tmp_path):
    """Five pictures in two class folders."""
    for index, pixels in enumerate(render_scenes(5, 24).pictures):
        path = tmp_path / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_maps_are_of_the_surest_classes_whatever_the_batch(images):
    subject = subject_of(lvvit(dense=True))
    found, undefined = looks(subject, images, batch=2)
    assert undefined == {}
    explainer = Explainer(subject.net, torch.float64)
    probabilities = explainer.probabilities(images)
    for at_, look in enumerate(found):
        surest = probabilities[at_].topk(2)
        assert look.classes == surest.indices.tolist()
        assert look.probabilities == pytest.approx(surest.values.tolist(), rel=1e-5)
        assert (look.guess, look.guess_probability) == (look.classes[0], look.probabilities[0])
        assert {method: len(heat) for method, heat in look.heats.items()} == {
            "attribution": 2,
            "rollout": 1,
            "class_attention": 1,
            "token_heat": 2,
        }
        second = torch.tensor([look.classes[1]])
        alone = explainer.heat(images[at_ : at_ + 1], second, "attribution").float()
        torch.testing.assert_close(look.heats["attribution"][1:], alone)


def test_classes_are_wanted_by_name_or_number(images):
    subject = subject_of(vit())
    found, _ = looks(subject, images, classes=["house", "0"], methods=["attribution"])
    assert [look.classes for look in found] == [[2, 0]] * 3
    assert list(found[0].heats) == ["attribution"]
    assert class_number(subject, "7") == 4  # a name goes before a number
    with pytest.raises(at.UserError, match=r"unknown class 'hose'. Did you mean 'house'.*from 0 to 4"):
        class_number(subject, "hose")
    with pytest.raises(at.UserError, match="only knows numbers, from 0 to 4"):
        class_number(subject._replace(class_names=()), "house")


def test_everybody_is_mixed_with_the_next_one_on_the_models_own_patches(images):
    subject = subject_of(vit())
    assert patch_size(subject) == 4
    for mixer in ("cutmix", "mixup", "random", "block", "mixtoken"):
        plan = draw_plan(subject, 3, mixer, seed=5)
        assert plan.partner.tolist() == [1, 2, 0]
        assert torch.equal(plan.mask, draw_plan(subject, 3, mixer, seed=5).mask)
        if mixer in ("random", "block", "mixtoken"):
            assert set(plan.token_share((4, 4)).unique().tolist()) <= {0, 1}
    with pytest.raises(at.UserError, match="at least two pictures"):
        draw_plan(subject, 1)
    with pytest.raises(at.UserError, match=r"unknown mixer 'cutmx'. Did you mean 'cutmix'"):
        draw_plan(subject, 2, "cutmx")


def test_a_mix_is_the_same_for_models_of_another_input_size(images):
    small, large = subject_of(vit()), subject_of(swin(), 40)
    plan = draw_plan(small, 3, alpha=4.0)
    found = follow_mix(large, torch.randn(3, 3, 40, 40), plan)
    assert found.plan.image_size == (40, 40)
    torch.testing.assert_close(found.plan.share, plan.share)
    assert found.followed.grid == (10, 10)
    assert found.followed.token_shares.shape == (3, 5, 5)
    torch.testing.assert_close(found.ratios["TL-Align"][-1], found.followed.share)
    assert "TransMix" not in found.ratios  # it has no class token
    assert resized(plan, (16, 16)) is plan


def test_the_error_is_that_of_plain_following(folder):
    subject = subject_of(vit())
    pictures = [one.picture for one in NamedPictures([folder]).some(5)]
    found = measured_error(subject, pictures, draws=2, seed=3, batch=2)  # 2, 2, 1: the last one joins the others
    assert (found.pictures, found.draws) == (5, 2)
    aligner = at.TLAlign(subject.net)
    errors = []
    for draw in range(2):
        generator = torch.Generator().manual_seed(3 + draw)
        squares = []
        for batch in (pictures[:2], pictures[2:]):
            batch = subject.images(batch)
            plan = at.draw_cutmix(len(batch), 16, per_sample=True, generator=generator)
            plan = at.MixPlan(torch.arange(1, len(batch) + 1) % len(batch), plan.mask)
            with aligner.follow(plan), torch.no_grad():
                subject.net(at.mix_images(batch, plan))
            squares.append((aligner.share - plan.share) ** 2)
        errors.append(torch.cat(squares).mean().sqrt().item())
    aligner.detach()
    assert errors[0] != errors[1]
    assert found.rmse == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert found.spread == pytest.approx(abs(errors[0] - errors[1]) / 2**0.5, rel=1e-4)


def test_pictures_are_files_folders_and_scenes(folder):
    found = NamedPictures([folder / "dog" / "1.png", folder, "scenes"], NAMES)
    assert len(found) == 1 + 5 + 64
    assert (found[0].name, found[0].label, found[0].picture.size) == ("1.png", "dog", (24, 24))
    assert (found[1].name, found[1].label) == ("cat/0.png", "cat")
    assert found[6].label in SCENE_CLASSES
    assert NamedPictures([folder])[0].label == ""  # nobody says that folders are classes
    some = found.some(4)
    assert [one.name for one in some[:2]] == ["1.png", "cat/0.png"]
    assert len(some) == 4
    assert [one.name for one in NamedPictures([folder]).some(9)] == [f"{c}/{i}.png" for c, i in
        (("cat", 0), ("cat", 2), ("cat", 4), ("dog", 1), ("dog", 3))]  # fmt: skip
    for wrong, says in (
        (["no.jpg"], "no picture no.jpg"),
        ([], "which pictures"),
        ([folder / "x.png"], "x.png"),
    ):
        with pytest.raises(at.UserError, match=says):
            NamedPictures(wrong)
    (folder / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(at.UserError, match=r"broken\.jpg: not a readable picture"):
        NamedPictures([folder / "broken.jpg"])[0]


def test_models_by_name(tmp_path):
    options = {"patch_size": 4, "img_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    subject = open_subject("vit_tiny_patch16_224@random", options=options)
    assert subject.image_size == (16, 16)
    again = open_subject("vit_tiny_patch16_224@random", options=options)
    assert torch.equal(subject.net.head.weight, again.net.head.weight)
    trained = vit(depth=2)
    torch.save(trained.state_dict(), tmp_path / "w.pth")
    given = open_subject(f"vit_tiny_patch16_224@{tmp_path / 'w.pth'}", options=options)
    assert torch.equal(given.net.head.weight, trained.head.weight)
    assert open_subject("vit_tiny_patch16_224@random").class_names[1] == "goldfish"
    for wrong, says in (
        (str(tmp_path), "no run"),
        ("vit_tinny@random", "unknown model 'vit_tinny'"),
        ("vit_tinny", "unknown model 'vit_tinny'"),
    ):
        with pytest.raises(at.UserError, match=says):
            open_subject(wrong)


def test_one_picture_has_maps_and_presence_but_no_mix(folder):
    found = explain([subject_of(vit())], [folder / "cat" / "0.png"])
    assert found.parts == ("maps", "presence")
    assert found.models[0].mixed is None
    assert [tuple(layer.shape) for layer in found.models[0].presence] == [(1, 4, 4)] * 3
    with pytest.raises(at.UserError, match="mixers: mixing wants at least two pictures"):
        explain([subject_of(vit())], [folder / "cat" / "0.png"], parts=["maps", "mixers"])


def test_a_model_that_cannot_be_followed_says_why_and_the_others_are_shown(folder):
    stranger = subject_of(timm.create_model("resnet10t", num_classes=5), 32, name="resnet")
    found = explain([subject_of(vit()), stranger], [folder], most=3, draws=1)
    assert found.models[0].mixed is not None
    assert found.models[0].error is not None
    assert found.models[1].mixed is None
    assert found.models[1].error is None
    assert "cannot be followed" in found.models[1].not_followed
    assert set(found.models[1].undefined) == {"attribution", "rollout", "class_attention", "token_heat"}
    assert list(found.gallery) == ["mixup", "cutmix", "mixtoken", "random", "block"]
    with pytest.raises(at.UnsupportedModel, match="rollout is not defined"):
        explain([stranger], [folder], parts=["maps"], methods=["rollout"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parts": ["map"]}, "unknown part 'map'. Did you mean 'maps'"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"most": 0}, "most must be at least 1"),
        ({"top": 0}, "top must be at least 1"),
        ({"methods": ["roll"]}, "unknown method 'roll'"),
    ],
)
def test_mistakes_are_named(folder, options, says):
    with pytest.raises(at.UserError, match=says):
        explain([subject_of(vit())], [folder], **options)
