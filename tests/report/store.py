"""A store of label maps over a few pictures, every number of which is known, and names that try to be markup."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image

from alltokens.core.label_maps import LabelMap
from alltokens.labels.manifest import Description
from alltokens.labels.store import LabelStore
from alltokens.labels.writer import LabelWriter

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;'\""
NAMES = ("cat", "dog", HOSTILE)

# key -> per cell of a 2 x 2 map: the probabilities of the two kept classes, {class: probability}; the rest is the tail
MAPS = {
    "cat/clear.png": [{0: 0.9, 1: 0.05}] * 4,
    "cat/really-a-dog.png": [{1: 0.8, 0: 0.1}] * 4,
    "dog/beside-a-cat.png": [{1: 0.7, 0: 0.2}, {1: 0.7, 0: 0.2}, {1: 0.6, 0: 0.2}, {0: 0.7, 1: 0.2}],
    "dog/unsure.png": [{1: 0.35, 2: 0.33}] * 4,
}
LABELS = {"cat": 0, "dog": 1}


def make_store(folder: Path, names: tuple[str, ...] = NAMES) -> tuple[LabelStore, Path]:
    """The store, and the folder of its pictures (with an empty class folder for the hostile name's stand-in)."""
    pictures = folder / "pictures"
    for index, key in enumerate(MAPS):
        (pictures / key).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40), (60 * index, 120, 90)).save(pictures / key)
    ids = torch.tensor([[list(cell) for cell in cells] for cells in MAPS.values()])  # (B, 4, k)
    kept = torch.tensor([[list(cell.values()) for cell in cells] for cells in MAPS.values()])
    tail = (1 - kept.sum(2)).log()
    maps = LabelMap(
        ids.transpose(1, 2).reshape(-1, 2, 2, 2).int(),
        (kept.log() + math.log(3)).transpose(1, 2).reshape(-1, 2, 2, 2),  # scores are defined up to a constant
        (tail + math.log(3)).reshape(-1, 2, 2),
    )
    writer = LabelWriter(folder / "store", Description((2, 2), 2, len(names), class_names=names, annotator="by hand"))
    writer.append(list(MAPS), maps)
    return writer.finish(), pictures


def probability(key: str, cell: int, class_id: int) -> float:
    return MAPS[key][cell].get(class_id, 0.0)
