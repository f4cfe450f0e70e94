"""A run's whole state in one safetensors file: nothing is pickled, and a rename makes it the last one.

Tensors by name: net.*, optimizer.*, average.*, random.<rank>.*. Numbers as JSON in the file's header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from alltokens.engine.averaging import WeightAverage
from alltokens.engine.run_folder import write_atomically
from alltokens.errors import UserError

FORMAT = 1
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def collect(
    step: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimizer and average, gathered whole from however they are sharded. Every process must call it.

    Returns tensors on the CPU and what is not a tensor; both are empty in all processes but the main one.
    """
    tensors = {f"net.{name}": value for name, value in _weights(step).items()}
    optimizer_state = cast(dict[str, Any], get_optimizer_state_dict(step, optimizer, options=_WHOLE))
    extra: dict[str, Any] = {"param_groups": optimizer_state.get("param_groups", []), "optimizer": {}}
    for parameter, values in optimizer_state.get("state", {}).items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}:{name}"] = value
            else:
                extra["optimizer"][f"{parameter}:{name}"] = value
    if average is not None:
        extra["average_updates"] = average.updates
        for name, value in average.values.items():
            tensors[f"average.{name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    return {name: value.contiguous() for name, value in tensors.items()}, extra


def restore(
    step: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    tensors: dict[str, Tensor],
    extra: dict[str, Any],
) -> None:
    """The reverse of `collect`. Every process has read the whole file."""
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(step, _part(tensors, "net."), options=whole)
    state: dict[str, dict[str, Any]] = {}
    for label, value in {**_part(tensors, "optimizer."), **extra["optimizer"]}.items():
        parameter, _, name = label.rpartition(":")
        state.setdefault(parameter, {})[name] = value
    optimizer_state = {"state": state, "param_groups": extra["param_groups"]}
    set_optimizer_state_dict(step, optimizer, cast(Any, optimizer_state), options=whole)
    if average is not None:
        average.updates = extra["average_updates"]
        for name, value in _part(tensors, "average.").items():
            own = average.values[name]
            if isinstance(own, DTensor):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
            own.copy_(value)


def whole_weights(step: nn.Module) -> dict[str, Tensor]:
    """The bare network's weights, gathered on the CPU. Every process must call it; only the main one gets them."""
    return _part(_weights(step), "net.")


def _weights(step: nn.Module) -> dict[str, Tensor]:
    return cast(dict[str, Tensor], get_model_state_dict(step, options=_WHOLE))


def write(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    header = {"format": str(FORMAT), "facts": json.dumps(facts)}
    write_atomically(path, save(tensors, metadata=header))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            header = file.metadata() or {}
            if header.get("format") != str(FORMAT):
                raise UserError(f"{path}: a checkpoint of format {header.get('format')}, this version reads {FORMAT}")
            facts = json.loads(header["facts"])
            if not isinstance(facts, dict):
                raise KeyError("facts")
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except (safetensors.SafetensorError, OSError, KeyError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is broken and cannot be read: {error}") from None


def random_state(device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """This process's random numbers: the trainer's generator, and torch's own (stochastic depth, dropout)."""
    state = {"generator": generator.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device, generator: torch.Generator) -> None:
    generator.set_state(state["generator"])
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
