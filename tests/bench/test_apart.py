import math
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from alltokens.bench import apart, arm_process, over_models, tl_align, token_labels, train
from alltokens.bench.apart import Comparison, Pace, compare_each
from alltokens.errors import TrainingFailed, UserError

CPU = torch.device("cpu")
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def linear(log, name, before=lambda: None):
    """An arm: a step of a small layer. What it does and where is written into `log`."""
    with log.open("a") as file:
        file.write(f"built {name} {os.getpid()} {os.environ.get(THREADS)}\n")
    before()
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def step():
        layer(x)
        with log.open("a") as file:
            file.write(f"step {name}\n")

    return step


def holding(own, extra):
    """An arm of so many MiB on the device, whose step needs some more."""
    kept = torch.zeros(own * 2**18, device="cuda")
    return lambda: torch.zeros(extra * 2**18, device=kept.device).sum()


def too_much_once(flag):
    if not flag.exists():
        flag.touch()
        raise torch.OutOfMemoryError("CUDA out of memory")


def too_much_beside(log, name):
    """As long as an arm of that name lives."""
    if any(alive(pid) for pid in built(log, name)):
        raise RuntimeError("CUDA error: out of memory")


def wait_forever():
    time.sleep(1e6)


def refuse():
    raise UserError("not with me")


def break_down():
    raise ZeroDivisionError("nothing is left")


def built(log, name):
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(words[2]) for words in lines if words[:2] == ["built", name]]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def nobody_left(log):
    pids = [int(line.split()[2]) for line in log.read_text().splitlines() if line.startswith("built")]
    assert pids
    return not any(alive(pid) for pid in pids)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def forked(monkeypatch):
    """Processes that need not import torch anew."""
    monkeypatch.setattr(arm_process, "START", "fork")


def test_arms_in_processes_give_what_arms_of_this_process_give(log, tmp_path, monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    for module in (apart, arm_process):
        monkeypatch.setattr(module, "default_workers", lambda processes: 10 // processes)
    arms = {
        "a": partial(linear, log, "a"),
        "b": partial(linear, log, "b", partial(too_much_once, tmp_path / "flag")),
    }
    said = []
    both = [Comparison("apart", arms, apart=True), Comparison("here", arms)]
    (tmp_path / "flag").touch()
    here = compare_each(both[1:], CPU, Pace(3, warmup=1), progress=said.append)
    assert said == [f"here: {text}" for text in ("warming up: a", "warming up: b", *rounds(3))]
    assert built(log, "a") == built(log, "b") == [os.getpid()]
    (tmp_path / "flag").unlink()
    log.unlink()
    said.clear()
    away = compare_each(both[:1], CPU, Pace(3, warmup=1), progress=said.append)
    assert [list(timing) for timing in away] == [list(timing) for timing in here] == [["a", "b"]]
    assert away[0]["a"].ratio == (1, 1, 1)
    assert away[0]["b"].peak_mib is None
    assert 0 < away[0]["b"].milliseconds.low <= away[0]["b"].milliseconds.median < math.inf
    assert len(built(log, "a")) == 1
    assert len(set(built(log, "b"))) == 1
    assert len(built(log, "b")) == 2, "what ran out of memory was tried again alone"
    assert not {os.getpid(), *built(log, "a")} & set(built(log, "b"))
    assert said[:2] == ["apart: warming up: a", "apart: warming up: b"]
    assert said[-4:] == ["apart: ready: b (1 of 1)", *(f"apart: {text}" for text in rounds(3))]
    lines = log.read_text().splitlines()
    assert {line.split()[3] for line in lines if line.startswith("built")} == {"5"}, "cores are shared out"
    assert THREADS not in os.environ
    # After warming up: two steps to wake up, one of those in every later turn, and one that counts.
    turns = [(name, len(list(steps))) for name, steps in groupby(line[-1] for line in lines[5:])]
    assert turns == [("a", 3), ("b", 3 + 2), ("a", 2 + 2), ("b", 2)]
    assert nobody_left(log)


def rounds(count):
    return [f"round {number} of {count}" for number in range(1, count + 1)]


def test_where_memory_is_short_every_turn_begins_cold(forked, log, monkeypatch):
    monkeypatch.setattr(apart, "MARGIN", math.nan)  # more than any room
    arms = {name: partial(linear, log, name) for name in "ab"}
    compare_each([Comparison("net", arms, apart=True)], CPU, Pace(2, steps=3, warmup=0))
    turns = [(name, len(list(steps))) for name, steps in groupby(line[-1] for line in log.read_text().splitlines()[2:])]
    assert turns == [("a", 2 + 3), ("b", 2 * (2 + 3)), ("a", 2 + 3)]


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        (refuse, UserError, "^not with me$"),
        (break_down, TrainingFailed, r"^net: bad failed\nTraceback[^\0]*in break_down\n[^\0]*nothing is left"),
        (partial(os._exit, 7), TrainingFailed, "^net: bad: its process ended with exit code 7$"),
    ],
)
def test_an_arm_that_fails_ends_the_others_at_once(what, kind, message, forked, log):
    def when_the_other_is_busy():
        while not built(log, "slow"):
            time.sleep(0.01)
        what()

    arms = {
        "slow": partial(linear, log, "slow", wait_forever),
        "bad": partial(linear, log, "bad", when_the_other_is_busy),
    }
    with pytest.raises(kind, match=message):
        compare_each([Comparison("net", arms, apart=True)], CPU, Pace(2), at_once=2)
    assert nobody_left(log)


@pytest.mark.parametrize("moment", ["ready: b (2 of 2)", "round 2 of 3"])
def test_an_arm_that_is_killed_while_it_waits_is_named(moment, forked, log):
    def kill(text):
        if text == f"net: {moment}":
            os.kill(built(log, "b")[0], signal.SIGKILL)

    arms = {name: partial(linear, log, name) for name in "ab"}
    with pytest.raises(TrainingFailed, match="net: b: its process ended by signal 9"):
        compare_each([Comparison("net", arms, apart=True)], CPU, Pace(3), at_once=1, progress=kill)
    assert nobody_left(log)


def test_what_fits_only_without_another_comparison_comes_after_it(forked, log):
    small = {"small": partial(linear, log, "small")}
    large = {"large": partial(linear, log, "large", partial(too_much_beside, log, "small"))}
    said = []
    comparisons = [Comparison("one", small, apart=True), Comparison("two", large, apart=True)]
    found = compare_each(comparisons, CPU, Pace(2), at_once=2, progress=said.append)
    assert [list(timing) for timing in found] == [["small"], ["large"]]
    assert [text for text in said if "round" in text] == [
        f"{name}: {text}" for name in ("one", "two") for text in rounds(2)
    ]
    assert nobody_left(log)


def test_what_does_not_fit_alone_says_so(forked, log):
    arms = {name: partial(linear, log, name, partial(too_much_beside, log, name)) for name in "ab"}
    with pytest.raises(UserError, match=r"'[ab]' does not fit.*smaller --batch"):
        compare_each([Comparison("net", arms, apart=True)], CPU, Pace(2))
    assert nobody_left(log)


def test_so_many_warm_up_at_once(forked, log):
    def said(at_once):
        lines = []
        nets = [
            Comparison(f"net{number}", {name: partial(linear, log, name) for name in "ab"}, True)
            for number in (1, 2, 3)
        ]
        compare_each(nets, CPU, Pace(1), at_once=at_once, progress=lines.append)
        return [
            text.split()[0][3] + text.split()[1][0] for text in lines
        ]  # number of the net, first letter of the verb

    assert said(1) == ["1w", "1r", "1w", "1r", "1r", "2w", "2r", "2w", "2r", "2r", "3w", "3r", "3w", "3r", "3r"]
    four = said(4)
    assert four[:4] == ["1w", "1w", "2w", "2w"]
    assert sorted(four[4:8]) == ["1r", "1r", "2r", "2r"]
    assert four[8:] == ["1r", "2r", "3w", "3w", "3r", "3r", "3r"]
    with pytest.raises(UserError, match="at_once must be at least 1, got 0"):
        said(0)


def test_what_the_user_set_for_the_compiler_stays(forked, log, monkeypatch):
    monkeypatch.setenv(THREADS, "3")
    compare_each([Comparison("net", {"a": partial(linear, log, "a")}, apart=True)], CPU, Pace(1))
    assert log.read_text().splitlines()[0].endswith(" 3")
    assert os.environ[THREADS] == "3"


@pytest.mark.parametrize(
    ("module", "bench", "model"),
    [
        (over_models, tl_align.bench_tl_align, "deit_tiny_patch16_224"),
        (over_models, token_labels.bench_token_labels, "lvvit_t"),
        (train, train.bench_train, "deit_tiny_patch16_224"),
    ],
)
def test_compiled_arms_for_a_gpu_can_be_sent_to_processes(module, bench, model, monkeypatch):
    class Seen(Exception):
        pass

    def see(comparisons, device, pace, progress):
        raise Seen(comparisons)

    monkeypatch.setattr(module, "compare_each", see)
    monkeypatch.setattr(train, "matmul_rate", lambda device: 1.0)

    def apart_of(device, **options):
        with pytest.raises(Seen) as caught:
            bench([model], device=torch.device(device), **options)
        (comparisons,) = caught.value.args
        for comparison in comparisons:
            again = pickle.loads(pickle.dumps(comparison))
            assert again.arms.keys() == comparison.arms.keys()
            assert all(again.arms[arm].args[-4:] == build.args[-4:] for arm, build in comparison.arms.items())
        return {comparison.title: comparison.apart for comparison in comparisons}

    both = [model] if module is train else [f"{model}, eager", f"{model}, compiled"]
    assert apart_of("cuda") == ({model: True} if module is train else {both[0]: False, both[1]: True})
    assert apart_of("cuda", apart=False) == dict.fromkeys(both, False)
    assert apart_of("cpu", modes=["eager", "compiled"]) == dict.fromkeys(both, False)
    assert apart_of("cpu", modes=["eager", "compiled"], apart=True) == dict.fromkeys(both, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bench",
    [tl_align.bench_tl_align, token_labels.bench_token_labels, train.bench_train],
    ids=lambda bench: bench.__name__,
)
def test_rows_are_the_same_but_for_their_times(bench):
    here, away = (bench(["test_vit"], batch=2, rounds=2, device=CPU, apart=apart) for apart in (False, True))
    same = ("bench", "device", "model", "image_size", "batch", "precision", "mode", "arm", "peak_mib", "at_most")
    assert [[getattr(row, name) for name in same] for row in away] == [
        [getattr(row, name) for name in same] for row in here
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("margin", [1.1, math.inf], ids=["room for all", "room for one"])
def test_memory_is_told_alike_and_what_does_not_fit_says_so(margin, monkeypatch):
    monkeypatch.setattr(apart, "MARGIN", margin)
    device = torch.device("cuda")
    arms = {"a": partial(holding, 64, 128), "b": partial(holding, 32, 256)}
    here, away = compare_each(
        [Comparison("here", arms), Comparison("away", arms, apart=True)], device, Pace(2, steps=3)
    )
    for name, mib in (("a", 64 + 128), ("b", 32 + 256)):
        assert here[name].peak_mib == pytest.approx(mib, abs=1)
        assert away[name].peak_mib == pytest.approx(mib, abs=1)
        assert away[name].milliseconds.median > 0
    for apart_ in (False, True):
        with pytest.raises(UserError, match=r"'big' does not fit.*smaller --batch"):
            compare_each([Comparison("net", {"big": partial(holding, 2**30, 1)}, apart_)], device, Pace(1))


SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from alltokens.bench.apart import Comparison, Pace, compare_each
from tests.bench.test_apart import CPU, linear, wait_forever

if __name__ == "__main__":
    log = Path(sys.argv[1])
    arms = {"ready": partial(linear, log, "ready"), "busy": partial(linear, log, "busy", wait_forever)}
    say = partial(print, flush=True)
    compare_each([Comparison("net", arms, apart=True)], CPU, Pace(2), at_once=2, progress=say)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_parent(how, log, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert parent.stdout is not None
    while "ready: ready" not in parent.stdout.readline():
        assert parent.poll() is None
    while not built(log, "busy"):
        time.sleep(0.05)
    (os.killpg if how == signal.SIGINT else os.kill)(parent.pid, how)  # an interrupt reaches all, as from a terminal
    _, errors = parent.communicate(timeout=60)
    assert errors.count("Traceback") == (how == signal.SIGINT), "children say nothing"
    for _ in range(600):
        if nobody_left(log):
            break
        time.sleep(0.1)
    assert nobody_left(log)
