"""The command as a shell, Slurm and the launchers start it."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alltokens.engine.run_folder import read_metrics
from tests.conftest import ROOT

SMALL = shlex.split(
    "--data.image_size 32 --data.train_pictures 64 --data.val_pictures 20 --train.batch_size 16 --log.every_steps 1 "
    "--model.name vit_tiny_patch16_224 --schedule.warmup_epochs 0 --train.device cpu "
    "--model.options '{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 2}'"
)


def train(run_dir: Path, *more: str, launcher: tuple[str, ...] = (sys.executable,)) -> list[str]:
    return [*launcher, "-m", "alltokens", "train", "quickstart", "--run-dir", str(run_dir), *SMALL, *more]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_as_slurm_wants_it_and_the_run_goes_on(tmp_path, number, code):
    process = subprocess.Popen(
        train(tmp_path / "run", "--train.epochs", "500"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert f"--resume {tmp_path / 'run'}" in errors
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# On a CPU accelerate launch starts several processes by MPI only: one shows that the environment it sets is understood.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")


@pytest.mark.distributed
@pytest.mark.parametrize(("launcher", "processes"), [(TORCHRUN, 2), (ACCELERATE, 1)], ids=["torchrun", "accelerate"])
def test_launchers_start_it(tmp_path, launcher, processes):
    command = train(tmp_path / "run", "--train.epochs", "1", launcher=launcher)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("best top-1") == 1  # only the main process speaks
    assert ("x 2 processes" in done.stdout) == (processes == 2)
    (evaluation,) = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "evaluation"]
    assert evaluation["pictures"] == 20
