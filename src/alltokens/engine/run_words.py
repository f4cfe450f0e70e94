"""What a run says of itself: when it begins, when it ends, when it does not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from alltokens.engine.config import RunConfig
from alltokens.engine.feeding import Feed
from alltokens.engine.progress import duration
from alltokens.engine.run_folder import RunFolder
from alltokens.engine.runtime import Runtime, network
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingFailed
from alltokens.models.cost import gmacs, in_words, parameter_count


def introduction(config: RunConfig, runtime: Runtime, feed: Feed, step: nn.Module) -> list[str]:
    net, size = network(step), config.data.image_size
    cost = in_words(parameter_count(net), gmacs(net, size))
    processes = f" x {runtime.world} processes" if runtime.world > 1 else ""
    return [
        f"model       {config.model.name}, {cost} at {size} px",
        f"pictures    {feed.train_pictures} to train, {feed.val_pictures} to validate, {feed.num_classes} classes",
        f"runs on     {runtime.device}{processes}, {config.train.precision}",
    ]


def closing(
    config: RunConfig, folder: RunFolder, feed: Feed, trainer: Trainer, done_before: bool
) -> list[tuple[str, str]]:
    at = trainer.position
    rows = [("best top-1", f"{at.best_top1:.2f} % (epoch {at.best_epoch})")]
    if trainer.last_scores is not None:
        last = trainer.last_scores
        rows += [
            ("last top-1", f"{last.top1:.2f} %"),
            ("last top-5", f"{last.top5:.2f} %"),
            ("last loss", f"{last.loss:.4f}"),
        ]
    if done_before:
        rows.append(("note", "the run was complete already"))
    if feed.skipped:
        rows.append(("skipped", f"{len(feed.skipped)} unreadable pictures, listed in {folder.skipped_file}"))
    pictures = at.update * config.train.batch_size
    rows += [
        ("training", f"{duration(at.seconds)}, {pictures / max(at.seconds, 1e-9):,.0f} pictures/s"),
        ("run folder", str(folder.path)),
        ("weights", f"{folder.weights / 'best'} (timm: local-dir:{folder.weights / 'best'})"),
        ("look again", f"alltokens evaluate {folder.path}"),
        ("as a page", f"alltokens report {folder.path} --out report.html"),
    ]
    return rows


@contextmanager
def enough_memory(config: RunConfig, runtime: Runtime) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        train = config.train
        pictures = train.batch_size // (runtime.world * train.accumulate)
        raise TrainingFailed(
            f"out of memory with {pictures} pictures of {config.data.image_size} px at a time on {runtime.device}. "
            f"Three settings help: train.accumulate (now {train.accumulate}; twice that halves the pictures at a "
            f"time), train.precision bf16 (now {train.precision}), train.checkpoint_activations "
            f"(now {str(train.checkpoint_activations).lower()})"
        ) from error
