"""Train what is missing of studies: one run after the other, or several side by side on one device.

A study's small runs keep a big device busy only together. Side by side, each process trains the seeds of one arm after
the other, so that a step is compiled once in a process; pictures are decoded once and handed to all.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alltokens.engine.config import TrainConfig
from alltokens.engine.progress import duration
from alltokens.engine.signals import stopping
from alltokens.errors import Stopped, TrainingStopped, UserError, unknown
from alltokens.labels.store import LabelStore
from alltokens.study.plan import Study
from alltokens.study.queue import Queue
from alltokens.study.results import Result, append_result, chosen, read_results
from alltokens.study.training import Job, train_job

GRACE = 20.0  # seconds after the deadline, for runs that are saving their state
GO_ON = "the same command"


@dataclass(frozen=True)
class Limits:
    """How, and how long."""

    minutes: float | None = None
    side_by_side: int = 1
    arms: tuple[str, ...] = ()
    seeds: int | None = None

    def seeds_of(self, study: Study) -> int:
        """As many as its file plans, or fewer."""
        return study.plan.seeds if self.seeds is None else min(self.seeds, study.plan.seeds)


@dataclass
class Ending:
    """What a call of `run_studies` came to."""

    done: int = 0
    failed: int = 0
    there: int = 0  # had their row already
    left: int = 0  # not begun, or stopped in the middle: the next call goes on with them


def pending(study: Study, rows: Sequence[Result], limits: Limits) -> dict[str, list[int]]:
    """Arm -> the seeds that have no good row yet."""
    missing: dict[str, list[int]] = {}
    for arm in (name for name in study.arms if not limits.arms or name in limits.arms):
        found = chosen(rows, study.settings(arm))
        seeds = range(limits.seeds_of(study))
        missing[arm] = [seed for seed in seeds if seed not in found or found[seed].status != "done"]
    return missing


def jobs_of(
    studies: Sequence[Study],
    rows: Sequence[Result],
    limits: Limits,
    *,
    stores: Mapping[str, str],
    runs_dir: Path,
    masks: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[list[Job], int]:
    """The runs that are missing, each one once, and how many are there; studies and arms in their order.

    An arm whose label store nobody named is left out, and `say` is told.
    """
    known = {arm for study in studies for arm in study.arms}
    for name in limits.arms:
        if name not in known:
            raise unknown("arm", name, known)
    if limits.seeds is not None and studies and limits.seeds > (most := max(study.plan.seeds for study in studies)):
        say(f"--seeds {limits.seeds}: at most {most} are planned; for more, write seeds: {limits.seeds} into the file")
    jobs: dict[tuple[str, int], Job] = {}
    there = 0
    for study in studies:
        missing = pending(study, rows, limits)
        if study.plan.truth and masks is None and any(missing.values()):
            raise UserError(f"{study.file} measures token predictions: say where the masks are with --masks PATH")
        for arm, seeds in missing.items():
            settings, store = study.settings(arm), study.arms[arm].data.labels
            there += limits.seeds_of(study) - len(seeds)
            if seeds and store is not None and store not in stores:
                say(f"left out: {study.name} {arm}, for want of its label store: --store {store}=PATH")
                continue
            for seed in seeds:
                config = study.config(arm, seed, stores)
                job = Job(
                    study.name,
                    arm,
                    seed,
                    settings,
                    config,
                    runs_dir / study.name / f"{arm}-{settings}-seed{seed}",
                    limits.side_by_side,
                    study.arms[arm].data.labels or "",
                    masks if study.plan.truth else None,
                )
                jobs.setdefault((settings, seed), job)
    return list(jobs.values()), there


def run_studies(
    studies: Sequence[Study],
    results: Path,
    limits: Limits | None = None,
    *,
    stores: Mapping[str, str] | None = None,
    runs_dir: Path = Path("runs/studies"),
    masks: str | None = None,
    say: Callable[[str], None] = print,
) -> Ending:
    """Train what is missing and append a row for each run. Time that is up ends it; nothing half-done gets a row."""
    limits = limits or Limits()
    if limits.side_by_side < 1:
        raise UserError(f"side by side must be at least 1, got {limits.side_by_side}")
    if limits.minutes is not None and limits.minutes <= 0:
        raise UserError(f"minutes must be above 0, got {limits.minutes:g}")
    if limits.seeds is not None and limits.seeds < 1:
        raise UserError(f"seeds must be at least 1, got {limits.seeds}")
    started = time.monotonic()
    deadline = None if limits.minutes is None else started + 60 * limits.minutes
    jobs, there = jobs_of(
        studies, read_results(results), limits, stores=stores or {}, runs_dir=runs_dir, masks=masks, say=say
    )
    _check_places(jobs)
    ending = Ending(there=there, left=len(jobs))
    at_once = min(limits.side_by_side, len(jobs))
    say(f"{len(jobs)} runs to train, {there} are there; {at_once} side by side, rows into {results}")
    if not jobs:
        return ending

    def finished(job: Job, result: Result) -> None:
        append_result(results, result)
        ending.left -= 1
        number = len(jobs) - ending.left
        if result.status == "done":
            ending.done += 1
            told = (
                f"top-1 {result.top1:.2f} %, {result.wall_seconds:.0f} s, {result.pictures_per_second:,.0f} pictures/s"
            )
        else:
            ending.failed += 1
            told = f"FAILED: {result.error}"
        say(f"[{number}/{len(jobs)}] {duration(time.monotonic() - started)}  {job.study} {job.name}: {told}")

    queue = Queue(jobs, deadline)
    try:
        if at_once == 1:
            _one_after_the_other(queue, finished)
        else:
            from alltokens.study.workers import side_by_side

            with stopping(GO_ON):
                side_by_side(queue, at_once, finished, deadline, GRACE)
    except TrainingStopped as stopped:
        raise Stopped(stopped.signal, GO_ON) from None
    return ending


def _check_places(jobs: Sequence[Job]) -> None:
    """What the runs read is there: said once and before, not by every run and after it."""
    data = [job.config.data for job in jobs]
    for root in {where or one.root for one in data for where in (one.train, one.val)}:
        if root is None:
            raise UserError("where are the pictures? Say --data DIR")
        if root != "scenes" and not root.startswith(("scenes:", "hfds:")) and not Path(root).expanduser().exists():
            raise UserError(f"there are no pictures at {root}")
    for path in {job.config.data.labels for job in jobs if job.config.data.labels is not None}:
        LabelStore.open(path)
    for masks in {job.masks for job in jobs if job.masks is not None}:
        if masks != "scenes" and not Path(masks).exists():
            raise UserError(f"there are no masks at {masks}; --masks takes a folder or tar of trimaps, or scenes")


def _one_after_the_other(queue: Queue, finished: Callable[[Job, Result], None]) -> None:
    from alltokens.engine.runs import Kept

    kept = Kept()
    last: Job | None = None
    while (job := queue.take(last)) is not None:
        result = train_job(job, kept, queue.deadline)
        queue.ended(job, result is not None)
        if result is not None:
            finished(job, result)
        last = job


def decoded_pictures(jobs: Sequence[Job]) -> dict[object, Any]:
    """Every data set of some jobs, decoded once, on the CPU. Sets that are not kept on the device are left out."""
    from alltokens.engine.feeding import decoded
    from alltokens.engine.runtime import start_runtime

    shelf: dict[object, Any] = {}
    ready: dict[object, Any] = {}
    seen: set[object] = set()
    for job in jobs:
        config = job.config
        if config.data.cache != "device" or (config.data, config.augment.crop_fraction) in seen:
            continue
        seen.add((config.data, config.augment.crop_fraction))
        plain = TrainConfig(batch_size=config.train.batch_size, epochs=config.train.epochs, device="cpu")
        runtime = start_runtime(plain)
        data = dataclasses.replace(config.data, workers=min(16, os.cpu_count() or 1))
        ready |= decoded(dataclasses.replace(config, train=plain, data=data), runtime, shelf)
    return ready
