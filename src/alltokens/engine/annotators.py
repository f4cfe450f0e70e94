"""An annotator by its name, runs among them: the network, how it wants its pictures, what its classes are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from alltokens.engine.assembly import build_net
from alltokens.engine.run_folder import RunFolder, load_config
from alltokens.errors import UserError
from alltokens.labels.annotator import Preprocessing, create_annotator
from alltokens.models.weights import load_weights, read_class_names


class OpenedAnnotator(NamedTuple):
    model: nn.Module
    preprocessing: Preprocessing
    class_names: tuple[str, ...]  # empty: what the model says of itself


def open_annotator(
    name: str,
    *,
    weights: str | None = None,
    options: Mapping[str, Any] | None = None,
    image_size: int | None = None,
) -> OpenedAnnotator:
    """A run folder (its best weights), or whatever `create_annotator` knows. See there for the options."""
    if not (Path(name) / "config.yaml").is_file():
        model = create_annotator(name, weights=weights, options=options, image_size=image_size)
        return OpenedAnnotator(model, Preprocessing.of(model), ())
    if options:
        raise UserError(f"{name} is a run folder, which knows how its model is built; it takes no model options")
    config = load_config(Path(name))
    folder = RunFolder(Path(name)).weights / "best"
    class_names = read_class_names(folder)
    size = image_size or config.data.image_size
    as_wanted = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, pretrained=False),
        data=dataclasses.replace(config.data, image_size=size),
    )
    net = build_net(as_wanted, len(class_names))
    load_weights(net, weights or folder)
    augment = config.augment
    return OpenedAnnotator(net.eval(), Preprocessing(size, augment.mean, augment.std, "bicubic"), class_names)
