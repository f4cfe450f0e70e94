"""The training step as a value: a batch in, a loss and its named parts out.

Shapes: B batch, C channels, H and W picture, N tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.errors import UserError, unknown
from alltokens.follow.area import Area
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from alltokens.supervision.mixer import Mixer

SOURCES = ("class",)


Function = TypeVar("Function", bound=Callable[..., Any])


def _outside_the_graph(function: Function) -> Function:
    """torch.compiler.disable, whose own types say nothing."""
    return cast(Function, torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


class Batch(Protocol):
    """What a step needs of a batch; `Sample` has it."""

    @property
    def image(self) -> Tensor: ...  # (B, C, H, W)
    @property
    def label(self) -> Tensor: ...  # (B,) int64


class Follower(Protocol):
    """What the mixed label follows. After a forward inside `follow(plan)` the shares of that forward are there."""

    @property
    def share(self) -> Tensor: ...  # (B,)
    @property
    def token_shares(self) -> Tensor: ...  # (B, N)
    def follow(self, plan: MixPlan) -> AbstractContextManager[object]: ...


class Parts(NamedTuple):
    """What a step's loss is made of."""

    output: Tensor  # (B, K) logits
    plan: MixPlan
    targets: Tensor  # (B, K), mixed
    share: Tensor  # (B,): the partner's share of each target
    token_shares: Tensor | None  # (B, N): the partner's share of each token, where the follower knows it
    loss_class: Tensor
    loss_token: Tensor | None  # only with a dense loss


class Supervision(nn.Module):
    """source x mixer x follower: `forward(batch, generator)` gives `(loss, parts)`.

    `net` maps pictures (B, C, H, W) to logits (B, K). `mixer` and `follower` are names or objects; for options of a
    mixer pass `Mixer("cutmix", patch_size=16)`, for those of a follower `TLAlign(net, layers=[12])`, on the bare
    network. This is the module to compile, and to wrap by DDP or FSDP; it adds no parameter to the network's own.
    """

    def __init__(
        self,
        net: nn.Module,
        source: str = "class",
        mixer: str | Mixer = "none",
        follower: str | Follower = "area",
        *,
        smoothing: float = 0.0,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        if not 0 <= smoothing < 1:
            raise UserError(f"smoothing must lie in [0, 1), got {smoothing}")
        classes = num_classes if num_classes is not None else getattr(net, "num_classes", None)
        if not isinstance(classes, int) or classes < 1:
            raise UserError("the network does not tell its num_classes; pass Supervision(..., num_classes=K)")
        self.net = net
        self.source = source
        self.mixer = Mixer(mixer) if isinstance(mixer, str) else mixer
        self.follower = _attached(follower, net) if isinstance(follower, str) else follower
        self._area = Area(token_grid(net))  # where nothing is mixed
        self.smoothing = smoothing
        self.num_classes = classes

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Parts]:
        """In evaluation mode nothing is mixed, followed or smoothed: the loss is the plain cross-entropy."""
        mixes = self.training and self.mixer.active
        plan = self.draw_plan(batch.image, generator)
        images = mix_images(batch.image, plan) if mixes else batch.image
        follower = self.follower if mixes else self._area
        with follower.follow(plan):
            logits = self.net(images)
        share = follower.share
        targets = smooth_one_hot(batch.label, self.num_classes, self.smoothing if self.training else 0.0)
        if mixes:
            targets = blend_targets(targets, plan.partner, share)
        loss = soft_cross_entropy(logits, targets)
        knows_tokens = not isinstance(follower, Area) or follower.grid is not None
        token_shares = follower.token_shares if knows_tokens else None
        return loss, Parts(logits, plan, targets, share, token_shares, loss, None)

    @_outside_the_graph
    def draw_plan(self, images: Tensor, generator: torch.Generator | None) -> MixPlan:
        """The plan of one batch, on its device; drawn outside the compiled graph, as it is a handful of numbers."""
        size = (images.shape[-2], images.shape[-1])
        mixer = self.mixer if self.training else Mixer("none")
        plan = mixer.draw(len(images), size, generator)
        return plan.to(images.device)


def token_grid(net: nn.Module) -> tuple[int, int] | None:
    """Rows and columns of the patches that a network cuts pictures into, if it says so."""
    grid = getattr(getattr(net, "patch_embed", None), "grid_size", None)
    return (int(grid[0]), int(grid[1])) if grid is not None else None


FOLLOWERS: dict[str, Callable[[nn.Module], Follower]] = {
    "area": lambda net: Area(token_grid(net)),
    "transmix": TransMix,
    "tl_align": TLAlign,
}


def _attached(follower: str, net: nn.Module) -> Follower:
    if follower not in FOLLOWERS:
        raise unknown("follower", follower, FOLLOWERS)
    return FOLLOWERS[follower](net)
