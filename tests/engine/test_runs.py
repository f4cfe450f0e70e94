"""A run as its user meets it: the folder, what is refused, and how it fails."""

import json
import time
from dataclasses import replace
from importlib import metadata
from multiprocessing import active_children

import pytest
import timm
import torch

from alltokens.engine.config import DataConfig, RunConfig
from alltokens.engine.feeding import open_pictures
from alltokens.engine.loading import build, read_yaml
from alltokens.engine.run_folder import load_config, read_metrics
from alltokens.engine.runs import dry_run, train
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingFailed, TrainingStopped, UserError
from alltokens.evaluate import evaluate
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = train(tiny_config(checkpoint={"keep_every": 2}), recipe="tiny", run_dir=folder, command=["x"], quiet=True)
    return folder, result


def test_loading_processes_end_with_the_run_however_it_ends(tmp_path):
    before = set(active_children())
    config = tiny_config(data={"workers": 1}, train={"epochs": 1}, schedule={"warmup_epochs": 0})
    result = train(config, run_dir=tmp_path / "whole", quiet=True)  # its feed could give more batches
    assert set(active_children()) <= before
    with pytest.raises(TrainingStopped) as stopped:  # the exception refers to the loaders
        train(config, run_dir=tmp_path / "stopped", quiet=True, deadline=time.monotonic())
    assert set(active_children()) <= before
    assert result.feed
    assert stopped.value
    dry_run(config)
    assert set(active_children()) <= before


def test_the_folder_can_rebuild_the_run(run):
    folder, result = run
    assert load_config(folder) == tiny_config(checkpoint={"keep_every": 2})
    assert build(RunConfig, read_yaml(folder / "config.yaml"), "config") == load_config(folder)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["recipe"] == "tiny"
    assert facts["command"] == ["x"]
    assert facts["versions"]["torch"] == metadata.version("torch")
    evaluations = [line for line in read_metrics(folder) if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluations] == [1, 2, 3]
    assert max(line["average_top1"] for line in evaluations) == result.best_top1
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["epoch-0002.safetensors", "last.safetensors"]


def test_stock_timm_loads_the_weights_and_they_score_the_same(run):
    folder, result = run
    net = timm.create_model(f"local-dir:{folder / 'weights' / 'best'}", pretrained=True)
    assert net.num_classes == 10
    scores = evaluate(str(folder), workers=0, device="cpu")
    assert scores.top1 == result.best_top1
    assert scores.pictures == 40
    model = evaluate(f"local-dir:{folder / 'weights' / 'best'}", data="scenes", workers=0, device="cpu")
    assert model.pictures == 1000  # a model has no pictures of its own: these are all that scenes makes
    assert model.gmacs == scores.gmacs > 0


def test_fine_tuning_takes_weights_and_not_state(run, tmp_path):
    folder, _ = run
    config = tiny_config(
        train={"epochs": 1, "ema_decay": None}, optimizer={"lr": 1e-12}, schedule={"warmup_epochs": 0, "min_lr": 0}
    )
    train(config, run_dir=tmp_path / "tuned", weights_from=str(folder), quiet=True)
    before = timm.create_model(f"local-dir:{folder / 'weights' / 'best'}", pretrained=True).state_dict()
    after = timm.create_model(f"local-dir:{tmp_path / 'tuned' / 'weights' / 'last'}", pretrained=True).state_dict()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-8, rtol=1e-8)


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = dry_run(tiny_config())
    for expected in ("epochs: 3", "image    (16, 3, 32, 32)", "first loss", "estimated time", "nothing was written"):
        assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    original = Trainer.update

    def poisoned(self, micro_batches):
        loss = original(self, micro_batches)
        return loss * float("nan") if self.position.update + 1 == 9 else loss

    monkeypatch.setattr(Trainer, "update", poisoned)
    with pytest.raises(TrainingFailed, match=r"the loss is nan at update 9 \(epoch 2\)"):
        train(tiny_config(), run_dir=tmp_path / "run", quiet=True)
    from alltokens.engine import checkpoint

    tensors, facts = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert facts["position"]["update"] == 6  # the end of epoch 1
    assert all(torch.isfinite(value).all() for value in tensors.values() if value.is_floating_point())


def test_a_first_loss_that_is_not_finite_promises_no_saved_state(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "update", lambda self, micro_batches: torch.tensor(float("nan")))
    with pytest.raises(TrainingFailed, match=r"the loss is nan at update 1 .*No state was saved before"):
        train(tiny_config(), run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()


def test_out_of_memory_names_the_batch_and_three_settings(tmp_path, monkeypatch):
    def full(self, micro_batches):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "update", full)
    with pytest.raises(TrainingFailed, match=r"16 pictures of 32 px.*accumulate.*bf16.*checkpoint_activations"):
        train(tiny_config(), run_dir=tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"batch_size": 97}}, "larger than the data: 96"),
        ({"train": {"accumulate": 3}}, "multiple of 1 x train.accumulate 3"),
        ({"data": {"image_size": 36}}, "not a multiple of the model's patch, 8; the nearest that are: 32 and 40"),
        ({"data": {"num_classes": 9}}, "num_classes is 9, but .* has 10"),
        ({"data": {"root": None}}, "data.root"),
        ({"data": {"root": "scnes"}}, "no such file or folder"),
        ({"model": {"name": "vit_tniy_patch16_224"}}, "Did you mean 'vit_tiny_patch16_224'"),
        ({"model": {"options": {"dpeth": 2}}}, "does not take these model.options.*dpeth"),
        ({"model": {"options": {"embed_dim": 30, "num_heads": 4}}}, "cannot be built"),
        ({"optimizer": {"name": "adamx"}}, "unknown optimizer 'adamx'"),
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.99]}}, "does not take these settings"),
        ({"supervision": {"mixer": {"name": "random", "patch_size": 5}}}, "does not divide"),
        ({"supervision": {"smoothing": 1.0}}, "smoothing must lie in"),
        ({"schedule": {"warmup_epochs": 5}}, "warmup_epochs"),
        ({"train": {"precision": "fp16"}}, "fp16 needs a GPU"),
        ({"data": {"cache": "device", "train_pictures": 32}, "train": {"batch_size": 33}}, "larger than the data"),
    ],
)
def test_what_cannot_work_has_its_own_message_and_leaves_no_folder(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tiny_config(**changes), run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_with_classes_is_said_by_the_setting_that_it_is_about(tmp_path):
    write_pictures(tmp_path)
    (tmp_path / "train" / "emu").mkdir()
    data = DataConfig(root=str(tmp_path), num_classes=2)
    with pytest.raises(UserError, match=r"num_classes is 2, but .* has 3 classes"):  # and not that one is empty
        open_pictures(data, "train")
    with pytest.raises(UserError, match=r"no picture: emu .*data\.allow_empty_classes"):
        open_pictures(replace(data, num_classes=3), "train")
    there = open_pictures(replace(data, num_classes=3, allow_empty_classes=True), "train")
    assert there.class_names == ("cat", "dog", "emu")
    assert len(open_pictures(data, "train", ("cat", "dog"))) == 24  # a run's own classes, when it is evaluated


def write_pictures(root, bad=()):
    from PIL import Image

    for split, count in (("train", 12), ("val", 6)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                color = (40 * (name == "dog"), 10 * index, 100)
                Image.new("RGB", (40, 30), color).save(folder / f"{index}.png")
    for path in bad:
        (root / path).write_bytes(b"no picture")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cache", ["off", "device"])
def test_unreadable_pictures_stop_the_run_by_name_or_are_skipped_counted_and_listed(tmp_path, workers, cache, capsys):
    write_pictures(tmp_path / "data", bad=("train/cat/3.png", "val/dog/2.png"))
    data = {
        "root": str(tmp_path / "data"),
        "train_pictures": None,
        "val_pictures": None,
        "workers": workers,
        "cache": cache,
    }
    config = {"train": {"epochs": 2, "batch_size": 8}, "data": data}
    with pytest.raises(UserError, match=r"3\.png|2\.png") as error:
        train(tiny_config(**config), run_dir=tmp_path / "stops", quiet=True)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("To go on without such pictures: data.on_bad_picture skip")
    data["on_bad_picture"] = "skip"
    result = train(tiny_config(**config), run_dir=tmp_path / "skips")
    listed = (tmp_path / "skips" / "skipped.txt").read_text().splitlines()
    assert len(listed) == 2
    assert "train/cat/3.png" in listed[0] + listed[1]
    assert "2 unreadable pictures" in capsys.readouterr().out
    assert result.scores.pictures == 11


@pytest.mark.parametrize("precision", ["bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_precision_layout_and_recomputed_activations(tmp_path, precision, channels_last):
    train_settings = {"epochs": 1, "precision": precision, "channels_last": channels_last, "ema_decay": None}
    train_settings["checkpoint_activations"] = True
    result = train(
        tiny_config(train=train_settings, schedule={"warmup_epochs": 0}), run_dir=tmp_path / "run", quiet=True
    )
    assert result.scores.loss < 10


def test_a_compiled_run_is_the_plain_run(tmp_path):
    plain = {"epochs": 1, "ema_decay": None}
    results = [
        train(
            tiny_config(train={**plain, "compile": mode}, schedule={"warmup_epochs": 0}, model={"drop_path": 0.0}),
            run_dir=tmp_path / mode,
            quiet=True,
        )
        for mode in ("off", "aot_eager")
    ]
    assert results[0].scores.loss == pytest.approx(results[1].scores.loss, abs=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_layer_decay_scales_each_layers_rate(tmp_path, dense):
    from alltokens.engine.assembly import build_net
    from alltokens.engine.optimizer import build_optimizer, set_learning_rate

    dense_loss = {"mixer": {"name": "none"}, "dense_weight": 0.5 * dense}
    config = tiny_config(optimizer={"layer_decay": 0.5}, supervision=dense_loss)
    net = build_net(config, 10)
    assert hasattr(net, "aux_head") == dense  # a wrapper around timm's model: the same rules for the same weights
    optimizer = build_optimizer(net, config.optimizer, 1.0)
    set_learning_rate(optimizer, 0.8)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates == {0.8, 0.4, 0.2, 0.1}  # head, two blocks, embedding
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"] if p.ndim < 3}
    assert decays[1] == 0
    assert decays[2] == 0.05


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    config = tiny_config(log={"trackers": ["tensorboard"]}, train={"epochs": 1}, schedule={"warmup_epochs": 0})
    train(config, run_dir=tmp_path / "run", quiet=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents*")}
    tags = {tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    assert {"train/loss", "train/lr", "evaluation/top1"} <= tags
