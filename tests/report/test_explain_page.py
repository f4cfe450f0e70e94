"""The page and the figures of `alltokens explain` hold the values that were found."""

import csv
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import alltokens as at
from alltokens.cli import main
from alltokens.data.scenes import render_scenes
from alltokens.explain import explain
from alltokens.report import figures
from alltokens.report.explain_figures import GAP, drawings
from alltokens.report.explain_page import error_table, write_explanation
from alltokens.report.style import heated
from tests.explain.test_explanation import NAMES, subject_of
from tests.explain.test_maps import lvvit, swin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for index, pixels in enumerate(render_scenes(3, 40).pictures):
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    models = [subject_of(lvvit(dense=True), name="lv <b>"), subject_of(swin(), 40, name="swin")]
    return explain(models, [folder], draws=2)


def squares(page):
    return [json.loads(one) for one in re.findall(r'<div class="squares.*?json">(.*?)</script>', page)]


def test_the_page_holds_every_map_share_and_presence(found, tmp_path):
    page = write_explanation(found, tmp_path / "a.html", table=tmp_path / "a.csv")
    text = page.file.read_text()
    assert page.bytes < 5_000_000
    values = squares(text)
    look, other = found.models[0].looks[0], found.models[1].looks[0]
    maps = [
        *look.heats["attribution"],
        *look.heats["rollout"],
        *look.heats["class_attention"],
        *look.heats["token_heat"],
    ]
    for shown, heat in zip(values, maps, strict=False):
        stretch = shown["told"]["before"] == ""
        expected = (heat - heat.min()) / (heat.max() - heat.min()) if stretch else heat
        assert (shown["rows"], shown["columns"]) == (4, 4)
        np.testing.assert_allclose(shown["values"], expected.flatten(), atol=1e-4)
    assert (values[len(maps)]["rows"], len(other.heats)) == (10, 1)  # Swin's rollout, at the grid of its patches
    mixed = found.models[0].mixed
    shares = [one for one in values if one["told"]["before"] == "partner "]
    np.testing.assert_allclose(shares[1]["values"], mixed.followed.token_shares[0].flatten(), atol=1e-4)
    present = [one for one in values if one["told"]["before"] == "presence "]
    np.testing.assert_allclose(present[0]["values"], found.models[0].presence[0][0].flatten(), atol=1e-4)
    assert "lv &lt;b&gt;" in text
    assert "<b>tl" not in text
    assert "No attribution for swin" in text
    assert (tmp_path / "a.csv").read_text() == error_table(found)
    for one in found.models:
        assert f">{one.error.rmse:#.3g}</td>" in text
        assert f">{one.error.spread:#.3g}</td>" in text


def test_the_table_of_errors(found):
    rows = list(csv.DictReader(error_table(found).splitlines()))
    assert [row["model"] for row in rows] == ["lv <b>", "swin"]
    for row, one in zip(rows, found.models, strict=True):
        assert float(row["rmse"]) == pytest.approx(one.error.rmse, abs=1e-6)
        assert float(row["standard_deviation"]) == pytest.approx(one.error.spread, abs=1e-6)
        assert (int(row["draws"]), int(row["pictures"])) == (2, 3)


def test_figures_draw_the_same_values(found):
    drawn = drawings(found)
    look = found.models[0].looks[0]
    axes = [one for one in drawn[0].axes if one.images]
    assert [one.get_title().split("\n")[0] for one in axes[1:7]] == [
        "attribution",
        "attribution",
        "rollout",
        "class attention",
        "token heat",
        "token heat",
    ]
    maps = look.heats["token_heat"]
    heat = torch.nn.functional.interpolate(maps[:1, None] / maps.max(), size=16, mode="bilinear")[0, 0]
    assert axes[5].get_title() == f"token heat\n{NAMES[look.classes[0]]}, to {maps[0].max():.0%}"
    np.testing.assert_allclose(axes[5].images[1].get_array(), heat, atol=1e-6)
    line = next(one for figure in drawn for ax in figure.axes for one in ax.lines if one.get_label() == "TL-Align")
    np.testing.assert_allclose(line.get_ydata(), found.models[0].mixed.ratios["TL-Align"][:, 0], atol=1e-6)
    bars = next(one.axes[0] for one in drawn if "RMSE" in one.get_supxlabel())
    widths = [bar.get_width() for bar in bars.patches]
    assert widths == pytest.approx([one.error.rmse for one in found.models])


def test_figures_in_one_picture_lie_below_one_another(found, tmp_path):
    one = found.models[0]
    model = one._replace(mixed=None, presence=[], looks=one.looks[:1], images=one.images[:1])
    few = found._replace(models=[model], pictures=found.pictures[:1], gallery={})
    page = write_explanation(few, tmp_path / "a.png")
    sizes = [Image.open(io.BytesIO(figures.as_png(one))).size for one in drawings(few)]
    assert len(sizes) == 2
    with Image.open(page.file) as picture:
        assert picture.width == max(width for width, _ in sizes)
        assert picture.height == sum(height for _, height in sizes) + GAP


def test_heat_is_laid_over_pixels():
    white = np.ones((4, 4, 3), dtype=np.float32)
    cold, hot = heated(white, torch.zeros(2, 2)), heated(white, torch.ones(2, 2))
    assert (cold == round(255 * 0.85)).all()  # nearly clear: 15 % of the darkest colour
    assert (hot < 255).any()
    assert (hot[0, 0] == hot).all()
    assert (hot > cold).any()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "explain what"),
        (["tiny"], "explain what"),
        (["vit_tiny@random", "PICTURE"], "unknown model 'vit_tiny'"),
        (["vit_tiny_patch16_224@random", "nowhere.png"], "no picture nowhere.png"),
        (["vit_tiny_patch16_224@random", "PICTURE", "--out", "page.pdf"], "what kind of file is page.pdf"),
        (["vit_tiny_patch16_224@random", "PICTURE", "--methods", "role"], "methods"),
        (["vit_tiny_patch16_224@random", "PICTURE", "--beside", "nothing@random"], "unknown model 'nothing'"),
    ],
)
def test_mistakes_are_told_in_one_line(words, says, folder, capsys):
    words = [str(folder / "0.png") if word == "PICTURE" else word for word in words]
    assert main(["explain", *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_the_command_writes_page_and_table(folder, tmp_path, capsys):
    options = "{patch_size: 4, img_size: 16, embed_dim: 24, depth: 2, num_heads: 3, num_classes: 5}"
    words = ["vit_tiny_patch16_224@random", str(folder), "--model-options", options, "--device", "cpu"]
    out, table = tmp_path / "new" / "a.html", tmp_path / "new" / "a.csv"
    assert main(["explain", *words, "--out", str(out), "--table", str(table), "--draws", "1"]) == 0
    told = capsys.readouterr()
    assert f"wrote {out}: 3 pictures" in told.out
    assert f"wrote {table}" in told.out
    assert "where it looks" in told.err
    assert out.is_file()
    assert len(table.read_text().splitlines()) == 2
    assert main(["explain", *words, "--out", str(tmp_path / "a.png"), "--parts", "maps", "--most", "1"]) == 0
    with pytest.raises(at.UserError, match="no error to put into the table"):
        write_explanation(explain([subject_of(lvvit())], [folder], parts=["maps"]), out, table=table)
