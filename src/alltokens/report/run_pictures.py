"""What a report shows of a run's own pictures, made with the weights that the run has kept.

Shapes: n pictures looked at, B pictures of a batch, K classes, N = h * w tokens, L layers, k kept labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from alltokens.core.label_maps import LabelMap
from alltokens.core.losses import blend_targets
from alltokens.data.datasets import PictureDataset, Sample, load_picture
from alltokens.data.picture_source import PictureSource
from alltokens.engine.assembly import build_step
from alltokens.engine.feeding import open_pictures
from alltokens.errors import UserError
from alltokens.explain.fluctuation import Followed, followed_shares, mixing_ratios
from alltokens.explain.maps import token_grid_of
from alltokens.explain.subject import Subject
from alltokens.labels.store import LabelStore
from alltokens.models.cost import gmacs
from alltokens.models.token_output import answers_for_tokens
from alltokens.supervision.mixer import Mixer

BUDGET = 2_000  # billions of multiply-accumulates: half a minute or so on two cores
FEWEST, MOST = 32, 1_000  # pictures that are looked at, if nobody says how many
SHOWN = 12  # best pictures, and as many worst ones
SAMPLES = 4  # mixed ones
OVERLAYS = 6
KEPT = 5  # classes of each token's prediction that go into the page


class Judged(NamedTuple):
    """One picture and what the model makes of it."""

    key: str
    picture: Image.Image  # as the network sees it
    label: int
    guess: int
    label_probability: float
    guess_probability: float


class Judgement(NamedTuple):
    looked: int
    of: int
    confusion: np.ndarray  # (K, K) counts: row the label, column the guess
    best: list[Judged]  # right, the surest first
    worst: list[Judged]  # the lowest probability of the label first


class MixedSample(NamedTuple):
    own: Tensor  # (3, H, W), and so on
    partner: Tensor
    mixed: Tensor
    names: tuple[str, str]
    share: float  # the partner's, by area
    target_share: float  # that of this run's target
    aligned_share: float | None  # None: TL-Align does not know this model
    input_shares: Tensor  # (h, w)
    aligned_shares: Tensor | None  # (h', w')
    targets: list[tuple[str, float, float | None]]  # (class, by area, aligned) of the classes that matter
    ratios: dict[str, Tensor] | None  # by method (L + 1,)


class Mixes(NamedTuple):
    samples: list[MixedSample]
    mixer: str
    follower: str
    mixes: bool  # whether the run itself mixes
    reason: str  # why nothing is aligned, if so


class Overlay(NamedTuple):
    """A picture with its label map, or the network's input with the classes of its tokens, or both."""

    key: str
    name: str  # of its class
    picture: Image.Image
    label_map: LabelMap | None  # (k, h, w), over the whole picture
    seen: Image.Image  # the network's input
    tokens: LabelMap | None  # (k, h, w), over the input


def picture_count(subject: Subject) -> int:
    """How many pictures a report looks at by itself: fewer of a model that takes longer."""
    cost = gmacs(subject.net, subject.image_size)
    return int(min(MOST, max(FEWEST, BUDGET / max(cost, 1e-9))))


def validation_pictures(subject: Subject) -> PictureSource:
    assert subject.config is not None
    return open_pictures(subject.config.data, "val", subject.class_names)


def spread_out(source: PictureSource, count: int) -> list[int]:
    """The indices of `count` pictures of all classes alike; the same ones every time."""
    chosen = np.random.default_rng(0).permutation(len(source))[:count]
    return np.sort(chosen).tolist()


def judge(subject: Subject, source: PictureSource, indices: Sequence[int], batch: int = 64) -> Judgement:
    """Run the network over these pictures; those that cannot be read are left out."""
    dataset = PictureDataset(source, subject.transform, on_bad_picture="mark")
    labels: list[int] = []
    rows: list[Tensor] = []
    known: list[int] = []
    for start in range(0, len(indices), batch):
        some = [(index, dataset[index]) for index in indices[start : start + batch]]
        some = [(index, sample) for index, sample in some if sample.label >= 0]
        if not some:
            continue
        with torch.inference_mode():
            rows.append(subject.net(torch.stack([sample.image for _, sample in some])).float().softmax(-1))
        labels += [sample.label for _, sample in some]
        known += [index for index, _ in some]
    if not known:
        raise UserError(f"none of {len(indices)} pictures of {source.location} could be read")
    probabilities, label = torch.cat(rows), torch.tensor(labels)  # (n, K), (n,)
    sure, guess = probabilities.max(1)
    own = probabilities.gather(1, label[:, None]).squeeze(1)
    classes = probabilities.shape[1]
    counts = torch.bincount(label * classes + guess, minlength=classes * classes).reshape(classes, classes)

    def told(at: int) -> Judged:
        picture = subject.transform.shown(load_picture(source, known[at]))
        numbers = float(own[at]), float(sure[at])
        return Judged(source.keys[known[at]], picture, int(label[at]), int(guess[at]), *numbers)

    order = own.argsort(stable=True).tolist()
    worst = [at for at in order if guess[at] != label[at]][:SHOWN]
    best = [at for at in reversed(order) if guess[at] == label[at]][:SHOWN]
    return Judgement(len(known), len(source), counts.numpy(), [told(at) for at in best], [told(at) for at in worst])


def labelled_pictures(subject: Subject, validation: PictureSource) -> tuple[PictureSource, LabelStore | None]:
    """The training pictures with their label maps where the run was taught by some, else those of validation."""
    config = subject.config
    assert config is not None
    if config.supervision.source == "class" or config.data.labels is None:
        return validation, None
    store = Path(config.data.labels)
    if subject.folder is not None and not store.exists() and (subject.folder / store.name).is_dir():
        store = subject.folder / store.name  # made within the run, which was moved or is looked at from elsewhere
    return open_pictures(config.data, "train", subject.class_names), LabelStore.open(store)


def mixes(subject: Subject, source: PictureSource, store: LabelStore | None, seed: int = 0) -> Mixes:
    """Pictures mixed as the run mixes them (by CutMix if it does not), with the targets that it would train on."""
    config = subject.config
    assert config is not None
    mixer, mixing = config.supervision.mixer, Mixer(**dataclasses.asdict(config.supervision.mixer)).active
    if not mixing:
        mixer = dataclasses.replace(mixer, name="cutmix")
    # Every picture a mix of its own, or one would see one box four times.
    always = dataclasses.replace(mixer, probability=1.0, per_sample=True)
    supervision = dataclasses.replace(config.supervision, mixer=always)
    step = build_step(subject.net, dataclasses.replace(config, supervision=supervision), len(subject.class_names))
    step.train()
    subject.net.eval()  # the step mixes, the network is as in evaluation
    batch = _batch(subject, source, store, 6 * SAMPLES)
    with torch.no_grad():
        _, parts = step(batch, torch.Generator().manual_seed(seed))
    step.detach()
    images, plan = batch.image, parts.plan
    aligned, ratios, reason = None, None, ""
    try:
        aligned = followed_shares(subject.net, images, plan)
        ratios = mixing_ratios(subject.net, images, plan)
    except UserError as error:
        reason = str(error)
    own = step.source.class_targets(batch, len(subject.class_names))
    before = blend_targets(own, plan.partner, plan.share)
    after = None if aligned is None else blend_targets(own, plan.partner, aligned.share)
    # Mixes of which one sees something, of two different classes where there are such.
    visible = [at for at in range(len(images)) if 0.15 <= float(plan.share[at]) <= 0.85]
    different = [at for at in visible if batch.label[at] != batch.label[plan.partner[at]]]
    shown = list(dict.fromkeys([*different, *visible, *range(len(images))]))[:SAMPLES]
    samples = [_sample(at, subject, batch, parts, aligned, ratios, before, after) for at in shown]
    return Mixes(samples, mixer.name, config.supervision.follower.name, mixing, reason)


def overlays(subject: Subject, source: PictureSource, store: LabelStore | None) -> list[Overlay]:
    """Pictures under their label maps, and under the classes of their tokens; none where the run has neither."""
    dense = answers_for_tokens(subject.net)
    if not dense and store is None:
        return []
    found: list[Overlay] = []
    for index in spread_out(source, OVERLAYS):
        picture, key = load_picture(source, index), source.keys[index]
        tokens = _token_map(subject, subject.transform(picture)[0]) if dense else None
        name = subject.class_names[int(source.labels[index])]
        found.append(
            Overlay(
                key,
                name,
                picture,
                None if store is None else LabelMap(*store[key]),
                subject.transform.shown(picture),
                tokens,
            )
        )
    return found


def _token_map(subject: Subject, image: Tensor) -> LabelMap:
    """What every token of the input is taken for, (k, h, w): its first classes, and the rest as tail."""
    net: Any = subject.net
    with torch.inference_mode():
        logits = net(image.unsqueeze(0), tokens=True).token_logits[0].float()  # (N, K)
    scores, ids = logits.topk(min(KEPT, logits.shape[1]), dim=-1)
    left = logits.scatter(1, ids, -torch.inf).logsumexp(-1)
    rows, columns = token_grid_of(net, subject.image_size)

    def placed(values: Tensor) -> Tensor:
        return values.T.reshape(-1, rows, columns)

    return LabelMap(placed(ids), placed(scores), left.reshape(rows, columns))


def _batch(subject: Subject, source: PictureSource, store: LabelStore | None, count: int) -> Sample:
    dataset = PictureDataset(source, subject.transform, labels=store, on_bad_picture="skip")
    return default_collate([dataset[index] for index in spread_out(source, count)])


def _sample(
    at: int,
    subject: Subject,
    batch: Sample,
    parts: Any,
    aligned: Followed | None,
    ratios: dict[str, Tensor] | None,
    before: Tensor,
    after: Tensor | None,
) -> MixedSample:
    plan, partner = parts.plan, int(parts.plan.partner[at])
    own_picture, other = batch.image[at], batch.image[partner]
    mask = plan.mask[at if len(plan.mask) > 1 else 0]
    grid = _input_grid(plan, aligned)
    strongest = before[at].topk(min(2, before.shape[1])).indices.tolist()
    classes = list(dict.fromkeys([int(batch.label[at]), int(batch.label[partner]), *strongest]))
    return MixedSample(
        own_picture,
        other,
        torch.lerp(own_picture, other, mask),
        (subject.class_names[int(batch.label[at])], subject.class_names[int(batch.label[partner])]),
        float(plan.share[at]),
        float(parts.share[at]),
        None if aligned is None else float(aligned.share[at]),
        plan.token_share(grid)[at],
        None if aligned is None else aligned.token_shares[at],
        [
            (subject.class_names[one], float(before[at, one]), None if after is None else float(after[at, one]))
            for one in classes
        ],
        None if ratios is None else {name: ratio[:, at] for name, ratio in ratios.items()},
    )


def _input_grid(plan: Any, aligned: Followed | None) -> tuple[int, int]:
    """The grid of the tokens at the input; squares of 16 pixels where nothing is known of tokens."""
    if aligned is not None:
        return aligned.grid
    rows, columns = plan.image_size
    return max(1, rows // 16), max(1, columns // 16)
