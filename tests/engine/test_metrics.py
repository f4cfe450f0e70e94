"""Scores against a plain count, for any split into batches."""

import pytest
import torch
import torch.nn.functional as F

from alltokens.engine.metrics import ScoreSums


def sums(logits, labels, size, **more):
    total = ScoreSums(torch.device("cpu"))
    for start in range(0, len(labels), size):
        total.add(logits[start : start + size], labels[start : start + size], **more)
    return total.result()


@pytest.mark.parametrize("size", [1, 7, 50])
@pytest.mark.parametrize("classes", [3, 20])
def test_scores_are_a_plain_count(size, classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    scores = sums(logits, labels, size)
    order = logits.argsort(1, descending=True)
    assert scores.top1 == pytest.approx(100 * (order[:, 0] == labels).double().mean().item())
    assert scores.top5 == pytest.approx(100 * (order[:, :5] == labels[:, None]).any(1).double().mean().item())
    assert scores.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert scores.pictures == 50


def test_what_is_not_counted_may_hold_anything():
    logits = torch.tensor([[2.0, 1.0], [float("nan"), 0.0], [0.0, float("inf")]])
    total = ScoreSums(torch.device("cpu"))
    total.add(logits, torch.tensor([0, -1, -1]), counted=torch.tensor([True, False, False]))
    assert total.result()[:2] == (100.0, 100.0)
    assert total.result().pictures == 1


def test_ties_and_nan_are_no_hits():
    total = ScoreSums(torch.device("cpu"))
    total.add(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64))
    assert total.result().top1 == 0
    total.add(torch.full((4, 10), float("nan")), torch.zeros(4, dtype=torch.int64))
    assert total.result().top5 == 0
