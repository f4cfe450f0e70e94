import csv
import json
from dataclasses import replace

import pytest
import timm
import torch

from alltokens.bench import over_models, tl_align
from alltokens.bench.over_models import Case, Record
from alltokens.bench.published import PublishedStep, has_published_way
from alltokens.bench.results import COLUMNS, Row
from alltokens.bench.tl_align import bench_tl_align
from alltokens.cli import main
from alltokens.errors import UnsupportedModel, UserError
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.step import Supervision

SMALL = {"img_size": 32, "num_classes": 7}
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, **SMALL}
SWIN = {"patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "window_size": 4, **SMALL}
# Kind -> timm's name and options of a model that takes milliseconds.
NETS = {
    "class token": ("vit_tiny_patch16_224", VIT),
    "average": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", **VIT}),
    "lvvit": ("lvvit_t", {"stem_channels": 8, **VIT}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
}


def net_of(kind):
    name, options = NETS[kind]
    torch.manual_seed(0)
    net = timm.create_model(name, **options)
    for parameter in net.parameters():  # attention far from uniform
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return net.train()


def both(kind, wrap=lambda module: module, mixer=None):
    """(loss, mixed targets) of the published way and of ours, on the same weights, batch and mix."""
    mixer = mixer or Mixer("cutmix")
    generator = torch.Generator().manual_seed(3)
    record = Record(torch.randn(5, 3, 32, 32, generator=generator), torch.arange(5))
    found = []
    for module in (
        PublishedStep(net_of(kind), mixer, 0.1),
        Supervision(net_of(kind), mixer=mixer, follower="tl_align", smoothing=0.1),
    ):
        torch.manual_seed(0)
        loss, rest = wrap(module)(record, torch.Generator().manual_seed(1))
        loss.backward()
        found.append((loss, rest if isinstance(rest, torch.Tensor) else rest.targets, module.net))
    return found


@pytest.mark.parametrize("kind", NETS)
def test_the_published_way_gives_the_same_targets_loss_and_gradients(kind):
    (loss, target, net), (our_loss, our_target, our_net) = both(kind)
    torch.testing.assert_close(target, our_target, atol=1e-6, rtol=0)
    torch.testing.assert_close(loss, our_loss, atol=1e-5, rtol=1e-5)
    for parameter, ours in zip(net.parameters(), our_net.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, ours.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class token", "swin"])
def test_the_published_way_is_the_same_when_compiled(kind):
    (loss, target, _), _ = both(kind)
    (compiled_loss, compiled_target, _), _ = both(kind, lambda module: torch.compile(module, backend="aot_eager"))
    torch.testing.assert_close(compiled_target, target, atol=1e-6, rtol=0)
    torch.testing.assert_close(compiled_loss, loss, atol=1e-5, rtol=1e-5)


def test_the_published_way_keeps_no_label_and_is_not_fused():
    step = PublishedStep(net_of("class token"), Mixer("cutmix"), 0.1)
    assert not any(block.attn.fused_attn for block in step.net.blocks)
    step(Record(torch.randn(2, 3, 32, 32), torch.arange(2)))
    assert step._labels == []


@pytest.mark.parametrize(
    ("name", "there"),
    [("deit_tiny_distilled_patch16_224", False), ("pvt_tiny", False), ("deit_tiny_patch16_224", True)],
)
def test_the_published_way_is_there_for_plain_vits_alone(name, there):
    with torch.device("meta"):
        assert has_published_way(timm.create_model(name)) is there


@pytest.fixture
def tiny_model(monkeypatch):
    """A model that takes milliseconds instead of deit_tiny_patch16_224."""

    def create(name, **options):
        assert name == "deit_tiny_patch16_224"
        net = real("vit_tiny_patch16_224", **VIT, **options)
        net.pretrained_cfg["input_size"] = (3, 32, 32)
        return net

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setattr(tl_align, "_mixer", lambda: Mixer("cutmix", patch_size=8))
    monkeypatch.setitem(tl_align.CASES["cpu"], "deit_tiny_patch16_224", Case(4, 1.03))


def test_the_command_measures_three_arms_and_writes_them(tiny_model, tmp_path, capsys):
    table, text = tmp_path / "out.csv", tmp_path / "out.json"
    words = ["bench", "tl_align", "--rounds", "2", "--device", "cpu", "--csv", str(table), "--json", str(text)]
    assert main(words) == 0
    shown, errors = capsys.readouterr()
    assert errors.startswith("deit_tiny_patch16_224, eager: warming up")  # progress, now and then
    assert f"torch {torch.__version__}" in shown.splitlines()[0]
    lines = [line for line in shown.splitlines() if line.startswith("deit_tiny_patch16_224")]
    assert len(lines) == 3
    assert ["1.03" in line.split() for line in lines] == [False, True, False], (
        "the limit stands beside TL-Align's ratio"
    )
    rows = [Row(**row) for row in json.loads(text.read_text())]
    assert [row.arm for row in rows] == ["CutMix", "TL-Align", "TL-Align as published"]
    assert {(row.bench, row.image_size, row.batch, row.precision, row.mode) for row in rows} == {
        ("tl_align", 32, 4, "fp32", "eager")
    }
    assert rows[0].ratio == 1
    for row in rows:
        assert 0 < row.step_ms_low <= row.step_ms <= row.step_ms_high
        assert row.pictures_per_second == pytest.approx(4_000 / row.step_ms)
        assert row.peak_mib is None
    assert main([*words[:-2], "--batch", "2"]) == 0
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["batch"] for row in written] == ["4"] * 3 + ["2"] * 3, "a second bench appends, without a header"
    assert tuple(written[0]) == COLUMNS
    assert float(written[1]["ratio"]) == pytest.approx(rows[1].ratio, rel=1e-5)
    assert written[0]["peak_mib"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tl_aling"], "unknown bench 'tl_aling'. Did you mean 'tl_align'?"),
        (["tl_align", "--models", "deit_tniy_patch16_224"], "Did you mean 'deit_tiny_patch16_224'?"),
        (["tl_align", "--models", "resnet18"], "ResNet cannot be followed"),
        (["tl_align", "--batch", "1"], "batch must be at least 2"),
        (["tl_align", "--batch", "2", "--rounds", "0"], "rounds and steps must be at least 1"),
        (["tl_align", "--rouns", "1"], "Did you mean --rounds?"),
        (["tl_align", "--csv", "nowhere/x.csv"], "cannot write nowhere/x.csv"),
        (["tl_align", "--csv", "pyproject.toml/x.csv"], "cannot write"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setattr(tl_align, "_arms", lambda *arguments: {})
    assert main(["bench", *words, *(["--device", "cpu"] if len(words) > 1 else [])]) == 2
    shown, errors = capsys.readouterr()
    assert shown == ""
    assert message in errors


def test_a_csv_of_something_else_is_left_alone(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("a,b\n1,2\n")
    assert main(["bench", "tl_align", "--csv", str(file)]) == 2
    assert "other columns" in capsys.readouterr().err
    assert file.read_text() == "a,b\n1,2\n"


def test_the_benches_are_listed(capsys):
    assert main(["bench"]) == 0
    assert "tl_align" in capsys.readouterr().out
    assert main(["bench", "tl_align", "--help"]) == 0
    assert "--rounds" in capsys.readouterr().out


def test_library_use_raises(monkeypatch):
    monkeypatch.setattr(over_models, "compare_each", lambda *arguments, **options: pytest.fail("measured"))
    with pytest.raises(UnsupportedModel):
        bench_tl_align(["resnet18"], device=torch.device("cpu"))
    with pytest.raises(UserError, match="unknown model"):
        bench_tl_align(["no"], device=torch.device("cpu"))


def test_memory_is_told_where_it_is_known(capsys):
    from alltokens.bench.results import show

    row = Row(
        "b", "card", "2", "m", 224, 8, "bf16", "compiled", "arm", 1, 1, 1, 8e3, 1.01, 1, 1.02, 2048.4, 1.012, 1.03, 1.02
    )
    show([row, replace(row, peak_mib=None, peak_ratio=None, peak_at_most=None)])
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[-4:] == ["1.03", "2,048", "1.012", "1.02"]
    assert second.split()[-2:] == ["1.03", "-"]
