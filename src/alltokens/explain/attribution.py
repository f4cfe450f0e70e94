"""Attribution in a ViT, DeiT or LV-ViT by relevance and gradient (Chefer et al., CVPR 2021).

Shapes: B batch, H heads, d channels of a head, T = P + N tokens, C width, K classes.

One forward is recorded; then relevance starts as 1 at the class's logit and goes back block by block by the rules in
`relevance`. Each block's attention weights get a relevance and a gradient, and the map is the class token's row of
their product over all blocks. Branches count as they enter the residual sum, so layer scale, and LV-ViT's division of
every branch by 1, 2 or 3, are honoured.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention, Mlp  # pyright: ignore[reportPrivateImportUsage]
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from alltokens.errors import UnsupportedModel
from alltokens.explain.recording import Attended, Seen, last_of, reading, recorded
from alltokens.explain.relevance import (
    attention_relevance,
    class_row,
    through_attention,
    through_copies,
    through_linear,
    through_scores,
    through_sum,
)
from alltokens.follow.route import Route

DEFINED = "attribution is defined for ViTs, DeiTs and LV-ViTs of plain blocks that classify one class token"


def check_attribution(model: nn.Module, route: Route) -> None:
    """Raise UnsupportedModel, saying why, if the rules do not cover this model."""
    if not isinstance(model, VisionTransformer) or route.class_attention is None:
        raise UnsupportedModel(f"{DEFINED}; this {type(model).__name__} is none")
    if not isinstance(model.head, nn.Linear):
        raise UnsupportedModel(f"{DEFINED}; this one has no classifier")
    for number, module in enumerate(model.blocks, 1):
        block: Any = module
        plain = type(block) is Block and type(block.attn) is Attention and block.attn.gate is None
        if not plain or type(block.mlp) is not Mlp or not isinstance(block.mlp.fc1, nn.Linear):
            raise UnsupportedModel(f"{DEFINED}; block {number} of this {type(model).__name__} is another kind")


def attribution(model: nn.Module, route: Route, images: Tensor, classes: Tensor) -> Tensor:
    """(B, T): the relevance of every token for each picture's class (B,), in a working copy of a checked model."""
    vit: Any = model
    modules: dict[str, nn.Module] = {"head": vit.head, "norm": vit.norm}
    for number, block in enumerate(vit.blocks):
        modules |= {f"{number}.{name}": module for name, module in _parts(block).items()}
    with torch.inference_mode(False), torch.enable_grad(), recorded(modules) as seen, reading(route) as readers:
        logits = vit(images.clone().requires_grad_())
        attended = [last_of(readers[step]) for step in route.steps]
        chosen = logits.gather(1, classes.unsqueeze(1)).sum()
        gradients = torch.autograd.grad(chosen, [one.weights for one in attended])
    with torch.no_grad():
        start = torch.zeros_like(logits).scatter_(1, classes.unsqueeze(1), 1)  # (B, K)
        relevance = torch.zeros_like(seen["norm"].came)  # (B, T, C)
        relevance[:, 0] = through_linear(seen["head"].entered, vit.head.weight, start)
        layers: list[Tensor] = []
        for number in reversed(range(len(vit.blocks))):
            block = vit.blocks[number]
            parts = {name: seen[f"{number}.{name}"] for name in _parts(block)}
            relevance, of_weights = _through_block(block, parts, attended[number], relevance)
            layers.append(attention_relevance(gradients[number], of_weights))
        return class_row(layers[::-1])


def _parts(block: Any) -> dict[str, nn.Module]:
    """What is recorded of a block, by the names that `_through_block` uses."""
    mlp, attention = block.mlp, block.attn
    return {
        "norm1": block.norm1,
        "qkv": attention.qkv,
        "proj": attention.proj,
        "branch1": block.ls1,
        "norm2": block.norm2,
        "fc1": mlp.fc1,
        "fc2": mlp.fc2,
        "branch2": block.ls2,
    }


def _through_block(block: Any, seen: dict[str, Seen], attended: Attended, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance (B, T, C) of what entered the block, and (B, H, T, T) of its attention weights."""
    middle, entered = seen["norm2"].entered, seen["norm1"].entered
    kept, branch = through_sum(middle, seen["branch2"].came, relevance)
    branch = through_linear(seen["fc2"].entered, block.mlp.fc2.weight, branch)
    branch = through_linear(seen["fc1"].entered, block.mlp.fc1.weight, branch)
    relevance = through_copies(middle, kept, branch)

    kept, branch = through_sum(entered, seen["branch1"].came, relevance)
    branch = through_linear(seen["proj"].entered, block.attn.proj.weight, branch)  # (B, T, H*d)
    branch, of_weights = _through_attention(attended, branch)
    branch = through_linear(seen["qkv"].entered, block.attn.qkv.weight, branch)
    return through_copies(entered, kept, branch), of_weights


def _through_attention(attended: Attended, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """The relevance (B, T, 3*H*d) of query, key and value side by side, and (B, H, T, T) of the weights."""
    weights, query, key, value = attended
    assert query is not None and key is not None and value is not None, "checked: timm's own attention"
    batch, heads, tokens, _ = value.shape
    by_head = relevance.reshape(batch, tokens, heads, -1).transpose(1, 2)  # (B, H, T, d)
    of_weights, of_value = through_attention(weights, value, by_head)
    of_query, of_key = through_scores(query, key, of_weights)
    parts = [part.transpose(1, 2).reshape(batch, tokens, -1) for part in (of_query, of_key, of_value)]
    return torch.cat(parts, dim=-1), of_weights
