"""The moving average of weights against its definition."""

import torch
from torch import nn

from alltokens.engine.averaging import WeightAverage


def steps(net: nn.Module, average: WeightAverage, count: int) -> list[torch.Tensor]:
    seen = []
    for step in range(count):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(step + 1)
        net[1].num_batches_tracked.add_(1)
        average.update()
        seen.append(net[0].weight.detach().clone())
    return seen


def test_it_is_the_recursion_on_every_parameter_and_buffer():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    expected = net[0].weight.detach().clone()
    average = WeightAverage(net, 0.9, warmup=False)
    for weight in steps(net, average, 5):
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(average.values["0.weight"], expected)
    assert average.values["1.num_batches_tracked"] == 5  # counters follow


def test_warmup_forgets_the_start():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = WeightAverage(net, 0.9999, warmup=True)
    expected = net[0].weight.detach().clone()
    for update, weight in enumerate(steps(net, average, 4)):
        decay = (1 + update) / (10 + update)
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(average.values["0.weight"], expected)


def test_applied_swaps_and_gives_back_even_after_an_error():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = WeightAverage(net, 0.5)
    live = steps(net, average, 3)[-1]
    kept = average.values["0.weight"].clone()
    try:
        with average.applied():
            assert torch.equal(net[0].weight, kept)
            raise RuntimeError
    except RuntimeError:
        pass
    assert torch.equal(net[0].weight, live)
    assert torch.equal(average.values["0.weight"], kept)
