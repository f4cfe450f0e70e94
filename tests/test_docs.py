"""Every code block of README and docs runs: python as it stands, each alltokens command in a small form."""

import re
import shlex

import pytest
from PIL import Image

from alltokens.cli import main
from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build, parse_yaml
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = shlex.split(
    "--train.epochs 1 --train.batch_size 8 --train.precision fp32 --train.compile off --schedule.warmup_epochs 0 "
    "--model.name vit_tiny_patch16_224 --model.options '{patch_size: 8, embed_dim: 24, depth: 2, num_heads: 2}' "
    "--data.image_size 32 --data.workers 0"
)
SCENES = shlex.split("--data.train_pictures 32 --data.val_pictures 16")


def blocks(page, language):
    return [body for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture
def place(tmp_path):
    folder = tmp_path
    for split, count in (("train", 16), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / "pictures" / split / name).mkdir(parents=True)
            for index in range(count):
                picture = Image.new("RGB", (48, 40), (200 * (name == "dog"), 10 * index, 90))
                picture.save(folder / "pictures" / split / name / f"{index}.jpg")
    (folder / "classes.yaml").write_text("cat: [tabby, Persian cat]\ndog: n02099601\n")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_one_after_the_other(page, place, monkeypatch):
    monkeypatch.chdir(place)
    names: dict = {"__name__": "docs"}
    for body in blocks(page, "python"):
        exec(compile(body, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page, place, monkeypatch, capsys):
    """Training commands run with a tiny model, annotators see small pictures; everything else as it stands."""
    monkeypatch.chdir(place)
    for body in blocks(page, "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words or words[0] != "alltokens":
                assert not words or words[0] in ("pip", "make", "git"), f"what is {line!r}?"
                continue
            words = words[1:]
            if words[0] == "annotate":
                words = [*words, "--image-size", "64", "--workers", "0"]
            if words[0] == "train" and "--resume" not in words:
                words = [*words, *SMALL, *(SCENES if "quickstart" in words else [])]
            assert main(words) == 0, f"{line}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_in_pages_are_valid(page):
    for body in blocks(page, "yaml"):
        settings = parse_yaml(body, page.name)
        settings.pop("extends", None)
        build(RunConfig, settings, page.name)


def links(page):
    """The files that a page leads to."""
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_inside_the_project_lead_somewhere(page):
    assert [link for link in links(page) if not link.exists()] == []


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.suffix == ".md" and page.exists():
            seen.add(page)
            waiting += links(page)
    assert set(PAGES) <= seen
