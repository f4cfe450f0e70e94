"""What a network with a dense head answers when it is asked for its tokens.

Shapes: B batch, N patch tokens, K classes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenOutput(NamedTuple):
    """The answer of `net(images, tokens=True)`."""

    logits: Tensor  # (B, K): of the picture
    token_logits: Tensor  # (B, N, K): of every patch, row by row
