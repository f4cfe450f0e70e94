import json

import pytest
import timm
import torch

from alltokens.bench import token_labels
from alltokens.bench.over_models import Case
from alltokens.bench.results import Row
from alltokens.bench.token_labels import PublishedStep, floor, labelled_batch
from alltokens.cli import main
from alltokens.models.token_classifier import TokenClassifier
from alltokens.supervision.mixer import Mixer
from alltokens.supervision.source import Source
from alltokens.supervision.step import Supervision

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 12}
NETS = {
    "lvvit_t": lambda: real_model("lvvit_t", stem_channels=8, dense=True, **TINY),
    "vit_tiny_patch16_224": lambda: TokenClassifier(real_model("vit_tiny_patch16_224", **TINY)),
}
real_model = timm.create_model
BOX = 1  # a seed whose box shows both pictures


def both(kind, wrap=lambda module: module):
    """(Loss, network) of the published way and of ours, on the same weights, batch and box."""
    batch = labelled_batch(4, (3, 32, 32), 12, torch.device("cpu"), seed=2)
    mixer = Mixer("mixtoken", patch_size=8)
    found = []
    for make in (
        lambda net: PublishedStep(net, mixer, 0.1),
        lambda net: Supervision(net, Source("tokens", smoothing=0.1), mixer, dense_weight=0.5),
    ):
        torch.manual_seed(0)
        module = make(NETS[kind]().train())
        loss = wrap(module)(batch, torch.Generator().manual_seed(BOX))[0]
        loss.backward()
        found.append((loss, module.net))
    return found


@pytest.mark.parametrize("kind", NETS)
def test_the_published_way_gives_the_same_loss_and_gradients(kind):
    plan = Mixer("mixtoken", patch_size=8).draw(4, 32, torch.Generator().manual_seed(BOX))
    assert 0.2 < float(plan.share[0]) < 0.8, "the box shows both pictures"
    (loss, net), (our_loss, our_net) = both(kind)
    torch.testing.assert_close(loss, our_loss, atol=1e-5, rtol=1e-5)
    for (name, parameter), ours in zip(net.named_parameters(), our_net.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, ours.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.slow
def test_both_ways_are_the_same_when_compiled():
    (loss, _), (our_loss, _) = both("lvvit_t", lambda module: torch.compile(module, backend="aot_eager"))
    torch.testing.assert_close(loss, our_loss, atol=1e-5, rtol=1e-5)


def test_the_floor_is_the_dense_heads_share_of_the_products():
    # LV-ViT-S: 196 tokens x 384 x 1000 beside 6.6 G (paper, table 1: 6.6 B).
    assert floor("lvvit_s") == pytest.approx(1 + 196 * 384 * 1000 / 6.6e9, abs=5e-4)


def test_the_command_measures_three_arms_and_writes_them(tmp_path, capsys, monkeypatch):
    def create(name, **options):
        assert name == "lvvit_t"
        net = real_model("lvvit_t", stem_channels=8, **TINY, **options)
        net.pretrained_cfg["input_size"] = (3, 32, 32)
        return net

    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setitem(token_labels.CASES["cpu"], "lvvit_t", Case(4, 1.06))
    text = tmp_path / "out.json"
    assert main(["bench", "token_labels", "--rounds", "2", "--device", "cpu", "--json", str(text)]) == 0
    shown, errors = capsys.readouterr()
    assert errors.startswith("lvvit_t, eager: warming up")  # progress, now and then
    lines = [line for line in shown.splitlines() if line.startswith("lvvit_t ")]
    assert ["1.06" in line.split() for line in lines] == [False, True, False], "the limit stands beside our arm"
    assert "products of the dense head alone" in shown
    rows = [Row(**row) for row in json.loads(text.read_text())]
    assert [row.arm for row in rows] == ["class label alone", "token labels", "token labels as published"]
    assert {(row.bench, row.image_size, row.batch, row.mode) for row in rows} == {("token_labels", 32, 4, "eager")}
    assert rows[0].ratio == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "lvvit_z"], "Did you mean 'lvvit_"),
        (["--models", "resnet18"], "has no patch embedding to mix after"),
        (["--batch", "1"], "batch must be at least 2"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setattr(token_labels, "_arms", lambda *arguments: pytest.fail("measured"))
    assert main(["bench", "token_labels", *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
