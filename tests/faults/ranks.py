"""Two processes that train together, forked as in `victims`, and what befalls one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alltokens.engine import runs
from alltokens.engine.config import RunConfig
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingFailed, UserError
from tests.distributed.plain import PLAIN
from tests.faults.moments import Moments
from tests.faults.victims import processes

TIMEOUT = 6.0  # seconds that one waits for another


class End(NamedTuple):
    """How a rank ended: its exit code (None: it had not ended, and was killed), its words, and when."""

    code: int | None
    error: str
    seconds: float


def settings(**data: Any) -> RunConfig:
    train = dataclasses.replace(PLAIN.train, timeout_minutes=TIMEOUT / 60)
    return dataclasses.replace(PLAIN, train=train, data=dataclasses.replace(PLAIN.data, **data))


def both(work: Callable[..., None], *arguments: Any, patience: float = 60.0, stopped: int | None = None) -> list[End]:
    """Run `work(rank, ...)` in two processes that find each other; the `stopped` one is not waited for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started, running = time.monotonic(), []
    for rank in (0, 1):
        mine, its = processes.Pipe(duplex=False)
        process = processes.Process(target=_rank, args=(its, work, rank, port, arguments))
        process.start()
        its.close()
        running.append((process, mine))
    ends = []
    for rank, (process, told) in enumerate(running):
        process.join(0.0 if rank == stopped else max(0.0, started + patience - time.monotonic()))
        code = process.exitcode
        process.kill()
        process.join()
        error = ""
        with contextlib.suppress(EOFError):
            error = told.recv()
        ends.append(End(code, error, time.monotonic() - started))
    return ends


def _rank(told: Any, work: Callable[..., None], rank: int, port: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        work(rank, *arguments)
        code, error = 0, ""
    except (UserError, TrainingFailed) as failure:
        code, error = (2 if isinstance(failure, UserError) else 1), str(failure)
    except SystemExit as left:
        code, error = int(str(left.code)), "(said by another)"
    except BaseException:
        code, error = 99, traceback.format_exc()
    told.send(error)
    os._exit(code)


def train_until(rank: int, run: Path, strategy: str, whom: int, update: int, number: int) -> None:
    """Rank `whom` gets the signal `number` in the middle of `update`."""
    original = Trainer.update

    def interrupted(self: Trainer, micro_batches: Any) -> Any:
        if rank == whom and self.position.update + 1 == update:
            os.kill(os.getpid(), number)
        return original(self, micro_batches)

    Trainer.update = interrupted  # type: ignore[method-assign]
    config = settings()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, strategy=strategy))
    runs.train(config, run_dir=run, quiet=True)


def train_own_folder(rank: int, run: Path, folders: tuple[Path, Path]) -> None:
    """Each rank its own pictures, as on two machines."""
    os.chdir(folders[rank])  # the settings are the same, what lies under the path is not
    config = settings(root=".", train_pictures=None, val_pictures=None)
    runs.train(config, run_dir=run, quiet=True)


def train_with_full_disk(rank: int, run: Path) -> None:
    if rank == 0:
        Moments(run / "checkpoints", fatal=6, fault="full").install()
    runs.train(settings(), run_dir=run, quiet=True)


def train_with_nan(rank: int, run: Path) -> None:
    original = Trainer.update

    def poisoned(self: Trainer, micro_batches: Any) -> Any:
        if rank == 1 and self.position.update == 6:
            micro_batches = [batch._replace(image=batch.image * float("nan")) for batch in micro_batches]
        return original(self, micro_batches)

    Trainer.update = poisoned  # type: ignore[method-assign]
    runs.train(settings(), run_dir=run, quiet=True)


def train_with_a_defect(rank: int, run: Path) -> None:
    """An error that nobody foresaw, in one process."""
    original = Trainer.update

    def defective(self: Trainer, micro_batches: Any) -> Any:
        if rank == 1 and self.position.update == 6:
            raise KeyError("unforeseen")
        return original(self, micro_batches)

    Trainer.update = defective  # type: ignore[method-assign]
    runs.train(settings(), run_dir=run, quiet=True)
