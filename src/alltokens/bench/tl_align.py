"""`alltokens bench tl_align`: what it costs that the label follows the tokens.

Shapes: B batch, H and W picture.

Three arms in one run, the same model, batch and mixes: CutMix with the pasted area, CutMix with TL-Align, and TL-Align
the published way. A step is forward, backward and AdamW. On a GPU compiled arms live in a process each (apart.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import timm
import torch
from torch import nn

from alltokens.bench.over_models import Case, StepBench, bench_models, training_step
from alltokens.bench.published import PublishedStep, has_published_way
from alltokens.bench.results import Row
from alltokens.bench.timing import Build, Step
from alltokens.follow.families import find_route
from alltokens.models.cost import weightless
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.step import Supervision

PLAIN, ALIGNED, PUBLISHED = "CutMix", "TL-Align", "TL-Align as published"
SMOOTHING = 0.1
PEAK_AT_MOST = 1.02


# DeiT and its picture sizes are the paper's; limits and batches are those of our design notes.
CASES = {
    "cuda": {
        "deit_small_patch16_224": Case(512, 1.03),
        "deit_base_patch16_384": Case(96, 1.04),
        "swin_tiny_patch4_window7_224": Case(256, 1.06),
        "lvvit_s": Case(256),
    },
    "cpu": {"deit_tiny_patch16_224": Case(8, 1.03)},
}
OTHER = {"cuda": Case(64), "cpu": Case(8)}


def bench_tl_align(
    models: Sequence[str] = (),
    *,
    batch: int | None = None,
    rounds: int | None = None,
    modes: Sequence[str] | None = None,
    device: torch.device | None = None,
    apart: bool | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each arm of each model in each mode; see `bench_models`."""
    bench = StepBench("tl_align", CASES, OTHER, _check, _arms, ALIGNED, PEAK_AT_MOST)
    return bench_models(
        bench, models, batch=batch, rounds=rounds, modes=modes, device=device, apart=apart, progress=progress
    )


def _check(name: str) -> None:
    find_route(weightless(name), "tl_align")  # refuses what cannot be followed


def _arms(name: str, batch: int, mode: str, device: torch.device) -> dict[str, Build]:
    steps = {PLAIN: _plain, ALIGNED: _aligned}
    if has_published_way(weightless(name)):
        steps[PUBLISHED] = _published
    return {arm: partial(_step, step, name, batch, mode, device) for arm, step in steps.items()}


def _step(module: Callable[[nn.Module], nn.Module], name: str, batch: int, mode: str, device: torch.device) -> Step:
    return training_step(module(fused_net(name, device)), batch, mode, device)


def _plain(net: nn.Module) -> nn.Module:
    return Supervision(net, mixer=_mixer(), smoothing=SMOOTHING)


def _aligned(net: nn.Module) -> nn.Module:
    return Supervision(net, mixer=_mixer(), follower="tl_align", smoothing=SMOOTHING)


def _published(net: nn.Module) -> nn.Module:
    return PublishedStep(net, _mixer(), SMOOTHING)


def _mixer() -> Mixer:
    return Mixer("cutmix", patch_size=16)


def fused_net(name: str, device: torch.device) -> nn.Module:
    """The same weights in every arm; attention fused wherever timm can (Swin's is not by default)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = timm.create_model(name)
    for module in net.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # pyright: ignore[reportArgumentType]
    return net.to(device).train()
