"""Shapes: n pictures, S their side in pixels."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from alltokens.data import scenes, scenes_drawing, scenes_layout
from alltokens.data.scenes import BACKGROUND, SCENE_CLASSES, Scenes, contact_sheet, load_scenes, render_scenes
from alltokens.data.scenes_layout import Draws
from alltokens.data.scenes_shapes import SHAPES, unit_scale
from alltokens.errors import UserError


@pytest.fixture(scope="module")
def many() -> Scenes:
    return render_scenes(800)


def visible_pixels(drawn: Scenes) -> np.ndarray:
    """(n, 10): how many pixels of each class are seen."""
    return np.stack([np.bincount(class_map.ravel(), minlength=256)[:10] for class_map in drawn.class_maps])


@pytest.mark.parametrize(
    ("count", "size", "seed", "split", "digest"),
    [
        (40, 64, 0, "train", "ba8fbb0539998b92abfca328962765137fd3a68ab6bceac01664de999ef64a86"),
        (10, 33, 7, "val", "3fa50a39afc951fe8c43a027a4516f2c23bfc42af3085d170ca284ae33dd46cd"),
        (3, 224, 2**64 - 1, "test", "fd76a22f48ca6456ca6436038834609d6dc22d595108f0616617de729569fbd9"),
    ],
)
def test_class_maps_and_labels_are_the_same_on_every_machine(count, size, seed, split, digest):
    drawn = render_scenes(count, size, seed, split)
    assert hashlib.sha256(drawn.class_maps.tobytes() + drawn.labels.astype("<i8").tobytes()).hexdigest() == digest


def test_random_numbers_are_the_upper_bits_of_philox_and_do_not_overlap():
    raw = np.random.Philox(key=[5, 1], counter=[0, 0, 0, 9]).random_raw(200)
    draws = Draws(5, 1, 9, purpose=0)
    np.testing.assert_array_equal(draws.array(2, 100).ravel(), (raw >> np.uint64(11)) / 2**53)
    others = [Draws(5, 1, 9, 1), Draws(5, 1, 10, 0), Draws(5, 2, 9, 0), Draws(6, 1, 9, 0)]
    assert len({float(other.array(1)[0]) for other in others} | {float(Draws(5, 1, 9, 0).array(1)[0])}) == 5


@pytest.mark.parametrize("size", [8, 33, 64, 224])
def test_arrays_have_the_promised_shapes_and_types(size):
    drawn = render_scenes(3, size)
    assert drawn.pictures.shape == (3, size, size, 3)
    assert drawn.pictures.dtype == np.uint8
    assert drawn.labels.shape == (3,)
    assert drawn.labels.dtype == np.int64
    assert drawn.class_maps.shape == (3, size, size)
    assert drawn.class_maps.dtype == np.uint8


def test_more_pictures_keep_the_first_ones(many):
    for few, more in zip(render_scenes(7), many, strict=True):
        np.testing.assert_array_equal(few, more[:7])


@pytest.mark.parametrize("other", [{"seed": 1}, {"split": "val"}, {"split": "test"}])
def test_another_seed_or_split_shows_other_scenes(many, other):
    changed = render_scenes(20, **other)
    same = (changed.class_maps == many.class_maps[:20]).all(axis=(1, 2))
    assert not same.any()
    assert len(np.unique(changed.pictures.reshape(20, -1), axis=0)) == 20


def test_another_size_shows_the_same_scenes(many):
    # The middle one of three pixels has its centre where the one large pixel has it.
    finer = render_scenes(12, 192)
    np.testing.assert_array_equal(finer.class_maps[:, 1::3, 1::3], many.class_maps[:12])
    np.testing.assert_array_equal(finer.labels, many.labels[:12])
    coarse = finer.pictures.reshape(12, 64, 3, 64, 3, 3).mean(axis=(2, 4))
    assert np.abs(coarse - many.pictures[:12]).mean() < 12  # of 255; two different scenes differ by about 80


def test_looks_cannot_move_anything(many, monkeypatch):
    monkeypatch.setattr(
        scenes_drawing,
        "_background",
        lambda draws, size: (np.zeros((3, size, size), np.float32), (draws.between(),) * 3),
    )
    plain = render_scenes(20)
    np.testing.assert_array_equal(plain.class_maps, many.class_maps[:20])
    assert np.abs(plain.pictures.astype(int) - many.pictures[:20]).mean() > 10


def test_no_object_is_cut_off_at_the_end_of_its_part(many, monkeypatch):
    monkeypatch.setattr(scenes_layout, "REACH", 3.0)
    np.testing.assert_array_equal(render_scenes(100).class_maps, many.class_maps[:100])


def test_every_picture_shows_two_to_four_classes_and_the_label_is_by_far_the_most_visible(many):
    pixels = visible_pixels(many)
    assert set(np.count_nonzero(pixels, axis=1)) == {2, 3, 4}
    main = pixels[np.arange(len(pixels)), many.labels]
    others = pixels.copy()
    others[np.arange(len(pixels)), many.labels] = 0
    assert (main >= 3 * others.max(axis=1)).all()
    assert main.min() > 0.12 * 64 * 64
    assert main.max() < 0.4 * 64 * 64
    assert set(np.unique(many.class_maps)) == {*range(10), BACKGROUND}


def test_all_classes_are_equally_frequent(many):
    frequency = np.bincount(many.labels, minlength=10)
    assert len(SCENE_CLASSES) == len(frequency) == 10
    assert 50 < frequency.min() <= frequency.max() < 120  # 80 expected, standard deviation 8.5


def test_colour_and_size_say_little_about_the_class(many):
    pixels = visible_pixels(many)
    main = pixels[np.arange(len(pixels)), many.labels] / 64**2
    own_colour = np.stack(
        [p[m == label].mean(0) / 255 for p, m, label in zip(many.pictures, many.class_maps, many.labels, strict=True)]
    )
    histogram = np.stack(
        [np.histogram(p[..., c], bins=6, range=(0, 256))[0] / 64**2 for p in many.pictures for c in range(3)]
    ).reshape(len(pixels), -1)
    cues = np.concatenate([main[:, None], own_colour, many.pictures.mean(axis=(1, 2)) / 255, histogram], axis=1)
    cues = np.concatenate([(cues - cues.mean(0)) / cues.std(0), np.ones((len(cues), 1))], axis=1)
    one_hot = np.eye(10)[many.labels]
    weights = np.linalg.lstsq(cues[:500].T @ cues[:500] + 5 * np.eye(cues.shape[1]), cues[:500].T @ one_hot[:500])[0]
    accuracy = ((cues[500:] @ weights).argmax(1) == many.labels[500:]).mean()
    assert accuracy < 0.27  # chance is 0.1; with 6,000 pictures to learn from, 0.2


def test_the_main_object_stands_out_from_the_ground(many):
    contrast = [
        np.abs(picture[class_map == label].mean(0) - picture[class_map == BACKGROUND].mean(0)).max()
        for picture, class_map, label in zip(many.pictures, many.class_maps, many.labels, strict=True)
    ]
    assert np.quantile(contrast, 0.05) > 20  # of 255
    assert many.pictures.reshape(len(many.pictures), -1).std(axis=1).min() > 8


@pytest.mark.parametrize("name", SCENE_CLASSES)
@pytest.mark.parametrize("level", [0.0, 0.3, 0.99])
def test_shapes_keep_near_their_frame_and_near_the_same_area(name, level):
    line = (np.arange(150) + 0.5) / 50 - 1.5
    x, y = np.meshgrid(line, line)
    form = SHAPES[name](x, y, (level, 1 - level, level, level))
    inside = form.outline < 0
    area = inside.mean() * 9 * unit_scale(SHAPES[name]) ** 2
    assert 0.7 < area < 1.4
    assert np.sqrt(x * x + y * y)[inside].max() < 1.16
    # A distance: it changes by at most the step from pixel to pixel (steep only where the mushroom's cap is squashed).
    assert np.abs(np.diff(form.outline, axis=0)).max() < 1.11 * 0.02


def test_the_star_has_its_tips_and_valleys_where_they_belong():
    tips, valleys = np.array([0.0, 36.0]), np.array([36.0, 0.0])
    for turns, radius in ((tips, 1.0), (valleys, 0.44)):
        angle = np.deg2rad(np.array([[turns[0]]]))
        outline = SHAPES["star"](radius * np.sin(angle), -radius * np.cos(angle), (0.0, 0.5, 0.0, 0.0)).outline
        assert abs(float(outline[0, 0])) < 1e-6


def test_the_second_call_reads_what_the_first_one_kept(tmp_path, monkeypatch):
    first = load_scenes(6, 16, seed=3, split="val", cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"v{scenes.RENDERER_VERSION}-16px-seed3-val-6.npy"]
    monkeypatch.setattr(scenes, "_render", None)
    second = load_scenes(6, 16, seed=3, split="val", cache=tmp_path)
    assert isinstance(second.pictures, np.memmap)
    for drawn, kept in zip(first, second, strict=True):
        np.testing.assert_array_equal(drawn, kept)
        assert drawn.dtype == kept.dtype


def test_writing_to_the_arrays_does_not_change_the_file(tmp_path):
    load_scenes(2, 16, cache=tmp_path)
    load_scenes(2, 16, cache=tmp_path).pictures[:] = 0
    np.testing.assert_array_equal(load_scenes(2, 16, cache=tmp_path).pictures, render_scenes(2, 16).pictures)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(content[:1000] + bytes(len(content) - 1000))
    elif how == "pickled":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif how == "other pictures":
        np.save(path, scenes._render(3, 16, 1, "train"))
    else:
        np.save(path, np.zeros(3))


@pytest.mark.parametrize("how", ["truncated", "empty", "zeros", "pickled", "other pictures", "other type"])
def test_a_broken_file_is_drawn_again_with_a_warning(tmp_path, how):
    load_scenes(3, 16, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    damage(path, how)
    with pytest.warns(UserWarning, match="drawn again"):
        mended = load_scenes(3, 16, cache=tmp_path)
    np.testing.assert_array_equal(mended.pictures, render_scenes(3, 16).pictures)
    assert isinstance(load_scenes(3, 16, cache=tmp_path).pictures, np.memmap)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="stay in memory") as caught:
        drawn = load_scenes(3, 16, cache=tmp_path / "file" / "scenes")
    assert len(caught) == 1
    np.testing.assert_array_equal(drawn.pictures, render_scenes(3, 16).pictures)


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.warns(UserWarning, match="no space left"):
        load_scenes(2, 16, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_several_at_once_leave_one_whole_file(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load_scenes(5, 16, cache=tmp_path), range(8)))
    expected = render_scenes(5, 16)
    for drawn in results:
        np.testing.assert_array_equal(drawn.pictures, expected.pictures)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_is_where_the_desktop_standard_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_scenes(1, 16)
    assert len(list((tmp_path / "alltokens" / "scenes").iterdir())) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert scenes._cache_folder(None) == Path.home() / ".cache" / "alltokens" / "scenes"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "trian"}, "Did you mean 'train'"),
        ({"count": 0}, "count must be at least 1"),
        ({"size": 4}, "size at least 8"),
        ({"seed": -1}, "seed must be between"),
    ],
)
@pytest.mark.parametrize("make", [render_scenes, load_scenes])
def test_wrong_arguments_say_what_is_allowed(make, wrong, message):
    with pytest.raises(UserError, match=message):
        make(**({"count": 1, "size": 16} | wrong))


def test_the_contact_sheet_shows_every_picture_and_its_map():
    drawn = render_scenes(5, 16)
    sheet = np.asarray(contact_sheet(drawn, columns=3, scale=2, class_maps=True))
    assert sheet.shape == (2 * (32 + 14 + 4) + 4, 3 * (64 + 4) + 4, 3)
    top, left = 4 + 50, 4 + 68  # of the fifth: second row, second column
    np.testing.assert_array_equal(sheet[top : top + 32 : 2, left : left + 32 : 2], drawn.pictures[4])
    colours = sheet[top : top + 32 : 2, left + 32 : left + 64 : 2]
    assert len(np.unique(colours.reshape(-1, 3), axis=0)) == len(np.unique(drawn.class_maps[4]))
    assert contact_sheet(drawn, columns=3).size == (3 * 36 + 4, 104)


def test_a_contact_sheet_needs_pictures():
    drawn = render_scenes(1, 16)
    with pytest.raises(UserError, match="at least one picture"):
        contact_sheet(Scenes(*(part[:0] for part in drawn)))
    with pytest.raises(UserError, match="columns and scale"):
        contact_sheet(drawn, columns=0)
