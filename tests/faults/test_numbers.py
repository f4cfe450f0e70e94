"""Numbers that go wrong: what has been good stays, and the message says when it ended."""

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from alltokens.core.label_maps import LabelMap
from alltokens.core.losses import soft_cross_entropy
from alltokens.core.mixing import mix_images
from alltokens.core.plan import MixPlan, flipped_partner
from alltokens.data.datasets import Sample
from alltokens.engine import checkpoint
from alltokens.engine.runs import resume, train
from alltokens.engine.trainer import Trainer
from alltokens.errors import TrainingFailed, UserError
from alltokens.labels.manifest import Description
from alltokens.labels.writer import LabelWriter
from alltokens.models.weights import read_weights
from alltokens.supervision.step import Supervision
from tests.tiny import tiny_config


def all_finite(tensors):
    return all(torch.isfinite(value).all() for value in tensors.values() if value.is_floating_point())


def exploding(monkeypatch, update):
    """The gradient of one update is infinite; its loss is not."""
    original = Trainer.update

    def exploded(self, micro_batches):
        loss = original(self, micro_batches)
        if self.position.update + 1 == update:
            with torch.no_grad():
                next(self.net.parameters()).mul_(float("inf"))
        return loss

    monkeypatch.setattr(Trainer, "update", exploded)


@pytest.mark.parametrize("epoch", [1, 2])
def test_weights_that_explode_in_the_last_update_before_a_save_are_not_saved(epoch, tmp_path, monkeypatch, tally):
    """The next loss would tell, but the state that a run goes on from would be ruined by then."""
    run = tmp_path / "run"
    exploding(monkeypatch, update=6 * epoch)
    with pytest.raises(TrainingFailed, match=rf"no longer finite after update {6 * epoch},.* \(epoch {epoch}\)"):
        train(tiny_config(), run_dir=run, quiet=True)
    if epoch == 1:
        assert not list(run.rglob("*.safetensors"))
    else:
        tensors, facts = checkpoint.read(run / "checkpoints" / "last.safetensors")
        assert facts["position"]["update"] == 6
        assert all_finite(tensors)
        assert all_finite(read_weights(run / "weights" / "best" / "model.safetensors"))
        monkeypatch.undo()
        assert resume(run, quiet=True).best_epoch > 0
    tally["numbers gone wrong"] += 1


def overflowing(monkeypatch, prepare=lambda trainer: None):
    """The backward pass of the fourth update overflows float16. Gives the scales after each update."""
    original, scales = Trainer.update, []

    def watched(self, micro_batches):
        if self.position.update == 0:
            prepare(self)
        if self.position.update in (3, 4):  # far too great, and as it would be after many such halvings
            self.runtime.accelerator.scaler.update(2.0**127 if self.position.update == 3 else 2.0**10)
        before = [value.detach().clone() for value in self.net.parameters()]
        loss = original(self, micro_batches)
        scales.append(self.runtime.accelerator.scaler.get_scale())
        stood = all(map(torch.equal, before, self.net.parameters()))
        assert stood == (self.position.update == 3), "exactly the step that overflows is left out"
        return loss

    monkeypatch.setattr(Trainer, "update", watched)
    return scales


def check_what_overflowed(scales, run):
    assert scales[3] == 2.0**126  # halved
    assert all_finite(checkpoint.read(run / "checkpoints" / "last.safetensors")[0])


@pytest.mark.gpu
def test_fp16_steps_over_infinite_gradients_and_goes_on(tmp_path, monkeypatch):
    scales = overflowing(monkeypatch)
    train(tiny_config(train={"precision": "fp16", "device": "cuda", "epochs": 2}), run_dir=tmp_path / "r", quiet=True)
    check_what_overflowed(scales, tmp_path / "r")


def test_a_scaled_loss_steps_over_infinite_gradients_and_goes_on(tmp_path, monkeypatch, tally):
    """The same on a CPU, where fp16 is refused: its scaler put under a run in float32."""

    def scaled(trainer):
        accelerator = trainer.runtime.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        trainer.optimizer = AcceleratedOptimizer(trainer.optimizer.optimizer, scaler=accelerator.scaler)
        accelerator._optimizers[:] = [trainer.optimizer]

    scales = overflowing(monkeypatch, scaled)
    train(tiny_config(train={"epochs": 2}), run_dir=tmp_path / "r", quiet=True)
    check_what_overflowed(scales, tmp_path / "r")
    tally["numbers gone wrong"] += 1


@pytest.mark.parametrize("label", [10, -1, 2**40])
def test_labels_out_of_range_are_named(label):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    step = Supervision(net, num_classes=10)
    labels = torch.tensor([3, label])
    batch = Sample(torch.zeros(2, 3, 2, 2), labels, ["a", "b"], torch.zeros(2, 2, 3))
    low, high = min(3, label), max(3, label)
    with pytest.raises(UserError, match=rf"labels must lie in 0 to 9 \(10 classes\), got {low} to {high}"):
        step(batch, torch.Generator())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["scores", "tail"])
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_map_that_is_not_finite_is_never_stored(wrong, place, form, tmp_path):
    numbers = {"scores": torch.ones(1, 2, 3, 3), "tail": torch.ones(1, 3, 3)}
    with LabelWriter(tmp_path / "s", Description((3, 3), 2, 10, form=form)) as writer:
        maps = LabelMap(torch.zeros(1, 2, 3, 3, dtype=torch.int32), **numbers)
        numbers[place].view(-1)[4] = wrong
        with pytest.raises(UserError, match="scores must be finite"):
            writer.append(["a"], maps)
        # A tail of -inf says that no probability is left for the other classes: that is a label.
        numbers[place].view(-1)[4] = 1.0 if place == "scores" else float("-inf")
        writer.append(["a"], maps)
        assert len(writer) == 1


@pytest.fixture(scope="module")
def net():
    import timm

    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10, "img_size": 32}
    return timm.create_model("vit_tiny_patch16_224", **options)


@pytest.mark.parametrize("follower", ["area", "tl_align", "transmix"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_an_empty_and_a_full_box_are_no_mix_and_the_partner(net, follower, batch, monkeypatch, tally):
    """Also in a batch of one, whose partner is itself, and in an odd one."""
    generator = torch.Generator().manual_seed(batch)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)
    sample = Sample(images, labels, ["x"] * batch, torch.zeros(batch, 2, 3))
    step = Supervision(net, mixer="cutmix", follower=follower)
    partner = flipped_partner(batch)
    try:
        for share in (0.0, 1.0):
            plan = MixPlan(partner, torch.full((1, 32, 32), share))
            prepare = getattr(step.follower, "prepare", lambda plan: None)
            monkeypatch.setattr(step, "draw_plan", lambda *_, plan=plan, prepare=prepare: (prepare(plan), plan)[1])
            net.zero_grad()
            loss, parts = step(sample, generator)
            loss.backward()
            shown, told = (images, labels) if share == 0 else (images[partner], labels[partner])
            assert torch.equal(mix_images(images, plan), shown)
            torch.testing.assert_close(parts.share, torch.full((batch,), share), atol=1e-5, rtol=0)
            expected = soft_cross_entropy(net(shown), torch.nn.functional.one_hot(told, 10).float())
            torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
            assert all(torch.isfinite(value.grad).all() for value in net.parameters())
            tally["numbers gone wrong"] += 1
    finally:
        step.detach()
