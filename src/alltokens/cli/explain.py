"""alltokens explain: where a model looks, and what becomes of a mix inside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from alltokens.cli._options import Positional, asks_for_help, read, show_help, shown_as
from alltokens.errors import UserError

PROGRAM = "alltokens explain"

Part = Literal["maps", "mixing", "presence", "error", "mixers"]
Method = Literal["attribution", "rollout", "class_attention", "token_heat"]


@dataclass(frozen=True)
class Command:
    target: Annotated[Positional[str | None], shown_as("RUN|MODEL")] = None
    """The folder of a run, a timm model, local-dir:FOLDER, NAME@WEIGHTS with weights of yours, or NAME@random."""
    given: Annotated[Positional[tuple[str, ...]], shown_as("PICTURE...")] = ()
    """Picture files, folders of pictures, or 'scenes'."""
    out: Annotated[str, shown_as("FILE")] = "explained.html"
    """A page (.html) or figures in one picture (.png)."""
    beside: Annotated[tuple[str, ...], shown_as("RUN|MODEL...")] = ()
    """More models, shown beside the first."""
    parts: tuple[Part, ...] = ()
    """What to show, all by default: where it looks, mixes, presence of tokens, error of areas, the mixers."""
    methods: tuple[Method, ...] = ()
    """Which maps; all that are defined for the model by default."""
    classes: Annotated[tuple[str, ...], shown_as("CLASS...")] = ()
    """Whose maps, by name or number; by default those of the surest classes of each picture."""
    top: int = 2
    """How many of those."""
    most: int = 6
    """Pictures shown, of more."""
    measured: int = 200
    """Pictures that go into the error of areas, of more."""
    precision: Literal["fp64", "fp32"] = "fp64"
    """In which maps are computed: the rules of attribution are ill-conditioned."""
    mixer: Literal["cutmix", "mixup", "mixup+cutmix", "random", "block", "mixtoken"] = "cutmix"
    """How the pictures whose labels are followed are mixed."""
    alpha: float = 4.0
    """Of the mixes that are shown: the higher, the nearer to a half; training draws by 1."""
    draws: int = 3
    """How often all pictures are mixed for the error of areas."""
    table: Annotated[str | None, shown_as("FILE")] = None
    """Write the errors of areas as CSV, too."""
    weights: Literal["best", "last"] = "best"
    """Which weights of a run."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """How a model that is no run is built, such as {num_classes: 10}."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    batch_size: int = 8
    """Pictures at a time."""
    seed: int = 0
    """Of the mixes."""


def main(words: Sequence[str]) -> int:
    if asks_for_help(words):
        show_help(Command(), PROGRAM, "Where a model looks, and what becomes of a mix inside it.")
        return 0
    command = read(Command(), words, PROGRAM)
    if command.target is None or not command.given:
        raise UserError(f"explain what? {PROGRAM} RUN|MODEL PICTURE... --out {command.out}")
    from alltokens.explain import explain, open_subject
    from alltokens.report.explain_page import KINDS, write_explanation

    if not command.out.lower().endswith(tuple(KINDS)):
        raise UserError(f"what kind of file is {command.out}? Its name should end in {', '.join(KINDS)}")
    device = _device(command.device)
    names = [command.target, *command.beside]
    subjects = [open_subject(name, weights=command.weights, options=command.model_options) for name in names]
    found = explain(
        [one._replace(net=one.net.to(device)) for one in subjects],
        command.given,
        parts=command.parts,
        methods=command.methods,
        classes=command.classes,
        top=command.top,
        most=command.most,
        measured=command.measured,
        precision=command.precision,
        mixer=command.mixer,
        alpha=command.alpha,
        draws=command.draws,
        seed=command.seed,
        batch_size=command.batch_size,
        progress=lambda what: print(what, file=sys.stderr),
    )
    page = write_explanation(found, command.out, table=command.table)
    counted = f"{page.pictures} picture{'s' if page.pictures > 1 else ''}"
    print(f"wrote {page.file}: {counted}, {page.bytes / 1e6:.1f} MB")
    if command.table is not None:
        print(f"wrote {command.table}")
    return 0


def _device(wanted: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda is asked for, but torch finds none; use --device cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
