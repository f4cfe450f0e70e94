"""One run of a study: train it, or go on with it, and say in a row what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alltokens.engine import run_folder, runs
from alltokens.engine.config import RunConfig
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.errors import TrainingStopped
from alltokens.evaluate.token_truth import TokenTruth, measure_token_truth
from alltokens.models.cost import gmacs, parameter_count
from alltokens.study.results import Result


@dataclass(frozen=True)
class Job:
    """A run that is to be made."""

    study: str
    arm: str
    seed: int
    settings: str
    config: RunConfig
    run_dir: Path
    side_by_side: int = 1
    labels: str = ""
    masks: str | None = None
    """Measure token predictions against these masks; see evaluate/token_truth.py."""

    @property
    def name(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def train_job(job: Job, kept: runs.Kept, deadline: float | None = None) -> Result | None:
    """The run's row, of a failure too; None if it had to stop at the deadline (it goes on from there next time)."""
    started, begun = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    facts: dict[str, Any] = _facts() | {"started": started, "side_by_side": job.side_by_side}
    try:
        result = _train(job, kept, deadline)
        facts |= _measured(job, result)
        facts["wall_seconds"] = time.monotonic() - begun
        shutil.rmtree(RunFolder(job.run_dir).checkpoints, ignore_errors=True)  # nothing is left to go on with
        return _row(job, "done", facts)
    except TrainingStopped as stopped:
        if stopped.signal != signal.SIGALRM:  # not the deadline: the study is to stop
            raise
        return None
    except Exception as error:  # whatever it is: a study goes on without this run, and says so
        words = " ".join(str(error).split())[:400]
        facts["wall_seconds"] = time.monotonic() - begun
        return failed(job, f"{type(error).__name__}: {words}", facts)


def failed(job: Job, error: str, facts: Mapping[str, Any] | None = None) -> Result:
    return _row(job, "failed", {**(facts or {}), "error": error})


def _row(job: Job, status: str, facts: Mapping[str, Any]) -> Result:
    return Result(job.study, job.arm, job.seed, status, settings=job.settings, labels=job.labels, **facts)


def _train(job: Job, kept: runs.Kept, deadline: float | None) -> runs.RunResult:
    folder = RunFolder(job.run_dir)
    words: dict[str, Any] = {"quiet": True, "deadline": deadline, "kept": kept, "command": ("alltokens", "study")}
    begun = folder.last_checkpoint.exists() and folder.config_file.exists()
    if begun and load_config(job.run_dir) == job.config:
        return runs.resume(job.run_dir, **words)
    if job.run_dir.exists():  # cut off before there was anything to go on from, or its pictures lie elsewhere now
        folder.lock()
        shutil.rmtree(job.run_dir, ignore_errors=True)
        folder.release()
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    return runs.train(job.config, recipe=f"{job.study}-{job.arm}", run_dir=job.run_dir, **words)


def _measured(job: Job, result: runs.RunResult) -> dict[str, Any]:
    records = run_folder.read_metrics(job.run_dir)
    last = [record for record in records if record["kind"] == "evaluation"][-1]
    prefix = "average_" if "average_top1" in last else ""  # of the averaged weights, where there are some
    size = job.config.data.image_size
    truth = TokenTruth(None, None, None)
    if job.masks is not None:
        truth = measure_token_truth(result.net, job.config, job.masks)
    return {
        "top1": last[f"{prefix}top1"],
        "top5": last[f"{prefix}top5"],
        "loss": last[f"{prefix}loss"],
        "best_top1": result.best_top1,
        "epochs": last["epoch"],
        "seconds": result.seconds,
        "pictures_per_second": statistics.median(
            record["pictures_per_second"] for record in records if record["kind"] == "train"
        ),
        "parameters": parameter_count(result.net),
        "gmacs": gmacs(result.net, size),
        "train_pictures": result.feed.train_pictures,
        "val_pictures": result.feed.val_pictures,
        "token_accuracy": truth.accuracy,
        "pointing": truth.pointing,
        "token_iou": truth.iou,
    }


def _facts() -> dict[str, Any]:
    git = run_folder.git_state() or {}
    commit = str(git.get("commit", ""))[:12] + ("+" if git.get("changed") else "")
    commit = commit or os.environ.get("ALLTOKENS_COMMIT", "")  # where the code went without its history
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"commit": commit, "device": device, "torch": torch.__version__}
