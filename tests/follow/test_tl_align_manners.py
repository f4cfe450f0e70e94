"""TLAlign leaves a model as it was, and says what it cannot do."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import DiffAttention, ParallelThingsBlock
from torch import nn

import alltokens as at
from alltokens.follow.families import follower_support, supported_models
from alltokens.follow.tl_align import TLAlign
from alltokens.follow.transmix import TransMix
from tests.follow.test_families import CASES, VIT, mixed_batch, sharp
from tests.follow.tiny_vit import followed, tiny


@pytest.mark.parametrize("name", ["vit", "vit_parallel_scaling", "cait", "swin", "pvt_v2", "mixer", "poolformer"])
def test_detach_leaves_outputs_state_and_modules_as_before(name):
    build, size, _ = CASES[name]
    model, (images, plan) = sharp(build, torch.float32), mixed_batch(size, torch.float32)
    before, state = model(images), copy.deepcopy(model.state_dict())
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    aligner = TLAlign(model, drop_path_aware=name == "vit")
    assert torch.equal(model(images), before)  # not following: the very same code
    assert list(model.state_dict()) == list(state)
    with aligner.follow(plan):
        model(images)
    aligner.detach()
    assert torch.equal(model(images), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert {key: set(vars(module)) for key, module in model.named_modules()} == attributes


def test_an_exception_inside_the_model_leaves_nothing(batch):
    images, plan = batch
    model = tiny()
    aligner = TLAlign(model)
    with aligner.follow(plan):
        model(images)
    hook = model.blocks[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), aligner.follow(plan):
        model(images)
    hook.remove()
    with pytest.raises(at.UserError, match="no batch has been followed"):
        _ = aligner.share
    with aligner.follow(plan):
        model(images)
    assert aligner.share.shape == (3,)


@pytest.mark.parametrize("second", [TLAlign, TransMix])
def test_two_followers_on_one_model_are_refused(second):
    model = tiny()
    first = TLAlign(model)
    with pytest.raises(at.UserError, match=r"detach\(\)"):
        second(model)
    first.detach()
    second(model)


def test_a_follow_inside_a_follow_is_refused_and_the_outer_one_goes_on(batch):
    images, plan = batch
    model = tiny()
    aligner = TLAlign(model)
    with aligner.follow(plan):
        with pytest.raises(at.UserError, match="already"), aligner.follow(plan):
            pass
        model(images)
    assert torch.equal(aligner.share, followed_share(aligner, model, images, plan))


def followed_share(aligner, model, images, plan):
    with aligner.follow(plan):
        model(images)
    return aligner.share


def test_copies_of_a_followed_model_are_not_followed(batch):
    images, plan = batch
    model = tiny()
    aligner = TLAlign(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with aligner.follow(plan):
        model(images)
        for other in copies:
            other(images * 2)  # an EMA model run in the middle must not touch the shares
    assert torch.equal(aligner.share, followed_share(aligner, model, images, plan))
    TLAlign(copies[0])  # and a copy can be followed by itself


def test_a_forgotten_model_is_reported(batch):
    model = tiny()
    aligner = TLAlign(model)
    with pytest.raises(at.UserError, match="layer 1 is not a number"), aligner.follow(batch[1]):
        pass


def test_the_plan_of_another_batch_is_refused(batch):
    images, plan = batch
    model = tiny()
    with pytest.raises(at.UserError, match="the plan of the very batch"):
        followed(model, images[:2], plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0]}, "from 1 to 3"),
        ({"layers": [4]}, "from 1 to 3"),
        ({"layers": []}, "from 1 to 3"),
        ({"residual": "averag"}, "Did you mean 'average'"),
    ],
)
def test_wrong_options_say_what_is_allowed(options, message):
    model = tiny()
    with pytest.raises(at.UserError, match=message):
        TLAlign(model, **options)
    TLAlign(model)  # nothing stayed behind


def test_shares_of_layers_need_to_be_asked_for(batch):
    images, plan = batch
    aligner = followed(tiny(), images, plan)
    with pytest.raises(at.UserError, match="layer_shares=True"):
        _ = aligner.layer_shares


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: timm.create_model("resnet18", num_classes=2), "Supported families: ViT"),
        (lambda: VIT(img_size=32, attn_layer=DiffAttention), "DiffAttention"),
        (lambda: VIT(img_size=32, patch_drop_rate=0.5), "patch_drop_rate=0"),
        (lambda: nn.Sequential(tiny(), tiny()), "several models"),
    ],
)
def test_models_that_cannot_be_followed_raise(build, message):
    with pytest.raises(at.UnsupportedModel, match=message) as error:
        TLAlign(build())
    assert "Supported families: ViT, DeiT, LV-ViT, EVA, CaiT, Swin" in str(error.value)


def test_a_compiled_model_is_refused_with_the_right_order():
    with pytest.raises(at.UserError, match="then compile it"):
        TLAlign(torch.compile(tiny()))


def test_a_model_inside_a_wrapper_is_found(batch):
    images, plan = batch
    model = tiny()
    wrapped = nn.ModuleDict({"net": model})
    assert torch.equal(followed(wrapped, images, plan, run=model).share, followed(model, images, plan).share)


def test_support_is_known_by_model_class_and_name():
    assert follower_support(tiny()) == ("area", "transmix", "tl_align")
    assert follower_support(sharp(CASES["swin"][0], torch.float32)) == ("area", "tl_align")
    assert follower_support(SwinTransformer) == ("area", "tl_align")
    assert follower_support("resnet18") == ("area",)
    assert follower_support(VIT(img_size=32, block_fn=ParallelThingsBlock)) == ("area", "tl_align")
    assert "vit_dpwee_patch16_reg1_gap_256" not in supported_models()
    assert {"deit_tiny_patch16_224", "pvt_tiny", "swinv2_tiny_window8_256"} <= set(supported_models())
    with pytest.raises(at.UserError, match="deit_tiny"):
        follower_support("deit_tiny_patch16_22")


@pytest.mark.slow
def test_every_model_that_is_listed_can_be_followed():
    for name in supported_models():
        with torch.device("meta"):
            model = timm.create_model(name)
        assert "tl_align" in follower_support(model), name
