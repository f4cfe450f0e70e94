"""Every test runs on one thread, in the repository's root, with a cache folder of its own."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="session")
def _apart(tmp_path_factory):
    """What tests and the processes they start may touch: one thread, a cache that goes away."""
    torch.set_num_threads(1)
    before = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    yield
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _nothing_stays_compiled():
    """Or what one test compiled counts towards the limit, and slows the guards, of all that follow."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        dynamo.reset()
        dynamo.utils.counters.clear()
