"""Learning rates against the published programs' tables, and at their ends."""

import numpy as np
import pytest

from alltokens.engine.config import OptimizerConfig, ScheduleConfig
from alltokens.engine.schedule import learning_rate, peak_rate, total_epochs

TABLES = {
    "tokenlabeling_default": (1.6e-3, 300, ScheduleConfig(warmup_lr=1e-6, min_lr=1e-5, cooldown_epochs=10)),
    "tokenlabeling_finetune_5e6": (5e-6, 30, ScheduleConfig(warmup_lr=1e-6, min_lr=5e-6, cooldown_epochs=10)),
    "tlalign_lr1e3": (1e-3, 300, ScheduleConfig(warmup_lr=1e-6, min_lr=1e-5, official_deit_offset=True)),
}


@pytest.mark.parametrize("name", TABLES)
def test_at_whole_epochs_the_rate_is_the_published_one(name):
    peak, epochs, schedule = TABLES[name]
    table = np.load("tests/golden/lr_tables.npz")[name]
    ours = [learning_rate(float(epoch), peak, epochs, schedule) for epoch in range(len(table))]
    np.testing.assert_allclose(ours, table, rtol=1e-9)


def test_inside_an_epoch_the_rate_moves_on_but_not_with_the_official_offset():
    schedule = ScheduleConfig(warmup_epochs=2)
    rates = [learning_rate(position, 1.0, 10, schedule) for position in (0.0, 0.5, 1.0, 1.5, 2.0)]
    assert np.allclose(np.diff(rates[:4]), np.diff(rates)[0])
    official = ScheduleConfig(warmup_epochs=2, official_deit_offset=True)
    assert learning_rate(3.9, 1.0, 10, official) == learning_rate(3.0, 1.0, 10, official)


@pytest.mark.parametrize(("kind", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)])
def test_kinds_at_the_middle_and_the_end(kind, middle, end):
    schedule = ScheduleConfig(kind=kind, warmup_epochs=0, min_lr=0.1)
    assert learning_rate(5, 1.0, 10, schedule) == pytest.approx(middle)
    assert learning_rate(10, 1.0, 10, schedule) == pytest.approx(end)
    assert learning_rate(12, 1.0, 10, schedule) == pytest.approx(end)


def test_linear_scaling_by_batch_is_stated_or_absent():
    assert peak_rate(OptimizerConfig(lr=1e-3, lr_per=1024), 256) == pytest.approx(2.5e-4)
    assert peak_rate(OptimizerConfig(lr=1e-3), 256) == 1e-3
    assert total_epochs(300, ScheduleConfig(cooldown_epochs=10)) == 310
