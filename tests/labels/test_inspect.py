"""The summary of a store, against numbers reckoned by hand."""

import math

import pytest

from alltokens.errors import UserError
from alltokens.labels.inspect import summarise
from tests.report.store import LABELS, MAPS, make_store

CLOSE = {"abs": 2e-3}  # scores are kept in half precision
CELLS = [cell for cells in MAPS.values() for cell in cells]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("summed"))[0]


def labels():
    return {key: LABELS[key.split("/")[0]] for key in MAPS}


@pytest.mark.parametrize("batch_size", [1, 3, 128])
def test_averages_over_all_cells(store, batch_size):
    calls = []
    found = summarise(store, labels(), batch_size=batch_size, progress=lambda *done: calls.append(done))
    assert found.pictures == 4
    assert found.kept_mass == pytest.approx(sum(sum(cell.values()) for cell in CELLS) / 16, **CLOSE)
    assert found.top_probability == pytest.approx(sum(max(cell.values()) for cell in CELLS) / 16, **CLOSE)
    # Of three classes two are kept: the third has all the rest.
    entropies = [-sum(p * math.log(p) for p in (*cell.values(), 1 - sum(cell.values()))) for cell in CELLS]
    assert found.entropy == pytest.approx(sum(entropies) / 16, **CLOSE)
    assert found.classes_per_picture == pytest.approx((1 + 1 + 2 + 1) / 4)
    assert calls[-1] == (4, 4)


def test_disagreements_are_those_with_the_folder_the_surest_first(store):
    found = summarise(store, labels())
    assert found.agreement == 3 / 4
    assert [(wrong.key, wrong.label, wrong.guess) for wrong in found.disagreements] == [("cat/really-a-dog.png", 0, 1)]
    assert found.disagreements[0].probability == pytest.approx(0.8, **CLOSE)
    turned = summarise(store, {key: 1 - label for key, label in labels().items()}, most=2)
    assert turned.agreement == 1 / 4
    assert [wrong.key for wrong in turned.disagreements] == ["cat/clear.png", "dog/beside-a-cat.png"]


def test_pictures_without_a_label_are_counted_and_left_out(store):
    one = {"cat/clear.png": 0}
    found = summarise(store, one)
    assert (found.agreement, found.unlabelled) == (1.0, 3)
    assert summarise(store).agreement is None
    with pytest.raises(UserError, match=r"none of the 4 pictures of .* has a label in the data"):
        summarise(store, {"train/cat/clear.png": 0})
