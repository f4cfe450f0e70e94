"""`alltokens bench tl_align`: what it costs that the label follows the tokens.

Shapes: B batch, H and W picture.

Three arms in one run, the same model, batch and mixes: CutMix with the pasted area, CutMix with TL-Align, and TL-Align
the published way. A step is forward, backward and AdamW. On a GPU compiled arms live in a process each (apart.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from alltokens.bench.apart import Comparison, compare_each, usual_pace
from alltokens.bench.published import PublishedStep, has_published_way
from alltokens.bench.results import Row, of_timing
from alltokens.bench.timing import Build, Step, Timing
from alltokens.errors import UserError, unknown
from alltokens.follow.families import find_route
from alltokens.models import lvvit  # noqa: F401  # pyright: ignore[reportUnusedImport]  # timm then knows these models
from alltokens.models.cost import weightless
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.step import Supervision

PLAIN, ALIGNED, PUBLISHED = "CutMix", "TL-Align", "TL-Align as published"
SMOOTHING = 0.1
PEAK_AT_MOST = 1.02


class Case(NamedTuple):
    batch: int
    at_most: float | None = None  # what the ratio of TL-Align to CutMix is to stay below (compiled; on a CPU: eager)


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


class Record(NamedTuple):
    """A batch, as a training step wants it."""

    image: Tensor
    label: Tensor


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
    """A row for each arm of each model in each mode ("eager", "compiled").

    What is None or empty is as the device asks for; on a CPU a comparison then ends after a minute. Arms that are
    compiled for a GPU live in processes of their own, or all of them, or none, by `apart`.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    cases = CASES[device.type]
    models = list(models) or list(cases)
    modes = list(modes or (("eager", "compiled") if cuda else ("eager",)))
    if batch is not None and batch < 2:
        raise UserError(f"batch must be at least 2, or there is no partner to mix with; got {batch}")
    for name in models:
        if not timm.is_model(name.split(".", 1)[0]):
            raise unknown("model", name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")
        find_route(weightless(name), "tl_align")  # refuses what cannot be followed, before anything is measured
    pairs = [(name, mode) for name in models for mode in modes]
    pictures = {name: batch or cases.get(name, OTHER[device.type]).batch for name in models}
    timings = compare_each(
        [
            Comparison(
                f"{name}, {mode}",
                _arms(name, pictures[name], mode, device),
                apart=cuda and mode == "compiled" if apart is None else apart,
            )
            for name, mode in pairs
        ],
        device,
        usual_pace(device, rounds),
        progress=progress,
    )
    rows: list[Row] = []
    for (name, mode), timing in zip(pairs, timings, strict=True):
        limit = cases.get(name, OTHER[device.type]).at_most if mode == ("compiled" if cuda else "eager") else None
        limits = {ALIGNED: (limit, PEAK_AT_MOST if cuda else None)} if limit is not None else {}
        rows += rows_of("tl_align", name, pictures[name], mode, device, timing, limits)
    return rows


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


def training_step(
    module: nn.Module, batch: int, mode: str, device: torch.device, record: tuple[Any, ...] | None = None
) -> Step:
    """A step of `module` on one batch, by default a Record of random pictures."""
    net: Any = module.net
    generator = torch.Generator().manual_seed(0)
    if record is None:
        size = net.pretrained_cfg["input_size"]
        images = torch.randn(batch, *size, generator=generator).to(device)
        labels = torch.randint(net.num_classes, (batch,), generator=generator).to(device)
        record = Record(images, labels)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    run: Any = torch.compile(module) if mode == "compiled" else module

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = run(record, generator)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rows_of(
    bench: str,
    name: str,
    batch: int,
    mode: str,
    device: torch.device,
    timings: dict[str, Timing],
    limits: Mapping[str, tuple[float | None, float | None]],
) -> list[Row]:
    """A row for each arm; `limits` are what an arm's ratios of time and memory to the first arm are to stay below."""
    size: Any = weightless(name).pretrained_cfg  # pyright: ignore[reportUnknownMemberType]
    base = next(iter(timings.values())).peak_mib
    return [
        Row(
            bench=bench,
            **of_timing(timing, batch, device),
            model=name,
            image_size=size["input_size"][-1],
            batch=batch,
            precision="bf16" if device.type == "cuda" else "fp32",
            mode=mode,
            arm=arm,
            peak_mib=timing.peak_mib,
            peak_ratio=timing.peak_mib / base if timing.peak_mib is not None and base else None,
            at_most=limits.get(arm, (None, None))[0],
            peak_at_most=limits.get(arm, (None, None))[1],
        )
        for arm, timing in timings.items()
    ]
