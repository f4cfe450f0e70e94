"""What the label map of each single picture says, and which pictures are worth a look.

Shapes: S pictures of a store, B pictures at a time, k kept labels, h and w cells of a map, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alltokens.errors import UserError
from alltokens.labels.inspect import batches, cell_entropy, cell_probabilities, picture_probabilities
from alltokens.labels.store import LabelStore


class Measures(NamedTuple):
    """Of S pictures, each in the store's order. Probabilities are averaged over a map's cells."""

    keys: list[str]
    label: np.ndarray  # (S,) the class of the picture's folder; -1 if not known
    label_probability: np.ndarray  # (S,); NaN where there is no label
    guess: np.ndarray  # (S,) the map's class, of the highest probability
    guess_probability: np.ndarray  # (S,)
    doubt: np.ndarray  # (S,) how much likelier the best class other than the label is than the label; NaN without one
    entropy: np.ndarray  # (S,) nats, mean over the cells
    runner_up: np.ndarray  # (S,) the class that is first in the second most cells; -1 if one class is first in all
    runner_up_size: np.ndarray  # (S,) the share of cells where it is first


# What pictures can be ordered by, the most remarkable first.
ORDERS = ("doubt", "runner_up_size", "entropy")


def measure(
    store: LabelStore,
    labels: Mapping[str, int] | None = None,
    *,
    keys: Sequence[str] | None = None,
    batch_size: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Measures:
    """Read the maps of `keys`, or all of them, once. `labels` gives pictures' classes by key, -1 for none."""
    chosen = list(store.keys()) if keys is None else list(keys)
    if not chosen:
        raise UserError(f"{store.path} holds no pictures to look at")
    columns: list[list[Tensor]] = []
    for some in batches(iter(chosen), batch_size):
        maps = store.read(some)
        own = torch.tensor([-1 if labels is None else labels.get(key, -1) for key in some])
        probabilities, mass = cell_probabilities(maps)
        first = maps.ids.long().gather(1, probabilities.argmax(1, keepdim=True)).flatten(1)  # (B, h*w)
        entropy = cell_entropy(probabilities, mass, store.manifest.num_classes).mean((1, 2))
        of_picture = picture_probabilities(maps.ids, probabilities, store.manifest.num_classes)  # (B, K)
        columns.append([own, *_against_label(of_picture, own), entropy, *_second(first, store.manifest.num_classes)])
        if progress:
            progress(sum(len(column[0]) for column in columns), len(chosen))
    return Measures(chosen, *(torch.cat(column).numpy() for column in zip(*columns, strict=True)))


def remarkable(found: Measures, most: int) -> np.ndarray:
    """Places of at most `most` pictures, ascending: the heads of all orders in turn, and a quarter of all others."""
    count = len(found.keys)
    if count <= most:
        return np.arange(count)
    orders = [_falling(getattr(found, name)) for name in ORDERS if not np.isnan(getattr(found, name)).all()]
    in_turn = np.stack(orders, axis=1).flatten()
    _, first = np.unique(in_turn, return_index=True)
    heads = in_turn[np.sort(first)][: most - most // 4]  # a page of oddities alone would say nothing about the rest
    others = np.setdiff1d(np.arange(count), heads)
    spread = others[np.linspace(0, len(others) - 1, most // 4).round().astype(np.int64)]
    return np.sort(np.concatenate([heads, spread]))


def _against_label(of_picture: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, K) and labels (B,) -> the label's probability, the guess, its probability, and how far others lead."""
    sure, guess = of_picture.max(1)
    known, place = own >= 0, own.clamp(min=0)[:, None]
    of_label = of_picture.gather(1, place).squeeze(1)
    others = of_picture.scatter(1, place, -1.0).amax(1)
    nothing = torch.full_like(sure, float("nan"))
    return torch.where(known, of_label, nothing), guess, sure, torch.where(known, others - of_label, nothing)


def _second(first: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """(B, h*w) first classes of cells -> the second most frequent one, -1 if there is none, and its share of cells."""
    counts = torch.zeros(len(first), num_classes).scatter_add(1, first, torch.ones(first.shape))
    if num_classes == 1:
        return torch.full((len(first),), -1), torch.zeros(len(first))
    counts, classes = counts.topk(2, dim=1)
    there = counts[:, 1] > 0
    return torch.where(there, classes[:, 1], -1), counts[:, 1] / first.shape[1]


def _falling(values: np.ndarray) -> np.ndarray:
    """Places of the values from the highest to the lowest, NaN last; ties keep their order."""
    return np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
