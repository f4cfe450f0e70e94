"""Files made to harm: nothing runs, nothing is written elsewhere, memory stays bounded, each gets one line."""

import json
import os
import resource
import threading

import numpy as np
import pytest
from PIL import Image

from alltokens.cli import main
from alltokens.data.pictures import MAX_PIXELS, UnreadablePicture, decode_picture
from alltokens.data.sources import open_source
from alltokens.engine import checkpoint, runs
from alltokens.engine.recipes import load_recipe
from alltokens.errors import UserError
from alltokens.labels.annotate import annotate
from alltokens.labels.formats import export_tree, import_tree
from alltokens.labels.formats import read_file as read_label_file
from alltokens.labels.sink import read_failures
from alltokens.labels.store import LabelStore, verify_store
from alltokens.models.weights import read_weights
from tests.faults import hostile
from tests.faults.victims import processes
from tests.labels.tiny_annotator import OPTIONS, Brittle
from tests.tiny import tiny_config

MOST_MEMORY = 800  # MB: three times the 256 MB of the largest picture that is let through


def refused(read, path):
    """The one line that a file gets."""
    with pytest.raises(UserError) as error:
        read(path)
    message = str(error.value)
    assert "\n" not in message, message
    assert path.name in message
    assert len(message) < 1000
    assert "weights_only" not in message  # torch advises to turn it off
    return message


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "it-was-executed"
    yield path
    assert not path.exists(), "code in a file was executed"


@pytest.mark.parametrize("read", [read_weights, checkpoint.read, read_label_file], ids=["weights", "state", "labels"])
def test_weights_states_and_label_files(read, canary, tmp_path, tally):
    for name, content in hostile.weights_files(canary).items():
        path = tmp_path / name
        path.write_bytes(content)
        message = refused(read, path)
        assert name != "code.pth" or read is checkpoint.read or "it asks for posix.system" in message
        tally["weights, states and label files"] += 1


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    """A folder of weights as a run leaves it: its configuration, and a file of weights."""
    run = tmp_path_factory.mktemp("weights") / "run"
    runs.train(tiny_config(train={"epochs": 1}, schedule={"warmup_epochs": 0}), run_dir=run, quiet=True)
    return {path.name: path.read_bytes() for path in (run / "weights" / "best").iterdir()}


def test_weight_folders(good_folder, canary, tmp_path, tally, capsys):
    """What timm reads for us: a configuration that says anything, a pickle beside it."""
    config = json.loads(good_folder["config.json"])
    code = hostile.weights_files(canary)["code.pth"]
    weights = good_folder["model.safetensors"]
    attempts = {
        "no JSON": {"config.json": b"{", "model.safetensors": weights},
        "a list": {"config.json": b"[]", "model.safetensors": weights},
        "deep": {"config.json": b"[" * 100_000, "model.safetensors": weights},
        "nothing in it": {"config.json": b"{}", "model.safetensors": weights},
        "no weights": {"config.json": good_folder["config.json"]},
        "code": {"config.json": good_folder["config.json"], "pytorch_model.bin": code},
        "code called safetensors": {"config.json": good_folder["config.json"], "model.safetensors": code},
        **{
            f"{name} {value!r}": {
                "config.json": json.dumps(config | {name: value}).encode(),
                "model.safetensors": weights,
            }
            for name, value in (
                ("architecture", "os.system"),
                ("architecture", ["x"]),
                ("num_classes", -1),
                ("num_classes", "many"),
                ("model_args", {"depth": 10**9, "no_such_thing": 1}),
                ("model_args", [1]),
                ("pretrained_cfg", {"input_size": "abc"}),
                ("pretrained_cfg", {"file": "/etc/passwd", "custom_load": "x"}),
            )
        },
    }
    for number, (what, files) in enumerate(attempts.items()):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        assert main(["evaluate", f"local-dir:{folder}", "--data", "scenes", "--device", "cpu"]) == 2, what
        said = capsys.readouterr().err
        assert said.count("\n") == 1, f"{what}: {said}"
        assert "Traceback" not in said, said
        assert "weights_only" not in said, said
        tally["weights, states and label files"] += 1


def test_a_label_tree_with_code(canary, tmp_path, tally):
    tree = tmp_path / "tree" / "n01"
    tree.mkdir(parents=True)
    (tree / "a.pt").write_bytes(hostile.weights_files(canary)["code.pth"])
    with pytest.raises(UserError, match="no label file"):
        import_tree(tmp_path / "tree", tmp_path / "store")
    tally["weights, states and label files"] += 1


def test_recipes(canary, tmp_path, tally, capsys):
    for number, (what, text) in enumerate(hostile.yaml_texts(canary).items()):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(text)
        message = refused(load_recipe, path)
        assert message, what
        tally["recipes"] += 1
        if what in ("code", "a bomb", "not UTF-8"):
            assert main(["train", str(path), "--dry-run"]) == 2
            said = capsys.readouterr()
            assert said.err.count("\n") == 1
            assert said.out == ""


@pytest.mark.parametrize("pixels", [1_000_000, pytest.param(MAX_PIXELS, marks=pytest.mark.faults)])
def test_bad_pictures_within_bounded_memory(pixels, tally):
    mine, its = processes.Pipe(duplex=False)
    process = processes.Process(target=_decode_all, args=(its, pixels))
    process.start()
    its.close()
    messages, grown = mine.recv()
    process.join()
    assert messages.keys() == hostile.pictures().keys()
    for what, message in messages.items():
        # A JPEG is decoded at an eighth of its size if that is small enough; what data it lacks is grey.
        expected = "decoded" if what == "JPEG bomb" and pixels == MAX_PIXELS else "x.jpg: "
        assert message.startswith(expected), f"{what}: {message}"
        assert "\n" not in message, what
        tally["pictures"] += 1
    assert grown < MOST_MEMORY


def _decode_all(told, pixels):
    """In a process of its own, whose memory at the most is told."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    messages = {}
    for what, data in hostile.pictures().items():
        try:
            picture = decode_picture(data, name="x.jpg", max_pixels=pixels)
            assert picture.width * picture.height <= pixels
            messages[what] = f"decoded, {picture.size}"
        except UnreadablePicture as error:
            messages[what] = str(error)
    told.send((messages, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))


def test_odd_pictures_show_what_a_viewer_shows(tally):
    for what, (data, colour) in hostile.odd_pictures().items():
        picture = decode_picture(data, name=f"{what}.jpg")  # whatever the extension says
        assert (picture.size, picture.mode) == ((9, 7), "RGB"), what
        assert picture.getpixel((4, 3)) == colour, what
        tally["pictures"] += 1


def small_picture():
    return hostile.encoded(Image.new("RGB", (8, 8), (9, 99, 9)))["PNG"]


def test_tars(tmp_path, tally):
    for number, (what, content) in enumerate(hostile.tars(small_picture()).items()):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        assert refused(open_source, path), what
        tally["tars"] += 1


def test_paths_that_lead_elsewhere_lead_nowhere(tmp_path, tally):
    """Members called ../ and / are names and nothing else: they are read, annotated, and never written to."""
    place = tmp_path / "deep" / "in"
    place.mkdir(parents=True)
    (place / "t.tar").write_bytes(hostile.traversing_tar(small_picture()))
    source = open_source(place / "t.tar", labelled=False)
    assert {decode_picture(source.read(index)).getpixel((0, 0)) for index in range(len(source))} == {(9, 99, 9)}
    store = annotate(Brittle(), source, place / "store", workers=0, **OPTIONS)
    assert len(store) == len(source) == 6
    assert verify_store(store.path) == []
    with pytest.raises(UserError, match="does not name a place below a folder; nothing was written"):
        export_tree(store, place / "tree")
    tally["paths that lead elsewhere"] += 6
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name.split("/")[2] for name in written} == {"t.tar", "store"}


NAMES = (
    b"caf\xe9",  # Latin-1
    b"\xff\xfe\x80",
    "\u5199\u771f \U0001f4f7".encode(),
    b"two\nlines",
    b"a\ttab\\n",
    b"\x1b[2Jclear",
    b"--run-dir=x",
    b"'; touch it-was-executed; '",
    b"<script>alert(1)</script>".replace(b"/", b"|"),
    b"{{ 7 * 7 }}",
    b"%s %d {0}",
    b"x" * 240,
    " \u2028 ".encode(),
)


def test_names_of_files_and_classes_in_any_encoding(tmp_path, tally, capsys):
    """Annotated, looked at, listed and trained on; what cannot be read is told of under the same name."""
    picture = small_picture()
    for index, name in enumerate(NAMES):
        folder = tmp_path / "pictures" / os.fsdecode(NAMES[index % 10])
        folder.mkdir(parents=True, exist_ok=True)
        files = {name + b".png": picture, name[:100] + b"-bad.png": b"", b"1.png": picture}
        for inner, content in files.items():
            (folder / os.fsdecode(inner)).write_bytes(content)
    source = open_source(tmp_path / "pictures")
    keys = list(source.keys)
    assert len(source.class_names) == 10
    assert len(keys) == 2 * len(NAMES) + 10
    mapped = {name: index for index, name in enumerate(source.class_names)}
    store = annotate(Brittle(), source, tmp_path / "store", class_map=mapped, workers=0, **OPTIONS)
    failed = read_failures(store.path)
    assert sorted([*failed, *store.keys()]) == sorted(keys)
    assert all(key in failed for key in keys if key.endswith("-bad.png"))
    assert verify_store(store.path) == []
    assert store.read(list(store.keys())).ids.shape[0] == len(NAMES) + 10

    page = tmp_path / "labels.html"
    words = ["labels", "inspect", str(store.path), "--data", str(tmp_path / "pictures"), "--page", str(page)]
    assert main(words) == 0, capsys.readouterr().err
    text = page.read_text(encoding="utf-8", errors="strict")
    assert "<script>alert(1)" not in text
    assert "49" not in [part.strip() for part in text.split("|")]

    small = "{patch_size: 8, embed_dim: 24, depth: 1, num_heads: 2}"
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        f"model: {{name: vit_tiny_patch16_224, options: {small}}}\n"
        f"data: {{train: {tmp_path / 'pictures'}, val: {tmp_path / 'pictures'}, image_size: 16, workers: 0, "
        "on_bad_picture: skip}\n"
        "schedule: {warmup_epochs: 0}\ntrain: {epochs: 1, batch_size: 8, device: cpu}\n"
    )
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--on-bad-picture", "skip"]) == 0, capsys.readouterr().err
    skipped = (tmp_path / "run" / "skipped.txt").read_text(encoding="utf-8")
    assert "caf\\udce9" in skipped
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "pictures")]) == 2  # and names a picture
    said = capsys.readouterr()
    assert "\\x1b[2Jclear" in said.out  # in the table of disagreements, spelled out
    assert [sign for sign in said.out + said.err if not (sign.isprintable() or sign == "\n")] == []
    assert not list(tmp_path.glob("**/it-was-executed"))
    tally["names in any encoding"] += len(NAMES)


def test_damaged_stores(tmp_path, tally):
    """A store whose files are exchanged, cut, emptied or swapped for links into other places."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(8):
        Image.fromarray(np.full((8, 8, 3), 20 * index, np.uint8)).save(folder / f"{index}.png")
    store = annotate(Brittle(), folder, tmp_path / "store", class_map="own", workers=0, **OPTIONS).path
    whole = {path.name: path.read_bytes() for path in store.iterdir()}
    shard = next(name for name in whole if name.startswith("maps"))
    damages = {
        "an empty manifest": {"manifest.json": b""},
        "no JSON": {"manifest.json": b"{"},
        "deep JSON": {"manifest.json": b"[" * 100_000},
        "a list": {"manifest.json": b"[]"},
        "a pickle": {"manifest.json": b"\x80\x04cos\nsystem\n"},
        "an empty shard": {shard: b""},
        "an empty index": {"index.bin": b""},
        "the index as a shard": {shard: whole["index.bin"]},
        "the shard as an index": {"index.bin": whole[shard]},
        "a cut shard": {shard: whole[shard][:-1]},
        "a longer shard": {shard: whole[shard] + b"\0"},
        "another manifest": {"manifest.json": whole["manifest.json"].replace(b"maps-0000", b"../../etc")},
    }
    for what, changed in damages.items():
        for name, content in changed.items():
            (store / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            LabelStore.open(store)
        assert "\n" not in str(error.value), what
        assert verify_store(store), what
        for name in changed:
            (store / name).write_bytes(whole[name])
        tally["damaged stores"] += 1
    assert verify_store(store) == []
    assert threading.active_count() < 20
