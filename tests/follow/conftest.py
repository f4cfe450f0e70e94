import pytest
import torch

from tests.follow.test_families import mixed_batch


@pytest.fixture
def batch():
    return mixed_batch((32, 32), torch.float32)
