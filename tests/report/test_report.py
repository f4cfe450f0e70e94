"""The report of runs says what the runs have logged and what their weights do, and survives what is missing."""

import json
import re
import shutil
import statistics

import numpy as np
import pytest
import torch

import alltokens as at
from alltokens.cli import main
from alltokens.evaluate import evaluate
from alltokens.explain.subject import open_run
from alltokens.report import write_report
from alltokens.report.run_pictures import judge, labelled_pictures, mixes, overlays, spread_out, validation_pictures
from alltokens.report.runs import MOST_POINTS, Group, differences, grouped, read_run, read_runs
from tests.report.tiny_runs import make_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(runs):
    written = write_report(runs, runs[0].parent / "report.html")
    assert (written.runs, written.settings) == (3, 2)
    assert written.bytes == written.file.stat().st_size < 5_000_000
    return written.file.read_text()


def logged(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def charts(page):
    found = re.findall(r'<figure class="chart"><script type="application/json">(.*?)</script>', page)
    return [json.loads(one) for one in found]


def section(page, anchor):
    return re.search(rf'<section id="{anchor}">(.*?)</section>', page, re.DOTALL)[1]


def test_seeds_of_one_setting_are_one_row_with_n_mean_and_spread(runs, page):
    best = [max(line["top1"] for line in logged(run, "evaluation")) for run in runs[:2]]
    told = f"{statistics.fmean(best):.2f} ± {statistics.stdev(best):.2f}\N{NARROW NO-BREAK SPACE}%"
    rows = re.findall(r"<tr><th>.*?</tr>", section(page, "summary"), re.DOTALL)
    row = next(one for one in rows if "aligned" in one)
    assert told in row
    assert '<td class="number" data-value="2">2</td>' in row
    assert "(one run)" in section(page, "summary") or "With one run" in section(page, "summary")


def test_curves_hold_what_was_logged(runs, page):
    top1 = next(one for one in charts(page) if one["title"] == "Validation top-1")
    assert [line["name"] for line in top1["lines"]] == ["aligned", "tokens"]
    seeds = np.array([[line["top1"] for line in logged(run, "evaluation")] for run in runs[:2]])
    np.testing.assert_allclose(top1["lines"][0]["y"], seeds.mean(0))
    np.testing.assert_allclose(top1["lines"][0]["spread"], seeds.std(0, ddof=1))
    assert top1["lines"][0]["x"] == [1, 2]
    assert top1["lines"][1]["spread"] is None
    loss = next(one for one in charts(page) if one["title"] == "Training loss")
    lines = logged(runs[2], "train")
    assert loss["lines"][1]["y"] == [line["loss"] for line in lines]
    np.testing.assert_allclose(
        loss["lines"][1]["x"], [line["update"] / 6 for line in lines], atol=1e-6
    )  # written to 6 digits


def test_a_long_curve_is_thinned_to_means(runs):
    record = read_run(runs[0])
    group = Group("one", (record,))
    line = group.line(lambda run: [(x, float(x % 2)) for x in range(10 * MOST_POINTS)])
    assert len(line.x) == MOST_POINTS
    assert set(line.y) == {0.5}
    assert line.x[0] == 4.5


def test_settings_that_differ_are_named(runs):
    groups = grouped(read_runs([*runs, runs[0]]))  # a run that is named twice counts once
    assert [(group.name, len(group.runs)) for group in groups] == [("aligned", 2), ("tokens", 1)]
    found = dict(differences(groups))
    assert found["supervision.source"] == ["class", "tokens"]
    assert found["supervision.follower.name"] == ["tl_align", "area"]
    assert "train.seed" not in found


def test_confusions_are_those_of_the_weights(runs, page):
    subject = open_run(runs[0])
    source = validation_pictures(subject)
    found = judge(subject, source, spread_out(source, len(source)), batch=16)
    assert found.confusion.sum() == found.looked == found.of == 40
    counts = np.bincount(source.labels, minlength=10)
    assert found.confusion.sum(1).tolist() == counts.tolist()
    top1 = 100 * np.trace(found.confusion) / 40
    assert top1 == pytest.approx(evaluate(str(runs[0]), device="cpu", workers=0).top1)
    assert [one.label == one.guess for one in found.best] == [True] * len(found.best)
    sure = [one.label_probability for one in found.best]
    assert sure == sorted(sure, reverse=True)
    assert all(one.guess != one.label for one in found.worst)
    least = [one.label_probability for one in found.worst]
    assert least == sorted(least)
    assert f"{np.trace(found.confusion)} of 40 pictures are right" in section(page, "confusion-of-classes")


def test_mixed_samples_have_the_targets_of_the_step(runs):
    subject = open_run(runs[0])
    source = validation_pictures(subject)
    found = mixes(subject, *labelled_pictures(subject, source))
    assert (found.mixer, found.follower, found.mixes) == ("cutmix", "tl_align", True)
    for sample in found.samples:
        assert sample.target_share == pytest.approx(sample.aligned_share, abs=1e-6)  # this run trains on those
        assert float(sample.input_shares.mean()) == pytest.approx(sample.share, abs=1e-6)
        covered = torch.nn.functional.interpolate(sample.input_shares[None, None], size=(32, 32))[0]
        torch.testing.assert_close(sample.mixed, torch.lerp(sample.own, sample.partner, covered))
        (_, own_before, own_after), (_, partner_before, _) = sample.targets[:2]
        if len(set(sample.names)) == 2:  # one-hot labels smoothed by nothing: the classes have the shares
            smoothing = subject.config.supervision.smoothing
            off = smoothing / 10
            assert own_before == pytest.approx((1 - smoothing) * (1 - sample.share) + off, abs=1e-6)
            assert partner_before == pytest.approx((1 - smoothing) * sample.share + off, abs=1e-6)
            assert own_after == pytest.approx((1 - smoothing) * (1 - sample.aligned_share) + off, abs=1e-6)
        assert float(sample.ratios["area"][-1]) == pytest.approx(sample.share)
        assert float(sample.ratios["TL-Align"][-1]) == pytest.approx(sample.aligned_share, abs=1e-6)
    again = mixes(subject, *labelled_pictures(subject, source))
    assert [one.names for one in again.samples] == [one.names for one in found.samples]


def test_overlays_show_the_maps_that_taught_and_what_tokens_are_taken_for(runs):
    subject = open_run(runs[2])
    source, store = labelled_pictures(subject, validation_pictures(subject))
    assert source.keys[0].startswith("train/")
    shown = overlays(subject, source, store)
    for one in shown:
        assert one.label_map is not None
        assert int(one.label_map.ids[0, 0, 0]) == subject.class_names.index(one.name)
        image = subject.transform(one.picture)[0].unsqueeze(0)
        with torch.no_grad():
            tokens = subject.net(image, tokens=True).token_logits[0].softmax(-1)
        assert one.tokens is not None
        scores, tail = one.tokens.scores, one.tokens.tail
        first = (scores[0] - torch.logaddexp(scores.logsumexp(0), tail)).exp().flatten()
        torch.testing.assert_close(first, tokens.amax(-1))
        assert torch.equal(one.tokens.ids[0].flatten(), tokens.argmax(-1))
    plain = open_run(runs[0])
    assert overlays(plain, validation_pictures(plain), None) == []  # no dense head, no maps


def test_environment_and_command_are_there(runs, page):
    told = section(page, "environment-and-command")
    facts = json.loads((runs[0] / "run.json").read_text())
    assert facts["versions"]["torch"] in told
    assert str(runs[2]) in told
    assert "follower:" in told


def test_names_of_users_are_text_and_nothing_is_fetched(runs, tmp_path):
    hostile = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(runs[0], hostile)
    page = write_report([hostile], tmp_path / "report.html", pictures=0).file.read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "default-src 'none'" in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "No pictures were asked for." in page


def test_a_run_without_weights_or_pictures_still_has_its_numbers(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "stopped", ignore=shutil.ignore_patterns("weights"))
    page = write_report([tmp_path / "stopped"], tmp_path / "a.html").file.read_text()
    assert "has no weights yet" in section(page, "confusion-of-classes")
    assert charts(page)[0]["lines"][0]["y"]
    (tmp_path / "stopped" / "metrics.jsonl").write_text("")
    page = write_report([tmp_path / "stopped"], tmp_path / "b.html").file.read_text()
    assert "No evaluation yet." in section(page, "summary")


def test_a_run_whose_pictures_or_labels_are_gone_says_so(runs, tmp_path):
    for place, gone in (("root: scenes", "root: /nowhere"), (f"labels: {runs[0].parent / 'labels'}", "labels: /gone")):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(runs[2], tmp_path / "run")
        config = tmp_path / "run" / "config.yaml"
        assert place in config.read_text()
        config.write_text(config.read_text().replace(place, gone))
        page = write_report([tmp_path / "run"], tmp_path / "a.html").file.read_text()
        assert gone.split()[1] in section(page, "mixed-samples")
        assert charts(page)[0]["lines"][0]["y"]
        confused = section(page, "confusion-of-classes")
        assert ("of 40 pictures are right" in confused) == (gone == "labels: /gone")


def test_labels_made_within_a_run_are_found_when_it_was_moved(runs, tmp_path):
    shutil.copytree(runs[2], tmp_path / "run")
    shutil.copytree(runs[0].parent / "labels", tmp_path / "run" / "labels")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(runs[0].parent / "labels"), "elsewhere/run/labels"))
    subject = open_run(tmp_path / "run")
    _, store = labelled_pictures(subject, validation_pictures(subject))
    assert store is not None
    assert store.path == tmp_path / "run" / "labels"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "report on which runs"),
        (["nowhere"], "nowhere"),
        (["RUN", "--pictures", "-1"], "at least 0"),
        (["RUN", "--put", "x"], "unknown option --put. Did you mean --out"),
        (["RUN", "--out", "/proc/report.html"], "cannot write /proc/report.html"),
    ],
)
def test_mistakes_are_told_in_one_line(runs, words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(runs[0]) if word == "RUN" else word for word in words]
    if "--pictures" not in words and "/proc/report.html" in words:
        words += ["--pictures", "0"]
    assert main(["report", *words]) == 2
    told = capsys.readouterr().err.strip()
    assert says in told
    assert "Traceback" not in told


def test_the_command_says_what_it_wrote(runs, capsys, tmp_path):
    assert main(["report", str(runs[0]), "--out", str(tmp_path / "new" / "page.html"), "--pictures", "0"]) == 0
    assert f"wrote {tmp_path / 'new' / 'page.html'}: 1 run, " in capsys.readouterr().out
    with pytest.raises(at.UserError, match="at least one run"):
        write_report([], tmp_path / "x.html")
