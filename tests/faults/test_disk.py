"""A disk that is full, a permission that was lost, a folder that is gone: one sentence, nothing earlier is harmed."""

import random
import subprocess

import pytest

from alltokens.engine import checkpoint
from tests.engine.test_resume import assert_same_run, metrics
from tests.faults.test_kills import annotated, straight  # noqa: F401  (fixtures)
from tests.faults.victims import annotate_or_go_on, ended, train_or_go_on

FAULTS = {"full": "No space left on device", "denied": "Permission denied", "gone": "No such file or directory"}
MANY = [pytest.param(15, fault, marks=pytest.mark.faults) for fault in FAULTS]


def moments_of(count, fault, last):
    return sorted(random.Random(f"{count}{fault}").sample(range(3, last - 2), count))


@pytest.mark.parametrize(("count", "fault"), [(1, "full"), *MANY])
def test_training_ends_with_a_sentence_and_can_go_on(straight, count, fault, tmp_path, tally):  # noqa: F811
    whole, moments = straight
    failed = 0
    for case, fatal in enumerate(moments_of(count, fault, moments)):
        run = tmp_path / f"{case}"
        code, reached, error = ended(train_or_go_on, run, below=run, fatal=fatal, fault=fault)
        if code == 0:  # nothing was left to write
            assert reached >= fatal
            assert fault != "full" or fatal > moments - 20
            continue
        assert code in (1, 2), error
        assert FAULTS[fault] in error or (fault == "gone" and "gone" in error), error
        assert str(run) in error
        assert "\n" not in error
        for kept in run.glob("checkpoints/*.safetensors"):
            checkpoint.read(kept)
        failed += 1
        if fault == "gone":
            assert not list(run.rglob("*.safetensors"))  # no part of a run grows where it was removed
        code, _, error = ended(train_or_go_on, run, below=run)
        assert code == 0, error
        assert_same_run(whole, run)
        assert metrics(whole) == metrics(run)
    assert failed
    tally[f"training: {FAULTS[fault]}"] += failed


@pytest.mark.parametrize(("count", "fault"), [(1, "gone"), *MANY])
def test_annotation_ends_with_a_sentence_and_can_go_on(annotated, count, fault, tmp_path, tally):  # noqa: F811
    folder, moments = annotated
    expected = {path.name: path.read_bytes() for path in (folder / "store").iterdir()}
    failed = 0
    for case, fatal in enumerate(moments_of(count, fault, moments)):
        store = tmp_path / f"{case}"
        code, _, error = ended(annotate_or_go_on, folder / "pictures", store, below=store, fatal=fatal, fault=fault)
        if code == 0:
            continue
        assert code in (1, 2), error
        assert FAULTS[fault] in error, error
        assert str(store) in error
        assert "\n" not in error
        failed += 1
        code, _, error = ended(annotate_or_go_on, folder / "pictures", store, below=store)
        assert code == 0, error
        assert {path.name: path.read_bytes() for path in store.iterdir()} == expected
    assert failed
    tally[f"annotation: {FAULTS[fault]}"] += failed


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 kB; only root may make one."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.faults
def test_a_disk_that_is_really_full(straight, small_disk, tally):  # noqa: F811
    whole, _ = straight
    run = small_disk / "run"
    code, _, error = ended(train_or_go_on, run, below=run)
    assert code == 1
    assert "No space left on device" in error
    for kept in run.glob("checkpoints/*.safetensors"):
        checkpoint.read(kept)
    tally["training: a small disk really full"] += 1
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    code, _, error = ended(train_or_go_on, run, below=run)
    assert code == 0, error
    assert_same_run(whole, run)
