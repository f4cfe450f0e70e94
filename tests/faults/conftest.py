"""What the suite tried, counted: `make faults` keeps the figures."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

import pytest

FIGURES = "ALLTOKENS_FAULTS_FIGURES"  # where the figures go; only `make faults` says so

_tally: Counter[str] = Counter()
_began = time.time()


@pytest.fixture
def tally():
    """`tally["pictures"] += 1` for each thing tried that came out as promised."""
    return _tally


def pytest_sessionfinish(session, exitstatus):
    path = os.environ.get(FIGURES)
    if path and exitstatus == 0:
        facts = {
            "tried": dict(sorted(_tally.items())),
            "tests": session.testscollected,
            "minutes": round((time.time() - _began) / 60, 1),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        Path(path).write_text(json.dumps(facts, indent=2) + "\n")
