"""Tensors on their way to a GPU that is not there: pinned as torch pins them, and none left out."""

import pytest
import torch

import alltokens as at
from alltokens.core.transfer import sent, sent_ahead
from alltokens.supervision.mixer import MIXERS, Mixer


@pytest.fixture
def travelled(monkeypatch):
    """How many numbers went to "cuda": each pinned before, in memory of its own, as torch wants and does it."""
    counts: list[int] = []
    pinned: set[int] = set()
    really_to = torch.Tensor.to

    def pin_memory(self):
        copy = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self)  # raises for expanded ones
        pinned.add(copy.data_ptr())
        return copy

    def to(self, device, *args, **kwargs):
        if not isinstance(device, torch.device) or device.type != "cuda":
            return really_to(self, device, *args, **kwargs)
        assert kwargs == {"non_blocking": True}
        assert self.data_ptr() in pinned
        counts.append(self.numel())
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return counts


MIXES = [(name, {}) for name in MIXERS] + [(name, {"then_mixup": 1.0}) for name in ("cutmix", "mixtoken")]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("name", "options"), MIXES, ids=lambda value: str(value))
def test_a_plan_of_every_mixer_gets_to_a_gpu(name, options, per_sample, travelled):
    for seed, patch in enumerate((4, 4, 8)):
        mixer = Mixer(name, patch_size=patch, per_sample=per_sample, **options)
        plan = mixer.draw(5, 16, torch.Generator().manual_seed(seed))
        there = plan.to("cuda")
        assert torch.equal(there.partner, plan.partner)
        assert torch.equal(there.mask, plan.mask)
        assert there.mask.is_contiguous()
        assert there.place == plan.place


def test_of_a_mixup_one_number_a_sample_travels(travelled):
    at.draw_mixup(6, 32, per_sample=True).to("cuda")
    at.draw_mixup(6, 32).to("cuda")
    assert travelled == [6, 6, 6, 1]  # partners and shares


def test_any_expanded_tensor_travels_as_its_distinct_numbers(travelled):
    numbers = torch.arange(6.0).view(2, 1, 3)
    assert torch.equal(sent_ahead(numbers.expand(2, 4, 3), "cuda"), numbers.repeat(1, 4, 1))
    assert torch.equal(sent_ahead(torch.tensor(2.0).expand(3), "cuda"), torch.full((3,), 2.0))
    assert travelled == [6, 1]


def test_towards_the_cpu_the_host_waits(monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: asked.append(non_blocking))
    for device in ("cpu", "cuda", "meta"):
        sent(torch.zeros(1), device)
    assert asked == [False, True, True]
