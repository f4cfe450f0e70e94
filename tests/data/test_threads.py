from __future__ import annotations

import threading

import pytest

from alltokens.data import threads
from alltokens.data.threads import in_order, most_held


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_results_come_in_order_in_pieces_and_not_far_ahead(count: int) -> None:
    begun: list[int] = []
    held = most_held(count, 3)

    def squared(item: int) -> int:
        begun.append(item)
        return item * item

    came: list[int] = []
    for piece in in_order(squared, iter(range(100)), count, 3):
        assert len(piece) == (3 if len(came) < 99 else 1)
        assert max(begun) < len(came) + held
        came += piece
    assert came == [item * item for item in range(100)]


def test_several_threads_are_at_work_at_a_time() -> None:
    together = threading.Barrier(3, timeout=20)
    assert list(in_order(lambda item: together.wait() >= 0, range(3), 3, 1)) == [[True]] * 3


def test_an_error_comes_in_its_place_and_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told, other = threading.Event(), threading.Event()

    class Ended(threading.Event):
        def set(self) -> None:
            super().set()
            told.set()

    monkeypatch.setattr(threads, "Event", Ended)
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            assert other.wait(20)
            raise ValueError("the first")
        other.set()
        assert told.wait(20)  # still at it when the end comes

    before = threading.active_count()
    with pytest.raises(ValueError, match="the first"):
        list(in_order(work, range(1000), 2, 4))
    assert sorted(begun) in ([0, 4], [0, 4, 8])  # the free thread may take one more before it is told
    assert threading.active_count() == before
