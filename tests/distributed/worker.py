"""Run by torchrun in each process: several runs one after the other, as the test that started it compares them."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import alltokens.cli
from alltokens.engine.config import RunConfig
from alltokens.engine.runs import resume, train
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingStopped
from alltokens.evaluate import evaluate
from tests.distributed.plain import FOLLOWED, PLAIN
from tests.tiny import COMMAND

torch.set_num_threads(1)


def main(folder: Path) -> None:
    assert alltokens.cli.main([*COMMAND, "--run-dir", str(folder / "command")]) == 0
    fsdp = sharded(PLAIN)
    train(FOLLOWED, run_dir=folder / "ddp-followed", quiet=True)
    train(sharded(FOLLOWED), run_dir=folder / "fsdp2-followed", quiet=True)
    train(PLAIN, run_dir=folder / "ddp", quiet=True)
    train(fsdp, run_dir=folder / "fsdp2", quiet=True)
    stop_and_resume(PLAIN, folder / "ddp-resumed")
    stop_and_resume(fsdp, folder / "fsdp2-resumed")
    scores = evaluate(str(folder / "ddp"), batch_size=7, workers=0, device="cpu")
    if scores is not None:
        (folder / "evaluation.txt").write_text(repr([scores.top1, scores.top5, scores.loss, scores.pictures]))


def sharded(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, strategy="fsdp2"))


def stop_and_resume(config, run_dir: Path) -> None:
    """One rank alone is asked to stop; both must, at the same update, and go on together."""
    original = Trainer.update

    def interrupted(self, micro_batches):
        if self.position.update == 7 and self.runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, micro_batches)

    Trainer.update = interrupted
    with pytest.raises((TrainingStopped, SystemExit)) as stopped:  # what all are told alike, one of them says
        train(config, run_dir=run_dir, quiet=True)
    end = stopped.value
    assert (128 + end.signal if isinstance(end, TrainingStopped) else end.code) == 128 + signal.SIGTERM
    Trainer.update = original
    resume(run_dir, quiet=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
