"""What a study's file may say, and the studies that come with the project."""

from dataclasses import replace

import pytest
import torch

from alltokens.engine.assembly import build_net, build_step
from alltokens.engine.checks import check
from alltokens.errors import UserError
from alltokens.study.plan import load_study, parse_stores, settings_hash
from alltokens.study.run import Limits, jobs_of
from tests.conftest import ROOT

STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.yaml"))
TINY = """
recipe: deit_tiny
data: scenes
common: {data: {root: scenes, num_classes: 10}}
arms:
  plain: {supervision: {mixer: none}}
  cutmix: {supervision: {mixer: cutmix}}
"""


def written(folder, text):
    file = folder / "tiny.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_each_study_plans_and_its_arms_can_be_built(file, tmp_path):
    study = load_study(file)
    assert len(study.arms) >= 2
    assert study.plan.about
    stores = {name: str(tmp_path / name) for name in study.plan.stores}
    jobs, there = jobs_of([study], [], Limits(), stores=stores, runs_dir=tmp_path, masks="masks")
    assert there == 0
    assert len(jobs) == study.plan.seeds * len(study.arms)
    assert len({job.run_dir for job in jobs}) == len(jobs)
    built = set()
    for job in jobs[:: study.plan.seeds]:
        check(job.config)
        chosen = job.config.supervision
        kind = (str(job.config.model), job.config.data.image_size, chosen.is_dense, chosen.follower, chosen.mixer.name)
        if kind in built:
            continue
        built.add(kind)
        with torch.device("meta"):  # no weights are drawn
            net = build_net(job.config, job.config.data.num_classes)
            build_step(net, job.config, job.config.data.num_classes)


def test_studies_share_the_runs_that_are_the_same():
    names = ("a_followers", "b_token_labels", "c_combined", "d_where", "s1_mixing")
    a, b, c, d, s1 = (load_study(ROOT / f"benchmarks/studies/{name}.yaml") for name in names)
    assert a.settings("area") == d.settings("usual") == s1.settings("snapped")
    assert a.settings("tl_align") == d.settings("usual_tl_align") == s1.settings("snapped_tl_align")
    assert b.settings("tokens_lite2") == c.settings("area")
    hashes = {study.settings(arm) for study in (a, b, c, d, s1) for arm in study.arms}
    assert len(hashes) == sum(len(study.arms) for study in (a, b, c, d, s1)) - 5


def test_the_hash_is_of_what_matters(tmp_path):
    config = load_study(written(tmp_path, TINY)).arms["cutmix"]
    own = settings_hash(config, "scenes")
    moved = replace(config, data=replace(config.data, root="elsewhere"), train=replace(config.train, seed=3))
    assert settings_hash(replace(moved, log=replace(config.log, every_steps=7)), "scenes") == own
    assert settings_hash(config, "pets") != own
    assert settings_hash(replace(config, train=replace(config.train, epochs=7)), "scenes") != own


def test_seeds_and_stores_reach_the_run(tmp_path):
    text = TINY + "  tokens: {data: {labels: made}, supervision: {source: tokens}}\nstores: {made: by hand}\n"
    study = load_study(written(tmp_path, text))
    stores = parse_stores(["made=/labels"], [study])
    config = study.config("tokens", 4, stores)
    assert (config.data.labels, config.train.seed) == ("/labels", 4)
    said = []
    jobs, _ = jobs_of([study], [], Limits(seeds=2), stores={}, runs_dir=tmp_path, say=said.append)
    assert [(job.arm, job.seed) for job in jobs] == [("plain", 0), ("plain", 1), ("cutmix", 0), ("cutmix", 1)]
    assert said == ["left out: tiny tokens, for want of its label store: --store made=PATH"]


def test_seeds_are_a_limit_and_not_a_plan(tmp_path):
    few, many = (load_study(written(tmp_path, TINY + f"seeds: {seeds}\n")) for seeds in (2, 6))
    said = []
    jobs, _ = jobs_of([few], [], Limits(seeds=4), stores={}, runs_dir=tmp_path, say=said.append)
    assert [job.seed for job in jobs] == [0, 1, 0, 1]
    assert said == ["--seeds 4: at most 2 are planned; for more, write seeds: 4 into the file"]
    jobs, _ = jobs_of([many, few], [], Limits(seeds=4), stores={}, runs_dir=tmp_path, say=said.append)
    assert [job.seed for job in jobs] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TINY + "baseline: cutmx\n", "unknown arm 'cutmx'. Did you mean 'cutmix'"),
        (TINY + "  hard: {augment: {rand_augment: rand-m12}}\n", r"arms\.hard: .*m must be in \[0, 10\]"),
        (TINY + "seed: 3\n", "Did you mean 'seeds'"),
        (TINY + "seeds: 0\n", "seeds must be at least 1"),
        (TINY + "  'a b': {}\n", "made of letters"),
        (TINY + "  tokens: {data: {labels: made}, supervision: {source: tokens}}\n", "unknown label store 'made'"),
        (TINY + "  far: {supervision: {mixr: none}}\n", "Did you mean 'mixer'"),
        ("recipe: deit_tiny\n", "needs arms"),
        ("recipe: quickstart\narms: {a: }\n", "set data.annotator to null"),
        (TINY + "paper: [{source: x, setting: y, top1: {plan: 1}}]\n", "unknown arm 'plan'"),
    ],
)
def test_what_is_wrong_is_said(text, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load_study(written(tmp_path, text))


def test_a_study_that_is_not_there(tmp_path):
    written(tmp_path, TINY)
    with pytest.raises(UserError, match=r"Beside it: .*tiny\.yaml"):
        load_study(tmp_path / "tny.yaml")
    with pytest.raises(UserError, match="wants NAME=PATH"):
        parse_stores(["made"], [load_study(tmp_path / "tiny.yaml")])
