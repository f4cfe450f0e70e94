"""How far our rule for followed token labels is from carrying K-wide labels through the network; writes a CSV.

python benchmarks/transport.py RUN [PICTURES]

RUN was trained with token labels (the quickstart, say). Its training pictures are mixed as it mixes them, always, and
TL-Align follows. The result goes into docs/token_labels.md too.

The oracle: the network's transport of shares is linear, so one pass for each token gives its matrix, which carries
whole labels. Distances are total variation per token (0: the same label, 1: nothing in common): of our rule, and of
labels that are pasted and not followed, both to the oracle.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan
from alltokens.core.token_targets import TokenTargets
from alltokens.data.datasets import PictureDataset, Sample
from alltokens.engine.assembly import build_net, build_step, build_train_transform
from alltokens.engine.feeding import open_pictures
from alltokens.engine.run_folder import RunFolder, load_config, read_metrics
from alltokens.errors import UserError
from alltokens.follow.tl_align import TLAlign
from alltokens.labels.store import LabelStore
from alltokens.models.weights import load_weights
from alltokens.supervision.embedding import grid_of, mix_embeddings

FILE = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parent.parent / "docs" / "token_labels.md"
BATCH = 16


class Distances(NamedTuple):
    """(B,): mean over the tokens of each picture."""

    ours: Tensor
    pasted: Tensor


def carried(net: nn.Module, images: Tensor, plan: MixPlan, aligner: TLAlign) -> Tensor:
    """(B, N): the partner's share of each output token."""
    return _followed(net, images, plan, aligner, plan)


def transport(net: nn.Module, images: Tensor, plan: MixPlan, aligner: TLAlign, grid: tuple[int, int]) -> Tensor:
    """(B, N, N): how much of each input token is in each output token, on the batch that `plan` mixes."""
    height, width = plan.image_size[0] // grid[0], plan.image_size[1] // grid[1]
    columns: list[Tensor] = []
    for token in range(grid[0] * grid[1]):
        row, column = divmod(token, grid[1])
        mask = torch.zeros_like(plan.mask[:1])
        mask[:, row * height : (row + 1) * height, column * width : (column + 1) * width] = 1
        alone = MixPlan(plan.partner, mask, plan.place)  # shares to carry, of this token alone
        columns.append(_followed(net, images, plan, aligner, alone))
    return torch.stack(columns, -1)


def _followed(net: nn.Module, images: Tensor, plan: MixPlan, aligner: TLAlign, shares: MixPlan) -> Tensor:
    """Mix by `plan`, carry the shares of another."""
    mixing = nullcontext()
    if plan.place == "pixels":
        images = mix_images(images, plan)
    else:
        mixing = mix_embeddings(getattr(net, "model", net), plan)
    with torch.no_grad(), aligner.follow(shares), mixing:
        net(images)
    return aligner.token_shares


def distances(
    net: nn.Module, images: Tensor, plan: MixPlan, aligner: TLAlign, targets: TokenTargets, classes: int
) -> Distances:
    pasted = targets.mix(plan).dense(classes)
    oracle = transport(net, images, plan, aligner, targets.grid).to(pasted.dtype) @ pasted
    ours = targets.follow(plan, carried(net, images, plan, aligner), classes).dense(classes)
    return Distances(*((labels - oracle).abs().sum(-1).mean(-1) / 2 for labels in (ours, pasted)))


def measure(run: Path, pictures: int) -> dict[str, str]:
    config = load_config(run)
    if config.supervision.source != "tokens" or config.data.labels is None:
        raise UserError(f"{run} was not trained with token labels")
    source, store = open_pictures(config.data, "train"), LabelStore.open(config.data.labels)
    classes = len(source.class_names)
    net = build_net(config, classes)
    load_weights(net, RunFolder(run).weights / "best")
    step = build_step(net, config, classes)
    mixer = dataclasses.replace(step.mixer, probability=1.0, per_sample=True)
    aligner = TLAlign(net)
    net.eval()
    data = PictureDataset(source, build_train_transform(config.augment, config.data), labels=store)
    generator = torch.Generator().manual_seed(0)
    found: list[Distances] = []
    for start in range(0, pictures, BATCH):
        batch: Sample = default_collate([data[index] for index in range(start, min(start + BATCH, pictures))])
        plan = mixer.draw(len(batch.label), config.data.image_size, generator)
        own = step.source.class_targets(batch, classes)
        with torch.no_grad():
            tokens = net(batch.image[:1], tokens=True).token_logits.shape[1]
        grid = grid_of(tokens, (config.data.image_size, config.data.image_size))
        targets = step.source.token_targets(batch, own, grid, classes)
        found.append(distances(net, batch.image, plan, aligner, targets, classes))
    top1 = max(line["top1"] for line in read_metrics(run) if line["kind"] == "evaluation")
    trained = {"model": config.model.name, "data": str(config.data.root), "epochs": str(config.train.epochs)}
    row = trained | {"top1": f"{top1:.1f}", "mixer": mixer.name, "pictures": str(pictures)}
    for name in Distances._fields:
        values = torch.cat([getattr(one, name) for one in found])
        row |= {f"{name}_mean": f"{float(values.mean()):.4f}", f"{name}_deviation": f"{float(values.std()):.4f}"}
    return row


def main(words: list[str]) -> None:
    if not words:
        sys.exit(__doc__)
    row = measure(Path(words[0]), int(words[1]) if len(words) > 1 else 256)
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
    print(row)


def filled(page: str, row: dict[str, str]) -> str:
    """The page with what was measured."""
    said = (
        f"{row['model']} on {row['data']} after {row['epochs']} epochs ({row['top1']} % top-1), {row['pictures']} "
        f"training pictures mixed by {row['mixer']}, mean and standard deviation over the pictures: our rule "
        f"{row['ours_mean']} ± {row['ours_deviation']}, labels that are pasted and not followed "
        f"{row['pasted_mean']} ± {row['pasted_deviation']}."
    )
    return re.sub(
        r"(<!-- benchmarks/transport -->\n).*?(<!-- end -->)",
        rf"\g<1>{textwrap.fill(said, 120)}\n\g<2>",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
