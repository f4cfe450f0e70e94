"""The pages that studies and benches become: what they say follows from rows, and the committed ones are up to date."""

import re
import subprocess
from pathlib import Path

import pytest
from benchmarks import device, docs, findings

from alltokens.cli import main
from alltokens.study.page import report_section
from alltokens.study.plan import load_study
from alltokens.study.results import Result, append_result, read_results
from alltokens.study.student import paired
from alltokens.study.table import compare
from tests.conftest import ROOT

STUDY = """
about: does it help
data: scenes
recipe: deit_tiny
arms:
  base: {supervision: {mixer: none}}
  better: {supervision: {mixer: cutmix}}
  same: {supervision: {mixer: mixup}}
  worse: {supervision: {mixer: block}}
paper:
  - {source: Some paper, setting: large and long, top1: {base: 70, better: 72, same: 70.1, worse: 71}}
"""
NOISE = (0.1, -0.1, 0.2, 0.0, -0.2)


@pytest.fixture
def study(tmp_path):
    (tmp_path / "help.yaml").write_text(STUDY)
    return load_study(tmp_path / "help.yaml")


def add(study, arm, values, **more):
    for seed, value in enumerate(values):
        speed = 1.0 if seed == 0 else 9.0  # the first run of a process compiles
        settings = study.settings(arm)
        row = Result(study.name, arm, seed, "done", value, settings=settings, pictures_per_second=speed, **more)
        append_result(study.file.with_name("results.csv"), row)


def compared(study):
    return compare(study, read_results(study.file.with_name("results.csv")))


def test_findings_follow_from_intervals(study):
    add(study, "base", [50 + noise for noise in NOISE])
    add(study, "better", [52 + 2 * noise for noise in NOISE])
    add(study, "same", [50 - 4 * noise for noise in NOISE])
    add(study, "worse", [49 - noise for noise in NOISE])
    one = compared(study)
    better, same, worse = findings.findings(one)
    # Differences 2 + noise, whose standard deviation is 0.158: t(4 degrees) 2.776 * 0.158 / sqrt(5) = 0.196.
    assert better.text == (
        "better against base: published +2.00 [1], here +2.00 (+1.80 to +2.20), n = 5: "
        "the interval leaves zero out, in the published direction."
    )
    assert worse.text.startswith("worse against base: published +1.00 [1], here -1.00 (")
    assert worse.text.endswith(", in the opposite direction.")
    assert same.text.endswith("a true difference of 1.31 would probably have shown, and the published one is smaller.")
    assert (better.kind, same.kind, worse.kind) == (findings.AGREES, findings.OPEN, findings.CONTRADICTS)
    page = docs.results_page([one, one])
    assert re.search(r"\| better \| 5 \| 52\.00 \| .* \| 72\.0 \|", page)
    assert "- [1] Some paper: large and long." in page
    assert f"- {better.text}\n" in page
    # A study that shares its arms with an earlier one adds nothing to the summary.
    assert page.count("\n- [help](#help), ") == 3
    assert f"**{findings.AGREES}**\n\n- [help](#help), {better.name}: {better.numbers}\n" in page


def test_a_difference_that_would_have_shown_and_too_few_seeds(study):
    add(study, "base", [50 + noise for noise in NOISE], token_iou=30.0)
    add(study, "better", [50 + 1.01 * noise for noise in NOISE], token_iou=31.0)
    add(study, "worse", [40.0] * 4)
    one = compared(study)
    better, iou, worse = findings.findings(one)
    assert better.kind == findings.MISSED
    assert (
        iou.text == "better against base, token IoU: here +1.00 (+1.00 to +1.00), n = 5: the interval leaves zero out."
    )
    assert iou.kind == findings.SEEN
    assert worse.kind == findings.FEW
    assert worse.text.endswith("n = 4: undecided, of fewer than 5 seeds nothing is claimed.")
    page = docs.results_page([one])
    assert "- Not run yet, or too seldom to be compared: same.\n" in page
    assert "2 comparisons of 5 seeds or more; 1 more have fewer" in page
    # Where arms have not the same seeds, a difference is not that of the means beside it: how many pairs it is of.
    assert re.search(r"\| better \| 5 \| 50\.00 \| 0\.16 \|  \| \+0\.00 \|", page)
    assert re.search(r"\| worse \| 4 \| 40\.00 \| 0\.00 \| 4 \| -10\.05 \|", page)
    study.file.write_text(STUDY + "  - {source: Another paper, setting: larger, top1: {base: 70, better: 73}}\n")
    page = docs.results_page([compared(load_study(study.file))])
    assert "2 comparisons of 5 seeds or more; 1 more have fewer" in page  # one stands beside two papers
    assert findings.judge(paired([51.0, 49.0] * 3, [50.0] * 6), None)[0] == findings.UNSEEN


def test_no_results_are_said_to_be_none(study, tmp_path):
    page = docs.results_page([compared(study)])
    assert "No study has been run yet" in page
    assert "Planned: 5 seeds of each of base, better, same, worse" in page
    assert docs.performance_page(tmp_path / "nothing").count("Not measured yet") >= 4


def test_a_page_of_a_study_and_the_command(study, tmp_path, capsys):
    add(study, "base", [50, 51, 50.5])
    add(study, "better", [52, 52.5, 52.25])
    assert (
        main(["study", "show", str(study.file), "--page", str(tmp_path / "p.html"), "--csv", str(tmp_path / "c.csv")])
        == 0
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("better"))
    assert "+1.75" in line
    assert line.endswith(" 9")  # pictures/s: the median
    page = (tmp_path / "p.html").read_text()
    assert "does it help" in page
    assert "+1.75" in page
    assert page.count("<svg") == 1
    title, section = report_section(study.file)
    assert title == "Study help"
    assert section in page
    assert (tmp_path / "c.csv").read_text().splitlines()[2].startswith("help,better,3,0,52.25,")
    assert main(["study", "show", str(tmp_path / "hepl.yaml")]) == 2
    assert main(["study", "shw", str(study.file)]) == 2
    assert "Did you mean 'show'" in capsys.readouterr().err


def test_a_bench_becomes_a_table_with_quartiles():
    rows = [
        {"bench": "x", "device": "d", "torch": "t", "arm": "ours", "step_ms": "12.345", "step_ms_low": "12.1",
         "step_ms_high": "12.6", "pictures_per_second": "23456.7", "peak_mib": ""},
    ]  # fmt: skip
    assert docs.bench_table(rows) == [
        "| arm | step ms | pictures per second |",
        "| --- | ---: | ---: |",
        "| ours | 12.35 (12.1 to 12.6) | 23,457 |",
    ]


def test_all_benches_in_one_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.csv").write_text("before")

    def bench(words, check):
        name = words[4]
        for option in ("--csv", "--json"):
            Path(words[words.index(option) + 1]).write_text(f"{name} {option}")
        return subprocess.CompletedProcess(words, 1 if name == "train" else 0)

    monkeypatch.setattr(device.subprocess, "run", bench)
    assert device.main(["--out", str(tmp_path), "--data", "pictures"]) == 1
    assert "FAILED: train" in capsys.readouterr().out
    assert (tmp_path / "train.csv").read_text() == "before"
    assert (tmp_path / "tl_align.csv").read_text() == "tl_align --csv"
    assert not list(tmp_path.glob(".*"))
    assert "--data" in device.command("data", tmp_path, "pictures")
    assert "--data" not in device.command("train", tmp_path, "pictures")
    assert device.command("tl_align", tmp_path, None, ["a", "b"])[-3:] == ["--models", "a", "b"]
    assert "--models" not in device.command("labels", tmp_path, None, ["a", "b"])


def test_the_committed_pages_are_what_the_files_say():
    assert (ROOT / "docs" / "results.md").read_text() == docs.results_page(docs.all_studies())
    assert (ROOT / "docs" / "performance.md").read_text() == docs.performance_page(docs.RESULTS)
