"""Tensors from one device to another, without anybody waiting who need not."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`. Towards the CPU the host waits, or it would read numbers that are not there yet."""
    device = torch.device(device)
    return tensor.to(device, non_blocking=device.type != "cpu")


def sent_ahead(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`, behind all that is queued there: for the small tensors of a step, out of plain memory, too.

    More than a few kilobytes of plain memory the driver would copy at once, after everything queued; so they are
    brought to memory that stays in place. Of an expanded tensor only the distinct numbers travel (torch cannot pin the
    whole), and it arrives like any other, dense: a compiled step then needs no second form for it.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return sent(tensor, device)
    distinct = tensor[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return sent(distinct.pin_memory(), device).expand(tensor.shape).contiguous()
