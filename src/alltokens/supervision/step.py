"""The training step as a value: a batch in, a loss and its named parts out.

Shapes: B batch, C channels, H and W picture, N tokens, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from alltokens.core.losses import blend_targets, smooth_one_hot, soft_cross_entropy
from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.core.token_loss import TokenLabelLoss
from alltokens.core.token_targets import TokenTargets
from alltokens.errors import UserError, unknown
from alltokens.follow.area import Area
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from alltokens.models.token_output import answers_for_tokens
from alltokens.supervision.embedding import EmbeddingMix, grid_of
from alltokens.supervision.mixer import ON_PATCHES, Mixer
from alltokens.supervision.source import Source

DENSE_WEIGHT = 0.5  # of token labels, where nothing else is said (Token Labeling, equation 4)

Function = TypeVar("Function", bound=Callable[..., Any])


def _outside_the_graph(function: Function) -> Function:
    """torch.compiler.disable, whose own types say nothing."""
    return cast(Function, torch.compiler.disable(function))  # pyright: ignore[reportUnknownMemberType]


class Batch(Protocol):
    """What a step needs of a batch; `Sample` has it. Label maps ask for its `matrix` and `maps` too."""

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
    loss_token: Tensor | None = None  # these three only with a dense loss
    token_logits: Tensor | None = None  # (B, N, K)
    token_targets: TokenTargets | None = None  # mixed


class Supervision(nn.Module):
    """source x mixer x follower: `forward(batch, generator)` gives `(loss, parts)`.

    `net` maps pictures (B, C, H, W) to logits (B, K). Options of a part: pass it as an object, `Source("tokens",
    tail="true")`, `Mixer("cutmix", patch_size=16)`, or `TLAlign(net, layers=[12])` on the bare network; a mixer that
    wants whole patches takes the network's.

    The loss is class_weight * that of the picture + dense_weight * that of its tokens, `participation` of which take
    part. The source `tokens` weighs them 0.5 unless told otherwise, the others 0: without a dense loss no dense head is
    needed. With one the network must have it (`TokenClassifier(model)`, or LV-ViT with dense=True).

    This is the module to compile, and to wrap by DDP or FSDP; it adds no parameter to the network's own.
    """

    def __init__(
        self,
        net: nn.Module,
        source: str | Source = "class",
        mixer: str | Mixer = "none",
        follower: str | Follower = "area",
        *,
        smoothing: float | None = None,
        dense_weight: float | None = None,
        class_weight: float = 1.0,
        participation: float = 1.0,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        classes = num_classes if num_classes is not None else getattr(net, "num_classes", None)
        if not isinstance(classes, int) or classes < 1:
            raise UserError("the network does not tell its num_classes; pass Supervision(..., num_classes=K)")
        self.net = net
        self.source = Source(source) if isinstance(source, str) else source
        if smoothing is not None:
            self.source = replace(self.source, smoothing=smoothing)
        if dense_weight is None:
            dense_weight = DENSE_WEIGHT if self.source.name == "tokens" else 0.0
        self.token_loss = TokenLabelLoss(dense_weight, class_weight, participation)
        if self.is_dense and not answers_for_tokens(net):
            raise UserError(
                f"a dense loss asks every token, and this {type(net).__name__} does not answer for them: take "
                "TokenClassifier(net), build LV-ViT with dense=True, or set dense_weight=0"
            )
        self.mixer = _fitted(Mixer(mixer) if isinstance(mixer, str) else mixer, net)
        self._embedding = EmbeddingMix(net) if self.mixer.name == "mixtoken" else None
        self.follower = _attached(follower, net) if isinstance(follower, str) else follower
        self._area = Area(token_grid(net))  # where nothing is mixed
        self.num_classes = classes

    @property
    def is_dense(self) -> bool:
        return self.token_loss.dense_weight > 0

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> tuple[Tensor, Parts]:
        """In evaluation mode nothing is mixed, followed or smoothed: the loss is the plain cross-entropy."""
        if not self.training:
            return self._evaluated(batch)
        plan = self.draw_plan(batch.image, generator)
        follower = self.follower if self.mixer.active else self._area
        with follower.follow(plan):
            logits, token_logits = self._answers(batch.image, plan)
        share = follower.share
        token_shares = self._token_shares(follower)
        own_targets = self.source.class_targets(batch, self.num_classes)
        targets = blend_targets(own_targets, plan.partner, share) if self.mixer.active else own_targets
        if token_logits is None:
            loss = self.token_loss.class_weight * (loss_class := soft_cross_entropy(logits, targets))
            return loss, Parts(logits, plan, targets, share, token_shares, loss_class)
        grid = grid_of(token_logits.shape[1], (batch.image.shape[-2], batch.image.shape[-1]))
        token_targets = self.source.token_targets(batch, own_targets, grid, self.num_classes)
        if self.mixer.active:
            token_targets = self._followed(token_targets, plan, token_shares)
        losses = self.token_loss.parts((logits, token_logits), targets, token_targets, generator)
        loss = self.token_loss.class_weight * losses.loss_class + self.token_loss.dense_weight * losses.loss_token
        return loss, Parts(logits, plan, targets, share, token_shares, *losses, token_logits, token_targets)

    def detach(self) -> None:
        """The network is as it was before."""
        if self._embedding is not None:
            self._embedding.detach()
        if isinstance(self.follower, Area | TLAlign | TransMix):
            self.follower.detach()

    def _evaluated(self, batch: Batch) -> tuple[Tensor, Parts]:
        plan = self.draw_plan(batch.image, None)
        logits = self.net(batch.image)
        targets = smooth_one_hot(batch.label, self.num_classes)
        loss = soft_cross_entropy(logits, targets)
        with self._area.follow(plan):
            pass
        return loss, Parts(logits, plan, targets, self._area.share, self._token_shares(self._area), loss)

    def _answers(self, images: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor | None]:
        """The logits of the mixed pictures (B, K), and of their tokens (B, N, K) where those are trained."""
        mixing = nullcontext()
        if self.mixer.active and self._embedding is not None:
            mixing = self._embedding.mixing(plan)
        elif self.mixer.active:
            images = mix_images(images, plan)
        with mixing:
            if not self.is_dense:
                return self.net(images), None
            output = self.net(images, tokens=True)
            return output[0], output[1]

    def _followed(self, targets: TokenTargets, plan: MixPlan, token_shares: Tensor | None) -> TokenTargets:
        """Each token's own label, mixed: by what is visible at its place, or by what attention has brought there."""
        if not isinstance(self.follower, TLAlign):
            return targets.mix(plan)
        assert token_shares is not None
        return targets.follow(plan, token_shares, self.num_classes)

    def _token_shares(self, follower: Follower) -> Tensor | None:
        return None if isinstance(follower, Area) and follower.grid is None else follower.token_shares

    @_outside_the_graph
    def draw_plan(self, images: Tensor, generator: torch.Generator | None) -> MixPlan:
        """The plan of one batch, on its device; drawn outside the compiled graph, as it is a handful of numbers."""
        size = (images.shape[-2], images.shape[-1])
        plan = self.mixer.draw(len(images), size, generator) if self.training else MixPlan.identity(len(images), size)
        plan = plan.to(images.device)
        if self.training and self.mixer.active and isinstance(self.follower, TLAlign | TransMix):
            self.follower.prepare(plan)
        return plan


def token_grid(net: nn.Module) -> tuple[int, int] | None:
    """Rows and columns of the patches that a network cuts pictures into, if it says so."""
    grid = getattr(_embedding(net), "grid_size", None)
    return (int(grid[0]), int(grid[1])) if grid is not None else None


FOLLOWERS: dict[str, Callable[[nn.Module], Follower]] = {
    "area": lambda net: Area(token_grid(net)),
    "transmix": TransMix,
    "tl_align": TLAlign,
}


def patch_size(net: nn.Module) -> tuple[int, int] | None:
    """The side of a patch in pixels, for networks that cut pictures into patches."""
    size = getattr(_embedding(net), "patch_size", None)
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _embedding(net: nn.Module) -> object:
    """timm's PatchEmbed of a network, or of the one that it wraps."""
    for bare in (net, getattr(net, "model", None)):
        for name in ("patch_embed", "stem"):
            found = getattr(bare, name, None)
            if hasattr(found, "grid_size"):  # overlapping patches have none: their side is not their stride
                return found
    return None


def _fitted(mixer: Mixer, net: nn.Module) -> Mixer:
    """The mixer with the network's patches, where it wants whole ones and was told no size."""
    if mixer.name not in ON_PATCHES or mixer.patch_size is not None:
        return mixer
    size = patch_size(net)
    if size is None:
        raise UserError(
            f"the mixer {mixer.name} mixes whole patches, and this {type(net).__name__} has no patch size of its own: "
            f'say Mixer("{mixer.name}", patch_size=...), in pixels'
        )
    return replace(mixer, patch_size=size[0])


def _attached(follower: str, net: nn.Module) -> Follower:
    if follower not in FOLLOWERS:
        raise unknown("follower", follower, FOLLOWERS)
    return FOLLOWERS[follower](net)
