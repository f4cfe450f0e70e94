"""Two gloo ranks do what one does with the same (whole) batch; sharded or not; stopped and resumed or not."""

import ast
import subprocess
import sys

import pytest
import torch

from alltokens.engine import checkpoint
from alltokens.engine.run_folder import read_metrics
from alltokens.engine.runs import train
from alltokens.evaluate import evaluate
from tests.conftest import ROOT
from tests.distributed.plain import PLAIN

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-ranks")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.distributed.worker", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    train(PLAIN, run_dir=folder / "one", quiet=True)
    (folder / "said.txt").write_text(done.stdout)
    return folder


def test_torchrun_starts_the_command(runs):
    said = (runs / "said.txt").read_text()
    assert "x 2 processes" in said
    assert said.count("best top-1") == 1  # only the main process speaks
    (evaluation,) = [line for line in read_metrics(runs / "command") if line["kind"] == "evaluation"]
    assert evaluation["pictures"] == 20


def state(folder):
    tensors, facts = checkpoint.read(folder / "checkpoints" / "last.safetensors")
    return {name: value for name, value in tensors.items() if not name.startswith("random.")}, facts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_equal_one(runs, strategy):
    (one, facts), (two, two_facts) = state(runs / "one"), state(runs / strategy)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            two[name], value, atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert two_facts["position"]["best_top1"] == pytest.approx(facts["position"]["best_top1"], abs=1e-9)
    assert two_facts["position"]["update"] == facts["position"]["update"] == 24


def test_labels_that_follow_the_tokens_are_the_same_sharded_or_not(runs):
    (whole, _), (sharded, _) = state(runs / "ddp-followed"), state(runs / "fsdp2-followed")
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_stop_together_and_resume_to_the_bit(runs, strategy):
    (straight, _), (resumed, _) = state(runs / strategy), state(runs / f"{strategy}-resumed")
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


def test_evaluation_counts_every_picture_once(runs):
    top1, top5, loss, pictures = ast.literal_eval((runs / "evaluation.txt").read_text())
    alone = evaluate(str(runs / "ddp"), batch_size=41, workers=0, device="cpu")
    assert pictures == alone.pictures == 41
    assert (top1, top5) == pytest.approx((alone.top1, alone.top5), abs=1e-9)
    assert loss == pytest.approx(alone.loss, abs=1e-6)
