"""Everything about some pictures in the eyes of one model or several: what `alltokens explain` shows.

Shapes: B pictures, L layers, h and w token grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from alltokens.core.plan import MixPlan
from alltokens.errors import UnsupportedModel, UserError, unknown
from alltokens.explain.findings import (
    BATCH,
    Look,
    Mixed,
    draw_plan,
    follow_mix,
    looks,
    measured_error,
    presences,
)
from alltokens.explain.fluctuation import AlignmentError
from alltokens.explain.pictures import Named, NamedPictures
from alltokens.explain.subject import Subject

PARTS = {
    "maps": "where the model looks",
    "mixing": "what becomes of a mix, layer by layer",
    "presence": "how present tokens stay",
    "error": "how far aligned labels lie from areas",
    "mixers": "what each mixer makes of pictures",
}
GALLERY = ("mixup", "cutmix", "mixtoken", "random", "block")
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}


class ModelView(NamedTuple):
    """What one model makes of the pictures; what was not asked for is empty."""

    subject: Subject
    images: Tensor  # (B, 3, H, W): the pictures as its input
    looks: list[Look]
    undefined: dict[str, str]  # method -> why it is not defined for this model
    mixed: Mixed | None
    presence: list[Tensor]  # L of (B, h, w)
    error: AlignmentError | None
    not_followed: str  # why labels cannot be followed through this model, "" if they can


class Explanation(NamedTuple):
    pictures: list[Named]
    parts: tuple[str, ...]
    models: list[ModelView]
    mixer: str
    gallery: dict[str, MixPlan]  # by mixer, of pictures as the first model gets them


def explain(
    subjects: Sequence[Subject],
    pictures: NamedPictures | Sequence[str | Path],
    *,
    parts: Sequence[str] = (),
    methods: Sequence[str] = (),
    classes: Sequence[str] = (),
    top: int = 2,
    most: int = 6,
    measured: int = 200,
    precision: str = "fp64",
    mixer: str = "cutmix",
    alpha: float = 4.0,
    draws: int = 3,
    seed: int = 0,
    batch_size: int = BATCH,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Look at pictures through models.

    At most `most` pictures are shown and at most `measured` go into the error; `parts` (of PARTS) and `methods` (of
    METHODS) are all by default. `alpha` is that of the mixes that are shown: 4 makes most of them easy to see, training
    draws by 1, and so does the error.
    """
    for part in parts:
        if part not in PARTS:
            raise unknown("part", part, PARTS)
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    for name, value in (("most", most), ("measured", measured), ("draws", draws), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if not subjects:
        raise UserError("explain which model?")
    if not isinstance(pictures, NamedPictures):
        pictures = NamedPictures(pictures, subjects[0].class_names)
    chosen = tuple(part for part in PARTS if not parts or part in parts)
    if len(pictures) < 2:
        if wanting := [part for part in ("mixing", "error", "mixers") if part in parts]:
            raise UserError(f"{', '.join(wanting)}: mixing wants at least two pictures, got {len(pictures)}")
        chosen = tuple(part for part in chosen if part in ("maps", "presence"))
    shown = pictures.some(most)
    say = progress or (lambda what: None)
    plan = draw_plan(subjects[0], len(shown), mixer, alpha=alpha, seed=seed) if "mixing" in chosen else None
    models: list[ModelView] = []
    for subject in subjects:
        images = subject.images([one.picture for one in shown])
        found, undefined = [], {}
        if "maps" in chosen:
            say(f"{subject.name}: where it looks")
            options = {"methods": methods, "classes": classes, "top": top, "batch": batch_size}
            found, undefined = looks(subject, images, dtype=PRECISIONS[precision], **options)
        mixed, presence, error, why = None, [], None, ""
        try:
            if plan is not None:
                say(f"{subject.name}: what becomes of mixes")
                mixed = follow_mix(subject, images, plan)
            if "presence" in chosen:
                presence = presences(subject, images)
            if "error" in chosen:
                count = min(measured, len(pictures))
                say(f"{subject.name}: {draws} mixes of {count} pictures")
                some = (one.picture for one in pictures.some(count))
                error = measured_error(subject, some, draws=draws, seed=seed, batch=batch_size)
        except UnsupportedModel as reason:
            why = str(reason)
        models.append(ModelView(subject, images, found, undefined, mixed, presence, error, why))
    if methods and not any(set(methods) - set(one.undefined) for one in models) and "maps" in chosen:
        first = models[0]
        raise UnsupportedModel("; ".join(f"{name} is not defined: {why}" for name, why in first.undefined.items()))
    gallery = {}
    if "mixers" in chosen:
        gallery = {name: draw_plan(subjects[0], len(shown), name, alpha=alpha, seed=seed) for name in GALLERY}
    return Explanation(shown, chosen, models, mixer, gallery)
