"""Where a run runs: processes, device, precision, sharding. accelerate is built here and nowhere else.

Started by plain python, torchrun, accelerate launch, or srun: the launcher says how many processes there are; the
recipe says everything else, and an environment that says otherwise is refused.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, InitProcessGroupKwargs, TorchDynamoPlugin
from torch import nn

from alltokens.engine.config import TrainConfig
from alltokens.errors import UserError

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Runtime:
    accelerator: Accelerator

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def agree(self, value: Any) -> Any:
        """The main process's value, in every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def any(self, flag: int) -> int:
        """The largest of all processes' flags."""
        if self.world == 1:
            return flag
        tensor = torch.tensor(flag, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def everyone(self, value: Any) -> list[Any]:
        """Every process's value, in every process."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def start_runtime(config: TrainConfig, trackers: tuple[str, ...] = (), run_dir: str | None = None) -> Runtime:
    """Join the other processes and set device, precision and sharding up. Once per run."""
    join_slurm(os.environ)
    meet_anew(os.environ, timedelta(minutes=config.timeout_minutes))
    _refuse_contradictions(config, os.environ)
    _check_trackers(trackers)
    spoken = set(os.environ)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device is cuda, but no CUDA device is there; `alltokens doctor` says what is")
    if config.precision == "fp16" and (config.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("train.precision fp16 needs a GPU; on a CPU use bf16 or fp32")
    # A process may train more than once: settings are new each time, the group of processes stays (gloo and NCCL cannot
    # meet a second time through the same store) until the process ends.
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fsdp = None
    if config.strategy == "fsdp2" and world > 1:
        fsdp = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1_000_000,
            state_dict_type="FULL_STATE_DICT",
        )
    accelerator = Accelerator(
        cpu=config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()),
        mixed_precision=_PRECISIONS[config.precision],
        fsdp_plugin=fsdp,
        dynamo_plugin=_dynamo_plugin(config),
        log_with=list(trackers) or None,
        project_dir=run_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=config.timeout_minutes))],
    )
    for name in set(os.environ) - spoken:  # accelerate notes its plugins down for itself; the next run has its own
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]
    if dist.is_initialized():
        atexit.register(_leave_processes)
    return Runtime(accelerator)


def meet_anew(environ: MutableMapping[str, str], timeout: timedelta) -> None:
    """After a restart by torchrun, let the processes meet at a store of their own, which the first of them serves.

    The launcher's store outlives them and still has the addresses (and last words) of those that are gone: who is quick
    enough would wait for a dead one.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = environ["MASTER_ADDR"]
    launchers = dist.TCPStore(address, int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    key = f"alltokens/port/{attempt}"
    if environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            launchers.set(key, str(free.getsockname()[1]))
    environ["MASTER_PORT"] = launchers.get(key).decode()  # waits until it is there
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _check_trackers(trackers: tuple[str, ...]) -> None:
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"log.trackers asks for {name}, which is not installed: pip install 'alltokens[{name}]'")


def network(step: nn.Module) -> nn.Module:
    """The bare network of a prepared Supervision: inside DDP's and compile's wrappers (FSDP2 shards in place)."""
    while True:
        inner = getattr(step, "_orig_mod", None) or (
            step.module if isinstance(step, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return cast(nn.Module, step.net)
        step = inner


def _leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _dynamo_plugin(config: TrainConfig) -> TorchDynamoPlugin:
    match config.compile:
        case "off":
            return TorchDynamoPlugin(backend=DynamoBackend.NO)
        case "on":
            return TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR)
        case "aot_eager":
            return TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER)
        case mode:
            return TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, mode=mode)


def _refuse_contradictions(config: TrainConfig, environment: MutableMapping[str, str]) -> None:
    """accelerate launch hands settings over in the environment; those the recipe decides must not say otherwise."""
    allowed = {
        "ACCELERATE_MIXED_PRECISION": ("train.precision", {"no", _PRECISIONS[config.precision]}),
        "ACCELERATE_DYNAMO_BACKEND": (
            "train.compile",
            {"no", "NO"} | ({"inductor", "INDUCTOR"} if config.compile != "off" else set()),
        ),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("train.accumulate", {"1", str(config.accumulate)}),
        "ACCELERATE_USE_FSDP": ("train.strategy", {"false"} | ({"true"} if config.strategy == "fsdp2" else set())),
        "ACCELERATE_USE_DEEPSPEED": ("train.strategy (DeepSpeed is not among them)", {"false"}),
        "ACCELERATE_USE_MEGATRON_LM": ("train.strategy (Megatron is not among them)", {"false"}),
        "ACCELERATE_USE_CPU": (
            "train.device",
            {"false", "False"} | ({"true", "True"} if config.device != "cuda" else set()),
        ),
    }
    for name, (setting, values) in allowed.items():
        came = environment.get(name)
        if came is not None and came not in values:
            raise UserError(
                f"the environment says {name}={came}, the recipe's {setting} says otherwise; "
                f"unset the variable (or configure accelerate launch without it) or change the recipe"
            )
        if came is not None and name != "ACCELERATE_USE_CPU":
            del environment[name]  # said and checked; accelerate must not act on it a second time


def join_slurm(environment: MutableMapping[str, str]) -> None:
    """srun starts the processes but does not speak torch's language: translate, unless a launcher already has."""
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    address = environment.get("SLURM_LAUNCH_NODE_IPADDR", socket.gethostname())
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "")) or address)
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))


def first_host(nodelist: str) -> str:
    """The first name of Slurm's compact list: 'gpu[07-09,12],login1' -> 'gpu07'."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.split(",")[0]
    inside, _, tail = rest.partition("]")
    return head + inside.split(",")[0].split("-")[0] + tail.split(",")[0]
