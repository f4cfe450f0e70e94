"""kill -9 at any moment, also with half of a file written; what goes on ends as if nothing had happened."""

import random
import signal

import pytest

from alltokens.engine import checkpoint
from alltokens.engine.run_folder import RunFolder
from alltokens.labels.store import LabelStore, verify_store
from tests.engine.test_resume import assert_same_run, metrics
from tests.faults.victims import annotate_or_go_on, ended, train_or_go_on
from tests.labels.tiny_annotator import write_pictures

MOMENTS = [pytest.param(2, id="few"), pytest.param(50, id="many", marks=pytest.mark.faults)]
TWICE = 5  # every fifth one is killed again while it goes on


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "run"
    code, moments, error = ended(train_or_go_on, run, below=run)
    assert code == 0, error
    return run, moments


@pytest.fixture(scope="module")
def annotated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotated")
    write_pictures(folder / "pictures")
    code, moments, error = ended(annotate_or_go_on, folder / "pictures", folder / "store", below=folder / "store")
    assert code == 0, error
    return folder, moments


def left_over(folder):
    return [path.name for path in folder.rglob("*.tmp")]


@pytest.mark.parametrize("count", MOMENTS)
def test_killed_training_goes_on_to_the_same_bytes(straight, count, tmp_path, tally):
    whole, moments = straight
    draw = random.Random(count)
    for case, fatal in enumerate(sorted(draw.sample(range(1, moments + 1), count))):
        run = tmp_path / f"{case}"
        again = [draw.randint(1, moments)] if case % TWICE == TWICE - 1 else []
        for time, moment in enumerate((fatal, *again)):
            code, _, error = ended(train_or_go_on, run, below=run, fatal=moment)
            assert code in (-signal.SIGKILL, 0), error
            assert time or code == -signal.SIGKILL  # what goes on may end before its moment comes
            tally["training killed"] += code == -signal.SIGKILL
            for kept in run.glob("checkpoints/*.safetensors"):
                checkpoint.read(kept)  # whole, or not there
        code, _, error = ended(train_or_go_on, run, below=run)
        assert code == 0, f"killed at moment {fatal} of {moments}: {error}"
        assert_same_run(whole, run)
        assert metrics(whole) == metrics(run)
        assert left_over(run) == []


@pytest.mark.parametrize("count", MOMENTS)
def test_killed_annotation_goes_on_to_the_same_bytes(annotated, count, tmp_path, tally):
    folder, moments = annotated
    expected = {path.name: path.read_bytes() for path in (folder / "store").iterdir()}
    draw = random.Random(count)
    for case, fatal in enumerate(sorted(draw.sample(range(1, moments + 1), count))):
        store = tmp_path / f"{case}"
        again = [draw.randint(1, moments)] if case % TWICE == TWICE - 1 else []
        for time, moment in enumerate((fatal, *again)):
            code, _, error = ended(annotate_or_go_on, folder / "pictures", store, below=store, fatal=moment)
            assert code in (-signal.SIGKILL, 0), error
            assert time or code == -signal.SIGKILL  # what goes on may end before its moment comes
            tally["annotation killed"] += code == -signal.SIGKILL
        code, _, error = ended(annotate_or_go_on, folder / "pictures", store, below=store)
        assert code == 0, f"killed at moment {fatal} of {moments}: {error}"
        assert {path.name: path.read_bytes() for path in store.iterdir()} == expected
        assert verify_store(store) == []
        assert len(LabelStore.open(store)) == 33


def test_a_lock_refuses_a_second_process_and_dies_with_the_first(straight, tmp_path):
    """The victim dies while it holds the lock; the next one takes it at once."""
    _, moments = straight
    run = tmp_path / "run"
    code, *_ = ended(train_or_go_on, run, below=run, fatal=moments // 2)
    assert code == -signal.SIGKILL
    folder = RunFolder(run)
    folder.lock()  # this process
    try:
        code, _, error = ended(train_or_go_on, run, below=run)
        assert code == 2
        assert "is in use by another process" in error
    finally:
        folder.release()
    code, _, error = ended(train_or_go_on, run, below=run)
    assert code == 0, error
