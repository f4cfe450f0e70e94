"""What a store's maps say, summed up.

Shapes: B pictures at a time, k kept labels, h and w cells of a map, c = h * w, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.store import LabelStore


class Disagreement(NamedTuple):
    """A picture whose map, averaged, names another class than its label does."""

    key: str
    label: int
    guess: int
    probability: float  # of the guess, averaged over the map


class Summary(NamedTuple):
    """Averages over all maps. A cell's probabilities are its softmax; without tails only over the kept classes."""

    pictures: int
    agreement: float | None  # share of pictures whose averaged map names the label; None without labels
    unlabelled: int  # pictures without a label, left out of the agreement
    kept_mass: float | None  # share of a cell's probability that its kept classes have; None without tails
    top_probability: float  # of a cell's first class
    entropy: float  # of a cell, in nats; what is not kept counts as spread evenly
    classes_per_picture: float  # different classes that are first in some cell
    disagreements: tuple[Disagreement, ...]  # the surest first


def summarise(
    store: LabelStore,
    labels: Mapping[str, int] | None = None,
    *,
    batch_size: int = 128,
    most: int = 100,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Read all maps once. `labels` gives pictures' classes by key; `most` disagreements are kept."""
    if not len(store):
        raise UserError(f"{store.path} holds no pictures")
    classes, has_tail = store.manifest.num_classes, store.manifest.tail
    sums = torch.zeros(4, dtype=torch.float64)  # kept mass, top probability, entropy, classes
    agreeing = labelled = done = 0
    wrong: list[Disagreement] = []
    for keys in batches(store.keys(), batch_size):
        maps = store.read(keys)
        probabilities, mass = cell_probabilities(maps)
        entropy = cell_entropy(probabilities, mass, classes)
        first = maps.ids.gather(1, probabilities.argmax(1, keepdim=True)).flatten(1).sort(dim=1).values  # (B, c)
        different = 1 + (first[:, 1:] != first[:, :-1]).sum(1)
        means = (mass, probabilities.amax(1), entropy)
        sums += torch.stack([*(value.double().mean((1, 2)).sum() for value in means), different.double().sum()])
        if labels is not None:
            sure, guess = picture_probabilities(maps.ids, probabilities, classes).max(1)
            known = [(at, labels[key]) for at, key in enumerate(keys) if key in labels]
            labelled += len(known)
            agreeing += sum(int(guess[at]) == label for at, label in known)
            wrong += [
                Disagreement(keys[at], label, int(guess[at]), float(sure[at]))
                for at, label in known
                if int(guess[at]) != label
            ]
            wrong = sorted(wrong, key=lambda found: (-found.probability, found.key))[:most]
        done += len(keys)
        if progress:
            progress(done, len(store))
    if labels is not None and not labelled:
        raise UserError(
            f"none of the {len(store):,} pictures of {store.path} has a label in the data, such as "
            f"{next(store.keys())!r}: keys are paths below the folder of the pictures, with extension"
        )
    mass, top, entropy, different = (sums / len(store)).tolist()
    return Summary(
        pictures=len(store),
        agreement=agreeing / labelled if labels is not None else None,
        unlabelled=len(store) - labelled if labels is not None else 0,
        kept_mass=mass if has_tail else None,
        top_probability=top,
        entropy=entropy,
        classes_per_picture=different,
        disagreements=tuple(wrong),
    )


def cell_probabilities(maps: LabelMap) -> tuple[Tensor, Tensor]:
    """(B, k, h, w) of the kept classes and (B, h, w), their sum; without tails that is 1."""
    scores = maps.scores.float()
    total = torch.logsumexp(scores, dim=1)
    if maps.has_tail:
        assert maps.tail is not None
        total = torch.logaddexp(total, maps.tail.float())
    probabilities = torch.exp(scores - total[:, None])
    return probabilities, probabilities.sum(1)


def picture_probabilities(ids: Tensor, probabilities: Tensor, num_classes: int) -> Tensor:
    """(B, k, h, w) -> (B, K): the mean over the cells of what is kept."""
    cells = ids.shape[-2] * ids.shape[-1]
    nothing = torch.zeros(len(ids), num_classes)
    return nothing.scatter_add(1, ids.flatten(1).long(), probabilities.flatten(1)) / cells


def cell_entropy(probabilities: Tensor, mass: Tensor, num_classes: int) -> Tensor:
    """(B, h, w), in nats; what is not kept counts as spread evenly over the other classes."""
    kept = torch.special.entr(probabilities).sum(1)  # -p log p
    others = num_classes - probabilities.shape[1]
    missing = (1 - mass).clamp(min=0)
    return kept + (torch.special.entr(missing) + missing * math.log(others) if others else 0)


def batches(keys: Iterator[str], size: int) -> Iterator[list[str]]:
    """Lists of `size` keys, the last one perhaps shorter."""
    while some := list(islice(keys, size)):
        yield some
