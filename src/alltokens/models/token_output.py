"""What a network with a dense head answers when it is asked for its tokens.

Shapes: B batch, N patch tokens, K classes.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import Tensor, nn


class TokenOutput(NamedTuple):
    """The answer of `net(images, tokens=True)`."""

    logits: Tensor  # (B, K): of the picture
    token_logits: Tensor  # (B, N, K): of every patch, row by row


def answers_for_tokens(net: nn.Module) -> bool:
    """Whether `net(images, tokens=True)` is a TokenOutput; timm's VOLO has a dense head, but keeps its answers."""
    if getattr(net, "aux_head", None) is None:
        return False
    asked = inspect.signature(net.forward).parameters.values()
    return any(one.name == "tokens" or one.kind is one.VAR_KEYWORD for one in asked)
