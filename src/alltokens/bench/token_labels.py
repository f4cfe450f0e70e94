"""`alltokens bench token_labels`: what it costs to train every token with its own label.

Shapes: B batch, N tokens, K classes, k kept classes, h and w cells of a label map.

Three arms in one run, the same model, pictures and MixToken boxes: the picture's label alone, without a dense head;
token labels, from sparse maps that lie on the device; and token labels the published way, which writes every target
out, B x N x K numbers in float32, before it compares. A step is forward, backward and AdamW. On a GPU compiled arms
live in a process each (apart.py).

What no implementation can save is the dense head itself, a product of B*N x C with C x K, forward and twice backward:
for LV-ViT-S 196 * 384 * 1000 = 75 M multiply-accumulates a picture beside the network's 6.6 G, 1.2 % of a step if they
run at one speed. The logits then are B*N*K numbers, in bfloat16 100 MB at batch 256: written by the head, read once for
the loss, read and replaced by their gradient, and that read twice by the head's backward, a quarter of a millisecond at
the memory speed of an H200. `floor` counts the products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

from alltokens.bench.over_models import Case, StepBench, bench_models, training_step
from alltokens.bench.results import Row
from alltokens.bench.timing import Build, Step
from alltokens.core import geometry
from alltokens.core.label_maps import LabelMap
from alltokens.core.losses import blend_targets, soft_cross_entropy
from alltokens.core.plan import MixPlan
from alltokens.core.token_loss import token_loss
from alltokens.errors import UserError
from alltokens.models.cost import model_cost, weightless
from alltokens.models.token_classifier import TokenClassifier
from alltokens.supervision.embedding import EmbeddingMix, find_embedding
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.source import Source
from alltokens.supervision.step import DENSE_WEIGHT, Supervision, patch_size, token_grid

CLASS_ALONE, TOKENS, PUBLISHED = "class label alone", "token labels", "token labels as published"
SMOOTHING = 0.1
KEPT, CELLS = 5, 18  # what the published maps hold (FACTS 2.2)
PEAK_AT_MOST = 1.10

CASES = {"cuda": {"lvvit_s": Case(256, 1.06)}, "cpu": {"lvvit_t": Case(4, 1.06)}}
OTHER = {"cuda": Case(128), "cpu": Case(4)}


class Labelled(NamedTuple):
    """A batch with its label maps, as a training step wants it."""

    image: Tensor
    label: Tensor
    matrix: Tensor
    maps: LabelMap


def bench_token_labels(
    models: Sequence[str] = (),
    *,
    batch: int | None = None,
    rounds: int | None = None,
    modes: Sequence[str] | None = None,
    device: torch.device | None = None,
    apart: bool | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each arm of each model in each mode; see `bench_models`."""
    bench = StepBench("token_labels", CASES, OTHER, _check, _arms, TOKENS, PEAK_AT_MOST)
    return bench_models(
        bench, models, batch=batch, rounds=rounds, modes=modes, device=device, apart=apart, progress=progress
    )


def _check(name: str) -> None:
    net = weightless(name)
    find_embedding(net)  # refuses what MixToken cannot mix
    if token_grid(net) is None:
        raise UserError(f"{name} does not tell the grid of its tokens; a ViT does, lvvit_s or deit_small_patch16_224")


def floor(name: str) -> float:
    """The least ratio to a step without: the dense head's products beside the network's, all at one speed."""
    net: Any = weightless(name)
    cost = model_cost(net)
    grid = token_grid(net)
    assert cost.gmacs is not None and grid is not None
    return 1 + grid[0] * grid[1] * net.num_features * net.num_classes / (1e9 * cost.gmacs)


def labelled_batch(batch: int, size: Sequence[int], classes: int, device: torch.device, seed: int = 0) -> Labelled:
    """Random pictures, maps and crops of a tenth of the picture and more, half of them mirrored."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, *size, generator=generator)
    labels = torch.randint(classes, (batch,), generator=generator)
    kept = min(KEPT, classes)
    first = torch.randint(classes, (batch, 1, CELLS, CELLS), generator=generator)
    ids = ((first + classes // kept * torch.arange(kept)[:, None, None]) % classes).int()  # no class twice in a cell
    scores = (10 * torch.rand(batch, kept, CELLS, CELLS, generator=generator)).sort(1, descending=True).values
    side = 0.3 + 0.7 * torch.rand(batch, 2, generator=generator)
    corner = torch.rand(batch, 2, generator=generator) * (1 - side)
    crops = geometry.crop(corner[:, 0], corner[:, 1], side[:, 0], side[:, 1])
    matrix = geometry.compose(geometry.flip(torch.rand(batch, generator=generator) < 0.5), crops)
    tail = torch.randn(batch, CELLS, CELLS, generator=generator).half()
    maps = LabelMap(ids, scores.half(), tail).to(device)
    return Labelled(images.to(device), labels.to(device), matrix.to(device), maps)


class PublishedStep(nn.Module):
    """`forward(batch, generator)` as the published program does it: targets in full, token logits un-mixed (FACTS 2.2).

    With the axes of crops set right, so that the loss is ours to the rounding and nothing but the way differs.
    """

    def __init__(self, net: nn.Module, mixer: Mixer, smoothing: float, dense_weight: float = DENSE_WEIGHT) -> None:
        super().__init__()
        self.net, self.mixer, self.smoothing, self.dense_weight = net, mixer, smoothing, dense_weight
        self._embedding = EmbeddingMix(net)

    def forward(self, batch: Labelled, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        plan, class_targets, token_targets, pasted = _prepare(self, batch, generator)  # pyright: ignore[reportCallIssue]
        with self._embedding.mixing(plan):
            logits, token_logits = net(batch.image, tokens=True)
        token_logits = torch.where(pasted, token_logits[plan.partner], token_logits)
        loss = soft_cross_entropy(logits, blend_targets(class_targets, plan.partner, plan.share))
        return loss + self.dense_weight * token_loss(token_logits, token_targets), token_targets


@torch.compiler.disable  # pyright: ignore[reportUnknownMemberType, reportUntypedFunctionDecorator]
@torch.no_grad()
def _prepare(
    step: PublishedStep, batch: Labelled, generator: torch.Generator | None
) -> tuple[MixPlan, Tensor, Tensor, Tensor]:
    """The plan, the labels of pictures (B, K) and tokens (B, N, K), and which tokens are pasted (B, N, 1)."""
    net: Any = step.net
    classes, grid = net.num_classes, token_grid(net)
    assert grid is not None
    size = (batch.image.shape[-2], batch.image.shape[-1])
    plan = step.mixer.draw(len(batch.image), size, generator).to(batch.image.device)
    planes = torch.zeros(len(batch.image), classes, CELLS, CELLS, device=batch.image.device)
    planes = planes.scatter(1, batch.maps.ids.long(), batch.maps.scores.float())  # (B, K, h, w)
    mirrored = batch.matrix[:, 0, 0] < 0
    planes = torch.where(mirrored[:, None, None, None], planes.flip(3), planes)
    width = batch.matrix[:, 0, 0].abs()
    left = torch.where(mirrored, 1 - batch.matrix[:, 0, 2], batch.matrix[:, 0, 2])
    top, height = batch.matrix[:, 1, 2], batch.matrix[:, 1, 1]
    corners = torch.stack([left, top, left + width, top + height], 1) * CELLS - 0.5
    boxes = torch.cat([torch.arange(len(corners), device=corners.device)[:, None], corners], 1)  # (B, 5)

    def labels(parts: tuple[int, int]) -> Tensor:
        mean = roi_align(planes, boxes, parts, sampling_ratio=-1, aligned=False)  # (B, K, *parts)
        low = step.smoothing / classes
        return mean.flatten(2).softmax(1).transpose(1, 2) * (1 - step.smoothing + low) + low

    return plan, labels((1, 1)).squeeze(1), labels(grid), plan.token_share(grid).flatten(1)[..., None] > 0.5


def _arms(name: str, batch: int, mode: str, device: torch.device) -> dict[str, Build]:
    steps = {CLASS_ALONE: _class_alone, TOKENS: _tokens, PUBLISHED: _published}
    return {arm: partial(_step, step, name, batch, mode, device) for arm, step in steps.items()}


def _step(
    make: Callable[[str, torch.device, Mixer], nn.Module], name: str, batch: int, mode: str, device: torch.device
) -> Step:
    module: Any = make(name, device, Mixer("mixtoken", patch_size=patch_size(weightless(name))[0]))  # pyright: ignore[reportOptionalSubscript]
    size, classes = module.net.pretrained_cfg["input_size"], module.net.num_classes
    return training_step(module, batch, mode, device, labelled_batch(batch, size, classes, device))


def _class_alone(name: str, device: torch.device, mixer: Mixer) -> nn.Module:
    return Supervision(_net(name, device), mixer=mixer, smoothing=SMOOTHING)


def _tokens(name: str, device: torch.device, mixer: Mixer) -> nn.Module:
    net = _net(name, device, dense=True)
    return Supervision(net, Source("tokens", smoothing=SMOOTHING), mixer, dense_weight=DENSE_WEIGHT)


def _published(name: str, device: torch.device, mixer: Mixer) -> nn.Module:
    return PublishedStep(_net(name, device, dense=True), mixer, SMOOTHING)


def _net(name: str, device: torch.device, dense: bool = False) -> nn.Module:
    """The same weights in every arm, and a dense head of its own or beside timm's model."""
    own = timm.models.is_model_in_modules(name, ["lvvit"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options: dict[str, Any] = {"dense": dense} if own else {}
        net: nn.Module = timm.create_model(name, **options)
        if dense and not own:
            net = TokenClassifier(net)
    return net.to(device).train()
