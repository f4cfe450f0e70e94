"""Data sets of Hugging Face on disk, as sources of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from alltokens.data.hugging_face import open_dataset
from alltokens.data.sources import open_source
from alltokens.errors import UserError
from tests.data.test_sources import content, picture


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

    def rows(shades: Sequence[int]) -> Any:
        images = [{"bytes": picture(shade), "path": None} for shade in shades]
        return datasets.Dataset.from_dict({"img": images, "label": [shade % 2 for shade in shades]}, features=features)

    datasets.DatasetDict(train=rows([4, 5, 6]), test=rows([7])).save_to_disk(tmp_path / "saved")
    rows([8, 9]).to_parquet(tmp_path / "parquet" / "train.parquet")
    return tmp_path


def test_a_saved_hugging_face_dataset(saved: Path) -> None:
    train = open_source(saved / "saved", "train")
    expected = {"train/00000000": ("cat", 4), "train/00000001": ("dog", 5), "train/00000002": ("cat", 6)}
    assert content(train) == expected
    val = open_source(f"{saved}/saved", "val", class_names=("dog", "cat"))
    assert content(val) == {"test/00000000": ("dog", 7)}
    with pytest.raises(UserError, match="several splits; say which of train, test"):
        open_source(saved / "saved")


def test_a_folder_of_parquet_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", saved / "cache")
    assert content(open_source(saved / "parquet")) == {"train/00000000": ("cat", 8), "train/00000001": ("dog", 9)}
    with pytest.raises(UserError, match="the datasets library cannot load"):
        open_dataset(str(saved / "missing"), None)


def test_columns_that_cannot_be_told_are_listed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "text")
    with pytest.raises(UserError, match=r"needs one column called image or .*its columns are text"):
        open_source(tmp_path / "text")
