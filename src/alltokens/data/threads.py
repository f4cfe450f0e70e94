"""Many items by several threads of this process, their results in order, never far ahead of whoever takes them.

Threads suit work that leaves Python most of the time, as reading and decoding pictures does: they start at once and
write into memory that is there already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Event
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # pieces for each thread


def most_held(threads: int, piece: int) -> int:
    """Of how many items `in_order` may at most have results (or their beginnings) that were not let go of."""
    return max(1, _AHEAD * threads) * piece


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, piece: int
) -> Generator[list[Result]]:
    """`work(item)` of every item, in order, `piece` results at a time, by so many threads (0: by the caller's own).

    A piece is let go of when the next one is asked for: of the `most_held` items from it on, none is begun before, so
    results may lie in memory that is used in turn. An error comes where its item's result would have come. It, Ctrl-C
    and closing the generator end everything when each thread is through with the item in its hands.
    """
    there = iter(items)
    pieces = iter(lambda: list(islice(there, piece)), [])
    if threads == 0:
        yield from ([work(item) for item in part] for part in pieces)
        return
    ended = Event()

    def done(part: list[Item]) -> list[Result]:
        return [work(item) for item in part if not ended.is_set()]

    pool = ThreadPoolExecutor(threads)
    under_way: deque[Future[list[Result]]] = deque()
    try:
        for part in pieces:
            if len(under_way) == _AHEAD * threads:
                yield under_way.popleft().result()
            under_way.append(pool.submit(done, part))
        while under_way:
            yield under_way.popleft().result()
    finally:
        ended.set()
        pool.shutdown(cancel_futures=True)
