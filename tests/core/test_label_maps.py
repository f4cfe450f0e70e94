"""Labels read from maps: against torchvision's RoIAlign and a plain loop over sample points."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.ops import roi_align

from alltokens.core import geometry
from alltokens.core.label_maps import LabelMap, sample_class_targets, sample_token_labels, sample_token_targets
from alltokens.core.losses import blend_targets
from alltokens.core.mixing import draw_cutmix, draw_mixup
from alltokens.core.plan import MixPlan, flipped_partner
from alltokens.errors import UserError


def random_maps(
    batch: int = 3, kept: int = 3, size: tuple[int, int] = (6, 6), classes: int = 9, seed: int = 0
) -> LabelMap:
    """Distinct classes in a cell, many of them shared by neighbours; in float64, to compare exactly."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(batch, classes, *size, generator=generator)
    scores = 4 * torch.rand(batch, kept, *size, generator=generator, dtype=torch.float64) - 1
    tail = torch.randn(batch, *size, generator=generator, dtype=torch.float64)
    return LabelMap(draws.topk(kept, 1).indices, scores, tail)


def random_crops(batch: int, least: float = 0.3, seed: int = 0) -> Tensor:
    """(B, 4) float64: left, top, width, height."""
    draws = torch.rand(batch, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    side = least + (1 - least) * draws[:, 2:]
    return torch.cat([draws[:, :2] * (1 - side), side], 1)


def crop_matrices(crops: Tensor) -> Tensor:
    return geometry.crop(*crops.unbind(1))


def planes(maps: LabelMap, classes: int, tail: str) -> Tensor:
    """(B, K, h, w): what is averaged for each class, in full."""
    if tail == "zero":
        full = torch.zeros(len(maps.ids), classes, *maps.ids.shape[2:], dtype=torch.float64)
        return full.scatter(1, maps.ids.long(), maps.scores.double())
    assert maps.tail is not None
    log_total = torch.cat([maps.scores, maps.tail[:, None]], 1).double().logsumexp(1, keepdim=True)
    each = (maps.tail[:, None] - log_total).exp() / (classes - maps.ids.shape[1])
    return each.expand(-1, classes, -1, -1).scatter(1, maps.ids, (maps.scores - log_total).exp())


def by_points(maps: LabelMap, matrix: Tensor, grid: tuple[int, int], classes: int, tail: str) -> tuple[Tensor, Tensor]:
    """The definition, point by point in plain loops: token labels (B, N, K) and the fraction inside (B, N)."""
    full = planes(maps, classes, tail)
    height, width = full.shape[2:]
    labels = torch.full((len(full), grid[0] * grid[1], classes), 1 / classes, dtype=torch.float64)
    inside = torch.zeros(labels.shape[:2], dtype=torch.float64)
    for sample in range(len(full)):
        (a, b, c), (d, e, f) = matrix[sample].tolist()
        counts = [
            max(1, math.ceil(math.hypot(x * width, y * height) / parts))
            for x, y, parts in ((b, e, grid[0]), (a, d, grid[1]))
        ]
        for token in range(labels.shape[1]):
            row, column = divmod(token, grid[1])
            read = []
            for j in range(counts[0]):
                for i in range(counts[1]):
                    v = (row + (j + 0.5) / counts[0]) / grid[0]
                    u = (column + (i + 0.5) / counts[1]) / grid[1]
                    x, y = a * u + b * v + c, d * u + e * v + f
                    if 0 <= x <= 1 and 0 <= y <= 1:
                        x, y = (min(max(p * n - 0.5, 0), n - 1) for p, n in ((x, width), (y, height)))
                        left, upper = int(x), int(y)
                        right, lower = min(left + 1, width - 1), min(upper + 1, height - 1)
                        top = torch.lerp(full[sample, :, upper, left], full[sample, :, upper, right], x - left)
                        low = torch.lerp(full[sample, :, lower, left], full[sample, :, lower, right], x - left)
                        read.append(torch.lerp(top, low, y - upper))
            inside[sample, token] = len(read) / (counts[0] * counts[1])
            if read:
                mean = torch.stack(read).mean(0)
                labels[sample, token] = mean.softmax(0) if tail == "zero" else mean
    return labels, inside


@pytest.mark.parametrize("tail", ["zero", "true"])
@pytest.mark.parametrize(
    ("size", "grid", "least"),
    [
        ((6, 6), (4, 4), 0.3),
        ((7, 5), (3, 4), 0.3),
        ((5, 7), (7, 7), 0.3),
        ((8, 8), (2, 2), 0.2),
        ((4, 4), (4, 4), 0.02),
    ],
)
def test_crops_are_torchvisions_roi_align(size, grid, least, tail):
    maps, crops = random_maps(5, size=size), random_crops(5, least, seed=1)
    crops[:, :2] = torch.minimum(crops[:, :2], 1 - 1 / torch.tensor(size[::-1])).clamp(min=0)
    crops[:, 2:] = torch.minimum(crops[:, 2:], 1 - crops[:, :2])
    corners = torch.cat([crops[:, :2], crops[:, :2] + crops[:, 2:]], 1)
    cells = corners * torch.tensor([size[1], size[0]] * 2) - 0.5
    boxes = torch.cat([torch.arange(5.0)[:, None], cells], 1).double()

    def aligned(output: tuple[int, int]) -> Tensor:
        mean = roi_align(planes(maps, 9, tail), boxes, output, sampling_ratio=-1, aligned=False)
        return (mean.softmax(1) if tail == "zero" else mean).flatten(2).mT

    class_targets, token_targets = sample_token_labels(maps, crop_matrices(crops), grid, 9, tail=tail)
    torch.testing.assert_close(token_targets, aligned(grid))
    torch.testing.assert_close(class_targets, aligned((1, 1)).squeeze(1))


@pytest.mark.parametrize("tail", ["zero", "true"])
@pytest.mark.parametrize(("size", "grid"), [((6, 6), (4, 4)), ((5, 8), (3, 3)), ((4, 4), (5, 4))])
def test_any_affine_matrix_is_sampled_point_by_point(size, grid, tail):
    maps = random_maps(4, size=size, seed=2)
    crops = crop_matrices(random_crops(4, 0.4, seed=2))
    degrees = torch.tensor([20.0, -35.0, 90.0, 160.0], dtype=torch.float64)
    moved = geometry.translate(
        torch.tensor([0.3, 0.0, -0.2, 0.1]).double(), torch.tensor([0.0, -0.4, 0.1, 0.0]).double()
    )
    matrices = geometry.compose(moved, geometry.rotate(degrees), crops)
    expected, inside = by_points(maps, matrices, grid, 9, tail)
    assert (inside == 0).any()
    assert (inside == 1).any()
    targets = sample_token_targets(maps, matrices, grid, 9, tail=tail)
    torch.testing.assert_close(targets.dense(9), expected)
    torch.testing.assert_close(targets.weight, inside)
    class_expected, _ = by_points(maps, matrices, (1, 1), 9, tail)
    torch.testing.assert_close(sample_class_targets(maps, matrices, 9, tail=tail), class_expected[:, 0])


def test_a_token_reads_the_place_it_shows():
    """A map whose score is a coordinate: what a token reads is where its centre comes from, to rounding."""
    x = torch.arange(18).double().expand(18, 18)
    coordinates = torch.stack([x, x.T])[:, None]  # (2, 1, 18, 18): x of the cell for one picture, y for the other
    maps = LabelMap(torch.zeros(2, 1, 18, 18, dtype=torch.int64), coordinates)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        draws = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        moves = geometry.compose(
            geometry.rotate(60 * draws[0] - 30), geometry.shear(0.4 * draws[1] - 0.2), geometry.flip(draws[2] < 0.5)
        ).double()
        crop = geometry.crop(0.3, 0.3 + 0.05 * draws[3], 0.3 + 0.1 * draws[3], 0.35).double()
        matrix = geometry.compose(moves, crop)
        label = sample_token_targets(maps, matrix.expand(2, -1, -1), (14, 14), 2).dense(2)
        read = torch.logit(label[..., 0])  # (2, N): between a score and the zero of the other class
        centres = torch.stack(geometry.coordinates(matrix, (14, 14))).flatten(1) * 18 - 0.5
        torch.testing.assert_close(read, centres, atol=1e-7, rtol=0)


def test_a_map_cell_per_token_is_read_as_it_is():
    maps = random_maps(2, size=(4, 4))
    label = sample_token_targets(maps, geometry.identity().expand(2, -1, -1), (4, 4), 9).dense(9)
    torch.testing.assert_close(label, planes(maps, 9, "zero").softmax(1).flatten(2).mT)


def test_without_a_class_count_the_kept_classes_share_the_label():
    """The label of all nine classes, conditional on those that the token reads (their scores are above zero here)."""
    maps = random_maps(4)
    maps = maps._replace(scores=maps.scores.abs() + 0.5)
    matrices = geometry.compose(
        geometry.rotate(torch.tensor([20.0, -35.0, 0.0, 160.0])), crop_matrices(random_crops(4))
    )
    among_all, alone = (sample_token_targets(maps, matrices, (4, 4), count) for count in (9, None))
    label = among_all.dense(9)
    read = label > among_all.rest[..., None] * (1 + 1e-9)
    assert (~read).any()
    torch.testing.assert_close(alone.dense(9), (label * read) / (label * read).sum(-1, keepdim=True).clamp(min=1e-9))
    torch.testing.assert_close(alone.weight, among_all.weight)
    away = sample_token_targets(maps, geometry.translate(1.5, 0.0).expand(4, -1, -1), (3, 3))
    assert not away.dense(9).any()
    assert not away.weight.any()
    for what in ({"smoothing": 0.1}, {"tail": "true"}, {"axes": "official"}):
        with pytest.raises(UserError, match="say num_classes"):
            sample_token_targets(maps, matrices, (4, 4), **what)


def test_the_true_softmax_is_recovered_from_the_tail():
    """Classes left out that score alike lose nothing: the label is the whole softmax of the annotator."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.full((2, 30, 4, 4), -3.0, dtype=torch.float64)
    scores[:, 7:12] = torch.rand(2, 5, 4, 4, generator=generator, dtype=torch.float64)
    top = scores.topk(5, 1)
    maps = LabelMap(top.indices, top.values, torch.full((2, 4, 4), -3 + math.log(25), dtype=torch.float64))
    label = sample_token_targets(maps, geometry.identity().expand(2, -1, -1), (4, 4), 30, tail="true").dense(30)
    torch.testing.assert_close(label, scores.softmax(1).flatten(2).mT)


def test_maps_that_keep_every_class_need_no_tail():
    maps = random_maps(2, kept=4, classes=4)._replace(tail=None)
    matrix = crop_matrices(random_crops(2))
    label = sample_token_targets(maps, matrix, (3, 3), 4, tail="true").dense(4)
    torch.testing.assert_close(label.sum(-1), torch.ones(2, 9, dtype=torch.float64))
    expected, _ = by_points(maps._replace(tail=torch.full((2, 6, 6), -torch.inf)), matrix, (3, 3), 5, "true")
    torch.testing.assert_close(label, expected[..., :4])


@pytest.mark.parametrize("tail", ["zero", "true"])
def test_outside_the_picture_there_is_no_label(tail):
    maps, away = random_maps(2), geometry.translate(1.5, 0.0).expand(2, -1, -1)
    right = sample_token_targets(maps, away, (3, 3), 9, tail=tail)
    assert torch.equal(right.weight, torch.zeros(2, 9, dtype=torch.float64))
    official = sample_token_targets(maps, away, (3, 3), 9, tail=tail, axes="official")
    assert torch.equal(official.weight, torch.ones(2, 9, dtype=torch.float64))
    for targets in (right, official):
        torch.testing.assert_close(targets.dense(9), torch.full((2, 9, 9), 1 / 9, dtype=torch.float64))


def test_official_axes_read_the_mirrored_place_of_a_crop():
    """FACTS 2.4: a hot cell at row 2, column 15 is seen by the published program in the crop of the other corner."""
    scores = torch.zeros(1, 1, 18, 18)
    scores[0, 0, 2, 15] = 20
    maps = LabelMap(torch.full((1, 1, 18, 18), 3), scores)
    upper_right, lower_left = geometry.crop(0.6, 0.0, 0.4, 0.4)[None], geometry.crop(0.0, 0.6, 0.4, 0.4)[None]

    def seen(matrix: Tensor, axes: str) -> float:
        return sample_token_targets(maps, matrix, (14, 14), 10, axes=axes).dense(10)[..., 3].max().item()

    assert seen(upper_right, "right") > 0.99
    assert seen(lower_left, "right") == pytest.approx(0.1)
    assert seen(upper_right, "official") == pytest.approx(0.1)
    assert seen(lower_left, "official") > 0.99


@pytest.mark.parametrize("tail", ["zero", "true"])
def test_mixing_pastes_labels_where_pixels_are_pasted(tail):
    maps, matrix = random_maps(3), crop_matrices(random_crops(3))
    targets = sample_token_targets(maps, matrix, (4, 4), 9, 0.1, tail=tail)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        plan = draw_cutmix(3, 32, per_sample=True, generator=generator)
        share = plan.token_share((4, 4)).flatten(1).double()
        mixed = targets.mix(plan)
        torch.testing.assert_close(mixed.dense(9), blend_targets(targets.dense(9), plan.partner, share))
        torch.testing.assert_close(mixed.weight, torch.ones(3, 16, dtype=torch.float64))
        again = draw_mixup(3, 32, generator=generator)
        torch.testing.assert_close(mixed.mix(again).dense(9), targets.mix(plan.then(again)).dense(9), atol=1e-6, rtol=0)


def test_mixing_is_exact_at_its_limits():
    targets = sample_token_targets(random_maps(3), crop_matrices(random_crops(3)), (4, 4), 9)
    partner = flipped_partner(3)
    nothing = targets.mix(MixPlan(partner, torch.zeros(1, 8, 8)))
    everything = targets.mix(MixPlan(partner, torch.ones(1, 8, 8)))
    assert torch.equal(nothing.dense(9), targets.dense(9))
    assert torch.equal(everything.dense(9), targets.dense(9)[partner])


def test_a_mix_keeps_the_label_of_the_picture_that_has_one():
    maps = random_maps(2)
    matrix = torch.stack([geometry.identity(), geometry.translate(0.5, 0.0)])  # the second: its right half is empty
    targets = sample_token_targets(maps, matrix, (1, 2), 9)
    assert targets.weight.tolist() == [[1, 1], [1, 0]]
    mixed = targets.mix(MixPlan(flipped_partner(2), torch.full((1, 4, 4), 0.25)))
    torch.testing.assert_close(mixed.weight, torch.tensor([[1, 0.75], [1, 0.25]]).double())
    torch.testing.assert_close(mixed.dense(9)[:, 1], targets.dense(9)[:1, 1].expand(2, -1))


def test_the_picture_label_is_the_softmax_of_the_mean():
    maps = random_maps(2, size=(4, 4))
    whole = geometry.identity().expand(2, -1, -1)
    class_targets, token_targets = sample_token_labels(maps, whole, (4, 4), 9)
    torch.testing.assert_close(class_targets, planes(maps, 9, "zero").mean((2, 3)).softmax(1))
    assert (class_targets - token_targets.mean(1)).abs().max() > 0.01


@pytest.mark.parametrize("tail", [None, "present"])
def test_maps_collate_and_move(tail):
    maps = random_maps(3) if tail else LabelMap(*random_maps(3)[:2])
    single = [LabelMap(*(part[i] if part.numel() else part for part in maps)) for i in range(3)]
    batch = default_collate(single)
    assert isinstance(batch, LabelMap)
    assert batch.has_tail == (tail is not None)
    for part, expected in zip(batch.to("cpu"), maps, strict=True):
        assert part.numel() == expected.numel()
        assert part.numel() == 0 or torch.equal(part, expected)
    assert not LabelMap(maps.ids, maps.scores, None).to("cpu").has_tail


def test_ids_of_any_integer_type_and_half_precision_scores():
    maps, matrix = random_maps(2, classes=21843), crop_matrices(random_crops(2)).float()
    maps = maps._replace(scores=maps.scores.half())
    expected = sample_token_targets(maps, matrix, (4, 4), 21843)
    assert expected.probabilities.dtype == torch.float32
    assert expected.ids.max() > 20000
    for dtype in (torch.int32, torch.uint16):
        targets = sample_token_targets(maps._replace(ids=maps.ids.to(dtype)), matrix, (4, 4), 21843)
        assert all(torch.equal(got, want) for got, want in zip(targets[:4], expected[:4], strict=True))
    torch.testing.assert_close(expected.dense(21843).sum(-1), torch.ones(2, 16))


def test_each_picture_is_sampled_by_itself():
    maps, matrix = random_maps(3), crop_matrices(random_crops(3))
    before = [tensor.clone() for tensor in (*maps, matrix)]
    together = sample_token_targets(maps, matrix, (4, 4), 9)
    alone = sample_token_targets(LabelMap(*(part[1:2] for part in maps)), matrix[1:2], (4, 4), 9)
    torch.testing.assert_close(alone.dense(9), together.dense(9)[1:2])
    assert all(torch.equal(was, now) for was, now in zip(before, (*maps, matrix), strict=True))


@pytest.mark.parametrize(
    ("tail", "axes"),
    [("true", "right"), *(pytest.param("zero", axes, marks=pytest.mark.slow) for axes in ("right", "official"))],
)
def test_compiled_is_eager(tail, axes):
    maps, matrix = random_maps(2, size=(3, 3)), crop_matrices(random_crops(2))
    plan = MixPlan.from_box(flipped_partner(2), (1, 6, 2, 7), (8, 8))

    def labels(maps: LabelMap, matrix: Tensor) -> tuple[Tensor, ...]:
        tokens = sample_token_targets(maps, matrix, (2, 2), 9, tail=tail, axes=axes).mix(plan).dense(9)
        if tail == "true":  # a picture's label is one large token, sampled by the same code
            return (tokens,)
        return tokens, sample_class_targets(maps, matrix, 9, tail=tail, axes=axes)

    compiled = torch.compile(labels, backend="aot_eager", fullgraph=True)(maps, matrix)
    for got, want in zip(compiled, labels(maps, matrix), strict=True):
        torch.testing.assert_close(got, want)


def test_a_picture_smaller_than_its_canvas_still_sums_to_one():
    zoomed_out = geometry.crop(-1.0, -1.0, 3.0, 3.0).expand(2, -1, -1).double()
    targets = sample_token_targets(random_maps(2), zoomed_out, (6, 6), 9, tail="true")
    torch.testing.assert_close(targets.dense(9).sum(-1), torch.ones(2, 36, dtype=torch.float64))
    middle = torch.zeros(6, 6)
    middle[2:4, 2:4] = 1
    torch.testing.assert_close(targets.weight.float(), middle.flatten().expand(2, -1))


def test_what_cannot_work_is_refused():
    maps, matrix = random_maps(2), crop_matrices(random_crops(2))
    with pytest.raises(UserError, match="Did you mean 'true'"):
        sample_token_targets(maps, matrix, (4, 4), 9, tail="tru")
    with pytest.raises(UserError, match="unknown axes"):
        sample_token_targets(maps, matrix, (4, 4), 9, axes="legacy")
    with pytest.raises(UserError, match="hold no tail"):
        sample_token_targets(maps._replace(tail=None), matrix, (4, 4), 9, tail="true")
    with pytest.raises(UserError, match="must be a batch"):
        sample_token_targets(LabelMap(*(part[0] for part in maps)), matrix[:1], (4, 4), 9)
    with pytest.raises(UserError, match="2 maps want a matrix"):
        sample_token_targets(maps, matrix[:1], (4, 4), 9)
    with pytest.raises(UserError, match="keep 3 classes"):
        sample_token_targets(maps, matrix, (4, 4), 2)
    with pytest.raises(UserError, match="smoothing"):
        sample_token_targets(maps, matrix, (4, 4), 9, 1.0)
    with pytest.raises(UserError, match="cannot mix the labels of 2"):
        sample_token_targets(maps, matrix, (4, 4), 9).mix(MixPlan.identity(3, (8, 8)))
