"""A run that was stopped and went on is the run that was not, to the bit."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from alltokens.engine import checkpoint
from alltokens.engine.runs import resume, train
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingStopped, UserError
from tests.tiny import tiny_config


def final_state(run_dir: Path):
    tensors, facts = checkpoint.read(run_dir / "checkpoints" / "last.safetensors")
    facts["position"].pop("seconds")
    facts.pop("metrics_size")  # times are written with as many digits as they have
    return tensors, facts


def metrics(run_dir: Path):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "pictures_per_second"} for line in lines]


def assert_same_run(one: Path, other: Path):
    (tensors, facts), (others, other_facts) = final_state(one), final_state(other)
    assert facts == other_facts
    assert tensors.keys() == others.keys()
    different = [name for name, value in tensors.items() if not torch.equal(value, others[name])]
    assert not different
    for name in ("best", "last"):
        files = [run / "weights" / name / "model.safetensors" for run in (one, other)]
        assert files[0].read_bytes() == files[1].read_bytes()


def stop_at(monkeypatch, update: int, number: int) -> None:
    """Send this process a real signal in the middle of `update`."""
    original = Trainer.update

    def interrupted(self, micro_batches):
        if self.position.update + 1 == update:
            os.kill(os.getpid(), number)
        return original(self, micro_batches)

    monkeypatch.setattr(Trainer, "update", interrupted)


VARIANTS = {
    "device cache": {"data": {"cache": "device"}},
    "loaded, accumulated": {"train": {"accumulate": 2}},
    "workers": {"data": {"workers": 2}},
    "sgd, no average": {"optimizer": {"name": "sgd"}, "train": {"ema_decay": None}},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_stopped_in_the_middle_of_an_epoch_and_resumed_is_bitwise_the_same(variant, tmp_path, monkeypatch):
    config = tiny_config(**variant)
    straight = train(config, run_dir=tmp_path / "straight", quiet=True)
    with monkeypatch.context() as patch, pytest.raises(TrainingStopped) as stopped:
        stop_at(patch, update=9, number=signal.SIGTERM)
        train(config, run_dir=tmp_path / "stopped", quiet=True)
    assert stopped.value.signal == signal.SIGTERM
    _, facts = checkpoint.read(tmp_path / "stopped" / "checkpoints" / "last.safetensors")
    assert (facts["position"]["epoch"], facts["position"]["update"]) == (1, 9)
    torch.manual_seed(999)  # what the process did in between must not matter
    resumed = resume(tmp_path / "stopped", quiet=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    assert resumed.scores == straight.scores
    evaluations = [
        [line for line in metrics(tmp_path / name) if line["kind"] == "evaluation"] for name in ("straight", "stopped")
    ]
    assert evaluations[0] == evaluations[1]


def test_killed_without_warning_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    """Updates after the last checkpoint are done again; their lines are not written twice."""
    config = tiny_config()
    train(config, run_dir=tmp_path / "straight", quiet=True)
    original = Trainer.update

    def killed(self, micro_batches):
        if self.position.update == 16:
            raise KeyboardInterrupt  # nothing is saved on the way out
        return original(self, micro_batches)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "update", killed)
        train(config, run_dir=tmp_path / "killed", quiet=True)
    resume(tmp_path / "killed", quiet=True)
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "killed")


def test_a_run_repeats_and_another_seed_differs(tmp_path):
    config = tiny_config(train={"epochs": 2})
    for name in ("one", "two"):
        train(config, run_dir=tmp_path / name, quiet=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    train(tiny_config(train={"epochs": 2, "seed": 1}), run_dir=tmp_path / "other", quiet=True)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "one", tmp_path / "other")


def test_changed_settings_are_refused_by_name(tmp_path):
    train(tiny_config(train={"epochs": 2}), run_dir=tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"train\.epochs: 2 -> 4.*--weights-from"):
        resume(tmp_path / "run", config=tiny_config(train={"epochs": 4}), quiet=True)


def test_a_finished_run_stays_as_it_is(tmp_path):
    train(tiny_config(train={"epochs": 2}), run_dir=tmp_path / "run", quiet=True)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    result = resume(tmp_path / "run", quiet=True)
    assert result.scores is None
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_folders_that_are_no_run_or_are_taken_are_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        resume(tmp_path, quiet=True)
    train(tiny_config(train={"epochs": 2}), run_dir=tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="already holds a run"):
        train(tiny_config(), run_dir=tmp_path / "run", quiet=True)
    (tmp_path / "run" / "checkpoints" / "last.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="broken"):
        resume(tmp_path / "run", quiet=True)
