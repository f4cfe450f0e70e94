"""alltokens study: arms times seeds; train what is missing, compare what is there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from alltokens.cli import _options
from alltokens.cli._options import Hidden, Positional, asks_for_help, show_help, shown_as
from alltokens.engine.config import RecipeCard, RunConfig
from alltokens.engine.loading import build
from alltokens.errors import UserError, unknown

if TYPE_CHECKING:
    from alltokens.study.plan import Study

PROGRAM = "alltokens study"
SETTINGS = tuple(item.name for item in fields(RunConfig))
WHATS = {"run": "train what is missing, one row in results.csv for each run", "show": "compare the arms"}


@dataclass(frozen=True)
class RunCommand(RunConfig):
    about: Annotated[RecipeCard, Hidden] = field(default_factory=RecipeCard)
    compare: Annotated[str | None, Hidden] = None
    files: Annotated[Positional[tuple[str, ...]], shown_as("FILE ...")] = ()
    """Studies, the most important first."""
    minutes: float | None = None
    """Begin no run that would not end in so many minutes, and stop those that have not; the next call goes on."""
    side_by_side: int = 1
    """So many runs at a time on one device."""
    arms: tuple[str, ...] = ()
    """Only these arms."""
    seeds: int | None = None
    """At most so many seeds of each arm, where the file plans more."""
    out: Annotated[str | None, shown_as("DIR")] = None
    """The folder of results.csv; the default is that of the first study's file."""
    runs: Annotated[str, shown_as("DIR")] = "runs/studies"
    """Where the folders of runs are."""
    store: Annotated[tuple[str, ...], shown_as("NAME=PATH ...")] = ()
    """Where the label stores are that the arms name."""
    masks: Annotated[str | None, shown_as("PATH")] = None
    """Masks of the validation pictures, for studies of token predictions: a folder or tar of trimaps, or scenes."""


@dataclass(frozen=True)
class ShowCommand:
    files: Annotated[Positional[tuple[str, ...]], shown_as("FILE ...")] = ()
    """Studies."""
    out: Annotated[str | None, shown_as("DIR")] = None
    """The folder of results.csv; the default is that of the first study's file."""
    csv: Annotated[str | None, shown_as("FILE")] = None
    """Write the comparison as CSV."""
    page: Annotated[str | None, shown_as("FILE")] = None
    """Write the comparison as a page of its own, with a plot."""


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {PROGRAM} {what} FILE ...   {meaning}" for what, meaning in WHATS.items())
        print(f"usage:\n{lines}\n\n{PROGRAM} run --help, {PROGRAM} show --help and docs/studies.md say more")
        return 0
    if words[0] not in WHATS:
        raise unknown("thing to do with a study", words[0], WHATS)
    return {"run": run, "show": show}[words[0]](words[1:])


def run(words: Sequence[str]) -> int:
    program = f"{PROGRAM} run"
    if asks_for_help(words):
        print(RUN_HELP)
        return 0
    words = _data_as_root(words)
    given = _options.given(RunCommand(), words, f"{program} FILE")
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    command = build(RunCommand, given, _options.WHERE)
    studies = _studies(command.files, program, settings)
    from alltokens.study.plan import parse_stores
    from alltokens.study.results import results_file
    from alltokens.study.run import Limits, run_studies

    file = results_file(studies[0].file, command.out)
    ending = run_studies(
        studies,
        file,
        Limits(command.minutes, command.side_by_side, command.arms, command.seeds),
        stores=parse_stores(command.store, studies),
        runs_dir=Path(command.runs),
        masks=command.masks,
        say=lambda text: print(text, flush=True),
    )
    told = [f"{ending.done} trained", f"{ending.there} there before"]
    told += [f"{ending.failed} failed"] * bool(ending.failed) + [f"{ending.left} left for the next call"] * bool(
        ending.left
    )
    where = [] if command.out is None else ["--out", command.out]
    print(f"{', '.join(told)}. Look: {shlex.join([*PROGRAM.split(), 'show', *command.files, *where])}")
    return 1 if ending.failed else 0


def show(words: Sequence[str]) -> int:
    program = f"{PROGRAM} show"
    if asks_for_help(words):
        show_help(ShowCommand(), program, "n, mean, spread, difference to the baseline with its 95 % interval, cost.")
        return 0
    command = _options.read(ShowCommand(), words, program)
    studies = _studies(command.files, program)
    from alltokens.study.results import read_results, results_file
    from alltokens.study.table import compare, print_table, write_csv

    rows = read_results(results_file(studies[0].file, command.out))
    compared = [compare(study, rows) for study in studies]
    for number, one in enumerate(compared):
        if number:
            print()
        print_table(one)
    if command.csv is not None:
        write_csv(compared, Path(command.csv))
    if command.page is not None:
        from alltokens.study.page import write_study_page

        write_study_page(compared, Path(command.page))
        print(f"\nwrote {command.page}")
    return 0


def _studies(files: Sequence[str], program: str, settings: dict[str, object] | None = None) -> list[Study]:
    from alltokens.study.plan import load_study

    if not files:
        raise UserError(f"which study? {program} FILE.yaml")
    return [load_study(file, settings) for file in files]


def _data_as_root(words: Sequence[str]) -> list[str]:
    """--data PATH, the short form that other verbs have, is --data.root PATH here; so is --data=PATH."""
    return [
        f"--data.root{word.removeprefix('--data')}" if word.partition("=")[0] == "--data" else word for word in words
    ]


RUN_HELP = """\
alltokens study run FILE ... [options]     train what has no row in results.csv yet

  --data DIR             the pictures, for all arms; the same as --data.root DIR
  --store NAME=PATH ...  where the label stores are that arms name
  --masks PATH           masks of the validation pictures, where a study measures token predictions
  --side-by-side N       so many runs at a time on one device (default 1)
  --minutes M            begin no run that would not end in M minutes, stop those that have not
  --arms NAME ...        only these arms
  --seeds N              at most N seeds of each arm, where the file plans more
  --out DIR              the folder of results.csv (default: that of the first file)
  --runs DIR             where the folders of runs are (default runs/studies)
  --GROUP.NAME VALUE     any setting, laid over all arms: --train.epochs 2. Other settings are other runs

Files come in the order given: a later one begins when all runs of the earlier ones are handed out or would not end
in time. Within a file arms grow evenly.
Rows that are there are not trained again, wherever they were made: results.csv may travel between machines.
A run that was stopped goes on where it was, if its folder is still there. A failed run is tried again."""
