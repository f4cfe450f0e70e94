"""What becomes of a mix inside a network: the mixing ratio layer by layer, and how present each token stays.

Shapes: B batch, H and W picture, T tokens, N patches, C channels, L layers; a row is (B, T) or (B, h, w).

The paper (TL-Align, section 3.2 and figures 3 and 4) calls it token fluctuation: attention gives some tokens more
weight than others, so the share of the partner in what is classified is not the share of its pixels. Everything here is
the partner's share; the paper's figures may show one minus it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.errors import UserError
from alltokens.explain.recording import first_row, move, read_attention, recorded, working_copy
from alltokens.follow.families import find_route, followed_model, follower_support
from alltokens.follow.route import Route, first_token
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from alltokens.supervision.embedding import grid_of, mix_embeddings

RATIOS = ("area", "token labeling", "TransMix", "TL-Align", "similarity")  # what `mixing_ratios` gives, in its order

DrawPlan = Callable[[int, torch.Generator], MixPlan]  # (number of pictures, generator) -> a plan for them


class Followed(NamedTuple):
    """Where the labels of a mixed batch have gone by TL-Align."""

    share: Tensor  # (B,): the partner's share of what is classified
    token_shares: Tensor  # (B, h', w'): of every patch after the last block
    layers: Tensor  # (L, B): of what would be classified after every layer
    grid: tuple[int, int]  # h and w of the tokens at the input


class AlignmentError(NamedTuple):
    """How far the aligned shares of a model lie from the shares by area."""

    rmse: float  # over all mixes; the mean over the draws
    spread: float  # standard deviation over the draws; 0 for one draw
    pictures: int
    draws: int


def mixing_ratios(model: nn.Module, images: Tensor, plan: MixPlan) -> dict[str, Tensor]:
    """By method, (L + 1, B): the partner's share of what is classified, at the input and after every layer.

    - "area": the pasted area, as CutMix labels; it stays;
    - "token labeling": the mean over hard token labels (each patch has the label of the picture that it shows most
      of); it stays, and equals the area where boxes are snapped to patches;
    - "TransMix": by the class token's last attention; it stays. Only for models with a class token;
    - "TL-Align": the share that follows attention;
    - "similarity": what the tokens themselves say (supplement, equation 1), see `similarity_share`. It has no value at
      the input (nan), and models whose blocks cannot be read have none at all.
    """
    net = followed_model(working_copy(model))
    images, plan = _placed(net, images, plan)
    followed = followed_shares(net, images, plan)
    layers, grid = followed.layers, followed.grid
    count = len(layers) + 1
    ratios = {
        "area": plan.share.expand(count, -1),
        "token labeling": (plan.token_share(grid) > 0.5).float().mean((1, 2)).expand(count, -1),
    }
    if "transmix" in follower_support(net):
        follower = TransMix(net)
        with follower.follow(plan), _mixing(net, images, plan) as mixed:
            net(mixed)
        ratios["TransMix"] = follower.share.expand(count, -1)
        follower.detach()
    ratios["TL-Align"] = torch.cat([plan.share.to(layers.dtype).unsqueeze(0), layers])
    blocks = _blocks(net)
    if len(blocks) == len(layers):
        own = _block_tokens(net, blocks, images)
        with _mixing(net, images, plan) as mixed:
            both = _block_tokens(net, blocks, mixed)
        read_class = find_route(net, "tl_align").classified is first_token
        shares = [
            similarity_share(tokens, alone, alone[plan.partner], read_class)
            for tokens, alone in zip(both, own, strict=True)
        ]
        ratios["similarity"] = torch.stack([torch.full_like(shares[0], math.nan), *shares])
    return {name: ratio.float().cpu() for name, ratio in ratios.items()}


def followed_shares(model: nn.Module, images: Tensor, plan: MixPlan) -> Followed:
    """The shares of `images` (B, 3, H, W), which `plan` mixes where it says, followed through the model."""
    net = followed_model(working_copy(model))
    images, plan = _placed(net, images, plan)
    aligner = TLAlign(net, layer_shares=True)
    with aligner.follow(plan), _mixing(net, images, plan) as mixed:
        net(mixed)
    tokens, grid = aligner.token_shares, aligner.route.grid(plan.image_size)
    last = (aligner.route.last_grid or aligner.route.grid)(plan.image_size)
    if tokens.shape[1] != last[0] * last[1]:
        last = grid_of(tokens.shape[1], plan.image_size)
    layers = torch.stack([layer.share for layer in aligner.layer_shares])
    return Followed(aligner.share.cpu(), tokens.reshape(-1, *last).cpu(), layers.cpu(), grid)


def similarity_share(mixed: Tensor, own: Tensor, partner: Tensor, class_token: bool) -> Tensor:
    """(B,): the partner's share by similarity, from tokens (B, T, C) of one layer, of the mix and of both pictures.

    Each token of the mix has its highest cosine with a token of either picture; the softmax of the two is its share.
    That of the first token is taken, or the mean over all tokens where no class token is classified.
    """
    mixed, own, partner = (_unit(tokens) for tokens in (mixed, own, partner))
    best = torch.stack([(mixed @ own.mT).amax(2), (mixed @ partner.mT).amax(2)])  # (2, B, T)
    share = best.softmax(0)[1]
    return share[:, 0] if class_token else share.mean(1)


def token_presence(model: nn.Module, images: Tensor) -> list[Tensor]:
    """For every layer (B, h, w): how much of each patch is in all tokens that the layer's mixing makes (equation 2).

    The sum over outputs of the weight that each gives to the token, rows normalised; the mean over all tokens,
    prefix ones included, is 1 where a layer makes as many tokens as it gets. Residuals are left out, as in the paper.
    """
    net = followed_model(working_copy(model))
    route = find_route(net, "tl_align")
    parameter = next(net.parameters())
    images = images.detach().to(parameter.device, parameter.dtype)
    attention = read_attention(net, route, images)
    grids = _grids(route, images)
    found: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.enable_grad():
        rows = [first_row(route, images)]
        for step in route.steps:
            row = rows[-1 - step.parallel].detach().requires_grad_()
            mixed = move(step, row, attention)
            if step.layer is not None and step.layer not in found:
                (presence,) = torch.autograd.grad(mixed.sum(), row)
                found[step.layer] = route.patches(presence).reshape(-1, *grids[tuple(row.shape)])
            rows.append(mixed.detach() if step.terms == 0 else rows[-1])
    return [found[layer].cpu() for layer in sorted(found)]


def alignment_error(
    model: nn.Module,
    images: Sequence[Tensor],
    draw: DrawPlan,
    *,
    draws: int = 3,
    seed: int = 0,
) -> AlignmentError:
    """The root mean square of aligned share minus share by area, over batches of pictures (figure 3).

    Every draw mixes all pictures anew. The paper does not say over what its RMSE is taken; a difference in the share of
    d is one of d, with either sign, in two entries of a one-hot target, so that over K classes theirs would be
    sqrt(2 / K) times ours.
    """
    if draws < 1 or not images:
        raise UserError(f"an error needs pictures and at least one draw, got {len(images)} batches and {draws} draws")
    net = followed_model(working_copy(model))
    aligner = TLAlign(net)
    errors: list[float] = []
    for number in range(draws):
        generator = torch.Generator().manual_seed(seed + number)
        squares: list[Tensor] = []
        for batch in images:
            plan = draw(len(batch), generator)
            placed, plan = _placed(net, batch, plan)
            with aligner.follow(plan), _mixing(net, placed, plan) as mixed:
                net(mixed)
            squares.append((aligner.share - plan.share).square())
        errors.append(float(torch.cat(squares).double().mean().sqrt()))
    values = torch.tensor(errors, dtype=torch.float64)
    spread = float(values.std()) if draws > 1 else 0.0
    return AlignmentError(float(values.mean()), spread, sum(len(batch) for batch in images), draws)


def _placed(net: nn.Module, images: Tensor, plan: MixPlan) -> tuple[Tensor, MixPlan]:
    """Both where the network is."""
    parameter = next(net.parameters())
    return images.detach().to(parameter.device, parameter.dtype), plan.to(parameter.device)


@contextmanager
def _mixing(net: nn.Module, images: Tensor, plan: MixPlan) -> Iterator[Tensor]:
    """Inside, `net(what comes)` sees the pictures mixed where the plan mixes: pixels, or what is embedded of them."""
    with torch.no_grad():
        if plan.place == "pixels":
            yield mix_images(images, plan)
        else:
            with mix_embeddings(net, plan):
                yield images


def _unit(tokens: Tensor) -> Tensor:
    return tokens / tokens.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _blocks(net: Any) -> list[nn.Module]:
    """The blocks of a ViT or of a Swin's stages, in order; none of other families."""
    if isinstance(getattr(net, "blocks", None), nn.Sequential | nn.ModuleList):
        return list(net.blocks)
    stages = getattr(net, "layers", None)
    if isinstance(stages, nn.Sequential | nn.ModuleList) and all(hasattr(stage, "blocks") for stage in stages):
        return [block for stage in net.layers for block in stage.blocks]
    return []


def _block_tokens(net: nn.Module, blocks: list[nn.Module], images: Tensor) -> list[Tensor]:
    """(B, T, C) after every block."""
    with recorded({str(number): block for number, block in enumerate(blocks)}) as seen, torch.no_grad():
        net(images)
    tokens = [seen[str(number)].came for number in range(len(blocks))]
    return [one if one.ndim == 3 else one.flatten(1, 2) for one in tokens]


def _grids(route: Route, images: Tensor) -> dict[tuple[int, ...], tuple[int, int]]:
    """The grid of the patches of rows, by the rows' shapes."""
    size = (images.shape[-2], images.shape[-1])
    first = first_row(route, images)
    grids: dict[tuple[int, ...], tuple[int, int]] = {}
    shape = tuple(first.shape)
    for step in route.steps:
        grids.setdefault(shape, (shape[1], shape[2]) if len(shape) == 3 else route.class_grid(size))
        shape = step.shape(shape)
    return grids
