"""Figures hold the numbers they were given: drawn arrays, lines and words are read back."""

import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import alltokens as at
from alltokens.core.label_maps import LabelMap
from alltokens.core.token_targets import TokenTargets
from alltokens.explain.fluctuation import RATIOS
from alltokens.models.token_output import TokenOutput
from alltokens.report import figures
from alltokens.report.section_parts import layer_chart
from alltokens.report.style import COLOURS, INK, OWN, PARTNER, SHARES, grid_of, stretched, to_pixels

NAMES = ("cat", "dog", "house")


def pictures(count, side=8):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def panels(figure):
    """(title, drawn arrays) of every axes that shows a picture, in reading order."""
    return [
        (one.get_title(), [np.asarray(image.get_array()) for image in one.images]) for one in figure.axes if one.images
    ]


def plain(images):
    """Colours that leave a tensor as it is."""
    return {"mean": (0, 0, 0), "std": (1, 1, 1)}


def test_pixels_are_those_of_the_picture_in_every_form():
    levels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    as_tensor = (torch.from_numpy(levels).permute(2, 0, 1) / 255 - 0.25) / 0.5
    for picture in (Image.fromarray(levels), levels, levels / 255):
        np.testing.assert_allclose(to_pixels(picture), levels / 255, atol=1e-6)
    np.testing.assert_allclose(to_pixels(as_tensor, (0.25,) * 3, (0.5,) * 3), levels / 255, atol=1e-6)
    with pytest.raises(at.UserError, match=r"\(3, H, W\)"):
        to_pixels(torch.zeros(4, 4))


def test_pictures_draws_each_with_its_title():
    images = pictures(3)
    drawn = panels(figures.pictures(images, NAMES, columns=2, **plain(images)))
    assert [title for title, _ in drawn] == list(NAMES)
    for image, (_, arrays) in zip(images, drawn, strict=True):
        np.testing.assert_allclose(arrays[0], image.permute(1, 2, 0).numpy(), atol=1e-6)


def test_heat_lies_over_its_picture_stretched_or_as_it_is():
    images, heats = pictures(2), torch.rand(2, 2, 4, 4)
    drawn = panels(figures.heat(images, heats, [["a", "b"], ["c", "d"]], ["x", "y"], **plain(images)))
    assert [title for title, _ in drawn] == ["x", "a", "b", "y", "c", "d"]
    (picture, smooth) = drawn[4][1]
    np.testing.assert_allclose(picture, images[1].permute(1, 2, 0).numpy(), atol=1e-6)
    whole = stretched(heats)[1, 0]
    assert float(whole.min()) == 0
    assert float(whole.max()) == 1
    # Bilinear: the corner pixel of the picture has the corner token's value.
    np.testing.assert_allclose(smooth[0, 0], whole[0, 0], atol=1e-6)
    np.testing.assert_allclose(smooth[-1, -1], whole[-1, -1], atol=1e-6)
    raw = panels(figures.heat(images, heats, stretch=False, **plain(images)))[1][1][1]
    np.testing.assert_allclose(raw[0, 0], heats[0, 0, 0, 0], atol=1e-6)
    assert (stretched(torch.full((1, 2, 2), 3.0)) == 0).all()


def test_mix_shows_both_pictures_and_both_labels():
    images = pictures(3)
    plan = at.MixPlan.from_box(torch.tensor([1, 2, 0]), (0, 4, 2, 8), (8, 8))
    after, share = torch.rand(3, 16), torch.tensor([0.1, 0.2, 0.3])
    drawn = panels(figures.mix(images, plan, after, share, NAMES, most=2, **plain(images)))
    assert [title for title, _ in drawn[5:]] == [
        "own\ndog",
        "partner\nhouse",
        "mixed",
        "labels at the input\npartner 38%",
        "after the last block\npartner 20%",
    ]
    own, partner, mixed, before, aligned = (arrays[0] for _, arrays in drawn[5:10])
    pixels = images.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(own, pixels[1], atol=1e-6)
    np.testing.assert_allclose(partner, pixels[2], atol=1e-6)
    np.testing.assert_allclose(mixed[:4, 2:], pixels[2][:4, 2:], atol=1e-6)
    np.testing.assert_allclose(mixed[4:], pixels[1][4:], atol=1e-6)
    assert before.tolist() == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(aligned, after[1].reshape(4, 4).numpy(), atol=1e-6)


def test_mixers_and_plan_draw_what_is_mixed():
    images = pictures(2)
    box = at.MixPlan.from_box(torch.tensor([1, 0]), (0, 4, 0, 4), (8, 8), place="embedding")
    half = at.MixPlan(torch.tensor([1, 0]), torch.full((1, 8, 8), 0.5))
    drawn = panels(figures.mixers(images, {"MixToken": box, "MixUp": half}, most=1, **plain(images)))
    assert [title for title, _ in drawn] == ["own", "partner", "MixToken\npartner 25%", "MixUp\npartner 50%"]
    np.testing.assert_allclose(drawn[3][1][0], images.mean(0).permute(1, 2, 0).numpy(), atol=1e-6)
    (title, (mask,)) = panels(figures.plan(box))[0]
    assert title == "whole batch\npartner 25%"
    np.testing.assert_array_equal(mask, box.mask[0].numpy())
    assert panels(figures.plan(box, grid=(2, 2)))[0][1][0].tolist() == [[1, 0], [0, 0]]


def test_fluctuation_draws_one_line_for_each_method():
    ratios = {"area": [0.3, 0.3, 0.3], "TL-Align": torch.tensor([0.3, 0.35, 0.4])}
    axes = figures.fluctuation(ratios, "one picture").axes[0]
    assert [line.get_label() for line in axes.lines] == list(ratios)
    np.testing.assert_allclose(axes.lines[1].get_ydata(), [0.3, 0.35, 0.4], atol=1e-6)
    assert axes.lines[1].get_xdata().tolist() == [0, 1, 2]
    assert len({line.get_linestyle() for line in axes.lines}) == 2  # lines that coincide stay visible


def test_a_method_looks_alike_in_every_chart():
    values = {name: [0.3, 0.4] for name in RATIOS}
    without = {name: value for name, value in values.items() if name != "TransMix"}

    def looks(ratios):
        lines = figures.fluctuation(ratios).axes[0].lines
        return {line.get_label(): (line.get_color(), line.get_linestyle()) for line in lines}

    def series(ratios):
        ratios = {name: torch.tensor(value) for name, value in ratios.items()}
        return {line["name"]: line["series"] for line in layer_chart("", ratios)["lines"]}

    assert looks(without).items() < looks(values).items()
    assert list(series(values).values()) == [0, 1, 2, 3, 4]
    assert series(without).items() < series(values).items()
    assert series({"mine": [0.1], "area": [0.2]}) == {"mine": 0, "area": 1}


def test_presence_is_drawn_in_powers_of_two_around_one():
    drawn = panels(figures.presence([torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.ones(2, 2)]))
    assert [title for title, _ in drawn[:2]] == ["layer 1", "layer 2"]
    assert drawn[0][1][0].tolist() == [[0, 1], [-1, -4]]  # what has faded is shown at the scale's end
    assert (drawn[1][1][0] == 0).all()


def test_rmse_bars_have_the_numbers_and_the_names():
    axes = figures.rmse([("deit_tiny", 0.125, 0.01), ("swin_tiny", 0.05, 0.0)]).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.125, 0.05]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["deit_tiny", "swin_tiny"]
    assert [text.get_text() for text in axes.texts] == ["0.125", "0.0500"]


def test_words_below_bars_fit_beside_long_names():
    figure = figures.rmse([("swin_tiny_patch4_window7_224@random", 0.1, 0.0)])
    figure.draw_without_rendering()
    words = next(text for text in figure.texts if text.get_text().startswith("RMSE"))
    box = words.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_label_map_shows_first_class_and_true_probability():
    ids = torch.tensor([[[0, 1], [2, 0]], [[1, 2], [0, 2]]])  # (k, h, w)
    scores = torch.tensor([[[2.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    tail = torch.zeros(2, 2)
    figure = figures.label_map(LabelMap(ids, scores, tail), names=NAMES)
    first, sure = (arrays[0] for _, arrays in panels(figure)[:2])
    expected = torch.cat([scores, tail[None]]).softmax(0)[:2].max(0)
    np.testing.assert_allclose(sure, expected.values.numpy(), atol=1e-6)
    winners = ids.gather(0, expected.indices[None])[0].numpy()  # [[0, 2], [2, 0]]
    assert (first[winners == 0] == first[0, 0]).all()
    assert (first[winners == 2] == first[0, 1]).all()
    assert not np.array_equal(first[0, 0], first[0, 1])
    legend = figure.legends[0]
    named = dict(zip([t.get_text() for t in legend.get_texts()], legend.legend_handles, strict=True))
    assert set(named) == {"cat", "house"}
    np.testing.assert_allclose(named["cat"].get_color(), first[0, 0], atol=1e-6)


def test_token_targets_leave_places_without_a_label_white():
    labels = at.smooth_one_hot(torch.tensor([1, 2]), 3, 0.3)
    targets = TokenTargets.of_pictures(labels, (2, 2))
    targets = targets._replace(weight=torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]]))
    drawn = panels(figures.token_targets(targets, names=NAMES))
    first, sure = drawn[0][1][0], drawn[1][1][0]
    assert first[1, 1].tolist() == [1, 1, 1]
    np.testing.assert_allclose(sure, [[0.8, 0.8], [0.8, 0.0]], atol=1e-6)


def test_many_classes_keep_names_for_the_most_frequent():
    ids = torch.arange(16).reshape(1, 4, 4).clone()
    ids[0, 0] = 9
    figure = figures.token_labels(ids, torch.ones(1, 4, 4))
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[0] == "class 9"
    assert len(words) == len(COLOURS)
    assert words[-1] == f"{12 - len(COLOURS) + 1} others"


def test_bytes_are_the_same_for_the_same_figure_and_carry_no_date():
    def make():
        return figures.fluctuation({"area": [0.0, 1.0]})

    assert figures.as_png(make())[:8] == b"\x89PNG\r\n\x1a\n"
    first, second = figures.as_svg(make()), figures.as_svg(make())
    assert first == second
    assert first.startswith("<svg")
    assert "currentColor" in first
    assert INK not in first
    assert not re.search(r"<(dc:)?date>", first)


def test_own_and_partner_differ_in_lightness_for_every_reader():
    """Relative luminance of the two ends and the middle of the scale; grey-scale print keeps them apart."""

    def luminance(colour):
        return float(np.dot(colour[:3], (0.2126, 0.7152, 0.0722)))

    own, middle, partner = (luminance(SHARES(value)) for value in (0.0, 0.5, 1.0))
    assert middle - max(own, partner) > 0.3
    assert SHARES(0.0)[:3] == pytest.approx(tuple(int(OWN[i : i + 2], 16) / 255 for i in (1, 3, 5)), abs=1e-3)
    assert SHARES(1.0)[:3] == pytest.approx(tuple(int(PARTNER[i : i + 2], 16) / 255 for i in (1, 3, 5)), abs=1e-3)


def test_grids():
    assert grid_of(196, (224, 224)) == (14, 14)
    assert grid_of(8, (32, 64)) == (2, 4)
    with pytest.raises(at.UserError, match="no grid"):
        grid_of(7, (224, 224))


def a_batch():
    return at.Sample(pictures(4), torch.tensor([0, 1, 2, 0]), ["a", "b", "c", "d"], torch.zeros(4, 2, 3))


@pytest.mark.parametrize(
    ("value", "images", "count"),
    [
        (at.MixPlan.identity(2, (8, 8)), None, 1),
        (at.MixPlan.identity(4, (8, 8)), pictures(4), 9),
        (a_batch(), None, 4),
        (LabelMap(torch.zeros(1, 2, 2, dtype=torch.int64), torch.zeros(1, 2, 2)), pictures(1)[0], 3),
        (TokenTargets.of_pictures(torch.eye(3)[1:], (2, 2)), pictures(2), 6),
        (TokenOutput(torch.rand(2, 3), torch.rand(2, 4, 3)), pictures(2), 6),
        (pictures(1)[0], None, 1),
        (pictures(3), None, 3),
        ([Image.new("RGB", (4, 4))] * 2, None, 2),
        (Image.new("RGB", (4, 4)), None, 1),
        (torch.rand(4, 4), None, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_show_finds_the_drawing(value, images, count):
    figure = at.show(value, images, NAMES)
    assert isinstance(figure, Figure)
    assert len(panels(figure)) == count
    assert figure._repr_png_()[:4] == b"\x89PNG"  # what a notebook asks for


def test_show_of_a_step_draws_its_mix():
    import timm

    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1
    )
    step = at.Supervision(net, mixer=at.Mixer("cutmix", patch_size=4), follower="tl_align")
    batch = a_batch()
    _, parts = step(batch, torch.Generator().manual_seed(1))
    drawn = panels(at.show(parts, batch))
    np.testing.assert_allclose(drawn[4][1][0], parts.token_shares[0].reshape(2, 2).numpy(), atol=1e-6)
    with pytest.raises(at.UserError, match="give their batch"):
        at.show(parts)


def test_show_of_an_aligner_draws_its_layers():
    import timm

    net = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=8, depth=3, num_heads=1)
    aligner = at.TLAlign(net, layer_shares=True)
    images, plan = pictures(2), at.MixPlan.from_box(torch.tensor([1, 0]), (0, 4, 0, 8), (8, 8))
    with aligner.follow(plan):
        net(images)
    lines = at.show(aligner).axes[0].lines
    np.testing.assert_allclose(lines[1].get_ydata(), [float(layer.share[1]) for layer in aligner.layer_shares])


def test_show_says_what_it_can_draw():
    with pytest.raises(at.UserError, match=r"cannot draw a dict.*MixPlan"):
        at.show({})
    with pytest.raises(at.UserError, match=r"tensor of shape \(1, 2, 5\)"):
        at.show(torch.rand(1, 2, 5))


def test_drawing_registers_nothing_with_pyplot():
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    at.show(pictures(2))
    assert pyplot.get_fignums() == before
