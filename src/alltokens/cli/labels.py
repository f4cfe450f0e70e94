"""alltokens labels: look into a label store, verify it, make one of a published tree or write such a tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from alltokens.cli._options import Positional, Switch, asks_for_help, read, show_help, shown_as
from alltokens.engine.picture_progress import PictureProgress
from alltokens.engine.progress import closing_table, table
from alltokens.errors import UserError, unknown
from alltokens.labels.layout import Form
from alltokens.labels.sink import FAILED_NAME, read_failures

if TYPE_CHECKING:
    from alltokens.data.picture_source import PictureSource
    from alltokens.labels.inspect import Summary
    from alltokens.labels.store import LabelStore

PROGRAM = "alltokens labels"

Store = Annotated[Positional[str | None], shown_as("STORE")]
Pictures = Annotated[str | None, shown_as("DIR")]
Command = TypeVar("Command")


@dataclass(frozen=True)
class InspectCommand:
    store: Store = None
    """The folder of the label store."""
    data: Pictures = None
    """The pictures, to compare the maps with their class folders."""
    split: str | None = None
    """Which part of them."""
    disagreements: int = 10
    """How many pictures to list whose map and folder disagree, the surest first."""
    page: Annotated[str | None, shown_as("FILE")] = None
    """Write an HTML page of pictures under their maps; it wants --data."""
    pictures: int = 300
    """How many pictures the page shows: the most remarkable ones, and some others."""
    json: Switch = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class VerifyCommand:
    store: Store = None
    """The folder of the label store; every byte of it is read."""


@dataclass(frozen=True)
class ImportCommand:
    store: Store = None
    """The folder of the label store to make; run the same command again after an interruption."""
    tree: Annotated[str | None, shown_as("DIR")] = None
    """The folder of published .pt files."""
    data: Pictures = None
    """The pictures whose labels they are; without them every key ends in --extension."""
    split: str | None = None
    """Which part of them."""
    extension: str = ".JPEG"
    """What pictures' names end in, if --data is not given."""
    num_classes: int = 1000
    """Classes that the ids count."""
    form: Form = "plain"
    """plain keeps the scores as they are; packed takes about half of the space and rounds them."""
    allow_missing: Switch = False
    """Leave out pictures that have no file."""


@dataclass(frozen=True)
class ExportCommand:
    store: Store = None
    """The folder of the label store."""
    tree: Annotated[str | None, shown_as("DIR")] = None
    """The folder for the .pt files, one for each picture."""


def inspect(words: Sequence[str]) -> int:
    command = _read(InspectCommand(), words, "inspect", "What a store holds, and how well its maps fit the folders.")
    if command is None:
        return 0
    from alltokens.labels.given import class_words, labels_in, open_folder
    from alltokens.labels.inspect import summarise

    store = _open(command.store, "inspect")
    if command.page is not None and command.data is None:
        raise UserError("--page shows pictures: say where they are with --data DIR")
    source = None if command.data is None else open_folder(command.data, command.split, class_map="own")
    try:
        labels = None if source is None else labels_in(store, source)
    except UserError as reason:
        labels = None
        print(f"the maps are not compared with the folders: {reason}", file=sys.stderr)
    with _bar("reading") as progress:
        summary = summarise(store, labels, most=command.disagreements, progress=progress)
    failed = read_failures(store.path)
    if command.json:
        print(json.dumps(summary_as_json(store, summary, failed), indent=2))
    else:
        _show(store, summary, failed, class_words(store, source))
    if command.page is not None and source is not None:
        _write_page(store, source, command.page, command.pictures)
    return 0


def _write_page(store: LabelStore, source: PictureSource, file: str, pictures: int) -> None:
    from alltokens.report.label_page import write_label_page

    with _bar("measuring") as progress:
        page = write_label_page(store, source, file, pictures=pictures, progress=progress)
    size = f"{page.bytes / 1e6:.1f} MB"
    print(f"\nwrote {page.file}: {page.pictures:,} of {page.measured:,} pictures, {size}", file=sys.stderr)


def verify(words: Sequence[str]) -> int:
    command = _read(VerifyCommand(), words, "verify", "Read every byte of a store and compare it with its checksums.")
    if command is None:
        return 0
    from alltokens.labels.store import LabelStore, verify_store

    path = _given(command.store, "verify")
    if problems := verify_store(path):
        raise UserError("\n  ".join([f"{len(problems)} file(s) of {path} are not as they were written:", *problems]))
    store = LabelStore.open(path)
    print(f"{path}: {len(store):,} label maps in {len(store.manifest.shards)} shard(s), every byte as it was written")
    return 0


def import_(words: Sequence[str]) -> int:
    command = _read(ImportCommand(), words, "import", "Make a store of the published .pt files, ReLabel's among them.")
    if command is None:
        return 0
    from alltokens.labels.formats import import_tree

    path = _given(command.store, "import")
    if command.tree is None:
        raise UserError(f"import which files? {PROGRAM} import STORE --tree DIR")
    source = _pictures(command.data, command.split)
    with _bar("importing") as progress:
        store = import_tree(
            command.tree,
            path,
            pictures=None if source is None else source.keys,
            extension=command.extension,
            num_classes=command.num_classes,
            class_names=source.class_names
            if source is not None and len(source.class_names) == command.num_classes
            else (),
            form=command.form,
            allow_missing=command.allow_missing,
            progress=progress,
        )
    print(f"wrote {store}; see it with: {PROGRAM} inspect {path}")
    return 0


def export(words: Sequence[str]) -> int:
    command = _read(ExportCommand(), words, "export", "Write the .pt files that the published programs read.")
    if command is None:
        return 0
    from alltokens.labels.formats import export_tree

    store = _open(command.store, "export")
    if command.tree is None:
        raise UserError(f"export where to? {PROGRAM} export STORE --tree DIR")
    with _bar("exporting") as progress:
        count = export_tree(store, command.tree, progress=progress)
    dropped = "; the tails have no place in them" if store.manifest.tail else ""
    print(f"wrote {count:,} .pt file(s) to {command.tree}{dropped}")
    return 0


WHATS = {
    "inspect": (inspect, "what a store holds, and how well its maps fit the class folders"),
    "verify": (verify, "whether every byte is as it was written"),
    "import": (import_, "make a store of published .pt files"),
    "export": (export, "write published .pt files"),
}


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        whats = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in WHATS.items())
        print(f"usage: {PROGRAM} {'|'.join(WHATS)} STORE ...\n\n{whats}\n\n{PROGRAM} inspect --help says more")
        return 0
    if words[0] not in WHATS:
        raise unknown("thing to do with labels", words[0], WHATS)
    run, _ = WHATS[words[0]]
    return run(words[1:])


def _read(defaults: Command, words: Sequence[str], what: str, description: str) -> Command | None:
    """The command with its options, or None after its help."""
    if asks_for_help(words):
        show_help(defaults, f"{PROGRAM} {what}", description)
        return None
    return read(defaults, words, f"{PROGRAM} {what}")


def _given(store: str | None, what: str) -> str:
    if store is None:
        raise UserError(f"{what} which store? {PROGRAM} {what} STORE")
    return store


def _open(store: str | None, what: str) -> LabelStore:
    from alltokens.labels.store import LabelStore

    return LabelStore.open(_given(store, what))


def _pictures(data: str | None, split: str | None) -> PictureSource | None:
    if data is None:
        return None
    from alltokens.data.sources import open_source

    return open_source(data, split, allow_empty_classes=True)


def _bar(what: str) -> PictureProgress:
    """Progress on a terminal, nothing elsewhere."""
    return PictureProgress(what, lines=False)


def summary_as_json(store: LabelStore, summary: Summary, failed: Mapping[str, str]) -> dict[str, object]:
    what = store.manifest
    about: dict[str, object] = {
        "store": str(store.path),
        "annotator": what.annotator,
        "annotator_hash": what.annotator_hash,
        "grid": what.grid,
        "kept": what.kept,
        "num_classes": what.num_classes,
        "form": what.form,
        "bytes_per_picture": _size(store) / max(1, summary.pictures),
        "score_error": what.score_error,
        "transform": dict(what.transform),
    }
    disagreements = [found._asdict() for found in summary.disagreements]
    return about | summary._asdict() | {"disagreements": disagreements, "failed": dict(failed)}


def summary_rows(store: LabelStore, summary: Summary) -> list[tuple[str, str]]:
    what = store.manifest
    rows = [
        ("pictures", f"{summary.pictures:,}, {_size(store) / max(1, summary.pictures) / 1000:.2f} kB each"),
        ("annotator", " ".join(part for part in (what.annotator, what.annotator_hash[:12]) if part) or "not stated"),
        ("maps", f"{what.grid[0]}x{what.grid[1]}, top {what.kept} of {what.num_classes:,} classes, {what.form}"),
        ("scores", f"within {what.score_error:.2g} of the annotator's" if what.score_error else "as they were given"),
        ("kept mass", "not known: no tails" if summary.kept_mass is None else f"{summary.kept_mass:.1%} of a cell"),
        ("first class", f"{summary.top_probability:.1%} of a cell, entropy {summary.entropy:.2f} nats"),
        ("classes", f"{summary.classes_per_picture:.1f} different first ones in a picture"),
    ]
    if summary.agreement is not None:
        left_out = f"; {summary.unlabelled:,} without a label" if summary.unlabelled else ""
        rows.append(("agreement", f"{summary.agreement:.2%} of the averaged maps name the folder's class{left_out}"))
    return rows


def _counted(pictures: int) -> str:
    return "1 picture has" if pictures == 1 else f"{pictures:,} pictures have"


def _size(store: LabelStore) -> int:
    return sum(file.bytes for file in (*store.manifest.shards, store.manifest.index))


def _show(store: LabelStore, summary: Summary, failed: Mapping[str, str], names: Sequence[str]) -> None:
    rows = summary_rows(store, summary)
    if failed:
        rows.append(("failed", f"{_counted(len(failed))} no map: {store.path / FAILED_NAME} says why"))
    closing_table(rows)
    if summary.disagreements:
        print()
        table(
            ("picture", "folder", "map", "sure"),
            [
                (
                    found.key,
                    names[found.label],
                    names[found.guess],
                    f"{found.probability:.1%}",
                )
                for found in summary.disagreements
            ],
            numbers=(3,),
        )
