"""How right a network is about each token, where the class of every pixel is known: scenes, pets with their masks.

Shapes: B batch, K classes, h and w token grid, S side of the network's input in pixels.

Tokens answer through the dense head, or, without one, through the network's own head applied at every place (see
labels/annotator.py). Three measures over the pictures, in percent:

- accuracy: of the tokens that show a class, those whose first class it is;
- pointing: of the pictures, those where the token that is surest of the picture's class shows it (the pointing game);
- iou: of the tokens at least halfway between the lowest and the highest probability of the picture's class, and the
  tokens that show it: intersection over union, mean over the pictures.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from alltokens.core import geometry
from alltokens.data.datasets import load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.data.scenes import BACKGROUND, load_scenes
from alltokens.data.sources import open_source
from alltokens.data.transforms import EvalTransform
from alltokens.engine.assembly import build_eval_transform
from alltokens.engine.config import AugmentConfig, DataConfig, RunConfig
from alltokens.engine.feeding import open_pictures
from alltokens.errors import UserError
from alltokens.labels.annotator import PlaceScores

NO_CLASS = -1  # background
UNKNOWN = -2  # the border of a trimap: counts neither way
TRIMAP = (1, 2, 3)  # the animal, whose class the folder names; background; border
BATCH = 256  # pictures at a time


class TokenTruth(NamedTuple):
    """Percent; None where there was nothing to measure."""

    accuracy: float | None
    pointing: float | None
    iou: float | None
    pictures: int = 0


def score_tokens(scores: Tensor, labels: Tensor, class_maps: Tensor) -> Tensor:
    """The sums behind TokenTruth, (5,) float64: right tokens, tokens, pictures hit, IoUs, pictures.

    scores (B, K, h, w), labels (B,) the pictures' classes, class_maps (B, S, S) with NO_CLASS and UNKNOWN. A token
    shows a class if at least half of its known pixels do; one that has no known pixel counts nowhere.
    """
    _, classes, *sides = scores.shape
    grid = (sides[0], sides[1])
    known = F.adaptive_avg_pool2d((class_maps != UNKNOWN).float()[:, None], grid)[:, 0]  # (B, h, w)
    planes = F.one_hot(torch.where(class_maps >= 0, class_maps, classes), classes + 1)[..., :classes]
    shares = F.adaptive_avg_pool2d(planes.permute(0, 3, 1, 2).float(), grid)  # (B, K, h, w)
    share, true = (shares / known.clamp(min=1e-6)[:, None]).max(1)
    shows = (share >= 0.5) & (known > 0)
    right = (scores.argmax(1) == true) & shows

    own = shows & (true == labels[:, None, None])  # (B, h, w): the picture's class is shown there
    heat = scores.float().softmax(1)[torch.arange(len(labels), device=labels.device), labels]
    heat = torch.where(known > 0, heat, -1.0).flatten(1)
    counted = own.flatten(1).any(1)
    hit = own.flatten(1).gather(1, heat.argmax(1, keepdim=True))[:, 0] & counted
    seen = torch.where(heat < 0, torch.inf, heat)
    middle = (seen.amin(1) + heat.amax(1)) / 2
    chosen = heat >= middle[:, None]
    both = (chosen & own.flatten(1)).sum(1)
    either = ((chosen | own.flatten(1)) & (heat >= 0)).sum(1)
    iou = torch.where(counted, both / either.clamp(min=1), 0.0)
    sums = (right.sum(), shows.sum(), hit.sum(), iou.double().sum(), counted.sum())
    return torch.stack([part.double() for part in sums])


def truth_of(sums: Tensor) -> TokenTruth:
    right, tokens, hits, iou, pictures = sums.tolist()
    accuracy = 100 * right / tokens if tokens else None
    if not pictures:
        return TokenTruth(accuracy, None, None)
    return TokenTruth(accuracy, 100 * hits / pictures, 100 * iou / pictures, int(pictures))


@torch.no_grad()
def measure_token_truth(net: nn.Module, config: RunConfig, masks: str) -> TokenTruth:
    """A run's network on its validation pictures. `masks` is "scenes", or a folder or tar of trimaps."""
    images, labels, class_maps = _truth(dataclasses.replace(config.data, labels=None), config.augment, masks)
    return measure(net, config.augment.mean, config.augment.std, images, labels, class_maps)


def measure(
    net: nn.Module,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    images: Tensor,
    labels: Tensor,
    class_maps: Tensor,
) -> TokenTruth:
    """images (N, 3, S, S) uint8, labels (N,), class_maps (N, S, S) int16; the network's mode is what it was."""
    device = next(net.parameters()).device
    levels = [255 * torch.tensor(color, device=device)[:, None, None] for color in (mean, std)]
    places, training = PlaceScores(net), net.training
    net.eval()
    sums = torch.zeros(5, dtype=torch.float64)
    try:
        for start in range(0, len(images), BATCH):
            part = slice(start, start + BATCH)
            image = (images[part].to(device).float() - levels[0]) / levels[1]
            maps = class_maps[part].to(device).long()
            sums += score_tokens(places(image), labels[part].to(device), maps).cpu()
    finally:
        net.train(training)
    return truth_of(sums)


def pictures_with_truth(
    source: PictureSource, transform: EvalTransform, class_map: Callable[[int], np.ndarray]
) -> tuple[Tensor, Tensor, Tensor]:
    """What `measure` takes; `class_map(i)` is the class of every pixel of picture i, before the transform."""
    shown: list[np.ndarray] = []
    truths: list[Tensor] = []
    for index in range(len(source)):
        picture = load_picture(source, index)
        shown.append(np.asarray(transform.shown(picture)))
        truths.append(sample_classes(class_map(index), transform(picture)[1], transform.size))
    images = torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(source.labels), torch.stack(truths)


def sample_classes(class_map: np.ndarray, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """(H, W) of the source picture -> (S, S) int16 of the network's input, by the nearest pixel."""
    x, y = geometry.coordinates(matrix, size)
    rows = (y * class_map.shape[0]).long().clamp(0, class_map.shape[0] - 1)
    columns = (x * class_map.shape[1]).long().clamp(0, class_map.shape[1] - 1)
    return torch.from_numpy(class_map.astype(np.int16))[rows, columns]


def open_masks(masks: str, source: PictureSource) -> Callable[[int], np.ndarray]:
    """The trimap of each picture of a source, found by its path without the extension."""
    found = open_source(masks, labelled=False)
    places = {_stem(key): index for index, key in enumerate(found.keys)}
    missing = [key for key in source.keys if _stem(key) not in places]
    if missing:
        raise UserError(f"{masks} has no mask for {missing[0]} and {len(missing) - 1} more of {source.location}")

    def class_map(index: int) -> np.ndarray:
        name = source.keys[index]
        content = found.read(places[_stem(name)])
        values = np.asarray(Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content)
        if values.ndim != 2 or not set(np.unique(values).tolist()) <= set(TRIMAP):
            raise UserError(f"{masks}: the mask of {name} is no trimap: its values must be 1 (shown), 2, 3 (border)")
        truth = np.full(values.shape, NO_CLASS, dtype=np.int16)
        truth[values == 1] = int(source.labels[index])
        truth[values == 3] = UNKNOWN
        return truth

    return class_map


@functools.lru_cache(maxsize=2)  # runs that follow each other look at the same pictures
def _truth(data: DataConfig, augment: AugmentConfig, masks: str) -> tuple[Tensor, Tensor, Tensor]:
    config = RunConfig(data=data, augment=augment)
    train = open_pictures(config.data, "train")
    source = open_pictures(config.data, "val", train.class_names)
    transform = build_eval_transform(config.augment, config.data)
    return pictures_with_truth(source, transform, class_maps_of(source, masks, config.data.image_size))


def class_maps_of(source: PictureSource, masks: str, size: int, split: str = "val") -> Callable[[int], np.ndarray]:
    """The class of every pixel by the picture's number; `size` and `split` are those of scenes."""
    if masks != "scenes":
        return open_masks(masks, source)
    if source.location != f"scenes:{split}":
        raise UserError(f"the masks of scenes do not fit the pictures of {source.location}")
    scenes = load_scenes(len(source), size, split=split)
    maps = scenes.class_maps.astype(np.int16)
    maps[scenes.class_maps == BACKGROUND] = NO_CLASS
    return lambda index: maps[index]


def _stem(key: str) -> str:
    return str(PurePosixPath(key).with_suffix(""))
