"""All that is found out about pictures by looking into a model, as values; pages and figures show them.

Shapes: B pictures, H and W picture, h and w token grid, M maps of a picture, L layers, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from alltokens.core.mixing import draw_cutmix
from alltokens.core.plan import MixPlan
from alltokens.errors import UserError, unknown
from alltokens.explain.fluctuation import (
    AlignmentError,
    Followed,
    alignment_error,
    followed_shares,
    mixing_ratios,
    token_presence,
)
from alltokens.explain.maps import BY_CLASS, METHODS, Explainer
from alltokens.explain.subject import Subject
from alltokens.follow.families import find_route, followed_model
from alltokens.supervision.mixer import MIXERS, Mixer

BATCH = 8  # pictures at a time
PATCH = 16  # pixels: of mixers that want whole patches, where the model says nothing


class Look(NamedTuple):
    """Where a model looks in one picture."""

    classes: list[int]  # of which there are maps: those asked for, or the surest
    probabilities: list[float]  # of these classes
    guess: int
    guess_probability: float
    heats: dict[str, Tensor]  # by method (M, h, w): a map for each class, or one where classes look alike


class Mixed(NamedTuple):
    """Mixed pictures, and where their labels go."""

    images: Tensor  # (B, 3, H, W) before mixing
    plan: MixPlan
    followed: Followed
    ratios: dict[str, Tensor]  # by method (L + 1, B)


def looks(
    subject: Subject,
    images: Tensor,
    *,
    methods: Sequence[str] = (),
    classes: Sequence[str] = (),
    top: int = 2,
    dtype: torch.dtype | None = torch.float64,
    batch: int = BATCH,
) -> tuple[list[Look], dict[str, str]]:
    """What the model looks at in every picture, by each method that it allows, and why others are not among them.

    classes: whose maps are wanted, by name or number; the `top` surest ones of each picture otherwise.
    """
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if top < 1:
        raise UserError(f"top must be at least 1, got {top}")
    explainer = Explainer(subject.net, dtype)
    wanted = [method for method in METHODS if not methods or method in methods]
    defined = [method for method in wanted if method in explainer.methods]
    chosen = [class_number(subject, one) for one in classes]
    found: list[Look] = []
    for at in range(0, len(images), batch):
        some = images[at : at + batch]
        found += _looks(explainer, some, defined, chosen, top)
    return found, {method: explainer.reasons[method] for method in wanted if method in explainer.reasons}


def _looks(explainer: Explainer, images: Tensor, methods: list[str], chosen: list[int], top: int) -> list[Look]:
    probabilities = explainer.probabilities(images).float().cpu()  # (B, K)
    surest = probabilities.topk(min(top, probabilities.shape[1])).indices  # (B, M)
    if chosen:
        surest = torch.tensor(chosen).expand(len(images), -1)
    heats: dict[str, Tensor] = {}
    for method in methods:
        each = surest.T if method in BY_CLASS else [None]
        maps = [explainer.heat(images, one, method).float().cpu() for one in each]
        heats[method] = torch.stack(maps, 1)  # (B, M, h, w)
    sure, guesses = probabilities.max(1)
    return [
        Look(
            classes.tolist(),
            probabilities[at, classes].tolist(),
            int(guesses[at]),
            float(sure[at]),
            {method: heat[at] for method, heat in heats.items()},
        )
        for at, classes in enumerate(surest)
    ]


def class_number(subject: Subject, wanted: str) -> int:
    """A class by its name or its number."""
    names = subject.class_names
    if wanted in names:
        return names.index(wanted)
    count = len(names) or int(getattr(subject.net, "num_classes", 0))
    if wanted.isdecimal() and int(wanted) < count:
        return int(wanted)
    if names:
        raise unknown("class", wanted, names, hint=f"Or a number from 0 to {count - 1}.")
    raise UserError(f"unknown class {wanted!r}: {subject.name} only knows numbers, from 0 to {count - 1}")


def draw_plan(subject: Subject, count: int, mixer: str = "cutmix", *, alpha: float = 1.0, seed: int = 0) -> MixPlan:
    """A plan that mixes each of `count` pictures with the next one, the last with the first."""
    if mixer not in MIXERS or mixer == "none":
        raise unknown("mixer", mixer, [name for name in MIXERS if name != "none"])
    if count < 2:
        raise UserError(f"mixing wants at least two pictures, got {count}")
    patch = None if mixer == "cutmix" else patch_size(subject)
    one = Mixer(mixer, alpha=alpha, mixup_alpha=alpha, patch_size=patch, per_sample=True)
    plan = one.draw(count, subject.image_size, torch.Generator().manual_seed(seed))
    return replace(plan, partner=torch.arange(1, count + 1) % count)


def resized(plan: MixPlan, size: tuple[int, int]) -> MixPlan:
    """The same mix of pictures of another size."""
    if plan.image_size == size:
        return plan
    return replace(plan, mask=F.interpolate(plan.mask.unsqueeze(1), size=size, mode="area").squeeze(1))


def patch_size(subject: Subject) -> int:
    """The side of a token of the input, in pixels."""
    try:
        rows, _ = find_route(followed_model(subject.net), "tl_align").grid(subject.image_size)
    except UserError:
        return PATCH
    return subject.image_size[0] // rows


def follow_mix(subject: Subject, images: Tensor, plan: MixPlan) -> Mixed:
    """Where the labels of this mix go; UnsupportedModel where they cannot be followed."""
    plan = resized(plan, subject.image_size)
    return Mixed(images, plan, followed_shares(subject.net, images, plan), mixing_ratios(subject.net, images, plan))


def presences(subject: Subject, images: Tensor) -> list[Tensor]:
    """(B, h, w) of every layer."""
    return token_presence(subject.net, images)


def measured_error(
    subject: Subject, pictures: Iterable[Image.Image], *, draws: int = 3, seed: int = 0, batch: int = BATCH
) -> AlignmentError:
    """How far aligned labels lie from those by area, over CutMix as it is drawn in training (figure 3 of TL-Align)."""
    source, batches = iter(pictures), []
    while some := list(islice(source, batch)):
        batches.append(subject.images(some))
    if len(batches) > 1 and len(batches[-1]) == 1:  # nobody to be mixed with
        batches[-2:] = [torch.cat(batches[-2:])]

    def draw(count: int, generator: torch.Generator) -> MixPlan:
        plan = draw_cutmix(count, subject.image_size, per_sample=True, generator=generator)
        return replace(plan, partner=torch.arange(1, count + 1) % count)

    return alignment_error(subject.net, batches, draw, draws=draws, seed=seed)
