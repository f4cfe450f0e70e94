"""One picture's map as a row of bytes: what is exact, what is rounded and by how much, and how many bytes it takes."""

import numpy as np
import pytest
import torch

from alltokens.core.label_maps import NO_TAIL, LabelMap
from alltokens.errors import UserError
from alltokens.labels.layout import FORMS, RowLayout
from alltokens.labels.packing import field_bytes, pack_field, score_bits, unpack_field

IMAGENET, IMAGENET_21K = 1000, 21_843


def random_maps(count, kept, num_classes, grid=(18, 18), spread=4.0, seed=0):
    """Maps as annotators make them: the best of scores for all classes, the highest id among them."""
    generator = torch.Generator().manual_seed(seed)
    few = min(num_classes, 40)
    scores = torch.randn(count, few, *grid, generator=generator) * spread
    best, at = scores.sort(1, descending=True)
    ids = torch.randperm(num_classes, generator=generator)[:few]
    ids[0] = num_classes - 1
    tail = best[:, kept:].logsumexp(1) if few > kept else torch.full((count, *grid), -torch.inf)
    return LabelMap(ids[at[:, :kept]].int(), best[:, :kept].half().float(), tail.half().float())


@pytest.mark.parametrize("width", [*range(1, 25), 31])
@pytest.mark.parametrize("count", [1, 7, 324])
def test_numbers_of_any_width_come_back_from_their_bytes(width, count):
    values = np.random.default_rng(width).integers(0, 2**width, (3, count))
    values[0, 0], values[1, -1] = 0, 2**width - 1
    packed = pack_field(values, width)
    assert packed.shape == (3, field_bytes(count, width))
    assert np.array_equal(unpack_field(packed, count, width).numpy(), values)
    planes = [8] * (width // 8) + [bits for bits in (4, 2, 1) if width % 8 & bits]
    assert packed.shape[1] == sum(-(-count * bits // 8) for bits in planes)


@pytest.mark.parametrize("num_classes", [IMAGENET, IMAGENET_21K, 70_000, 2_000_000])
@pytest.mark.parametrize("form", FORMS)
def test_ids_are_exact_however_many_classes_there_are(form, num_classes):
    maps = random_maps(3, 5, num_classes)
    layout = RowLayout((18, 18), 5, num_classes, form=form)
    content, _ = layout.encode(maps)
    assert content.shape == (3, layout.row_bytes)
    read = layout.decode(content)
    assert int(read.ids.max()) == num_classes - 1
    assert torch.equal(read.ids, maps.ids)


def test_plain_scores_and_tails_are_float16_to_the_bit():
    maps = random_maps(70, 5, IMAGENET, grid=(5, 3))
    content, errors = RowLayout((5, 3), 5, IMAGENET).encode(maps)
    read = RowLayout((5, 3), 5, IMAGENET).decode(content)
    assert torch.equal(read.scores.float(), maps.scores)
    assert torch.equal(read.tail.float(), maps.tail)
    assert errors.max() == 0
    finer = maps._replace(scores=maps.scores + 1e-3)
    rounding = (finer.scores - finer.scores.half().float()).abs().amax((1, 2, 3))
    np.testing.assert_allclose(RowLayout((5, 3), 5, IMAGENET).encode(finer)[1], rounding.numpy())


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 200.0])
def test_packed_scores_are_as_close_as_the_row_says_and_as_their_bits_allow(spread):
    maps = random_maps(9, 5, IMAGENET_21K, spread=spread)
    layout = RowLayout((18, 18), 5, IMAGENET_21K, form="packed")
    content, errors = layout.encode(maps)
    read = layout.decode(content)
    away = (read.scores.float() - maps.scores).abs().amax((1, 2, 3))
    tail_away = (read.tail.float() - maps.tail).abs().amax((1, 2))
    np.testing.assert_allclose(errors, torch.maximum(away, tail_away).numpy(), rtol=1e-6)
    # Half of the coarsest step: the first score's span in 8 bits, each further one's distance from the one before.
    first = maps.scores[:, 0].flatten(1)
    steps = [(first.amax(1) - first.amin(1)) / 255, (maps.tail.flatten(1).amax(1) - maps.tail.flatten(1).amin(1)) / 254]
    steps += [(maps.scores[:, at - 1] - maps.scores[:, at]).flatten(1).amax(1) for at in range(1, 5)]
    coarsest = torch.stack([*steps[:2], *(step / (2 ** score_bits(at + 1) - 1) for at, step in enumerate(steps[2:]))])
    rounding = maps.scores.abs().amax((1, 2, 3)) * 2**-10  # of float16, in the steps and in what is read
    assert (away <= 0.51 * coarsest.amax(0) * 1.02 + 2 * rounding).all()
    assert (read.scores[:, 1:] <= read.scores[:, :-1]).all()


def test_packing_moves_a_probability_by_less_than_half_of_the_stated_error():
    maps = random_maps(9, 5, IMAGENET)
    layout = RowLayout((18, 18), 5, IMAGENET, form="packed")
    content, errors = layout.encode(maps)
    read = layout.decode(content)

    def probabilities(scores, tail):
        return torch.cat([scores.double(), tail.double()[:, None]], 1).softmax(1)

    moved = (probabilities(read.scores, read.tail) - probabilities(maps.scores, maps.tail)).abs().flatten(1).amax(1)
    assert (moved.numpy() <= np.tanh(errors / 2) + 1e-12).all()
    assert errors.max() < 0.08  # scores that spread over 20 or so
    assert moved.max() < 0.03


@pytest.mark.parametrize(
    ("form", "num_classes", "limit"),
    [("plain", IMAGENET, 7200), ("packed", IMAGENET, 4000), ("packed", 1024, 4000), ("packed", IMAGENET_21K, 5000)],
)
def test_a_picture_takes_no_more_bytes_than_we_say(form, num_classes, limit):
    """The row, its key, its end in the shard and its place in the index."""
    key = len("n01440764/ILSVRC2012_val_00000293.JPEG")
    assert RowLayout((18, 18), 5, num_classes, form=form).row_bytes + key + 4 + 12 <= limit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("grid", "kept", "num_classes"), [((1, 1), 1, 1), ((2, 5), 1, 2), ((3, 3), 7, 7)])
def test_the_smallest_maps_and_those_of_all_classes(form, grid, kept, num_classes):
    maps = random_maps(5, kept, num_classes, grid)
    layout = RowLayout(grid, kept, num_classes, form=form)
    read = layout.decode(layout.encode(maps)[0])
    assert torch.equal(read.ids, maps.ids)
    assert (read.tail == -torch.inf).all() == (kept == num_classes)
    without = layout.encode(maps._replace(tail=torch.full_like(maps.tail, -torch.inf)))
    assert (layout.decode(without.content).tail == -torch.inf).all()


@pytest.mark.parametrize("form", FORMS)
def test_maps_without_a_tail_and_of_one_score_everywhere(form):
    layout = RowLayout((4, 4), 3, 10, tail=False, form=form)
    ids = torch.arange(3).view(1, 3, 1, 1).expand(2, 3, 4, 4)
    read = layout.decode(layout.encode(LabelMap(ids, torch.full((2, 3, 4, 4), 1.5), NO_TAIL))[0])
    assert not read.has_tail
    assert (read.scores == 1.5).all()


def test_some_cells_may_have_no_tail():
    maps = random_maps(4, 3, 20, (4, 4))
    maps.tail[:, 1] = -torch.inf
    layout = RowLayout((4, 4), 3, 20, form="packed")
    content, errors = layout.encode(maps)
    read = layout.decode(content)
    assert torch.equal(torch.isinf(read.tail), torch.isinf(maps.tail))
    assert (np.isfinite(errors) & (errors < 0.1)).all()


def test_packed_sorts_scores_and_their_ids_together():
    maps = random_maps(4, 5, 50, (3, 3))
    layout = RowLayout((3, 3), 5, 50, form="packed")
    sorted_ = layout.encode(maps)
    order = torch.tensor([3, 0, 4, 1, 2])
    turned = layout.encode(LabelMap(maps.ids[:, order], maps.scores[:, order], maps.tail))
    assert np.array_equal(sorted_.content, turned.content)


def test_what_a_row_cannot_hold_is_refused():
    maps = random_maps(2, 3, 20, (4, 4))
    for form in FORMS:
        layout = RowLayout((4, 4), 3, 20, form=form)
        for wrong, message in (
            (maps._replace(ids=maps.ids + 1), "0 to 19"),
            (maps._replace(ids=maps.ids - 20), "class ids must lie in"),
            (maps._replace(scores=maps.scores + 70_000), "fit into float16"),
            (maps._replace(scores=maps.scores * torch.nan), "must be finite"),
            (maps._replace(tail=maps.tail + torch.inf), "or be -inf"),
            (maps._replace(tail=NO_TAIL), "wants a tail"),
            (maps._replace(tail=maps.tail[:, :2]), r"\(B, 4, 4\), got \(2, 2, 4\)"),
            (LabelMap(maps.ids[:, :2], maps.scores[:, :2], maps.tail), r"= \(3, 4, 4\); got ids \(2, 2, 4, 4\)"),
        ):
            with pytest.raises(UserError, match=message):
                layout.encode(wrong)
    for grid, kept, classes in (((0, 4), 1, 2), ((4, 4), 0, 2), ((4, 4), 3, 2), ((4, 4), 1, 2**31 + 1)):
        with pytest.raises(UserError, match="between 1 and all classes"):
            RowLayout(grid, kept, classes)
    with pytest.raises(UserError, match="Did you mean 'packed'"):
        RowLayout((4, 4), 1, 2, form="paked")
