"""The patch embedding of LV-ViT: convolutions, each with BatchNorm and ReLU, then a projection onto the tokens.

Shapes: B batch, c channels, H and W picture, h and w token grid, N = h * w tokens, C width.

Kernels and strides are written as in the paper's ablation (supplement, table 3), the projection last; for 16-pixel
patches, with 64 channels, its rows are

    1 convolution    [16]                  [16]                 the plain patch embedding, 81.1 %
    2                [7, 8]                [2, 8]               81.4 %
    3                [7, 3, 8]             [2, 2, 4]            81.4 %; the projection's patches overlap
    3                [7, 3, 8]             [2, 1, 8]            81.9 %
    4                [7, 3, 3, 8]          [2, 1, 1, 8]         82.2 %: the published models, and the default here
    6                [7, 3, 3, 3, 3, 8]    [2, 1, 1, 1, 1, 8]   82.2 %

The default at other patch sizes keeps all but the projection, whose kernel and stride are half the patch. It works at
half the picture's resolution, which costs 16 M multiply-accumulates with 24 channels at 64 pixels and 8-pixel patches.
A stem for small pictures is kernels [3, 3, 3, 1], strides [2, 2, 2, 1], channels [24, 32, 64]: 4 M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from alltokens.errors import UserError

Pair = tuple[int, int]


class Convolution(NamedTuple):
    channels: int
    kernel: int
    stride: int

    @property
    def padding(self) -> int:
        """What makes a side of H pixels one of H / stride: 3 for 7 / 2, 1 for 3 / 1, 0 for 8 / 8."""
        return (self.kernel - self.stride + 1) // 2

    def build(self, in_channels: int, **options: Any) -> nn.Conv2d:
        return nn.Conv2d(in_channels, self.channels, self.kernel, self.stride, self.padding, **options)


def stem_convolutions(
    patch_size: int,
    embed_dim: int,
    channels: int | Sequence[int] = 64,
    kernels: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> list[Convolution]:
    """The convolutions of a stem, the projection last."""
    if (kernels is None) != (strides is None):
        raise UserError("stem_kernels and stem_strides belong together: give both, or none for the paper's stem")
    if kernels is None or strides is None:
        kernels, strides = (7, 3, 3, patch_size // 2), (2, 1, 1, patch_size // 2)
    before = [channels] * (len(kernels) - 1) if isinstance(channels, int) else list(channels)
    lengths = (len(kernels), len(strides), len(before) + 1)
    if not kernels or len(set(lengths)) != 1:
        raise UserError(
            "a stem needs one kernel and one stride per convolution, the projection included, and channels for each "
            f"but the projection; got {lengths[0]} kernels, {lengths[1]} strides, {len(before)} channels"
        )
    if math.prod(strides) != patch_size:
        raise UserError(
            f"the strides of the stem must multiply to the patch size {patch_size}, got {list(strides)}; "
            "stem_strides=[2, 2, 2, 1] makes 8, [2, 1, 1, 8] makes 16"
        )
    for kernel, stride in zip(kernels, strides, strict=True):
        if kernel < stride or (stride == 1 and kernel % 2 == 0):
            raise UserError(
                "a stem's kernel must be as large as its stride at least, and odd where the stride is 1; "
                f"got kernel {kernel} with stride {stride}"
            )
    return [Convolution(*row) for row in zip([*before, embed_dim], kernels, strides, strict=True)]


class ConvStem(nn.Module):
    """(B, c, H, W) -> (B, N, C), or (B, h, w, C) for pictures of changing size; with the face of timm's PatchEmbed."""

    def __init__(
        self,
        img_size: int | Pair = 224,
        patch_size: int | Pair = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        channels: int | Sequence[int] = 64,
        kernels: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        bias: bool = True,
        strict_img_size: bool = True,
        dynamic_img_pad: bool = False,
        output_fmt: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.patch_size = _pair(patch_size)
        if self.patch_size[0] != self.patch_size[1]:
            raise UserError(f"a convolutional stem makes square patches, got patch_size {self.patch_size}")
        if dynamic_img_pad:
            raise UserError("a convolutional stem pads no picture: resize them to a multiple of the patch size")
        self.strict_img_size = strict_img_size
        self.as_grid = output_fmt == "NHWC"
        self._resize(_pair(img_size))
        *before, last = stem_convolutions(self.patch_size[0], embed_dim, channels, kernels, strides)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.depth = len(before)
        width = in_chans
        for number, convolution in enumerate(before, 1):
            self.add_module(f"conv{number}", convolution.build(width, bias=False, **place))
            self.add_module(f"bn{number}", nn.BatchNorm2d(convolution.channels, **place))
            width = convolution.channels
        self.proj = last.build(width, bias=bias, **place)

    def forward(self, images: Tensor) -> Tensor:
        self._check(images.shape[-2], images.shape[-1])
        picture = images
        for number in range(1, self.depth + 1):
            picture = F.relu(getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(picture)))
        picture = self.proj(picture)  # (B, C, h, w)
        return picture.permute(0, 2, 3, 1) if self.as_grid else picture.flatten(2).transpose(1, 2)

    def set_input_size(self, img_size: int | Pair | None = None, patch_size: int | Pair | None = None) -> None:
        if patch_size is not None and _pair(patch_size) != self.patch_size:
            raise UserError(f"the stem's strides fix its patch size at {self.patch_size}: build another model instead")
        if img_size is not None:
            self._resize(_pair(img_size))

    def feat_ratio(self, as_scalar: bool = True) -> int | Pair:
        return self.patch_size[0] if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: Pair) -> Pair:
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def _resize(self, img_size: Pair) -> None:
        if img_size[0] % self.patch_size[0] or img_size[1] % self.patch_size[1]:
            raise UserError(f"img_size must divide by the patch size {self.patch_size[0]}, got {img_size}")
        self.img_size = img_size
        self.grid_size = self.dynamic_feat_size(img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def _check(self, height: int, width: int) -> None:
        if self.strict_img_size and (height, width) != self.img_size:
            raise UserError(
                f"this model was built for pictures of {self.img_size}, got ({height}, {width}): build it with that "
                "img_size, call set_input_size, or build it with dynamic_img_size=True"
            )
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise UserError(f"pictures must divide by the patch size {self.patch_size[0]}, got ({height}, {width})")


def _pair(size: int | Sequence[int]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
