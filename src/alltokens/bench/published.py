"""TL-Align as its program does it, to measure against: explicit attention, a label of K classes for every token.

Shapes: B batch, P prefix tokens, N patches, T = P + N tokens, h and w token grid, M windows of S tokens, H heads,
K classes.

Y <- (A Y + Y) / 2 in each block, A the softmaxed attention's mean over heads, Y (B, T, K) in float32 (FACTS 3.1). For
ViT, DeiT and LV-ViT; for Swin after the paper's text, as no program for it was published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer, window_partition, window_reverse
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.step import Batch

Move = Callable[[Tensor, Tensor], Tensor]  # (attention (B', H, T, T), labels) -> labels that attention moved


def has_published_way(net: nn.Module) -> bool:
    if isinstance(net, VisionTransformer):
        plain = all(type(block.attn) is Attention for block in net.blocks)
        return plain and net.num_prefix_tokens <= 1 and net.attn_pool is None
    return type(net) is SwinTransformer


class PublishedStep(nn.Module):
    """`forward(batch, generator)` gives the loss and the label (B, K) that it was reckoned with."""

    def __init__(self, net: nn.Module, mixer: Mixer, smoothing: float) -> None:
        super().__init__()
        assert has_published_way(net)
        self.net, self.mixer, self.smoothing = net, mixer, smoothing
        self._labels: list[Tensor] = []  # those of the present depth, while the network runs
        for module in net.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False  # pyright: ignore[reportArgumentType]
        listen = _listen_to_swin if isinstance(net, SwinTransformer) else _listen_to_vit
        listen(net, self._labels)

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        plan = _draw(self.mixer, batch.image, generator)  # pyright: ignore[reportCallIssue]
        net: Any = self.net
        classes = smooth_one_hot(batch.label, net.num_classes, self.smoothing)  # (B, K)
        grid = net.patch_embed.grid_size
        patches = blend_targets(classes, plan.partner, plan.token_share(grid).flatten(1))  # (B, N, K)
        if isinstance(net, SwinTransformer):
            labels = patches.unflatten(1, grid)  # (B, h, w, K)
        else:
            prefix = blend_targets(classes, plan.partner, plan.share).unsqueeze(1)  # (B, 1, K)
            labels = torch.cat([prefix.expand(-1, net.num_prefix_tokens, -1), patches], dim=1)  # (B, T, K)
        self._labels[:] = [labels]
        logits = net(mix_images(batch.image, plan))
        target = self._classified(self._labels.pop())
        return soft_cross_entropy(logits, target), target

    def _classified(self, labels: Tensor) -> Tensor:
        """(B, K): the label of what the head reads."""
        net: Any = self.net
        if isinstance(net, SwinTransformer):
            return labels.mean((1, 2))
        return labels[:, 0] if net.global_pool == "token" else labels[:, net.num_prefix_tokens :].mean(1)


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
def _draw(mixer: Mixer, images: Tensor, generator: torch.Generator | None) -> MixPlan:
    """Outside the compiled graph, as in our own step."""
    size = (images.shape[-2], images.shape[-1])
    return mixer.draw(len(images), size, generator).to(images.device)


def _listen_to_vit(net: Any, labels: list[Tensor]) -> None:
    for block in net.blocks:
        _listen(block.attn.attn_drop, labels, _attended)


def _listen_to_swin(net: Any, labels: list[Tensor]) -> None:
    for stage in net.layers:
        if not isinstance(stage.downsample, nn.Identity):
            _listen_to_merging(stage.downsample, labels)
        for block in stage.blocks:
            _listen(block.attn.attn_drop, labels, _in_windows(block.window_size, block.shift_size))


def _listen(dropout: nn.Module, labels: list[Tensor], move: Move) -> None:
    """`attn_drop` is handed the softmaxed attention, in the code that is not fused."""

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            attention = arguments[0].detach().clone()  # as published
            labels[0] = (move(attention, labels[0]) + labels[0]) / 2

    dropout.register_forward_pre_hook(hook)


def _listen_to_merging(merging: nn.Module, labels: list[Tensor]) -> None:
    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        labels[0] = F.avg_pool2d(labels[0].permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)

    merging.register_forward_pre_hook(hook)


def _attended(attention: Tensor, labels: Tensor) -> Tensor:
    """(B, T, K); under autocast the product is in 16 bits, as published."""
    return (attention.mean(1) @ labels).float()


def _in_windows(window: tuple[int, int], shift: tuple[int, int]) -> Move:
    def move(attention: Tensor, labels: Tensor) -> Tensor:
        _, height, width, classes = labels.shape
        rolled = labels.roll((-shift[0], -shift[1]), (1, 2))
        parts = window_partition(rolled, window).flatten(1, 2)  # (B * M, S, K)
        mixed = _attended(attention, parts).view(-1, *window, classes)
        return window_reverse(mixed, window, height, width).roll(shift, (1, 2))

    return move
