"""This process among those that annotate together."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def processes() -> tuple[int, int]:
    """(rank, world)"""
    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 1)


def local_processes() -> int:
    """Those on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_device() -> torch.device:
    there = torch.cuda.is_available()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if there else torch.device("cpu")


def wait() -> None:
    """For all the others."""
    if processes()[1] > 1:
        dist.barrier()
