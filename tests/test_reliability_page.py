"""docs/reliability.md states the figures of the file that `make faults` made, and nothing that is not there."""

import json
import re

from benchmarks import faults

from tests.conftest import ROOT

PAGE = faults.PAGE.read_text(encoding="utf-8")
OTHER = {"tried": {"pictures": 7654}, "tests": 1, "minutes": 2.5, "cores": 2, "python": "3.11"}


def test_the_page_is_as_the_figures_say():
    assert faults.PLACE.search(PAGE)
    assert faults.filled(PAGE) == PAGE


def test_other_figures_would_change_it(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "FIGURES", tmp_path / "faults.json")
    faults.FIGURES.write_text(json.dumps(OTHER))
    other = faults.filled(PAGE)
    assert other != PAGE
    assert "| pictures | 7,654 |" in other
    assert "1 tests in 2.5 minutes" in other


def test_every_promise_names_tests_that_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(set(named)) >= 7
    assert [name for name in named if not (ROOT / name).is_file()] == []
