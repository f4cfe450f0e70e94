"""Training steps compared over models and modes: what `bench tl_align` and `bench token_labels` have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from alltokens.bench.apart import Comparison, compare_each, usual_pace
from alltokens.bench.results import Row, of_timing
from alltokens.bench.timing import Build, Step, Timing
from alltokens.errors import UserError, unknown
from alltokens.models import lvvit  # noqa: F401  # pyright: ignore[reportUnusedImport]  # timm then knows these models
from alltokens.models.cost import weightless


class Case(NamedTuple):
    batch: int
    at_most: float | None = None  # what the judged arm's ratio of time is to stay below (compiled; on a CPU: eager)


class StepBench(NamedTuple):
    """One such bench."""

    name: str
    cases: Mapping[str, Mapping[str, Case]]  # device type -> model -> case; measured if none are named
    other: Mapping[str, Case]  # device type -> case of all other models
    check: Callable[[str], None]  # refuses a model, before anything is measured
    arms: Callable[[str, int, str, torch.device], dict[str, Build]]  # of a model, batch, mode and device
    judged: str  # the arm that has limits
    peak_at_most: float  # its ratio of memory on a GPU


class Record(NamedTuple):
    """A batch, as a training step wants it."""

    image: Tensor
    label: Tensor


def bench_models(
    bench: StepBench,
    models: Sequence[str],
    *,
    batch: int | None,
    rounds: int | None,
    modes: Sequence[str] | None,
    device: torch.device | None,
    apart: bool | None,
    progress: Callable[[str], None],
) -> list[Row]:
    """A row for each arm of each model in each mode ("eager", "compiled").

    What is None or empty is as the device asks for; on a CPU a comparison then ends after a minute. Arms that are
    compiled for a GPU live in processes of their own, or all of them, or none, by `apart`.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    cases, other = bench.cases[device.type], bench.other[device.type]
    models = list(models) or list(cases)
    modes = list(modes or (("eager", "compiled") if cuda else ("eager",)))
    if batch is not None and batch < 2:
        raise UserError(f"batch must be at least 2, or there is no partner to mix with; got {batch}")
    for name in models:
        if not timm.is_model(name.split(".", 1)[0]):
            raise unknown("model", name, timm.list_models(), hint="`alltokens models PATTERN` lists them.")
        bench.check(name)
    pairs = [(name, mode) for name in models for mode in modes]
    pictures = {name: batch or cases.get(name, other).batch for name in models}
    timings = compare_each(
        [
            Comparison(
                f"{name}, {mode}",
                bench.arms(name, pictures[name], mode, device),
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
        limit = cases.get(name, other).at_most if mode == ("compiled" if cuda else "eager") else None
        limits = (limit, bench.peak_at_most if cuda and limit is not None else None)
        rows += _rows(bench, name, pictures[name], mode, device, timing, limits)
    return rows


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


def _rows(
    bench: StepBench,
    name: str,
    batch: int,
    mode: str,
    device: torch.device,
    timings: dict[str, Timing],
    limits: tuple[float | None, float | None],
) -> list[Row]:
    """A row for each arm; `limits` are what the judged arm's ratios of time and memory are to stay below."""
    size: Any = weightless(name).pretrained_cfg  # pyright: ignore[reportUnknownMemberType]
    base = next(iter(timings.values())).peak_mib
    rows: list[Row] = []
    for arm, timing in timings.items():
        at_most, peak_at_most = limits if arm == bench.judged else (None, None)
        rows.append(
            Row(
                bench=bench.name,
                **of_timing(timing, batch, device),
                model=name,
                image_size=size["input_size"][-1],
                batch=batch,
                precision="bf16" if device.type == "cuda" else "fp32",
                mode=mode,
                arm=arm,
                peak_mib=timing.peak_mib,
                peak_ratio=timing.peak_mib / base if timing.peak_mib is not None and base else None,
                at_most=at_most,
                peak_at_most=peak_at_most,
            )
        )
    return rows
