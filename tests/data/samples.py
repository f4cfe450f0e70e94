"""What the tests of loaders and caches share."""

from __future__ import annotations

import torch

from alltokens.data.datasets import Sample

COUNT = 11  # pictures of the source in conftest.py


def same(first: Sample, second: Sample) -> bool:
    return (
        torch.equal(first.image, second.image)
        and torch.equal(first.matrix, second.matrix)
        and torch.equal(torch.as_tensor(first.label), torch.as_tensor(second.label))
        and list(first.key) == list(second.key)
    )
