"""Runs of a study: rows are the truth, nothing half-done gets one, failures are kept."""

import multiprocessing
import shutil
import signal
from dataclasses import replace

import pytest

from alltokens.engine import feeding, runs
from alltokens.engine.runtime import start_runtime
from alltokens.errors import Stopped, UserError
from alltokens.study import training
from alltokens.study.plan import load_study
from alltokens.study.queue import Queue
from alltokens.study.results import COLUMNS, Result, _locked, append_result, chosen, read_results
from alltokens.study.run import Limits, run_studies
from alltokens.study.table import compare, csv_rows, print_table
from alltokens.study.training import Job
from tests.engine.test_resume import stop_at
from tests.tiny import tiny_config

STUDY = """
about: two ways on a handful of scenes
data: scenes
recipe: imagenette
common:
  model: {name: vit_tiny_patch16_224, drop_path: 0.1, options: {patch_size: 8, embed_dim: 32, depth: 1, num_heads: 2}}
  data: {root: scenes, image_size: 32, cache_size: 32, train_pictures: 64, val_pictures: 32}
  augment: {rand_augment: null}
  schedule: {warmup_epochs: 0}
  train: {epochs: 2, batch_size: 32, precision: fp32, compile: "off", device: cpu, ema_decay: 0.9}
  evaluation: {every_epochs: 2}
  log: {every_steps: 1}
seeds: 2
truth: true
arms:
  area: {supervision: {mixer: {patch_size: 8}}}
  tl_align: {supervision: {mixer: {patch_size: 8}, follower: tl_align}}
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "tiny.yaml").write_text(STUDY)
    return load_study(tmp_path / "tiny.yaml")


def run(study, folder, **limits):
    said = []
    ending = run_studies(
        [study], folder / "results.csv", Limits(**limits), runs_dir=folder / "runs", masks="scenes", say=said.append
    )
    return ending, read_results(folder / "results.csv"), said


def test_what_is_missing_is_trained_and_compared(study, tmp_path, capsys):
    ending, rows, _ = run(study, tmp_path, seeds=1)
    assert (ending.done, ending.failed, ending.left) == (2, 0, 0)
    ending, rows, said = run(study, tmp_path)
    assert (ending.done, ending.there) == (2, 2)
    assert said[0].startswith("2 runs to train, 2 are there; 1 side by side")
    assert [(row.arm, row.seed, row.status) for row in rows] == [
        ("area", 0, "done"), ("tl_align", 0, "done"), ("area", 1, "done"), ("tl_align", 1, "done"),
    ]  # fmt: skip
    assert all(row.epochs == 2 and 0 <= row.token_accuracy <= 100 and row.parameters > 0 for row in rows)
    assert run(study, tmp_path)[0].done == 0

    # The same as in a process, and a folder, of its own: what is kept between runs changes nothing.
    alone = runs.train(study.config("area", 1, {}), run_dir=tmp_path / "alone", quiet=True)
    assert alone.scores.loss == pytest.approx(rows[2].loss, abs=1e-5)
    assert alone.scores.top1 == pytest.approx(rows[2].top1, abs=1e-3)

    compared = compare(study, rows)
    print_table(compared)
    printed = capsys.readouterr().out
    assert "Fewer than 5 seeds, so no claim: area, tl_align." in printed
    difference = sum(rows[i + 1].top1 - rows[i].top1 for i in (0, 2)) / 2
    line = csv_rows([compared])[1]
    assert (line["n"], line["baseline"], line["pairs"]) == (2, "area", 2)
    assert line["difference"] == pytest.approx(difference)


def test_time_that_is_up_leaves_no_row_and_the_next_call_goes_on(study, tmp_path):
    long = load_study(study.file, {"train": {"epochs": 3000}, "evaluation": {"every_epochs": 3000}})
    ending, rows, _ = run(long, tmp_path, minutes=0.02)
    assert rows == []
    assert (ending.done, ending.left) == (0, 4)
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    before = len((folder / "metrics.jsonl").read_text().splitlines())
    ending, rows, _ = run(long, tmp_path, minutes=0.02)
    assert rows == []
    assert len((folder / "metrics.jsonl").read_text().splitlines()) > before


def test_a_signal_ends_the_study_and_what_it_stopped_goes_on_with_the_same_settings(study, tmp_path, monkeypatch):
    long = {"train": {"epochs": 5}, "evaluation": {"every_epochs": 5}}
    with monkeypatch.context() as patch:
        stop_at(patch, update=3, number=signal.SIGTERM)
        with pytest.raises(Stopped, match="go on with: the same command") as stopped:
            run(load_study(study.file, long), tmp_path, seeds=1)
    assert stopped.value.signal == signal.SIGTERM
    assert read_results(tmp_path / "results.csv") == []
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()  # none was begun after it
    shutil.copytree(folder, tmp_path / "stopped")
    gone_on, resume = [], runs.resume
    monkeypatch.setattr(runs, "resume", lambda *words, **more: gone_on.append(1) or resume(*words, **more))
    _, rows, _ = run(load_study(study.file, long), tmp_path, seeds=1, arms=("area",))
    assert ([row.status for row in rows], len(gone_on)) == (["done"], 1)

    # How many load pictures changes no result; the run is not refused for it, but made anew.
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "stopped", folder)
    (tmp_path / "results.csv").unlink()
    _, again, _ = run(load_study(study.file, {**long, "data": {"workers": 0}}), tmp_path, seeds=1, arms=("area",))
    assert [(row.status, row.error, row.loss) for row in again] == [("done", "", rows[0].loss)]
    assert len(gone_on) == 1


def test_a_failed_run_is_kept_shown_and_tried_again(study, tmp_path, monkeypatch, capsys):
    def failing(job, result):
        if job.arm == "tl_align":
            raise ZeroDivisionError("division\nby zero")
        return measured(job, result)

    measured = training._measured
    with monkeypatch.context() as patched:
        patched.setattr(training, "_measured", failing)
        ending, rows, said = run(study, tmp_path, seeds=1)
    assert (ending.done, ending.failed) == (1, 1)
    assert rows[1].error == "ZeroDivisionError: division by zero"
    assert "FAILED" in said[-1]
    print_table(compare(study, rows))
    assert "FAILED: tl_align, seed 0: ZeroDivisionError: division by zero" in capsys.readouterr().out
    ending, rows, _ = run(study, tmp_path, seeds=1)
    assert (ending.done, ending.there) == (1, 1)
    assert chosen(rows, study.settings("tl_align"))[0].status == "done"


@pytest.mark.parametrize(
    ("settings", "masks", "limits", "words"),
    [
        ({"data": {"root": None}}, "scenes", {}, "where are the pictures"),
        ({"data": {"root": "/nowhere"}}, "scenes", {}, "no pictures at /nowhere"),
        ({"data": {"train": "scenes:train", "val": "/elsewhere"}}, "scenes", {}, "no pictures at /elsewhere"),
        ({}, "/nowhere.tar", {}, "no masks at /nowhere.tar"),
        ({}, None, {}, "--masks PATH"),
        ({}, "scenes", {"minutes": 0}, "minutes must be above 0"),
        ({}, "scenes", {"seeds": 0}, "seeds must be at least 1"),
        ({}, "scenes", {"side_by_side": 0}, "side by side must be at least 1"),
        ({}, "scenes", {"arms": ("aera",)}, "Did you mean 'area'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(study, tmp_path, settings, masks, limits, words):
    with pytest.raises(UserError, match=words):
        run_studies([load_study(study.file, settings)], tmp_path / "r.csv", Limits(**limits), masks=masks, say=str)
    assert not (tmp_path / "r.csv").exists()


def test_rows_of_other_settings_do_not_count(study, tmp_path):
    file = tmp_path / "results.csv"
    append_result(file, Result("tiny", "area", 0, "done", top1=50.0, settings="otherwise"))
    append_result(file, Result("other", "named", 1, "done", top1=51.0, settings=study.settings("area")))
    arm = compare(study, read_results(file)).arm("area")
    assert (arm.n, arm.stale) == (1, 1)
    assert arm.rows[0].study == "other"  # the same run, whatever study it was made for


def test_a_row_that_was_cut_off_is_no_row_and_the_next_one_takes_its_place(tmp_path):
    file, row = tmp_path / "results.csv", Result("s", "a, b", 0, "done", top1=50.0)
    append_result(file, row)
    one = file.read_bytes()
    append_result(file, replace(row, seed=1))
    two = file.read_bytes()
    for size in range(len(two) + 1):  # killed after so many bytes
        file.write_bytes(two[:size])
        found = [other.seed for other in read_results(file)]
        assert found == [0][: size >= len(one) - 1] + [1][: size >= len(two) - 1]
        append_result(file, replace(row, seed=2))
        assert [other.seed for other in read_results(file)] == [*found, 2]


def test_rows_of_two_processes_wait_for_each_other(tmp_path):
    file, row = tmp_path / "results.csv", Result("s", "a", 0, "done", top1=50.0)
    append_result(file, row)
    other = multiprocessing.get_context("fork").Process(target=append_result, args=(file, replace(row, seed=1)))
    with _locked(file) as opened:
        other.start()
        other.join(0.2)
        assert other.is_alive()
        opened.write(",".join(("s", "a", "2", "done", "50", *[""] * (len(COLUMNS) - 5))) + "\n")
    other.join(30)
    assert other.exitcode == 0
    assert [row.seed for row in read_results(file)] == [0, 2, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"\xff\xfe" + data, "is no file of results"),
        (lambda data: data.replace(b"arm", b"leg", 1), "has other columns"),
        (lambda data: data.replace(b"50", b"5O"), "line 2: top1 is '5O', which is no number"),
        (lambda data: data + b"s,a,1\n", r"line 3: 3 values instead of"),
        (lambda data: data + b'"s\n', "is no file of results"),
    ],
)
def test_a_file_of_results_that_is_none_is_refused(change, words, tmp_path):
    file = tmp_path / "results.csv"
    append_result(file, Result("s", "a", 0, "done", top1=50.0))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=words):
        read_results(file)


def test_studies_come_in_order_arms_grow_evenly_and_a_process_stays_with_its_arm(tmp_path):
    config = tiny_config()
    jobs = [Job("s", arm, seed, arm, config, tmp_path) for arm in "ab" for seed in range(8)]
    queue = Queue(jobs)
    one, two = queue.take(), queue.take()
    assert (one.name, two.name) == ("a, seed 0", "b, seed 0")
    assert queue.take(one).name == "a, seed 1"
    first = [Job("first", arm, seed, arm, config, tmp_path) for arm in "ab" for seed in range(4)]
    later = [Job("later", "c", seed, "c", config, tmp_path) for seed in range(4)]
    queue, last, order = Queue([*first, *later]), None, ""
    while (last := queue.take(last)) is not None:
        order += last.arm
    assert order == "aabbbbaacccc"


def test_no_run_begins_that_would_not_end_in_time(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("alltokens.study.queue.now", lambda: clock[0])
    jobs = [Job("s", arm, seed, arm, tiny_config(), tmp_path) for arm in "ab" for seed in range(8)]
    queue = Queue(jobs, deadline=300.0)
    one, two = queue.take(), queue.take()
    clock[0] = 100.0
    queue.ended(one, whole=True)  # with its compilation
    again = queue.take(one)
    clock[0] = 140.0
    queue.ended(again, whole=True)
    queue.ended(two, whole=True)
    # b took 140 seconds with its compilation; without it, as a's runs tell, 0.4 of that: it ends at 196 or so.
    assert queue.take(two).name == "b, seed 1"
    clock[0] = 250.0
    assert queue.take(again).name == "a, seed 2"  # 40 seconds
    assert queue.take(two) is None  # 56 of its own, 100 of a's with a compilation
    assert queue.take() is None
    assert len(queue.jobs) == 16 - 5


def test_decoded_pictures_serve_another_process(study, monkeypatch):
    config = study.config("area", 0, {})
    ready = feeding.decoded(config, start_runtime(config.train), {})
    assert {key[0] for key in ready if isinstance(key[0], str)} == {"pictures", "evaluation"}
    monkeypatch.setattr(feeding, "cache_pictures", None)
    monkeypatch.setattr(feeding, "cache_evaluation", None)
    feed = feeding.open_feed(config, start_runtime(config.train), dict(ready))
    assert len(next(feed.batches(0, 0)).image) == 32
    other = replace(config, data=replace(config.data, train_pictures=63))
    with pytest.raises(TypeError):
        feeding.open_feed(other, start_runtime(config.train), dict(ready))


@pytest.mark.slow
def test_side_by_side_is_the_same_and_a_death_is_a_failure(study, tmp_path, monkeypatch):
    _, alone, _ = run(study, tmp_path)
    (tmp_path / "two").mkdir()
    monkeypatch.setenv("ALLTOKENS_COMMIT", "abc")
    _, rows, _ = run(study, tmp_path / "two", side_by_side=2)
    key = lambda row: (row.arm, row.seed, row.top1, row.loss, row.token_accuracy)  # noqa: E731
    assert sorted(map(key, rows)) == sorted(map(key, alone))
    assert {row.side_by_side for row in rows} == {2}

    from alltokens.study import workers

    fate = workers._Worker.give
    killed = []

    def give(self, queue):
        fate(self, queue)
        if self.job is not None and not killed:
            killed.append(self.job)
            self.process.kill()

    monkeypatch.setattr(workers._Worker, "give", give)
    (tmp_path / "three").mkdir()
    ending, rows, _ = run(study, tmp_path / "three", side_by_side=2)
    assert (ending.done, ending.failed) == (3, 1)
    assert [row.error for row in rows if row.status == "failed"] == [f"its process ended by signal {signal.SIGKILL:d}"]
