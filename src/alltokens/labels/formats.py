"""Label trees as they were published: one `.pt` file for each picture. In and out of a store.

Shapes: k kept labels, h and w cells of a map.

Token labeling and ReLabel (FACTS 2.2, 5) keep for the picture CLASS/NAME.JPEG a file CLASS/NAME.pt with a float16
tensor (2, k, h, w): raw scores, falling, and class ids. The file is called by the last two parts of the picture's
path, cut at the first dot of the name. Ids in float16 are exact up to 2,048 only; there is no tail.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.files import write_aside
from alltokens.labels.layout import Form
from alltokens.labels.manifest import Description
from alltokens.labels.store import LabelStore
from alltokens.labels.writer import SHARD_SIZE, LabelWriter
from alltokens.models.weights import first_line, load_plain

EXACT_IDS = 2048  # float16 holds every whole number up to here

_AT_A_TIME = 256

Progress = Callable[[int, int], None]


def import_tree(
    tree: str | Path,
    out: str | Path,
    *,
    pictures: Iterable[str] | None = None,
    extension: str = ".JPEG",
    num_classes: int = 1000,
    class_names: Sequence[str] = (),
    form: Form = "plain",
    allow_missing: bool = False,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
) -> LabelStore:
    """Make a store of a published tree. Killed, it goes on where it stopped when it is called again.

    The files do not say which extension a picture has. Give the keys of the data set's `pictures`, and each gets its
    file; every one must have one, unless `allow_missing`. Without them the key is the file's path with `extension`.
    """
    tree = Path(tree).expanduser()
    if not tree.is_dir():
        raise UserError(f"{tree} is no folder of .pt label files")
    files = _files_of(tree, pictures, extension, allow_missing)
    first = read_file(next(iter(files.values())))
    _, kept, height, width = first.shape
    description = Description(
        (height, width),
        kept,
        num_classes,
        tail=False,
        form=form,
        class_names=tuple(class_names),
        annotator="a published .pt label tree",
    )
    with LabelWriter(out, description, shard_size=shard_size) as writer:
        keys = writer.remaining(files)
        done = len(files) - len(keys)
        for start in range(0, len(keys), _AT_A_TIME):
            some = keys[start : start + _AT_A_TIME]
            values = torch.stack([read_file(files[key], tuple(first.shape), num_classes) for key in some])
            writer.append(some, LabelMap(values[:, 1].round().int(), values[:, 0]))
            if progress:
                progress(done + start + len(some), len(files))
        return writer.finish()


def export_tree(store: LabelStore, out: str | Path, *, progress: Progress | None = None) -> int:
    """Write the published `.pt` files of all pictures below `out`; the number of files. Tails do not fit in there.

    Every key is looked at before anything is written: none may lead out of the folder, no two to the same file.
    """
    out = Path(out).expanduser()
    highest = store.manifest.num_classes - 1
    if highest > EXACT_IDS:
        raise UserError(
            f"the published format keeps class ids in float16, exact up to {EXACT_IDS}; this store has classes up to "
            f"{highest}. Nothing was written"
        )
    targets: dict[str, str] = {}
    keys = store.keys()
    for key in keys:
        if (name := published_name(_harmless(key))) in targets:
            raise UserError(f"{targets[name]!r} and {key!r} would both be written to {name}; nothing was written")
        targets[name] = key
    out.mkdir(parents=True, exist_ok=True)
    root = out.resolve()
    for folder in sorted({PurePosixPath(name).parent.as_posix() for name in targets}):
        (target := root / folder).mkdir(parents=True, exist_ok=True)
        if target.resolve() != target:
            raise UserError(f"{out / folder} is a link that leads elsewhere; export to a folder without links")
    names = list(targets)
    for start in range(0, len(names), _AT_A_TIME):
        some = names[start : start + _AT_A_TIME]
        maps = store.read([targets[name] for name in some])
        for name, ids, scores in zip(some, maps.ids, maps.scores, strict=True):
            _save(root / name, torch.stack([scores, ids.half()]))
        if progress:
            progress(start + len(some), len(names))
    return len(names)


def published_name(key: str) -> str:
    """The file of a picture's labels: "train/n01/n01_1.a.JPEG" -> "n01/n01_1.pt"."""
    *folders, name = PurePosixPath(key).parts
    return "/".join([*folders[-1:], name.partition(".")[0] + ".pt"])


def read_file(path: Path, shape: tuple[int, ...] | None = None, num_classes: int | None = None) -> Tensor:
    """(2, k, h, w): scores and ids of one published file. Code in it is refused, and so is another `shape`."""
    try:
        values = load_plain(path)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # torch reports damage and code alike through its own error types
        raise UserError(f"{path} is no label file: {first_line(error)}") from None
    if not isinstance(values, Tensor) or values.ndim != 4 or len(values) != 2 or not values.is_floating_point():
        came = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"{path}: expected a floating-point tensor (2, kept, h, w) of scores and ids, got {came}")
    if shape is not None and tuple(values.shape) != shape:
        raise UserError(f"{path} holds {tuple(values.shape)}, the files before it {shape}; a store has one size of map")
    ids = values[1]
    if not torch.isfinite(values).all() or (ids != ids.round()).any() or (ids < 0).any():
        raise UserError(f"{path}: its second half is no class ids, or a score is not finite")
    if values.dtype == torch.float16 and ids.max() > EXACT_IDS:
        raise UserError(
            f"{path} has the class id {int(ids.max())} in float16, which is exact up to {EXACT_IDS} only: the ids in "
            "these files are already rounded. Annotate again with alltokens annotate"
        )
    if num_classes is not None and ids.max() >= num_classes:
        raise UserError(
            f"{path} has the class id {int(ids.max())}, but there are {num_classes} classes; see num_classes"
        )
    return values


def _files_of(tree: Path, pictures: Iterable[str] | None, extension: str, allow_missing: bool) -> dict[str, Path]:
    """Key -> label file, for each picture or else for each file."""
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.pt"))
    if not names:
        raise UserError(f"{tree} holds no .pt label files")
    if pictures is None:
        return {name.removesuffix(".pt") + extension: tree / name for name in names}
    files, there, taken, missing = {}, set(names), {}, []
    for key in pictures:
        name = published_name(key)
        if name in taken:
            raise UserError(
                f"the published names cannot tell {taken[name]!r} and {key!r} apart: both are {name}. One of them has "
                "the other's labels; annotate again with alltokens annotate"
            )
        taken[name] = key
        if name in there:
            files[key] = tree / name
        else:
            missing.append(key)
    if not files or (missing and not allow_missing):
        raise UserError(
            f"{tree} has no label file for {len(missing):,} of {len(taken):,} pictures, such as {missing[0]!r} "
            f"(looked for {published_name(missing[0])}); allow_missing leaves them out"
            if missing
            else "no pictures were given"
        )
    return files


def _harmless(key: str) -> str:
    """The key, if it is a plain path that leads downwards."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(sign in key for sign in "\\\0:"):
        raise UserError(f"the key {key!r} does not name a place below a folder; nothing was written")
    return key


def _save(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    torch.save(values.clone(), buffer)
    write_aside(path, [buffer.getvalue()])
