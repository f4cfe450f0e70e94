"""Several processes, one end: whatever ends one of them ends all, and the others say which it was and why.

Each process counts up a heartbeat in the store through which they met. One whose own error ends it leaves its words
there first. When a collective breaks off or times out, the others look who left words, and whose heart stands still.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d

from alltokens.engine.runtime import Runtime
from alltokens.errors import Stopped, TrainingFailed, UserError

BEAT = 0.5  # seconds between two heartbeats
GONE = 3.0  # without one for so long, when a collective has broken off: it has ended
SILENT = 60.0  # without one for so long, while all seems well: said once, as a warning


@contextmanager
def together(runtime: Runtime, then: str = "") -> Iterator[None]:
    """Around all that the processes do together. Errors that are alike in all of them are said by one.

    `then` is what a user can do once another one has ended.
    """
    if runtime.world == 1:
        yield
        return
    watch = _Watch(runtime.rank, runtime.world)
    try:
        yield
    except (UserError, TrainingFailed) as error:
        code = 2 if isinstance(error, UserError) else 1
        if watch.farewell(str(error)) > 1:
            raise SystemExit(code) from None
        raise
    except Stopped as stopped:
        if not runtime.is_main:
            raise SystemExit(128 + stopped.signal) from None
        raise
    except RuntimeError as error:
        who = watch.who_ended()
        if not who and isinstance(error, dist.DistError):
            who = "another process did not answer in time, though all of them live"
        if who:
            watch.farewell(_AFTER_ANOTHER)
            raise TrainingFailed(
                f"{who}. This is process {runtime.rank}, which cannot go on alone{then and f'. {then}'}"
            ) from None
        watch.farewell(f"{type(error).__name__}: {error}")
        raise
    except Exception as error:
        watch.farewell(f"{type(error).__name__}: {error}")
        raise
    finally:
        watch.end()


def same_everywhere(runtime: Runtime, **facts: object) -> None:
    """Refuse processes that are about to train on different things; `facts` are names and what each process has."""
    everyone = runtime.everyone(facts)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise UserError(
                    f"the processes do not see the same {name}: {value} in process 0, {other[name]} in process {rank}. "
                    "All must be given the same data and settings"
                )


_AFTER_ANOTHER = "because another had ended"  # words of one that is not the first to end


class _Watch:
    """This process's heartbeat, in a thread, and a look at the others'."""

    def __init__(self, rank: int, world: int) -> None:
        store = distributed_c10d._get_default_store().clone()  # one's own connection: another may wait in it for long
        self._store = dist.PrefixStore("alltokens", store)
        self._rank, self._world = rank, world
        self._heard = dict.fromkeys(range(world), "")  # the words of those that have ended
        self._stop = threading.Event()
        self._store.add(f"beat/{rank}", 1)
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def farewell(self, words: str) -> int:
        """Leave the reason of one's end; how many have left the same words."""
        self.end()
        try:
            self._store.set(f"words/{self._rank}", words[:2000])
            alike = self._store.add(f"same/{words[:2000]}", 1)
        except RuntimeError:
            return 1
        if self._rank == 0:
            time.sleep(3 * BEAT)  # the store may end with this process: the others hear its words first
        return alike

    def who_ended(self) -> str:
        """Which of the others ended first, and why; empty if all are alive."""
        self.end()
        try:
            before = self._beats()
            time.sleep(GONE)
            after = self._beats()
            self._hear()
        except RuntimeError:  # the store is gone, and process 0 with it
            before, after = [], []
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank in others:
            if self._heard[rank] not in ("", _AFTER_ANOTHER):
                return f"process {rank} has ended: {self._heard[rank]}"
        if not after:
            return "process 0, through which all met, has ended without a word: it was killed, or its machine is gone"
        still = [str(rank) for rank in others if before[rank] == after[rank] and not self._heard[rank]]
        if not still:
            return ""
        which = f"process {still[0]} has" if len(still) == 1 else f"processes {', '.join(still)} have"
        return f"{which} ended without a word, as one that was killed or whose machine is gone"

    def end(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT)

    def _beat(self) -> None:
        seen = {rank: (0, time.monotonic()) for rank in range(self._world)}
        while not self._stop.wait(BEAT):
            with suppress(RuntimeError):  # the store is gone: whoever needs it says so
                self._store.add(f"beat/{self._rank}", 1)
                self._hear()
                for rank, count in enumerate(self._beats()):
                    last, since = seen[rank]
                    if count != last:
                        seen[rank] = (count, time.monotonic())
                    elif time.monotonic() - since > SILENT:
                        print(f"alltokens: no sign of life from process {rank} for {SILENT:g} s", file=sys.stderr)
                        seen[rank] = (count, float("inf"))  # once

    def _beats(self) -> list[int]:
        return [self._store.add(f"beat/{rank}", 0) for rank in range(self._world)]

    def _hear(self) -> None:
        for rank, words in self._heard.items():
            if not words and self._store.check([key := f"words/{rank}"]):
                self._heard[rank] = self._store.get(key).decode(errors="replace")
