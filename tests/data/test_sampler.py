from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alltokens.data.sampler import Draw, EpochSampler, draw_seeds, epoch_order, evaluation_indices
from alltokens.errors import UserError


@given(length=st.integers(1, 300), seed=st.integers(0, 2**64), epoch=st.integers(0, 1000))
def test_an_epoch_has_every_picture_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(length, seed, epoch)) == list(range(length))


def test_the_order_and_the_seeds_are_these_forever() -> None:
    # A change here changes every run that is resumed.
    assert epoch_order(8, seed=1, epoch=2).tolist() == [3, 2, 4, 0, 5, 1, 6, 7]
    assert draw_seeds(2, seed=1, epoch=2).tolist() == [2542770300237765227, 2095397996449722340]


def test_seeds_and_epochs_change_the_order_and_the_draws() -> None:
    settings = [(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(epoch_order(20, *setting)) for setting in settings}) == 16
    seeds = np.concatenate([draw_seeds(1000, *setting) for setting in settings])
    assert len(np.unique(seeds)) == 16_000
    assert seeds.min() >= 0


def test_every_picture_is_equally_likely_at_every_place() -> None:
    first = np.array([epoch_order(10, seed=0, epoch=epoch) for epoch in range(4000)])
    counts = np.stack([np.bincount(place, minlength=10) for place in first.T])
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)  # five standard deviations


def test_seeds_use_all_their_bits() -> None:
    bits = (draw_seeds(4000, 0, 0)[:, None] >> np.arange(63)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(("length", "repeats"), [(12, 3), (13, 3), (14, 3), (2, 3), (10, 1)])
def test_repeated_augmentation_keeps_the_length_and_repeats_pictures(length: int, repeats: int) -> None:
    order = epoch_order(length, 0, 0, repeats)
    assert len(order) == length
    whole = order[: length // repeats * repeats].reshape(-1, repeats)
    assert (whole == whole[:, :1]).all()
    assert len(np.unique(order)) == -(-length // repeats)


def test_repeated_pictures_are_augmented_anew_and_go_to_different_ranks() -> None:
    ranks = [next(iter(EpochSampler(24, 4, seed=0, rank=rank, world=3, repeats=3))) for rank in range(3)]
    for copies in zip(*ranks, strict=True):
        assert len({draw.index for draw in copies}) == 1
        assert len({draw.seed for draw in copies}) == 3


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("length", [24, 25, 31])
def test_ranks_together_see_what_one_rank_with_a_larger_batch_sees(length: int, world: int) -> None:
    alone = list(EpochSampler(length, 2 * world, seed=5))
    ranks = [list(EpochSampler(length, 2, seed=5, rank=rank, world=world)) for rank in range(world)]
    assert len(alone) == length // (2 * world)
    for batch, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert set(batch) == {draw for part in parts for draw in part}
        assert sum(map(len, parts)) == len(batch)


@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_a_resumed_epoch_goes_on_as_the_whole_one(start: int) -> None:
    sampler = EpochSampler(23, 4, seed=7)
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.set_epoch(3, start)
    assert len(sampler) == 5 - start
    assert list(sampler) == whole[start:]
    sampler.set_epoch(4)
    assert len(sampler) == 5
    assert list(sampler) != whole


def test_an_iteration_keeps_its_epoch_when_the_next_is_set() -> None:
    sampler = EpochSampler(8, 2, seed=0)
    expected = list(sampler)
    running = iter(sampler)
    sampler.set_epoch(1, 2)
    assert list(running) == expected


def test_batches_are_draws_of_plain_numbers() -> None:
    batch = next(iter(EpochSampler(4, 2, seed=0)))
    assert all(type(draw) is Draw and type(draw.index) is int and type(draw.seed) is int for draw in batch)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_has_every_picture_once_over_all_ranks(world: int) -> None:
    parts = [list(evaluation_indices(7, rank, world)) for rank in range(world)]
    assert sorted(index for part in parts for index in part) == list(range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "world": 2}, r"a batch of 6 on 2 rank\(s\) takes 12 pictures, .* only 11; .* at most 5"),
        ({"batch_size": 0}, "batch size must be at least 1, got 0"),
        ({"batch_size": 1, "rank": 2, "world": 2}, "rank must lie in 0 to 1"),
        ({"batch_size": 1, "repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_what_cannot_work_is_explained(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(EpochSampler(11, seed=0, **options))


def test_a_start_beyond_the_epoch_is_an_error() -> None:
    with pytest.raises(UserError, match="start_batch must lie in 0 to 5, got 6"):
        EpochSampler(11, 2, seed=0).set_epoch(0, 6)
