"""Weights into a model and out of it: other picture sizes, other class counts, files that stock timm loads.

Shapes: N positions, P prefix positions (class token and registers), C channels.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn

from alltokens.errors import UserError
from alltokens.models.token_classifier import TokenClassifier

WEIGHTS_FILE = "model.safetensors"
DENSE_HEAD_FILE = "token_head.safetensors"  # beside it: what TokenClassifier adds to a model of stock timm
CONFIG_FILE = "config.json"
DENSE_HEAD = "aux_head"
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where training programs put the weights


def load_weights(model: nn.Module, path: str | Path) -> list[str]:
    """Load weights from a file (.safetensors, or .pth read without executing anything), a weights folder or a run.

    Position embeddings are resized to the model's grid. Where the class count differs, the heads keep their fresh
    values; so does a dense head that the file has not, and one that the model has not is passed over. Everything else
    must fit. Returns the names of the weights that were left as they are.
    """
    if isinstance(model, TokenClassifier):
        return _load_wrapped(model, find_weights(Path(path)))
    file = find_weights(Path(path))
    own = model.state_dict()
    given = {name: value.to(own[name].dtype) if name in own else value for name, value in read_weights(file).items()}
    heads = classifier_names(model)
    fresh = _changed_heads(own, given, heads) | _one_sided_dense_head(own, given)
    wanted = {name: value for name, value in given.items() if name.split(".")[0] not in fresh and name not in fresh}
    wanted = {name: _fit(name, value, own, model) for name, value in wanted.items()}
    missing = [name for name in own if name not in wanted and not _belongs(name, fresh)]
    unknown = [name for name in wanted if name not in own]
    wrong = [
        f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in wanted.items()
        if name in own and value.shape != own[name].shape
    ]
    problems = [
        f"{kind}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for kind, names in (("missing", missing), ("not in the model", unknown), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise UserError(f"{file} does not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(wanted, strict=False)
    return [name for name in own if name not in wanted]


def _load_wrapped(model: TokenClassifier, file: Path) -> list[str]:
    """The model's own weights, and those of the dense head if they lie beside them and count the same classes."""
    left = [f"model.{name}" for name in load_weights(model.model, file)]
    beside = file.with_name(DENSE_HEAD_FILE)
    given = read_weights(beside) if beside.is_file() else {}
    own = model.aux_head.state_dict()
    if {name: value.shape for name, value in given.items()} != {name: value.shape for name, value in own.items()}:
        return [*left, *(f"{DENSE_HEAD}.{name}" for name in own)]
    model.aux_head.load_state_dict(given)
    return left


def find_weights(path: Path) -> Path:
    """The weights file that a path means: itself, or the best (else last) weights of a run or weights folder."""
    if path.is_file():
        return path
    for inner in ("", "weights/best", "weights/last"):
        if (path / inner / WEIGHTS_FILE).is_file():
            return path / inner / WEIGHTS_FILE
    if path.is_dir():
        raise UserError(f"no weights in {path}: expected {WEIGHTS_FILE}, or a run folder with weights/best")
    raise UserError(f"no weights at {path}: there is no such file or folder")


def read_weights(file: Path) -> dict[str, Tensor]:
    """The state dict in a file, unwrapped from what training programs put around it. Nothing in it is executed."""
    try:
        content: Any = load_file(file) if file.suffix == ".safetensors" else load_plain(file)
    except UserError:
        raise
    except (safetensors.SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{file} cannot be read as weights: {first_line(error)}") from None
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is not a plain state dict (weights with code in them are refused): {first_line(error)}"
        ) from None
    except Exception:  # whatever comes of taking other bytes for a pickle
        raise UserError(f"{file} cannot be read as weights: torch.save did not write it, or it is damaged") from None
    for _ in _WRAPPERS:  # not for ever: what is in a file may contain itself
        if isinstance(content, Mapping) and (wrapped := [key for key in _WRAPPERS if key in content]):
            content = content[wrapped[0]]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{file} holds no state dict: expected names and tensors")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def load_plain(file: Path) -> Any:
    """What torch.save wrote, if it is plain values and tensors: no code runs, and no more memory than bytes is used."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise UserError(f"{file} is compressed, which torch.save never does: it may unfold to any size")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of odd pickles, which are read or refused all the same
        content = torch.load(file, "cpu", weights_only=True)
    _refuse_repeats(content, file, set())
    return content


def _refuse_repeats(content: Any, file: Path, seen: set[int]) -> None:
    """A tensor may repeat its few bytes by strides of 0; whoever copied it would need any amount of memory."""
    if id(content) in seen:
        return
    seen.add(id(content))
    if isinstance(content, Tensor):
        if not content.is_sparse and content.numel() * content.element_size() > content.untyped_storage().nbytes():
            raise UserError(f"{file} holds a tensor of {tuple(content.shape)} that has fewer bytes than that")
    elif isinstance(content, Mapping | list | tuple):
        for part in content.values() if isinstance(content, Mapping) else content:
            _refuse_repeats(part, file, seen)


@contextmanager
def opening_folder(name: str) -> Iterator[None]:
    """Around the making of a model: whatever is wrong with a folder (`local-dir:FOLDER`) is said in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its configuration may say anything, and timm raises what comes of that
        if not name.startswith("local-dir:"):
            raise
        folder = name.removeprefix("local-dir:")
        reason = first_line(error)[:300]
        raise UserError(f"{folder} holds no model that can be made ({type(error).__name__}: {reason})") from None


def read_class_names(folder: Path) -> tuple[str, ...]:
    """The names of the classes in a weights folder."""
    file = folder / CONFIG_FILE
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["label_names"]
        if not isinstance(names, list):
            raise TypeError
        return tuple(map(str, names))
    except FileNotFoundError:
        raise UserError(f"{folder} has no weights yet: the run was stopped before its first evaluation") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{file} is damaged: it names no classes; restore it from a copy") from None


def resize_positions(
    positions: Tensor, grid: tuple[int, int], prefix: int, old_grid: tuple[int, int] | None = None
) -> Tensor:
    """(1, P + N, C) -> (1, P + h * w, C): bicubic over the grid, prefix positions as they are (FACTS section 1)."""
    count = positions.shape[1] - prefix
    old = old_grid if old_grid is not None else (round(count**0.5), round(count**0.5))
    if old[0] * old[1] != count:
        raise UserError(f"{count} positions are no square grid; they cannot be resized")
    image = positions[:, prefix:].reshape(1, *old, -1).permute(0, 3, 1, 2).float()  # (1, C, h, w)
    image = F.interpolate(image, size=grid, mode="bicubic", align_corners=False)
    resized = image.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1).to(positions.dtype)
    return torch.cat([positions[:, :prefix], resized], dim=1)


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """The modules that turn features into classes, the dense head among them."""
    config = getattr(model, "pretrained_cfg", None) or {}
    named = config.get("classifier") or ("head",)
    named = (named,) if isinstance(named, str) else tuple(named)
    return (*named, DENSE_HEAD)


def save_weights(
    net: nn.Module,
    state: Mapping[str, Tensor],
    folder: Path,
    *,
    model_args: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    class_names: tuple[str, ...],
    write: Any,
) -> None:
    """A folder that `timm.create_model("local-dir:FOLDER")` loads. `write(path, content)` must replace a file whole.

    What TokenClassifier adds to a model goes into a file of its own.
    """
    if isinstance(net, TokenClassifier):
        head = {name.removeprefix(f"{DENSE_HEAD}."): state[name] for name in state if name.startswith(DENSE_HEAD)}
        write(folder / DENSE_HEAD_FILE, _packed(head))
        state = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
        net = net.model
    pretrained = getattr(net, "pretrained_cfg", None) or {}
    config = {
        "architecture": pretrained.get("architecture", type(net).__name__.lower()),
        "num_classes": net.num_classes,
        "num_features": getattr(net, "num_features", None),
        "label_names": list(class_names),
        "model_args": dict(model_args),
        "pretrained_cfg": {
            "tag": "alltokens",
            "custom_load": False,
            "num_classes": net.num_classes,
            "first_conv": pretrained.get("first_conv"),
            "classifier": pretrained.get("classifier"),
            "fixed_input_size": bool(pretrained.get("fixed_input_size")),
            **preprocessing,
        },
    }
    write(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    write(folder / WEIGHTS_FILE, _packed(state))


def _packed(state: Mapping[str, Tensor]) -> bytes:
    return save({name: value.detach().cpu().contiguous() for name, value in state.items()})


def first_line(error: Exception) -> str:
    """What a library says of a file it could not read, but for the advice to run the code in it."""
    said = str(error)
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in said:  # torch's words, and timm's
        asked = re.search(r"(?:GLOBAL|globals:) ([\w.]+\w)", said)
        what = f"it asks for {asked[1]}" if asked else "it is damaged, or was not made by torch.save"
        return f"{what}; only plain values and tensors are read, and nothing is run"
    return (said.strip() or type(error).__name__).splitlines()[0]


def _belongs(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _changed_heads(own: Mapping[str, Tensor], given: Mapping[str, Tensor], heads: tuple[str, ...]) -> set[str]:
    """All heads, if any of them counts other classes than the model does; else none."""
    for head in heads:
        for kind in ("weight", "bias"):
            name = f"{head}.{kind}"
            if name in own and name in given and own[name].shape[0] != given[name].shape[0]:
                return set(heads)
    return set()


def _one_sided_dense_head(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> set[str]:
    """The dense head, if only one of the two has one."""
    return {DENSE_HEAD} if (f"{DENSE_HEAD}.weight" in own) != (f"{DENSE_HEAD}.weight" in given) else set()


def _fit(name: str, value: Tensor, own: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """`value` in the model's shape, where a change of the picture's size explains the difference."""
    target = own.get(name)
    if target is None or target.shape == value.shape:
        return value
    if name.split(".")[-1] == "pos_embed" and value.ndim == target.ndim == 3 and value.shape[2] == target.shape[2]:
        prefix = 0 if getattr(model, "no_embed_class", False) else int(getattr(model, "num_prefix_tokens", 0))
        grid = cast("tuple[int, int]", tuple(model.patch_embed.grid_size))  # type: ignore[union-attr]
        return resize_positions(value, grid, prefix)
    if name.endswith("relative_position_bias_table") and value.shape[1] == target.shape[1]:
        window = cast("tuple[int, int]", model.get_submodule(name.rpartition(".")[0]).window_size)
        return resize_rel_pos_bias_table(value, new_window_size=window, new_bias_shape=target.shape)
    return value
