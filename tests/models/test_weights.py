"""Weights into models of other sizes and class counts, and out for stock timm."""

import numpy as np
import pytest
import timm
import torch

from alltokens.engine.run_folder import write_atomically
from alltokens.errors import UserError
from alltokens.models.weights import load_weights, read_weights, resize_positions, save_weights

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def vit(**more):
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, "num_classes": 5, **more})


def input_tokens(seed, shape):
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(("name", "side"), [("pos_384", 24), ("pos_112", 7)])
def test_positions_are_resized_as_published(name, side):
    golden = np.load("tests/golden/pos_embed_resize.npz")
    ours = resize_positions(input_tokens(103, (1, 197, 6)), (side, side), prefix=1)
    np.testing.assert_allclose(ours, golden[name], atol=2e-5, rtol=1e-4)


def test_a_weight_file_of_the_same_model_loads_whole(tmp_path):
    source, target = vit(), vit()
    torch.save({"state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "a.pth")
    assert load_weights(target, tmp_path / "a.pth") == []
    assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())


def test_weights_in_float16_are_read_into_the_model_s_own_type(tmp_path):
    source, target = vit().half(), vit(img_size=64)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    assert load_weights(target, tmp_path / "a.pth") == []
    assert {value.dtype for value in target.state_dict().values()} == {torch.float32}
    assert torch.equal(target.head.weight, source.head.weight.float())
    assert torch.equal(target.pos_embed, resize_positions(source.pos_embed.float(), (8, 8), prefix=1))


def test_another_picture_size_and_class_count(tmp_path):
    source, target = vit(), vit(img_size=64, num_classes=7)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    head = target.head.weight.detach().clone()
    assert load_weights(target, tmp_path / "a.pth") == ["head.weight", "head.bias"]
    assert torch.equal(target.head.weight, head)
    assert target.pos_embed.shape == (1, 65, 24)
    torch.testing.assert_close(target.pos_embed[:, :1], source.pos_embed[:, :1])
    assert torch.equal(target.pos_embed, resize_positions(source.pos_embed, (8, 8), prefix=1))


def test_swin_biases_are_resized(tmp_path):
    small = {"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 3}
    source = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7, **small)
    target = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=8, **small)
    torch.save(source.state_dict(), tmp_path / "a.pth")
    left = load_weights(target, tmp_path / "a.pth")
    assert not [name for name in left if "bias_table" in name]


def test_a_saved_folder_is_what_stock_timm_loads(tmp_path):
    net = vit().eval()
    save_weights(
        net, net.state_dict(), tmp_path, model_args=SMALL, class_names=tuple("abcde"), write=write_atomically,
        preprocessing={"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.2] * 3, "crop_pct": 0.9},
    )  # fmt: skip
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    picture = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(picture), net(picture))
    assert tuple(timm.data.resolve_data_config(model=loaded)["mean"]) == (0.5, 0.5, 0.5)
    assert loaded.pretrained_cfg["label_names"] == ["a", "b", "c", "d", "e"]


class Danger:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as weights"),
        (b"just text\n", "cannot be read as weights: torch.save did not write it"),
        (b"not weights at all", "refused"),
        ({"weights": Danger()}, "refused"),
        ({"epoch": 3}, "no state dict"),
    ],
)
def test_what_is_no_state_dict_is_refused_and_not_executed(tmp_path, capsys, content, message):
    file = tmp_path / "a.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UserError, match=message):
        read_weights(file)
    assert "executed" not in capsys.readouterr().out


def test_weights_of_another_model_are_refused_by_name(tmp_path):
    torch.save(vit(embed_dim=48).state_dict(), tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"of another shape: .*48"):
        load_weights(vit(), tmp_path / "a.pth")
    torch.save(vit(depth=1).state_dict(), tmp_path / "b.pth")
    with pytest.raises(UserError, match=r"missing: blocks\.1"):
        load_weights(vit(), tmp_path / "b.pth")
    with pytest.raises(UserError, match="no such file"):
        load_weights(vit(), tmp_path / "c.pth")
