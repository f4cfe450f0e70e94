"""Which run comes next: studies in their order, a study's arms evenly, a process with the arm that it has compiled."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic as now

from alltokens.study.training import Job

AHEAD = 2  # so many runs may an arm be ahead of the one that is furthest behind before its processes help there


class Queue:
    """Hands out jobs. When the time is up at any moment, a study's arms have about as many seeds as each other.

    A later study begins when all runs of the earlier ones are handed out, or would not end in time.
    """

    def __init__(self, jobs: Sequence[Job], deadline: float | None = None) -> None:
        self.deadline = deadline
        self._arms: dict[str, list[Job]] = {}  # by settings; in the order of the studies, and of arms in them
        self._study: dict[str, str] = {}
        for job in jobs:
            self._arms.setdefault(job.settings, []).append(job)
            self._study.setdefault(job.settings, job.study)
        self._taken = dict.fromkeys(self._arms, 0)
        self._started: dict[tuple[str, int], tuple[float, bool]] = {}
        # Seconds of an arm's last run that was the first of its process (True), or a later one (False).
        self._seconds: dict[tuple[str, bool], float] = {}

    def take(self, last: Job | None = None) -> Job | None:
        """The next run of a process whose last one was `last`; None if none is left, or none would end in time."""
        compiled = None if last is None else last.settings
        ready = [settings for settings, jobs in self._arms.items() if jobs and self._in_time(settings, compiled)]
        if not ready:
            return None
        ready = [settings for settings in ready if self._study[settings] == self._study[ready[0]]]
        behind = min(ready, key=lambda settings: self._taken[settings])
        own = behind if compiled is None else compiled
        stay = own in ready and self._taken[own] < self._taken[behind] + AHEAD
        settings = own if stay else behind
        job = self._arms[settings].pop(0)
        self._taken[settings] += 1
        self._started[(job.settings, job.seed)] = now(), settings != compiled
        return job

    def ended(self, job: Job, whole: bool) -> None:
        """Note how long a run took, if it went to its end."""
        started, first = self._started[(job.settings, job.seed)]
        if whole:
            self._seconds[(job.settings, first)] = now() - started

    @property
    def jobs(self) -> list[Job]:
        """Those that nobody has taken yet."""
        return [job for jobs in self._arms.values() for job in jobs]

    def _in_time(self, settings: str, compiled: str | None) -> bool:
        return self.deadline is None or now() + self._guess(settings, settings != compiled) < self.deadline

    def _guess(self, settings: str, first: bool) -> float:
        """How long a run will take. The first of a process compiles: how much that adds, other arms tell."""
        seconds = self._seconds
        if (settings, first) in seconds:
            return seconds[settings, first]
        if (settings, not first) in seconds:
            both = [arm for arm in self._arms if (arm, True) in seconds and (arm, False) in seconds]
            factors = [seconds[arm, first] / seconds[arm, not first] for arm in both]
            return seconds[settings, not first] * max(factors, default=1.0)
        return max(seconds.values(), default=0.0)
