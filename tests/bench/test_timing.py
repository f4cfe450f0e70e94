import time

import pytest
import torch

from alltokens.bench.timing import compare, device_name, spread
from alltokens.errors import UserError

CPU = torch.device("cpu")


class Clock:
    """Time that passes only when a step says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step_of(self, *seconds):
        left = list(seconds)

        def step():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return lambda: step


def test_a_ratio_is_that_of_one_round_and_warm_up_does_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    # The machine becomes ten times slower after the first round: medians of times would mix both.
    found = compare({"a": clock.step_of(99, 1, 10, 10), "b": clock.step_of(99, 1.5, 15, 15)}, CPU, rounds=3, warmup=1)
    assert list(found) == ["a", "b"]
    assert found["a"].milliseconds == (10_000, 5_500, 10_000)
    assert found["b"].milliseconds == (15_000, 8_250, 15_000)
    assert found["a"].ratio == (1, 1, 1)
    assert found["b"].ratio == (1.5, 1.5, 1.5)
    assert found["b"].peak_mib is None


def test_every_round_begins_with_another_arm():
    order = []
    arms = {name: (lambda name=name: lambda: order.append(name)) for name in "abc"}
    compare(arms, CPU, rounds=4, steps=1, warmup=0)
    assert "".join(order) == "abcbcacababc"


def test_the_time_of_a_round_is_shared_by_its_steps(monkeypatch):
    clock = Clock(monkeypatch)
    assert compare({"a": clock.step_of(2)}, CPU, rounds=1, steps=4)["a"].milliseconds.median == 2_000


@pytest.mark.parametrize(("seconds", "rounds"), [(7.5, 8), (0, 5), (100, 9)])
def test_no_round_begins_after_the_time_is_up_but_five_are_there(monkeypatch, seconds, rounds):
    clock = Clock(monkeypatch)
    compare({"a": clock.step_of(1)}, CPU, rounds=9, seconds=seconds, warmup=0)
    assert clock.now == rounds


def test_quartiles_are_those_of_the_values():
    assert spread([4, 1, 2, 3, 5]) == (3, 2, 4)
    assert spread([7]) == (7, 7, 7)


def test_what_does_not_fit_says_so():
    def build():
        raise torch.OutOfMemoryError("no")

    with pytest.raises(UserError, match=r"'big' does not fit.*smaller --batch"):
        compare({"big": build}, CPU, rounds=1)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"rounds": 1, "steps": 0}])
def test_nothing_to_measure_is_an_error(wrong):
    with pytest.raises(UserError, match="at least 1"):
        compare({}, CPU, **wrong)


def test_a_processor_is_named_with_its_threads():
    threads = torch.get_num_threads()
    assert device_name(CPU).endswith(", 1 thread" if threads == 1 else f", {threads} threads")
    assert not device_name(CPU).startswith(",")
