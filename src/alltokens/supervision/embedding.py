"""MixToken: two pictures mixed after the patch embedding (Jiang et al., NeurIPS 2021).

Shapes: B batch, h and w token grid, N = h * w tokens, C channels.

A hook on the module that cuts pictures into tokens mixes what that module gives out: no position and no class token is
in it yet. Any timm model whose tokens keep their places from there on will do, ViT or not.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alltokens.core.plan import MixPlan
from alltokens.errors import UnsupportedModel, UserError

EMBEDDINGS = ("patch_embed", "patch_embed1", "stem", "model")  # `model`: a wrapper, such as TokenClassifier


class EmbeddingMix:
    """Attached to a model; inside `mixing(plan)` its token embeddings are mixed, otherwise it does nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.embedding = find_embedding(model)
        self._plan: MixPlan | None = None
        self._handle = self.embedding.register_forward_hook(self._hook)

    @contextmanager
    def mixing(self, plan: MixPlan) -> Generator[None]:
        if plan.place != "embedding":
            raise UserError("this plan mixes pictures, not what the patch embedding makes of them; see mix_images")
        if self._plan is not None:
            raise UserError("embeddings are being mixed already; leave that `with` block first")
        self._plan = plan
        try:
            yield
        finally:
            self._plan = None

    def detach(self) -> None:
        """The model is as it was before."""
        self._handle.remove()

    def _hook(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return None if self._plan is None else mix_tokens(output, self._plan, module)


@contextmanager
def mix_embeddings(model: nn.Module, plan: MixPlan) -> Generator[None]:
    """Inside, `model(images)` mixes the patch embeddings by `plan` (as `draw_mixtoken` draws it); `images` stay whole.

    For one's own loop; `Supervision` does it by itself. Compile the model outside of the `with` block only if it is
    compiled again for every block; otherwise keep one `EmbeddingMix` attached.
    """
    mix = EmbeddingMix(model)
    try:
        with mix.mixing(plan):
            yield
    finally:
        mix.detach()


def find_embedding(model: nn.Module) -> nn.Module:
    """The module that makes tokens of pictures."""
    for name in EMBEDDINGS:
        child = getattr(model, name, None)
        if isinstance(child, nn.Module):
            return find_embedding(child) if name == "model" else child
    raise UnsupportedModel(
        f"{type(model).__name__} has no patch embedding to mix after (no patch_embed or stem): mix pictures instead"
    )


def mix_tokens(tokens: Tensor, plan: MixPlan, module: nn.Module | None = None) -> Tensor:
    """(B, N, C), (B, h, w, C) or (B, C, h, w): each token with its partner's share of it."""
    if len(tokens) != len(plan.partner):
        raise UserError(f"a plan for {len(plan.partner)} pictures cannot mix the embeddings of {len(tokens)}")
    if tokens.ndim == 3:
        grid = grid_of(tokens.shape[1], plan.image_size)
        share = plan.token_share(grid).flatten(1).unsqueeze(-1)  # (B, N, 1)
    elif _channels_last(tokens, module):
        share = plan.token_share((tokens.shape[1], tokens.shape[2])).unsqueeze(-1)
    else:
        share = plan.token_share((tokens.shape[2], tokens.shape[3])).unsqueeze(1)
    return torch.lerp(tokens, tokens[plan.partner], share.to(tokens.dtype))


def grid_of(count: int, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of `count` square tokens that cover a picture of this height and width."""
    height, width = image_size
    rows = round((count * height / width) ** 0.5)
    if rows < 1 or count % rows:
        raise UnsupportedModel(f"{count} tokens are no grid over a picture of {height}x{width}")
    return rows, count // rows


def _channels_last(tokens: Tensor, module: nn.Module | None) -> bool:
    """Whether (B, ?, ?, ?) is (B, h, w, C): the embedding says so, or its width does."""
    form = str(getattr(module, "output_fmt", None) or "")
    if form.endswith(("NHWC", "NCHW")):
        return form.endswith("NHWC")
    width = getattr(getattr(module, "proj", None), "out_channels", None)
    return width is not None and tokens.shape[-1] == width and tokens.shape[1] != width
