"""A study's file: arms (a recipe with settings laid over it) times seeds, and what they are compared with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alltokens.engine import checks
from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build, flatten, read_yaml, to_mapping
from alltokens.engine.recipes import load_recipe, overlay
from alltokens.errors import UserError, unknown


@dataclass(frozen=True)
class Paper:
    """Published numbers to be shown beside ours."""

    source: str
    """The paper and its table."""
    setting: str
    """Model, data set and length there, so that nobody mistakes them for ours."""
    top1: dict[str, float]
    """Arm -> the published top-1."""


@dataclass(frozen=True)
class StudyFile:
    """What stands in the YAML file."""

    about: str = ""
    """The question, in a sentence."""
    data: str = ""
    """The data set by its name, for the tables."""
    recipe: str = "imagenette"
    """Every arm starts from this packaged recipe, or from a file beside the study."""
    common: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings laid over the recipe for all arms."""
    arms: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arm -> settings laid over that; the key `recipe` starts an arm from another recipe."""
    seeds: int = 5
    """How many seeds each arm is to have: 0, 1, 2, ..."""
    baseline: str = ""
    """The arm that the others are compared with; the default is the first."""
    against: dict[str, str] = field(default_factory=dict[str, str])
    """Arm -> the arm that it is compared with instead."""
    stores: dict[str, str] = field(default_factory=dict[str, str])
    """Label store -> how it is made. Arms name it in data.labels; `--store NAME=PATH` says where it is."""
    leaks: dict[str, str] = field(default_factory=dict[str, str])
    """Label store -> what its annotator has seen that it should not have; stated with every result."""
    truth: bool = False
    """Measure token predictions against masks after each run; `--masks PATH` says where the masks are."""
    paper: tuple[Paper, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the page of results."""


@dataclass(frozen=True)
class Study:
    """A study that has been read and checked."""

    file: Path
    plan: StudyFile
    arms: dict[str, RunConfig]
    """Arm -> its settings; the seed is 0, and data.labels is still a store's name."""

    @property
    def name(self) -> str:
        return self.file.stem

    def baseline_of(self, arm: str) -> str | None:
        """The arm that this one is compared with; None for the baseline itself."""
        chosen = self.plan.against.get(arm) or self.plan.baseline or next(iter(self.arms))
        return None if chosen == arm else chosen

    def settings(self, arm: str) -> str:
        """A short hash of all that an arm's result depends on but the seed."""
        return settings_hash(self.arms[arm], self.plan.data)

    def config(self, arm: str, seed: int, stores: Mapping[str, str]) -> RunConfig:
        """The settings of one run."""
        config = self.arms[arm]
        data = config.data
        if data.labels is not None:
            if data.labels not in stores:
                raise UserError(
                    f"the arm {arm} reads the label store {data.labels!r}: say where it is with "
                    f"--store {data.labels}=PATH. How it is made: {self.plan.stores[data.labels]}"
                )
            data = dataclasses.replace(data, labels=stores[data.labels])
        return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, seed=seed))


def load_study(path: str | Path, settings: Mapping[str, Any] | None = None) -> Study:
    """Read a study; `settings` are laid over all its arms (the command line's)."""
    file = Path(path)
    if not file.is_file():
        near = sorted(str(other) for other in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise UserError(f"there is no study {file}.{' Beside it: ' + ', '.join(near) + '.' if near else ''}")
    plan = build(StudyFile, read_yaml(file), str(file))
    if not plan.arms:
        raise UserError(f"{file}: a study needs arms: 'arms:' with a name and settings for each")
    if plan.seeds < 1:
        raise UserError(f"{file}: seeds must be at least 1, got {plan.seeds}")
    arms = {name: _arm(plan, file, name, values, settings or {}) for name, values in plan.arms.items()}
    study = Study(file, plan, arms)
    _check_names(study)
    return study


def _arm(plan: StudyFile, file: Path, name: str, values: Any, settings: Mapping[str, Any]) -> RunConfig:
    where = f"{file}: arms.{name}"
    if not all(letter.isalnum() or letter in "_-" for letter in name):
        raise UserError(f"{where}: an arm's name is made of letters, digits, '_' and '-': it names folders")
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"{where}: expected settings as 'key: value', got {values!r}")
    own = dict(values or {})
    config = load_recipe(_recipe(own.pop("recipe", plan.recipe), file))
    for laid, place in ((plan.common, f"{file}: common"), (own, where), (settings, "command line")):
        config = overlay(config, laid, place)
    if config.data.annotator is not None:
        raise UserError(
            f"{where}: data.annotator {config.data.annotator} would make a label store for each run; a study's stores "
            "are made once, before: set data.annotator to null, and name one of stores: in data.labels"
        )
    config = dataclasses.replace(config, compare=None, train=dataclasses.replace(config.train, seed=0))
    try:
        checks.check(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


def _recipe(name: Any, file: Path) -> str:
    """A word is a packaged recipe; a path is meant from the study's own folder."""
    if not isinstance(name, str):
        raise UserError(f"{file}: recipe: expected the name of one recipe, got {name!r}")
    beside = file.parent / name
    return str(beside) if beside.suffix in (".yaml", ".yml") and beside.is_file() else name


def _check_names(study: Study) -> None:
    plan, arms = study.plan, study.arms
    named = [(plan.baseline, "baseline")] if plan.baseline else []
    named += [(name, "against") for pair in plan.against.items() for name in pair]
    named += [(name, "paper") for paper in plan.paper for name in paper.top1]
    for name, where in named:
        if name not in arms:
            raise unknown("arm", name, arms, hint=f"(in {study.file}: {where})")
    for name, config in arms.items():
        if config.data.labels is not None and config.data.labels not in plan.stores:
            raise unknown(
                "label store", config.data.labels, plan.stores, hint=f"(data.labels of the arm {name}; see stores:)"
            )
    for name in plan.leaks:
        if name not in plan.stores:
            raise unknown("label store", name, plan.stores, hint=f"(in {study.file}: leaks)")


# What says where things lie and how fast or how talkative a run is, and not what comes out of it.
_APART = ("about.", "checkpoint.", "log.", "evaluation.")
_PLACES = ("data.root", "data.train", "data.val", "data.workers", "data.max_pixels")
_MACHINE = ("train.seed", "train.device", "train.compile", "train.timeout_minutes")


def settings_hash(config: RunConfig, data: str) -> str:
    """`data` is the data set's name, which stands for its place.

    Only what differs from the defaults counts, so that a setting that is new in a later version changes no hash.
    """
    usual = flatten(to_mapping(RunConfig()))
    values = {
        key: value
        for key, value in flatten(to_mapping(config)).items()
        if value != usual.get(key) and not key.startswith(_APART) and key not in (*_PLACES, *_MACHINE)
    }
    return hashlib.sha256(json.dumps([data, values], sort_keys=True).encode()).hexdigest()[:10]


def parse_stores(words: Sequence[str], studies: Sequence[Study]) -> dict[str, str]:
    """NAME=PATH for each label store."""
    known = {name for study in studies for name in study.plan.stores}
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not path:
            raise UserError(
                f"--store wants NAME=PATH, got {word!r}; known stores: {', '.join(sorted(known)) or 'none'}"
            )
        if not known:
            raise UserError(f"--store {word}: no arm of these studies reads a label store")
        if name not in known:
            raise unknown("label store", name, known)
        found[name] = path
    return found
