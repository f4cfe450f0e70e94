"""What the crash tests start in forked processes and kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alltokens.engine import runs
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingFailed, UserError
from alltokens.labels.annotate import annotate
from alltokens.labels.labeller import Labeller
from tests.faults.moments import Fault, Moments
from tests.labels.tiny_annotator import OPTIONS, Brittle
from tests.tiny import tiny_config

CONFIG = tiny_config(train={"epochs": 2}, checkpoint={"keep_every": 2})

# Imports once, runs nothing itself, and forks: torch's autograd does not work in a fork of a process that used it.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.faults.victims"])


def train_or_go_on(run: Path) -> None:
    """What a user types after a crash: --resume if there is a run, else the first command again."""
    if (run / "config.yaml").exists():
        runs.resume(run, quiet=True)
    else:
        runs.train(CONFIG, run_dir=run, quiet=True)


def annotate_or_go_on(pictures: Path, store: Path) -> None:
    annotate(Brittle(), pictures, store, workers=0, **OPTIONS)


def ended(
    work: Callable[..., None], *arguments: Any, below: Path, fatal: int = 0, fault: Fault = "kill"
) -> tuple[int, int, str]:
    """Run `work` in a process that a fault meets at its moment `fatal`: exit code, moments, and the error if any.

    The exit code and the error are those of the command line; an error that it would show as a traceback gives 99.
    """
    mine, its = processes.Pipe(duplex=False)
    process = processes.Process(target=_victim, args=(its, work, arguments, Moments(below, fatal, fault)))
    process.start()
    its.close()
    moments, error = 0, ""
    with contextlib.suppress(EOFError):  # killed
        moments, error = mine.recv()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, moments, error


def _victim(told: Any, work: Callable[..., None], arguments: tuple[Any, ...], moments: Moments) -> None:
    torch.set_num_threads(1)
    moments.around(Trainer, "update")
    moments.around(Labeller, "forward")
    moments.install()
    try:
        work(*arguments)
        code, error = 0, ""
    except (UserError, TrainingFailed) as failure:
        code, error = (2 if isinstance(failure, UserError) else 1), str(failure)
    except BaseException:
        code, error = 99, traceback.format_exc()
    told.send((moments.count, error))
    told.close()
    os._exit(code)
