"""`alltokens bench train`: how fast models train here, and how much of the device that uses.

Shapes: B batch, H and W picture.

A step is forward, backward and AdamW of a plain CutMix step, as in `bench tl_align`; eager and compiled take turns, on
a GPU each from a process of its own (apart.py). What the device could do is measured in the same run: a large matrix
product of random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch

from alltokens.bench.apart import Comparison, compare_each, usual_pace
from alltokens.bench.over_models import training_step
from alltokens.bench.results import TrainRow, of_timing
from alltokens.bench.timing import Step, Timing, compare
from alltokens.bench.tl_align import SMOOTHING, fused_net
from alltokens.errors import UserError, unknown
from alltokens.models.cost import model_cost, weightless
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.step import Supervision

# Model -> pictures in a step.
BATCHES = {
    "cuda": {
        "deit_tiny_patch16_224": 512,
        "deit_small_patch16_224": 512,
        "deit_base_patch16_224": 256,
        "swin_tiny_patch4_window7_224": 256,
        "lvvit_s": 256,
    },
    "cpu": {"deit_tiny_patch16_224": 8},
}
OTHER = {"cuda": 128, "cpu": 8}
MATRIX = {"cuda": 8192, "cpu": 1024}  # side of the product; 8192 fills every card we know
PASSES = 3  # forward, and twice as much backward


def bench_train(
    models: Sequence[str] = (),
    *,
    batch: int | None = None,
    rounds: int | None = None,
    modes: Sequence[str] | None = None,
    device: torch.device | None = None,
    apart: bool | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[TrainRow]:
    """A row for each model in each mode ("eager", "compiled"); what is None or empty is as the device asks for.

    On a GPU the modes live in processes of their own if one of them is compiled, or always, or never, by `apart`.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    batches = BATCHES[device.type]
    models = list(models) or list(batches)
    modes = list(modes or (("eager", "compiled") if cuda else ("eager",)))
    for name in models:
        if not timm.is_model(name.split(".", 1)[0]):
            raise unknown("model", name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")
    if batch is not None and batch < 1:
        raise UserError(f"batch must be at least 1, got {batch}")
    progress("a large matrix product")
    peak = matmul_rate(device)
    pictures = [batch or batches.get(name, OTHER[device.type]) for name in models]
    timings = compare_each(
        [
            Comparison(
                name,
                {mode: partial(_step, name, count, mode, device) for mode in modes},
                apart=cuda and "compiled" in modes if apart is None else apart,
            )
            for name, count in zip(models, pictures, strict=True)
        ],
        device,
        usual_pace(device, rounds, usual=12),
        progress=progress,
    )
    return [row for case in zip(models, pictures, timings, strict=True) for row in _rows(*case, device, peak)]


def matmul_rate(device: torch.device) -> float:
    """FLOP a second of a large matrix product in the precision that training has there; the median of several."""
    side = MATRIX[device.type]
    dtype = _precision(device)[0]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    timing = compare({"product": lambda: lambda: left @ right}, device, rounds=5, steps=5, warmup=3)["product"]
    return 2 * side**3 / (timing.milliseconds.median / 1e3)


def _precision(device: torch.device) -> tuple[torch.dtype, str]:
    return (torch.bfloat16, "bf16") if device.type == "cuda" else (torch.float32, "fp32")


def _step(name: str, batch: int, mode: str, device: torch.device) -> Step:
    step = Supervision(fused_net(name, device), mixer=Mixer("cutmix"), smoothing=SMOOTHING)
    return training_step(step, batch, mode, device)


def _rows(name: str, batch: int, timings: dict[str, Timing], device: torch.device, peak: float) -> list[TrainRow]:
    cost = model_cost(weightless(name))
    gmacs: Any = cost.gmacs if cost.gmacs is not None else float("nan")
    base = next(iter(timings.values())).peak_mib
    rows: list[TrainRow] = []
    for mode, timing in timings.items():
        speed = 1e3 * batch / timing.milliseconds.median
        flops = 2e9 * PASSES * gmacs * speed
        rows.append(
            TrainRow(
                bench="train",
                **of_timing(timing, batch, device),
                model=name,
                image_size=cost.image_size[0],
                batch=batch,
                precision=_precision(device)[1],
                mode=mode,
                arm="CutMix",
                peak_mib=timing.peak_mib,
                peak_ratio=timing.peak_mib / base if timing.peak_mib is not None and base else None,
                at_most=None,
                peak_at_most=None,
                gmacs=gmacs,
                tflops=flops / 1e12,
                matmul_tflops=peak / 1e12,
                matmul_share=flops / peak,
            )
        )
    return rows
