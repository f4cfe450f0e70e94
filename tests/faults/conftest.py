"""What the suite tried, counted: `make faults` keeps the figures, from as many workers as it has."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

import pytest

FIGURES = "ALLTOKENS_FAULTS_FIGURES"  # where the figures go; only `make faults` says so
GREATEST = " at the most"  # how a figure ends that is no sum

_tally: Counter[str] = Counter()
_began = time.time()


@pytest.fixture
def tally():
    """`tally["pictures"] += 1` for each thing tried that came out as promised."""
    return _tally


def add(figures: dict[str, int]) -> None:
    for what, count in figures.items():
        _tally[what] = max(_tally[what], count) if what.endswith(GREATEST) else _tally[what] + count


class _FromWorkers:
    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        add(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_configure(config):
    config.pluginmanager.register(_FromWorkers())


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = dict(_tally)
    elif exitstatus == 0 and (path := os.environ.get(FIGURES)):
        facts = {
            "tried": dict(sorted(_tally.items())),
            "tests": session.testscollected,
            "minutes": round((time.time() - _began) / 60, 1),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        Path(path).write_text(json.dumps(facts, indent=2) + "\n")
