import json

import pytest
import torch

from alltokens.bench import data
from alltokens.bench.results import Row
from alltokens.cli import main
from alltokens.engine import trainer

SMALL = {
    "model": {"options": {"embed_dim": 24, "depth": 1, "num_heads": 2}},
    "data": {"image_size": 32, "cache_size": 32, "train_pictures": 48, "val_pictures": 8, "num_classes": None},
    "train": {"batch_size": 16, "device": "cpu", "precision": "fp32"},
}


def test_transform_and_loader_beside_timms(monkeypatch, tmp_path, capsys):
    for name, value in {"PICTURES": 8, "BATCH": 4, "DRAWN": 48, "SIZE": 32}.items():
        monkeypatch.setattr(data, name, value)
    file = tmp_path / "out.json"
    assert main(["bench", "data", "--rounds", "2", "--device", "cpu", "--json", str(file)]) == 0
    rows = [Row(**row) for row in json.loads(file.read_text())]
    assert [(row.mode, row.arm) for row in rows] == [
        ("transform", "timm"),
        ("transform", "alltokens"),
        ("loader", "timm"),
        ("loader", "alltokens"),
    ]
    assert [row.at_most for row in rows] == [None, 1.0, None, 1.0]
    assert all(row.device.endswith(", 1 thread") for row in rows)
    for row in rows:
        assert row.pictures_per_second == pytest.approx(4_000 / row.step_ms)
        assert row.model == "scenes 48x48"
    assert capsys.readouterr().out.count("scenes 48x48") == 4


def test_both_loaders_give_batches_of_the_same_shape(monkeypatch, tmp_path):
    for name, value in {"PICTURES": 8, "BATCH": 4, "DRAWN": 48, "SIZE": 32}.items():
        monkeypatch.setattr(data, name, value)
    for index, picture in enumerate(data._pictures(None)):
        (tmp_path / str(index % 2)).mkdir(exist_ok=True)
        picture.save(tmp_path / str(index % 2) / f"{index}.jpg")
    theirs, ours = (build()() for build in data._loaders(str(tmp_path)).values())
    assert theirs[0].shape == ours.image.shape == (4, 3, 32, 32)
    assert set(theirs[1].tolist()) | set(ours.label.tolist()) <= {0, 1}


def test_the_cache_feeds_the_trainers_own_update(monkeypatch):
    """The fed arm trains on a new batch each time, the other one on the same."""
    seen = []
    original = trainer.Trainer.update

    def update(self, batches):
        seen.append(batches[0].image.sum().item())
        return original(self, batches)

    monkeypatch.setattr(trainer.Trainer, "update", update)
    rows = data._cached(None, 1, False, SMALL, lambda text: None)
    assert [(row.arm, row.mode, row.batch, row.image_size) for row in rows] == [
        ("fixed batch", "eager", 16, 32),
        ("device cache", "eager", 16, 32),
    ]
    assert rows[1].at_most == pytest.approx(1 / 0.9)
    fixed, fed = seen[:12] + seen[24:27], seen[12:24] + seen[27:]
    assert len(set(fixed)) == 1
    assert len(set(fed)) == len(fed) == 15


def test_without_pictures_scenes_of_the_same_number_are_drawn():
    config = data.cached_config(None, True, {})
    assert (config.data.root, config.data.train_pictures, config.data.cache) == ("scenes", 9469, "device")
    assert (config.train.compile, config.data.image_size) == ("on", 112)
    assert data.cached_config("pictures", False, {}).data.root == "pictures"


def test_threads_are_as_before(monkeypatch):
    monkeypatch.setattr(data, "_pictures", lambda root: (_ for _ in ()).throw(KeyError("stop")))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            data._on_one_core(None, 1, lambda text: None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
