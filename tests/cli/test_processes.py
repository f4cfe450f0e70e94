"""The command as a shell, Slurm and accelerate start it; torchrun does so in tests/distributed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from alltokens.cli import main
from alltokens.engine.run_folder import read_metrics
from tests.faults.victims import processes
from tests.tiny import COMMAND


def training(run_dir: Path, *more: str) -> list[str]:
    return [*COMMAND, "--run-dir", str(run_dir), *more]


def run_command(words: list[str], said: Path, environment: dict[str, str]) -> None:
    """What `python -m alltokens` does, in a process of its own that has imported torch already."""
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    sys.exit(main(words))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_as_slurm_wants_it_and_the_run_goes_on(tmp_path, number, code):
    said = tmp_path / "said.txt"
    words = training(tmp_path / "run", "--train.epochs", "500")
    process = processes.Process(target=run_command, args=(words, said, dict(os.environ)))
    process.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.is_alive(), said.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code
    assert "Traceback" not in said.read_text()
    assert f"--resume {tmp_path / 'run'}" in said.read_text()
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()


def test_what_accelerate_launch_sets_is_understood(tmp_path):
    """On a CPU it starts several processes by MPI only, so it is one."""
    words = training(tmp_path / "run")
    launch = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    asked = launch_command_parser().parse_args([*launch, "--dynamo_backend", "no", "-m", "alltokens", *words])
    command, environment = prepare_simple_launcher_cmd_env(asked)
    assert command[-len(words) - 2 :] == ["-m", "alltokens", *words]
    assert environment["ACCELERATE_USE_CPU"] == "True"
    process = processes.Process(target=run_command, args=(words, tmp_path / "said.txt", environment))
    process.start()
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "said.txt").read_text()
    assert "best top-1" in (tmp_path / "said.txt").read_text()
    (evaluation,) = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "evaluation"]
    assert evaluation["pictures"] == 20
