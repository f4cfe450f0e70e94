"""Annotation: what is stored is what the annotator said, however it is run, stopped and taken up again."""

import multiprocessing
import random
import time

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from alltokens.data.scenes import render_scenes
from alltokens.data.sources import open_scenes, open_source
from alltokens.errors import UserError
from alltokens.labels.annotate import annotate
from alltokens.labels.annotator import PlaceScores, Preprocessing
from alltokens.labels.class_map import AnnotatorClasses, ClassMap, own_classes
from alltokens.labels.inspect import cell_probabilities, summarise
from alltokens.labels.labeller import Labeller, top_labels
from alltokens.labels.sink import NOT_FINITE, read_failures
from alltokens.labels.store import LabelStore, verify_store
from tests.labels.tiny_annotator import (
    CLASSES,
    OPTIONS,
    Brittle,
    annotate_and_tell,
    annotate_together,
    write_pictures,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "store"
    return annotate(Brittle(), pictures, out, workers=0, **OPTIONS)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def seen(path, size=32):
    """What a network sees of a picture, (1, 3, S, S), made apart from the code under test."""
    picture = Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@torch.no_grad()
def dense_scores(model, path, size=32):
    return PlaceScores(model.eval())(seen(path, size))[0]  # (K, h, w)


def holds(label_map, scores, atol=2e-3):
    """Whether a map holds these scores (L, h, w): the best ones, and the log-sum-exp of the rest."""
    kept = label_map.ids.shape[0]
    best, ids = scores.sort(0, descending=True)
    torch.testing.assert_close(label_map.scores.float(), best[:kept], atol=atol, rtol=atol)
    torch.testing.assert_close(scores.gather(0, label_map.ids.long()), best[:kept], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(label_map.tail.float(), best[kept:].logsumexp(0), atol=atol, rtol=atol)
    assert (label_map.ids == ids[:kept]).float().mean() > 0.95


def test_maps_hold_the_best_scores_and_the_rest_of_every_readable_picture(pictures, undisturbed):
    source = open_source(pictures)
    failed = read_failures(undisturbed.path)
    assert len(source) == 43 == len(undisturbed) + len(failed)
    assert list(undisturbed.keys()) == [key for key in source.keys if key not in failed]
    assert undisturbed.manifest.class_names == CLASSES
    assert undisturbed.manifest.grid == (4, 4)
    model = Brittle()
    for key in list(undisturbed.keys())[::7]:
        holds(undisturbed[key], dense_scores(model, pictures / key))
    assert verify_store(undisturbed.path) == []


def test_failures_are_listed_with_their_reasons(pictures, undisturbed):
    keys = list(open_source(pictures).keys)
    failed = read_failures(undisturbed.path)
    assert set(failed) == {keys[5], keys[14], *keys[24:32]}
    assert failed[keys[5]] == "not a readable picture (of no known format)"
    assert {failed[key] for key in (keys[14], *keys[24:32])} == {NOT_FINITE}


def test_top_labels_are_exact_against_the_dense_softmax():
    scores = torch.randn(3, 21, 4, 5, generator=torch.Generator().manual_seed(0)) * 4
    ids, best, tail, usable = top_labels(scores, 5)
    assert usable.all()
    total = torch.logaddexp(best.logsumexp(1), tail)
    torch.testing.assert_close(total, scores.logsumexp(1))
    torch.testing.assert_close((best - total[:, None]).exp(), scores.softmax(1).gather(1, ids.long()))
    assert (best[:, :-1] >= best[:, 1:]).all()
    assert len({tuple(cell) for cell in ids[0, :, 0].T.tolist()}) == 5
    everything = top_labels(scores, 21)
    assert (everything.tail == -torch.inf).all()
    assert everything.usable.all()


@pytest.mark.parametrize(("value", "place"), [(torch.nan, 20), (torch.inf, 3), (70_000.0, 7), (-torch.inf, None)])
def test_scores_that_no_map_can_hold_are_seen(value, place):
    scores = torch.randn(3, 21, 2, 2, generator=torch.Generator().manual_seed(0))
    if place is None:
        scores[1] = value
    else:
        scores[1, place, 1, 0] = value
    assert top_labels(scores, 5).usable.tolist() == [True, False, True]


def labeller(model, **options):
    classes = options.pop("classes", own_classes(AnnotatorClasses.of(model)))
    return Labeller(PlaceScores(model.eval()), classes, mean=MEAN, std=STD, kept=3, **options)


@torch.no_grad()
def test_flips_and_scales_average_raw_scores():
    model = Brittle()
    small, large = (
        torch.randint(0, 200, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        for size in (32, 48)
    )

    def plain(pixels):
        return labeller(model).scores([pixels])

    flipped = labeller(model, flip=True).scores([small])
    torch.testing.assert_close(flipped, (plain(small) + plain(small.flip(3)).flip(3)) / 2)
    torch.testing.assert_close(labeller(model, flip=True).scores([small.flip(3)]), flipped.flip(3))
    both = labeller(model).scores([small, large])
    resized = torch.nn.functional.interpolate(plain(large), (4, 4), mode="bilinear", align_corners=False)
    torch.testing.assert_close(both, (plain(small) + resized) / 2)
    merged = labeller(model, classes=ClassMap(((3,), (1, 2)), ("a", "b"))).scores([small])
    torch.testing.assert_close(merged[:, 1], plain(small)[:, 1:3].logsumexp(1))


def test_the_class_map_decides_what_is_kept_and_what_the_tail_is(pictures, tmp_path):
    written = {name: (at + 3) % 10 for at, name in enumerate(CLASSES[:9])} | {CLASSES[9]: ["class2"]}
    store = annotate(Brittle(), pictures, tmp_path / "s", class_map=written, workers=0, **OPTIONS)
    key = next(store.keys())
    holds(store[key], dense_scores(Brittle(), pictures / key)[[(at + 3) % 10 for at in range(10)]])
    assert store.manifest.transform["classes"].startswith("class0=3, class1=4")
    # Only mapped classes count, in the tail too.
    source = open_source(pictures)
    few = [(pictures / key, key) for key in list(source.keys)[:4]]
    store = annotate(Brittle(), few, tmp_path / "few", class_map={"x": 7, "y": 1, "z": 4, "w": 5}, **OPTIONS)
    holds(store[few[0][1]], dense_scores(Brittle(), few[0][0])[[7, 1, 4, 5]])
    assert store.manifest.class_names == ("x", "y", "z", "w")
    store = annotate(Brittle(), few, tmp_path / "own", **OPTIONS)
    assert store.manifest.transform["classes"] == "own"
    holds(store[few[1][1]], dense_scores(Brittle(), few[1][0]))


def test_a_stream_of_pictures_or_bytes_a_tar_and_workers_all_give_the_same(pictures, undisturbed, tmp_path):
    keys = list(open_source(pictures).keys)

    def stream():
        for at, key in enumerate(keys):
            path = pictures / key
            yield (path if at == 5 else Image.open(path) if at % 3 else path.read_bytes()), key

    store = annotate(Brittle(), stream(), tmp_path / "stream", **OPTIONS)
    assert files(store.path) == files(undisturbed.path)
    store = annotate(Brittle(), pictures, tmp_path / "workers", workers=2, **OPTIONS)
    assert files(store.path) == files(undisturbed.path)
    with pytest.raises(UserError, match=r"came twice|already"):
        twice = [
            (pictures / keys[0], "same"),
            *((pictures / key, key) for key in keys[:5]),
            (pictures / keys[6], "same"),
        ]
        annotate(Brittle(), twice, tmp_path / "twice", **OPTIONS)


def test_pictures_are_squashed_or_cropped_as_published(tmp_path):
    """A wide picture whose right half is red: squashed, half of the map sees red; its middle is half of each."""
    wide = Image.new("RGB", (96, 32), (0, 0, 200))
    wide.paste((250, 0, 0), (48, 0, 96, 32))
    wide.paste((0, 200, 0), (0, 0, 32, 32))
    model = Brittle()
    whole = annotate(model, [(wide, "wide")], tmp_path / "whole", **OPTIONS)["wide"]
    wide.save(tmp_path / "wide.png")
    holds(whole, dense_scores(model, tmp_path / "wide.png"))
    middle = annotate(model, [(wide, "wide")], tmp_path / "middle", official_center_crop=True, **OPTIONS)
    wide.crop((32, 0, 64, 32)).save(tmp_path / "middle.png")
    holds(middle["wide"], dense_scores(model, tmp_path / "middle.png"))
    assert middle.manifest.transform["picture"] == "center crop (official)"
    with pytest.raises(UserError, match="center crop"):
        annotate(model, [(wide, "wide")], tmp_path / "middle", **OPTIONS)


def test_one_picture_other_scales_and_a_model_that_stays_as_it_was(tmp_path):
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **options)
    model.blocks[0].eval()
    one = [(Image.new("RGB", (40, 30), (10, 200, 90)), "one")]
    store = annotate(
        model, one, tmp_path / "one", scales=(1, 1.6), flip=True, form="packed", kept=9,
        preprocessing=Preprocessing(32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "bilinear"), annotator="mine",
    )  # fmt: skip
    assert [model.training, model.blocks[0].training, model.blocks[1].training] == [True, False, True]
    assert (len(store), store.manifest.grid, store.manifest.kept) == (1, (4, 4), 5)  # all of five classes
    assert (store["one"].tail == -torch.inf).all()
    assert store.manifest.transform["image_size"] == "32 48"
    assert (store.manifest.annotator, store.manifest.transform["std"]) == ("mine", "0.25 0.25 0.25")
    rigid = timm.create_model("vit_tiny_patch16_224", **options)
    with pytest.raises(UserError, match=r"cannot annotate pictures of 48 px.*dynamic_img_size"):
        annotate(rigid, one, tmp_path / "rigid", image_size=32, scales=(1, 1.6))
    assert not (tmp_path / "rigid").exists()


def test_wrong_wishes_and_hopeless_pictures(pictures, tmp_path):
    for options, message in (
        ({"kept": 0}, "must be 1 or more"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"scales": ()}, "scales must be"),
        ({"class_map": "auto2"}, "unknown class map"),
        ({"split": "train"}, "has no split"),
    ):
        with pytest.raises(UserError, match=message):
            annotate(Brittle(), pictures, tmp_path / "x", **{**OPTIONS, **options})
    with pytest.raises(UserError, match="not one of 1 pictures could be annotated; the first: a: not a readable"):
        annotate(Brittle(), [(b"none", "a")], tmp_path / "none", **OPTIONS)
    with pytest.raises(UserError, match="there were none"):
        annotate(Brittle(), [], tmp_path / "nothing", **OPTIONS)


def test_a_finished_store_is_given_back_and_other_settings_are_refused(pictures, undisturbed):
    before = files(undisturbed.path)
    assert len(annotate(Brittle(), pictures, undisturbed.path, **OPTIONS)) == 33
    with pytest.raises(UserError, match=r"kept 3, now 2"):
        annotate(Brittle(), pictures, undisturbed.path, **{**OPTIONS, "kept": 2})
    other = Brittle()
    with torch.no_grad():
        other.net.fc.bias += 1
    with pytest.raises(UserError, match="annotator_hash"):
        annotate(other, pictures, undisturbed.path, **OPTIONS)
    with pytest.raises(UserError, match=r"label store with transform\.flip 'off', now 'averaged'\. Choose"):
        annotate(Brittle(), pictures, undisturbed.path, **{**OPTIONS, "flip": True})
    assert files(undisturbed.path) == before


def test_an_exception_in_the_middle_leaves_whole_shards_to_go_on_from(pictures, undisturbed, tmp_path):
    def stop(done, total):
        assert total == 43
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        annotate(Brittle(), pictures, tmp_path / "s", workers=0, progress=stop, **OPTIONS)
    assert not (tmp_path / "s" / "manifest.json").exists()
    with pytest.raises(UserError, match="was begun with kept 3, now 4"):
        annotate(Brittle(), pictures, tmp_path / "s", workers=0, **{**OPTIONS, "kept": 4})
    calls = []
    annotate(Brittle(), pictures, tmp_path / "s", workers=0, progress=lambda *done: calls.append(done), **OPTIONS)
    assert files(tmp_path / "s") == files(undisturbed.path)
    assert calls[-1] == (43, 43)


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.labels.tiny_annotator"])
    return context


def killed_at_random_moments(processes, pictures, out, times, rng):
    """Start the annotation again and again, killed each time somewhere, then let it come to its end."""
    for attempt in range(times + 1):
        hears, tells = processes.Pipe(duplex=False)
        process = processes.Process(target=annotate_and_tell, args=(pictures, out, tells))
        process.start()
        tells.close()
        for _ in range(rng.randrange(16) if attempt < times else 99):  # so many batches, and a moment
            try:
                if hears.poll(60) and hears.recv() == "done":
                    break
            except EOFError:
                break
        if attempt < times:
            time.sleep(rng.random() * 0.02)
            process.kill()
        process.join(60)
    assert process.exitcode == 0


def test_killed_three_times_it_writes_the_same_bytes(processes, pictures, undisturbed, tmp_path):
    killed_at_random_moments(processes, pictures, tmp_path / "s", 3, random.Random(0))
    assert files(tmp_path / "s") == files(undisturbed.path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_twenty_times_it_writes_the_same_bytes(processes, pictures, undisturbed, tmp_path, seed):
    killed_at_random_moments(processes, pictures, tmp_path / "s", 20, random.Random(100 + seed))
    assert files(tmp_path / "s") == files(undisturbed.path)


@pytest.mark.distributed
def test_two_processes_make_the_maps_of_one(processes, pictures, undisturbed, tmp_path):
    both = [processes.Process(target=annotate_together, args=(pictures, tmp_path / "s", rank, 2)) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(90)
        assert process.exitcode == 0
    both = LabelStore.open(tmp_path / "s")
    assert verify_store(both.path) == []
    assert sorted(both.keys()) == sorted(undisturbed.keys())
    assert read_failures(both.path) == read_failures(undisturbed.path)
    keys = list(undisturbed.keys())
    for part, expected in zip(both.read(keys), undisturbed.read(keys), strict=True):
        assert torch.equal(part, expected)
    assert {shard.name[:9] for shard in both.manifest.shards} == {"maps-0000", "maps-0001"}


def test_the_summary_of_made_labels(pictures, undisturbed):
    source = open_source(pictures)
    labels = dict(zip(source.keys, source.labels.tolist(), strict=True))
    summary = summarise(undisturbed, labels)
    means_of = list(undisturbed.keys())
    means = {key: dense_scores(Brittle(), pictures / key).softmax(0).mean((1, 2)) for key in means_of}
    assert summary.agreement == pytest.approx(
        np.mean([int(mean.argmax()) == labels[key] for key, mean in means.items()])
    )
    assert summary.pictures == 33
    assert 0 < summary.kept_mass < 1


def test_scenes_have_maps_too(tmp_path):
    source = open_scenes(12, 32)
    store = annotate(Brittle(), source, tmp_path / "s", class_map="own", workers=0, **OPTIONS)
    assert list(store.keys()) == list(source.keys)
    mass = cell_probabilities(store.read(list(store.keys())))[1]
    assert ((mass > 0) & (mass < 1)).all()
    first = render_scenes(1, 32).pictures[0]
    Image.fromarray(first).save(tmp_path / "first.png")
    holds(store["train/000000"], dense_scores(Brittle(), tmp_path / "first.png"))
