import pytest

from alltokens.engine.config import RunConfig
from alltokens.engine.loading import build, flatten, parse_yaml, read_yaml, to_mapping, to_yaml
from alltokens.errors import UserError


def made(text):
    return build(RunConfig, parse_yaml(text, "a.yaml"), "a.yaml")


def test_what_is_left_out_has_its_default():
    assert made("{}") == RunConfig()
    assert made("train: {epochs: 5}").train.batch_size == RunConfig().train.batch_size


def test_what_is_left_out_comes_from_the_given_default():
    base = made("train: {epochs: 5, seed: 7}")
    laid = build(RunConfig, {"train": {"seed": 8}}, "b.yaml", base)
    assert (laid.train.epochs, laid.train.seed) == (5, 8)
    assert base.train.seed == 7


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optimizer: {lr: 1e-3}", "optimizer.lr", 1e-3),  # YAML 1.1 takes it for a word
        ("optimizer: {lr: 1}", "optimizer.lr", 1.0),
        ("train: {epochs: 1e2}", "train.epochs", 100),
        ("train: {compile: on}", "train.compile", "on"),
        ("train: {compile: off}", "train.compile", "off"),
        ("data: {cache: off}", "data.cache", "off"),
        ("data: {num_classes: null}", "data.num_classes", None),
        ("augment: {scale: [0.5, 1]}", "augment.scale", [0.5, 1.0]),
        ("optimizer: {betas: [0.9, 0.95]}", "optimizer.betas", [0.9, 0.95]),
        ("log: {trackers: [wandb]}", "log.trackers", ["wandb"]),
        ("model: {options: {depth: 2, img_size: [64, 32]}}", "model.options.img_size", [64, 32]),
        ("data: {root: '7'}", "data.root", "7"),
    ],
)
def test_values_become_what_the_setting_is(text, path, value):
    found = flatten(to_mapping(made(text)))[path]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: {epochs: 3}", "unknown key 'trian'.*Did you mean 'train'.*a.yaml"),
        ("train: {epoch: 3}", "unknown key 'epoch'.*Did you mean 'epochs'"),
        ("train: {epochs: 3.5}", "a.yaml: train.epochs: expected a whole number, got 3.5"),
        ("train: {epochs: many}", "expected a whole number, got 'many'"),
        ("train: {epochs: true}", "expected a whole number, got True"),
        ("train: {epochs: null}", "expected a whole number, got None"),
        ("train: {channels_last: 1}", "expected true or false, got 1"),
        ("train: {channels_last: 'yes'}", "expected true or false, got 'yes'"),
        ("optimizer: {lr: [1]}", "expected a number"),
        ("optimizer: {lr: true}", "expected a number, got True"),
        ("data: {root: 7}", "expected a word or text, got 7"),
        ("train: {precision: bf17}", "'bf17'.*Did you mean 'bf16'.*fp16, fp32"),
        ("train: {precision: off}", "unknown value of a.yaml: train.precision: False"),
        ("augment: {scale: 0.5}", "expected a list, got 0.5"),
        ("augment: {scale: [0.1, 0.5, 1]}", "expected a list of 2"),
        ("augment: {scale: [0.1, big]}", "expected a number, got 'big'"),
        ("train: 3", "train: expected settings as 'key: value', got 3"),
        ("model: {options: [1]}", "expected settings as 'key: value'"),
        ("train: {epochs: 3}\ntrain: {seed: 1}", "line 2: the key 'train' stands twice"),
        ("train:\n  seed: 1\n  seed: 2", "line 3: the key 'seed' stands twice"),
        ("1: 2", "the key 1 is not a word"),
        ("train: {epochs: 3", "a.yaml, line 1: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        made(text)


def test_settings_survive_yaml():
    config = made("model: {options: {a: {b: [1, x]}}}\naugment: {ratio: [0.5, 1.3333333333333333]}\ndata: {cache: off}")
    assert made(to_yaml(config)) == config


def test_an_empty_file_is_no_settings(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*: No such file"), (b"\xff\xfe\x00", "not UTF-8"), (b"- 1", "expected settings .* got list")],
)
def test_a_file_that_is_no_settings_is_refused(tmp_path, content, message):
    file = tmp_path / "bad.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_yaml(file)


def test_flat_keys_name_every_setting():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {"a.b.c": 1, "a.d": {}, "e": [2]}
