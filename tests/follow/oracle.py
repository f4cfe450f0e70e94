"""TL-Align by brute force: attention read by hooks, matrices of whole pictures built entry by entry, labels K wide.

Shapes: B batch, T tokens, K classes, y and x positions in the token grid.

Shares nothing with the package but the plan: every layer becomes a dense matrix (B, T', T), a label table (B, T, K) is
pushed through, and only unfused attention is read.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from timm.models.mlp_mixer import ResBlock
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock
from torch import Tensor, nn

import alltokens as at
from alltokens.models.pvt import PyramidVisionTransformer

Grid = tuple[int, int]
CLASSES = 5


def start_labels(plan: at.MixPlan, labels: Tensor, grid: Grid, prefix: int) -> Tensor:
    """(B, prefix + N, K) float64: the published start, one-hot labels in proportion of what a token shows."""
    own = torch.eye(CLASSES, dtype=torch.float64)[labels]
    partner = own[plan.partner]
    shares = plan.token_share(grid).double().flatten(1)
    shares = torch.cat([plan.share.double()[:, None].expand(-1, prefix), shares], 1)
    return (1 - shares)[..., None] * own[:, None] + shares[..., None] * partner[:, None]


def attention_matrices(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Every attention matrix (B', H, T, S) of a forward, in order, from the unfused code of the model."""
    seen: list[Tensor] = []
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double()))
        for name, module in model.named_modules()
        if name.endswith("attn_drop")
    ]
    try:
        for module in fused:
            module.fused_attn = False
        with torch.no_grad():
            model(images)
    finally:
        for module in fused:
            module.fused_attn = True
        for hook in hooks:
            hook.remove()
    return seen


def rows_normalised(matrix: Tensor) -> Tensor:
    return matrix.abs() / matrix.abs().sum(-1, keepdim=True)


def averaged(labels: Tensor, *branches: Tensor) -> Tensor:
    return torch.stack([labels, *branches]).mean(0)


def vit(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    """(labels of what is classified (B, K), labels of the patches (B, N, K))."""
    prefix = model.num_prefix_tokens
    attention = iter(attention_matrices(model, images))
    labels = start(model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:])), prefix)
    for block in model.blocks:
        if isinstance(block, ParallelThingsBlock):
            labels = averaged(labels, *[next(attention).mean(1) @ labels for _ in block.attns])
        elif isinstance(block, ParallelScalingBlock):
            labels = averaged(labels, labels, next(attention).mean(1) @ labels)
        else:
            labels = averaged(labels, next(attention).mean(1) @ labels)
    return _vit_head(model, images, labels, prefix), labels[:, prefix:]


def _vit_head(model: nn.Module, images: Tensor, labels: Tensor, prefix: int) -> Tensor:
    if model.attn_pool is not None:
        with torch.no_grad():
            tokens = model.forward_features(images)
        skip = 0 if getattr(model, "pool_include_prefix", model.__class__.__name__ == "Eva") else prefix
        return latent_pooling(model.attn_pool, tokens[:, skip:]) @ labels[:, skip:]
    if hasattr(model, "dist_token"):
        return labels[:, :2].mean(1)
    return labels[:, 0] if model.global_pool == "token" else labels[:, prefix:].mean(1)


def latent_pooling(pool: nn.Module, tokens: Tensor) -> Tensor:
    """(B, 1, N) or, without latents (PRR), the row of what is pooled."""
    batch, count, _ = tokens.shape
    heads, size = pool.num_heads, pool.head_dim
    with torch.no_grad():
        if not hasattr(pool, "latent"):
            query = key = tokens.view(batch, count, heads, size).transpose(1, 2)
        else:
            query = pool.q(pool.latent.expand(batch, -1, -1)).view(batch, -1, heads, size).transpose(1, 2)
            key = pool.kv(tokens).view(batch, count, 2, heads, size)[:, :, 0].transpose(1, 2)
        weights = (query.double() @ key.double().transpose(-2, -1) * size**-0.5).softmax(-1).mean(1)
    return weights[:, 0].unsqueeze(1) if pool.pool == "token" else weights.mean(1, keepdim=True)


def cait(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    attention = iter(attention_matrices(model, images))
    labels = start(model.patch_embed.grid_size, 1)
    token, patches = labels[:, :1], labels[:, 1:]
    for _ in model.blocks:
        patches = averaged(patches, rows_normalised(next(attention)).mean(1) @ patches)
    for _ in model.blocks_token_only:
        token = averaged(token, next(attention).mean(1) @ torch.cat([token, patches], 1))
    return token[:, 0], patches


def swin(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    attention = iter(attention_matrices(model, images))
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    labels = start(grid, 0)
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            labels, grid = merging_matrix(grid, 2, 2, 0, ceil=True) @ labels, ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        for block in stage.blocks:
            labels = averaged(labels, window_matrix(next(attention), grid, block, len(images)) @ labels)
    return labels.mean(1), labels


def window_matrix(attention: Tensor, grid: Grid, block: nn.Module, batch: int) -> Tensor:
    """(B, N, N) out of the windows' (B * M, H, S, S), each entry put where its two tokens are in the picture."""
    (height, width), (y, x), (down, right) = grid, block.window_size, block.shift_size
    rows, columns = -(-height // y), -(-width // x)
    attention = attention.unflatten(0, (batch, rows * columns))
    matrix = torch.zeros(batch, height * width, height * width, dtype=torch.float64)
    for window in range(rows * columns):
        places = []  # (index in the window, token): padding lies below and beside the rolled picture
        for index in range(y * x):
            rolled_y, rolled_x = window // columns * y + index // x, window % columns * x + index % x
            if rolled_y < height and rolled_x < width:
                places.append((index, (rolled_y + down) % height * width + (rolled_x + right) % width))
        inside, tokens = (torch.tensor(values) for values in zip(*places, strict=True))
        matrix[:, tokens[:, None], tokens] = rows_normalised(attention[:, window][:, :, inside[:, None], inside]).mean(
            1
        )
    return matrix


def merging_matrix(grid: Grid, size: int, stride: int, padding: int, ceil: bool = False) -> Tensor:
    """(N', N): the mean of the tokens inside each window."""
    count = [(side + 2 * padding - size + (stride - 1 if ceil else 0)) // stride + 1 for side in grid]
    matrix = torch.zeros(count[0] * count[1], grid[0] * grid[1], dtype=torch.float64)
    for out_y in range(count[0]):
        for out_x in range(count[1]):
            for y in range(out_y * stride - padding, out_y * stride - padding + size):
                for x in range(out_x * stride - padding, out_x * stride - padding + size):
                    if 0 <= y < grid[0] and 0 <= x < grid[1]:
                        matrix[out_y * count[1] + out_x, y * grid[1] + x] = 1
    return rows_normalised(matrix)


def convolution_matrix(kernel: Tensor, grid: Grid) -> Tensor:
    """(N, N): a kernel (y, x) as a matrix, signs kept, zero padding left out."""
    half = kernel.shape[0] // 2
    matrix = torch.zeros(grid[0], grid[1], grid[0], grid[1], dtype=torch.float64)
    for out_y in range(grid[0]):
        for out_x in range(grid[1]):
            for y in range(max(0, out_y - half), min(grid[0], out_y + half + 1)):
                for x in range(max(0, out_x - half), min(grid[1], out_x + half + 1)):
                    matrix[out_y, out_x, y, x] = kernel[y - out_y + half, x - out_x + half]
    return matrix.flatten(2).flatten(0, 1)


def depth_wise_matrix(conv: nn.Conv2d, grid: Grid) -> Tensor:
    return rows_normalised(convolution_matrix(conv.weight.detach().double().abs().mean((0, 1)), grid))


def pvt(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    second = isinstance(model, PyramidVisionTransformerV2)
    attention = iter(attention_matrices(model, images) if second else _pvt_attention(model, images))
    grid: Grid = (images.shape[-2] // 4, images.shape[-1] // 4)
    token, labels = start(grid, 1).split([1, grid[0] * grid[1]], 1)
    stages = [stage.blocks for stage in model.stages] if second else [getattr(model, f"block{n}") for n in (1, 2, 3, 4)]
    for number, blocks in enumerate(stages):
        if number:
            labels = merging_matrix(grid, *((3, 2, 1) if second else (2, 2, 0))) @ labels
            grid = (grid[0] // 2, grid[1] // 2)
        if number == 3 and not second:
            labels = torch.cat([token, labels], 1)
        for block in blocks:
            keys = labels
            if second and block.attn.pool is not None:  # all grids here are multiples of 7 or single tokens
                bins = 7
                keys = _adaptive_matrix(grid, bins) @ labels
            elif (ratio := block.attn.sr.stride[0] if getattr(block.attn, "sr", None) is not None else 1) > 1:
                keys = merging_matrix(grid, ratio, ratio, 0) @ labels
            labels = averaged(labels, next(attention).mean(1) @ keys)
            if second:
                labels = averaged(labels, depth_wise_matrix(block.mlp.dwconv, grid) @ labels)
    return (labels.mean(1), labels) if second else (labels[:, 0], labels[:, 1:])


def _adaptive_matrix(grid: Grid, bins: int) -> Tensor:
    """(bins^2, N): adaptive average pooling, bin i from floor(i n / bins) to ceil((i + 1) n / bins)."""
    one_axis = []
    for side in grid:
        matrix = torch.zeros(bins, side, dtype=torch.float64)
        for index in range(bins):
            matrix[index, index * side // bins : -(-(index + 1) * side // bins)] = 1
        one_axis.append(rows_normalised(matrix))
    return torch.kron(*one_axis)


def _pvt_attention(model: PyramidVisionTransformer, images: Tensor) -> list[Tensor]:
    """Our PVT has only fused attention: its matrices out of the inputs of its norms."""
    seen: list[Tensor] = []

    def read(module: nn.Module, args: tuple[Tensor, Grid]) -> None:
        tokens, grid = args
        batch, count, dim = tokens.shape
        source = tokens
        if module.reduction > 1:
            source = module.norm(
                module.sr(tokens.transpose(1, 2).reshape(batch, dim, *grid)).flatten(2).transpose(1, 2)
            )
        size = dim // module.heads
        query = module.q(tokens).double().view(batch, count, module.heads, size).transpose(1, 2)
        key = module.kv(source)[..., :dim].double().view(batch, -1, module.heads, size).transpose(1, 2)
        seen.append((query @ key.transpose(-2, -1) * size**-0.5).softmax(-1))

    blocks = [block.attn for number in (1, 2, 3, 4) for block in getattr(model, f"block{number}")]
    hooks = [block.register_forward_pre_hook(read) for block in blocks]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return seen


def mixer(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    labels = start(model.stem.grid_size, 0)
    for block in model.blocks:
        if isinstance(block, ResBlock):
            matrix = rows_normalised(block.linear_tokens.weight.detach().double())
        else:
            first, second = (layer.weight.detach().double() for layer in (block.mlp_tokens.fc1, block.mlp_tokens.fc2))
            matrix = rows_normalised(second) @ rows_normalised(first)
        labels = averaged(labels, matrix @ labels)
    return labels.mean(1), labels


def convnext(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    grid: Grid = (images.shape[-2] // 4, images.shape[-1] // 4)
    labels = start(grid, 0)
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            labels, grid = merging_matrix(grid, 2, 2, 0) @ labels, (grid[0] // 2, grid[1] // 2)
        for block in stage.blocks:
            labels = averaged(labels, depth_wise_matrix(block.conv_dw, grid) @ labels)
    return labels.mean(1), labels


def metaformer(model: nn.Module, images: Tensor, start: Callable[[Grid, int], Tensor]) -> tuple[Tensor, Tensor]:
    attention = iter(attention_matrices(model, images))
    grid: Grid = (images.shape[-2] // 4, images.shape[-1] // 4)
    labels = start(grid, 0)
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            labels, grid = merging_matrix(grid, 3, 2, 1) @ labels, (grid[0] // 2, grid[1] // 2)
        for block in stage.blocks:
            kind = type(block.token_mixer)
            if kind is timm.models.metaformer.Pooling:
                box = rows_normalised(convolution_matrix(torch.ones(3, 3, dtype=torch.float64), grid))
                matrix = rows_normalised(box - torch.eye(grid[0] * grid[1], dtype=torch.float64))
            elif kind is timm.models.metaformer.SepConv:
                matrix = depth_wise_matrix(block.token_mixer.dwconv, grid)
            else:
                matrix = next(attention).mean(1)
            labels = averaged(labels, matrix @ labels)
    return labels.mean(1), labels
