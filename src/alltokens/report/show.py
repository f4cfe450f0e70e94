"""`alltokens.show`: the right drawing for what it is given.

Shapes: B batch, H and W picture, h and w token grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.core.plan import MixPlan
from alltokens.core.token_targets import TokenTargets
from alltokens.data.datasets import PictureDataset, Sample
from alltokens.errors import UserError
from alltokens.follow.tl_align import TLAlign
from alltokens.models.token_output import TokenOutput
from alltokens.supervision.step import Parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAN_SHOW = (
    "a MixPlan (alone, or with the images that it mixes), the Parts of a step with their batch, a Sample or a batch of "
    "them, a PictureDataset, a LabelMap, TokenTargets, a TokenOutput, a TLAlign that kept its layer_shares, pictures "
    "(PIL, or tensors (3, H, W) and (B, 3, H, W)), a map (h, w)"
)
MOST = 12  # pictures of a batch or a data set


def show(value: Any, images: Any = None, names: Sequence[str] | None = None, **options: Any) -> Figure:
    """A matplotlib Figure of `value`. Notebooks show it as it is; elsewhere `.savefig(path)` keeps it.

    images: the pictures (or the Sample batch) that a plan, targets or a map belong to. names: of the classes.
    options: go to the drawing function (alltokens.report.figures), `mean` and `std` of normalised pictures for one.
    """
    from alltokens.report import figures  # matplotlib takes a second to import: not before it is needed
    from alltokens.report.style import class_name

    if isinstance(images, Sample):
        images = images.image
    match value:
        case MixPlan():
            if images is None:
                return figures.plan(value, **options)
            return figures.mixers(images, {"mixed": value}, **options)
        case Parts():
            return _parts(value, images, options)
        case Sample():
            return _sample(value, names, options)
        case PictureDataset():
            samples = [value[index] for index in range(min(MOST, len(value)))]
            titles = [class_name(sample.label, names or value.class_names) for sample in samples]
            return figures.pictures([sample.image for sample in samples], titles, **options)
        case LabelMap():
            return figures.label_map(value, _batched(images), names, **options)
        case TokenTargets():
            return figures.token_targets(value, _batched(images), names, **options)
        case TokenOutput():
            return _output(value, images, names, options)
        case TLAlign():
            shares = torch.stack([layer.share for layer in value.layer_shares])  # (L, B)
            lines = {f"sample {index}": shares[:, index] for index in range(min(5, shares.shape[1]))}
            return figures.fluctuation(lines, **options)
        case Image.Image():
            return figures.pictures([value], **options)
        case Tensor() if value.ndim == 2:
            return figures.heat_map(value, **options)
        case Tensor() if value.ndim in (3, 4) and value.shape[-3] == 3:
            return figures.pictures(_batched(value)[:MOST], **options)
        case [Image.Image(), *_]:
            return figures.pictures(value[:MOST], **options)
        case _:
            what = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"show cannot draw a {what}. It can draw {CAN_SHOW}.")


def _parts(parts: Parts, images: Any, options: dict[str, Any]) -> Figure:
    from alltokens.report import figures

    if images is None:
        raise UserError("to show the parts of a step give their batch too: show(parts, batch)")
    if parts.token_shares is None:
        return figures.mixers(images, {"mixed": parts.plan}, **options)
    return figures.mix(images, parts.plan, parts.token_shares, parts.share, **options)


def _sample(sample: Sample, names: Sequence[str] | None, options: dict[str, Any]) -> Figure:
    from alltokens.report import figures
    from alltokens.report.style import class_name

    images = _batched(sample.image)[:MOST]
    if isinstance(sample.maps, LabelMap):
        return figures.label_map(sample.maps, images, names, **options)
    labels = torch.as_tensor(sample.label).reshape(-1).tolist()
    return figures.pictures(images, [class_name(label, names) for label in labels], **options)


def _output(output: TokenOutput, images: Any, names: Sequence[str] | None, options: dict[str, Any]) -> Figure:
    """The class that every token is taken for."""
    from alltokens.report import figures
    from alltokens.report.style import grid_of

    size = (1, 1) if images is None else (images.shape[-2], images.shape[-1])
    sure, ids = output.token_logits.softmax(-1).max(-1)  # (B, N)
    shape = (-1, *grid_of(ids.shape[1], size))
    return figures.token_labels(ids.reshape(shape), sure.reshape(shape), _batched(images), names, **options)


def _batched(images: Any) -> Any:
    """Pictures as something with a length: none, one or several."""
    if images is None:
        return ()
    if isinstance(images, Image.Image):
        return [images]
    return images.unsqueeze(0) if isinstance(images, Tensor) and images.ndim == 3 else images
