"""The families of models that a share can be followed through.

A family is one file with a function `route(model) -> Route`, and one line here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import timm
import torch
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import MlpMixer
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from alltokens.errors import UnsupportedModel, UserError, unknown
from alltokens.follow import cait, convnext, eva, metaformer, mixer, pvt, swin, vit
from alltokens.follow.route import Route
from alltokens.models.pvt import PyramidVisionTransformer

FOLLOWERS = ("area", "transmix", "tl_align")


@dataclass(frozen=True)
class Family:
    """Models of one class (or a subclass) and how a share goes through them."""

    name: str
    model: type[nn.Module]
    route: Callable[[nn.Module], Route]
    modules: tuple[str, ...]  # the files of timm's registry that make such models
    exceptions: tuple[str, ...] = ()  # names of models from those files that `route` refuses


FAMILIES = (
    Family(
        "ViT, DeiT, LV-ViT",
        VisionTransformer,
        vit.route,
        ("vision_transformer", "deit", "vision_transformer_hybrid", "lvvit"),
        ("vit_dlittle*", "vit_dpwee*", "vit_dwee*"),
    ),
    Family("EVA", Eva, eva.route, ("eva",)),
    Family("CaiT", Cait, cait.route, ("cait",)),
    Family("Swin", SwinTransformer, swin.route, ("swin_transformer",)),
    Family("Swin V2", SwinTransformerV2, swin.route, ("swin_transformer_v2",)),
    Family("PVT v2", PyramidVisionTransformerV2, pvt.route_v2, ("pvt_v2",)),
    Family("PVT", PyramidVisionTransformer, pvt.route_v1, ("pvt",)),
    Family("MLP-Mixer, ResMLP", MlpMixer, mixer.route, ("mlp_mixer",), ("gmixer*", "gmlp*")),
    Family("ConvNeXt", ConvNeXt, convnext.route, ("convnext",)),
    Family("PoolFormer, MetaFormer", MetaFormer, metaformer.route, ("metaformer",)),
)


def find_route(model: nn.Module, follower: str) -> Route:
    """The way of the share through `model`, or through the one model that it wraps."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UserError("this model is compiled already: attach the follower to the bare model, then compile it")
    inner, family = _find(model)
    try:
        route = family.route(inner)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}. {_supported()}") from None
    if follower == "transmix" and route.class_attention is None:
        raise UnsupportedModel(
            f"TransMix reads the attention of a class token that is classified; this {type(inner).__name__} has none. "
            "TLAlign can follow it. Families with a class token: ViT, DeiT, LV-ViT, EVA, CaiT, PVT."
        )
    return route


def followed_model(model: nn.Module) -> nn.Module:
    """The model of a known family that `model` is, or wraps."""
    return _find(model)[0]


def follower_support(model: nn.Module | type[nn.Module] | str) -> tuple[str, ...]:
    """The followers that work with a model, a class of models, or a timm name.

    A model is looked at as it is; a class or a name is judged by its family alone, at no cost, so that "transmix" is
    then only promised where every model of the family has a class token.
    """
    if isinstance(model, nn.Module):
        return tuple(follower for follower in FOLLOWERS if follower == "area" or _works(model, follower))
    if isinstance(model, str):
        if not timm.is_model(model):
            raise unknown("model", model, timm.list_models())
        return _of_name(model)
    family = next((family for family in FAMILIES if issubclass(model, family.model)), None)
    return _of_family(family)


def supported_models() -> list[str]:
    """The names of all registered timm models that TLAlign can follow."""
    return [name for name in timm.list_models() if "tl_align" in _of_name(name)]


def _find(model: nn.Module) -> tuple[nn.Module, Family]:
    found = _followable(model)
    if len(found) == 1:
        return found[0]
    what = "holds several models that could be followed" if found else "cannot be followed"
    raise UnsupportedModel(f"{type(model).__name__} {what}. {_supported()}")


def _supported() -> str:
    return f"Supported families: {', '.join(family.name for family in FAMILIES)} (timm's classes)."


def _followable(model: nn.Module) -> list[tuple[nn.Module, Family]]:
    """The outermost models of a known family."""
    for family in FAMILIES:
        if isinstance(model, family.model):
            return [(model, family)]
    return [found for child in model.children() for found in _followable(child)]


def _works(model: nn.Module, follower: str) -> bool:
    try:
        find_route(model, follower)
    except UserError:
        return False
    return True


@cache
def _modules() -> dict[str, Family]:
    """The family of every model name."""
    found = {}
    for family in FAMILIES:
        for module in family.modules:
            for name in timm.list_models(module=module):
                if not any(fnmatch.fnmatch(name, pattern) for pattern in family.exceptions):
                    found[name] = family
    return found


def _of_name(name: str) -> tuple[str, ...]:
    return _of_family(_modules().get(name))


def _of_family(family: Family | None) -> tuple[str, ...]:
    if family is None:
        return ("area",)
    return FOLLOWERS if family.name == "CaiT" else ("area", "tl_align")
