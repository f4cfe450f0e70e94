"""What single maps say, against numbers computed by hand."""

import math

import numpy as np
import pytest

from alltokens.errors import UserError
from alltokens.labels.measure import Measures, measure, remarkable
from tests.report.store import LABELS, MAPS, make_store

CLOSE = {"abs": 2e-3}  # scores are kept in half precision


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    store, _ = make_store(tmp_path_factory.mktemp("measured"))
    return measure(store, {key: LABELS[key.split("/")[0]] for key in MAPS}, batch_size=3)


def of(found, key, name):
    return getattr(found, name)[found.keys.index(key)]


def test_the_map_is_compared_with_the_folder(found):
    assert of(found, "cat/clear.png", "guess") == 0
    assert of(found, "cat/clear.png", "label_probability") == pytest.approx(0.9, **CLOSE)
    assert of(found, "cat/clear.png", "doubt") == pytest.approx(0.05 - 0.9, **CLOSE)
    assert of(found, "cat/really-a-dog.png", "guess") == 1
    assert of(found, "cat/really-a-dog.png", "guess_probability") == pytest.approx(0.8, **CLOSE)
    assert of(found, "cat/really-a-dog.png", "doubt") == pytest.approx(0.8 - 0.1, **CLOSE)
    assert of(found, "dog/beside-a-cat.png", "label_probability") == pytest.approx((0.7 + 0.7 + 0.6 + 0.2) / 4, **CLOSE)


def test_the_second_object_is_where_another_class_comes_first(found):
    assert of(found, "dog/beside-a-cat.png", "runner_up") == 0
    assert of(found, "dog/beside-a-cat.png", "runner_up_size") == 0.25
    assert of(found, "cat/clear.png", "runner_up") == -1
    assert of(found, "cat/clear.png", "runner_up_size") == 0


def test_entropy_counts_what_is_not_kept(found):
    by_hand = -(0.35 * math.log(0.35) + 0.33 * math.log(0.33) + 0.32 * math.log(0.32))
    assert of(found, "dog/unsure.png", "entropy") == pytest.approx(by_hand, **CLOSE)


def test_without_labels_nothing_is_compared(tmp_path):
    store, _ = make_store(tmp_path)
    found = measure(store, keys=["cat/clear.png"])
    assert found.keys == ["cat/clear.png"]
    assert found.label.tolist() == [-1]
    assert np.isnan(found.doubt).all()
    assert found.guess.tolist() == [0]
    with pytest.raises(UserError, match="no pictures to look at"):
        measure(store, keys=[])


def measures(**columns):
    count = len(columns["doubt"])
    rest = {name: np.zeros(count) for name in Measures._fields if name not in columns}
    return Measures(**(rest | columns | {"keys": [str(index) for index in range(count)]}))


def test_the_remarkable_are_the_heads_of_every_order_and_some_others():
    places = np.arange(100)
    found = measures(doubt=places / 100, runner_up_size=-np.abs(places - 50.0), entropy=-places.astype(float))
    chosen = remarkable(found, 12).tolist()
    assert len(chosen) == 12
    assert {99, 98, 97} <= set(chosen)  # doubt
    assert {50, 49, 51} <= set(chosen)  # second object
    assert {0, 1, 2} <= set(chosen)  # entropy
    ordinary = sorted(set(chosen) - {99, 98, 97, 50, 49, 51, 0, 1, 2})
    assert ordinary == [3, 48, 96]  # first, middle and last of the others
    assert remarkable(found, 100).tolist() == places.tolist()


def test_an_order_that_is_not_known_takes_no_place():
    nothing = np.full(10, np.nan)
    found = measures(doubt=nothing, runner_up_size=np.arange(10.0), entropy=np.zeros(10))
    assert set(remarkable(found, 4).tolist()) >= {9, 8, 0}
