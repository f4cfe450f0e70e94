"""Scores of a training step's network on a stream of batches, exact for any number of processes.

Shapes: B batch, C channels, H and W picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from alltokens.data.datasets import Sample
from alltokens.engine.metrics import Scores, ScoreSums


def score(
    step: nn.Module,
    batches: Iterable[Sample],
    *,
    forwards: int,
    batch_size: int,
    image_size: int,
    device: torch.device,
    channels_last: bool = False,
) -> Scores:
    """Run `step` (a Supervision, wrapped or not) over this process's batches and add up over all processes.

    Every process makes the same number of forwards on batches of the same size, as sharded and compiled models need;
    what fills a batch up has the label -1 and is not counted. So is a picture that could not be read.
    """
    sums = ScoreSums(device)
    was_training = step.training
    step.eval()
    try:
        with torch.no_grad():
            for image, label in _filled(iter(batches), forwards, batch_size, image_size, device):
                if channels_last:
                    image = image.contiguous(memory_format=torch.channels_last)
                batch = Sample(image, label.clamp(min=0), [], torch.empty(0), ())
                _, parts = step(batch)
                sums.add(parts.output, label, counted=label >= 0)
    finally:
        step.train(was_training)
    return sums.result()


def _filled(
    batches: Iterator[Sample], forwards: int, batch_size: int, image_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(forwards):
        batch = next(batches, None)
        if batch is None:
            image = torch.zeros(0, 3, image_size, image_size, device=device)
            label = torch.zeros(0, dtype=torch.int64, device=device)
        else:
            image, label = batch.image.to(device, non_blocking=True), batch.label.to(device, non_blocking=True)
        missing = batch_size - len(label)
        if missing:
            image = torch.cat([image, image.new_zeros(missing, *image.shape[1:])])
            label = torch.cat([label, label.new_full((missing,), -1)])
        yield image, label
