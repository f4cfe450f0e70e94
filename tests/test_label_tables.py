"""docs/labels.md states the numbers of the files that its commands made."""

import re

from benchmarks import label_tables


def test_the_page_is_as_its_results_say():
    page = label_tables.PAGE.read_text(encoding="utf-8")
    assert {found[2] for found in label_tables.PLACE.finditer(page)} == set(label_tables.TABLES)
    assert label_tables.filled(page) == page


def test_another_result_would_change_it():
    page = label_tables.PAGE.read_text(encoding="utf-8")
    other = re.sub(r"\d\.\d+ nats", "9.87 nats", page)
    assert other != page
    assert label_tables.filled(other) == page
