"""Several processes: when one ends, all end, in time, and say which it was. No hang."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from PIL import Image

from alltokens.engine import checkpoint, runs
from tests.conftest import ROOT
from tests.distributed.plain import PLAIN
from tests.faults import ranks
from tests.faults.ranks import TIMEOUT, both

pytestmark = pytest.mark.distributed

LONG = pytest.mark.faults
START = 45.0  # seconds for a start and for looking who has ended, on a busy machine


@pytest.mark.parametrize(
    ("strategy", "whom"),
    [("ddp", 1), pytest.param("ddp", 0, marks=LONG), pytest.param("fsdp2", 1, marks=LONG)],
)
def test_the_other_names_the_one_that_was_killed(strategy, whom, tmp_path, tally):
    ends = both(ranks.train_until, tmp_path / "run", strategy, whom, 15, signal.SIGKILL)
    assert ends[whom].code == -signal.SIGKILL
    other = ends[1 - whom]
    assert other.code == 1, other.error
    assert f"process {whom}" in other.error
    assert "ended without a word" in other.error
    assert "--resume" in other.error
    checkpoint.read(tmp_path / "run" / "checkpoints" / "last.safetensors")
    tally["one of two processes ended"] += 1


@LONG
def test_one_that_no_longer_answers_is_given_up_in_the_stated_time(tmp_path, tally):
    patience = START + TIMEOUT
    ends = both(ranks.train_until, tmp_path / "run", "ddp", 1, 15, signal.SIGSTOP, patience=patience, stopped=1)
    assert ends[1].code is None
    assert ends[0].code == 1, ends[0].error
    assert "process 1 has ended without a word" in ends[0].error
    assert ends[0].seconds < patience
    tally["one of two processes ended"] += 1


def pictures(folder, count, broken=()):
    for split, number in (("train", count), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for index in range(number):
                path = folder / split / name / f"{index}.png"
                if split == "train" and index in broken:
                    path.write_bytes(b"no picture")
                else:
                    Image.new("RGB", (40, 36), (200 * (name == "dog"), 10 * index, 90)).save(path)
    return folder


def test_processes_that_see_different_pictures_are_refused(tmp_path, tally):
    folders = (pictures(tmp_path / "0", 8), pictures(tmp_path / "1", 9))
    ends = both(ranks.train_own_folder, tmp_path / "run", folders)
    assert [end.code for end in ends] == [2, 2], ends
    said = [end.error for end in ends if end.error != "(said by another)"]
    assert len(said) == 1
    assert "the processes do not see the same pictures: 16 + 8 pictures" in said[0]
    assert "18 + 8 pictures" in said[0]
    assert not (tmp_path / "run").exists()
    tally["one of two processes ended"] += 1


def test_a_picture_that_one_process_cannot_read_ends_both(tmp_path, tally):
    folders = (pictures(tmp_path / "0", 8), pictures(tmp_path / "1", 8, broken=range(8)))
    ends = both(ranks.train_own_folder, tmp_path / "run", folders)
    assert ends[1].code == 2, ends
    assert "not a readable picture" in ends[1].error
    assert ends[0].code == 1, ends
    assert "process 1 has ended" in ends[0].error
    assert "not a readable picture" in ends[0].error
    tally["one of two processes ended"] += 1


def test_a_full_disk_of_the_main_process_ends_both(tmp_path, tally):
    ends = both(ranks.train_with_full_disk, tmp_path / "run")
    assert [end.code for end in ends] == [1, 1], ends
    assert "No space left on device" in ends[0].error
    assert "process 0 has ended" in ends[1].error
    assert "No space left on device" in ends[1].error
    tally["one of two processes ended"] += 1


def test_a_loss_that_is_no_number_in_one_process_ends_both(tmp_path, tally):
    ends = both(ranks.train_with_nan, tmp_path / "run")
    assert [end.code for end in ends] == [1, 1], ends
    assert any("the loss is nan at update 7" in end.error for end in ends), ends
    tally["one of two processes ended"] += 1


@LONG
def test_an_error_that_nobody_foresaw_in_one_process_is_named_by_the_other(tmp_path, tally):
    ends = both(ranks.train_with_a_defect, tmp_path / "run")
    assert [end.code for end in ends] == [1, 99], ends
    assert "KeyError: 'unforeseen'" in ends[1].error  # its traceback: a defect is to be reported
    assert "process 1 has ended: KeyError: 'unforeseen'" in ends[0].error
    tally["one of two processes ended"] += 1


def test_torchrun_starts_again_and_goes_on_to_the_same_weights(tmp_path, tally):
    """The second rank kills itself in the first attempt; `torchrun --max-restarts` does the rest."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from pathlib import Path
        import torch
        from alltokens.engine import runs
        from alltokens.engine.trainer import Trainer
        from tests.distributed.plain import PLAIN

        torch.set_num_threads(1)
        original = Trainer.update

        def interrupted(self, micro_batches):
            first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first and self.runtime.rank == 1 and self.position.update == 16:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, micro_batches)

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "1":
            time.sleep(2)  # meanwhile the other must not look for it where the first attempt's was
        Trainer.update = interrupted
        runs.train(PLAIN, run_dir=Path(sys.argv[1]), quiet=True)
        """)
    )

    def torchrun(*options, run):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*launcher, *options, script, run], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
        )
        return done.returncode, done.stderr

    code, said = torchrun("--max-restarts=1", run=tmp_path / "restarted")
    assert code == 0, said[-4000:]
    ends = both(_plain, tmp_path / "straight")
    assert [end.code for end in ends] == [0, 0], ends
    (one, facts), (two, other) = (
        checkpoint.read(tmp_path / name / "checkpoints" / "last.safetensors") for name in ("straight", "restarted")
    )
    assert facts["position"]["update"] == other["position"]["update"] == 24
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    tally["torchrun restarts"] += 1


def _plain(rank, run):
    runs.train(PLAIN, run_dir=run, quiet=True)
