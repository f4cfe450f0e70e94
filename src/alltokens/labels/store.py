"""Reading a store of label maps by the pictures' keys.

Shapes: B pictures at a time, k kept labels, h and w cells of a map.

Opening maps the files into memory and reads only the manifest; a million pictures take a moment and a few megabytes.
Loader workers, forked or not, share the mapped pages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from alltokens.core.label_maps import LabelMap
from alltokens.errors import UserError
from alltokens.labels.files import INDEX_NAME, check_digest, check_record, encode_key, map_index, map_shard
from alltokens.labels.keys import KeyIndex, hash_keys
from alltokens.labels.layout import RowLayout
from alltokens.labels.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, is_shard_name, read_manifest


class LabelStore:
    """The label maps of many pictures: `store[key]` one map, `store.read(keys)` a batch."""

    def __init__(self, path: Path, manifest: Manifest, index: KeyIndex) -> None:
        """Use `LabelStore.open`."""
        self.path, self.manifest = path, manifest
        self._index = index
        self._layout: RowLayout = manifest.layout

    @classmethod
    def open(cls, path: str | Path) -> LabelStore:
        """Open a finished store; files that are missing, cut off or of another version are errors."""
        path = Path(path).expanduser()
        manifest = _manifest_of(path)
        layout = manifest.layout
        for expected in (*manifest.shards, manifest.index):
            check_record(path / expected.name, expected)
        shards = [map_shard(path / expected.name, layout.row_bytes) for expected in manifest.shards]
        for shard, expected in zip(shards, manifest.shards, strict=True):
            if (len(shard.rows), shard.digest) != (expected.count, expected.sha256):
                raise UserError(
                    f"{path / expected.name} is not the shard that {MANIFEST_NAME} lists; "
                    "restore it from a copy, or make the labels again"
                )
        return cls(path, manifest, KeyIndex(shards, *map_index(path / INDEX_NAME, manifest.count)))

    def __reduce__(self) -> tuple[object, ...]:
        return LabelStore.open, (self.path,)  # a process that is not forked maps the files itself

    def __len__(self) -> int:
        return self.manifest.count

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._index.find([key])[0] >= 0)

    def __getitem__(self, key: str) -> LabelMap:
        """The map of one picture: ids (k, h, w) int32, scores (k, h, w) and tail (h, w) float16."""
        ids, scores, tail = self.read([key])
        assert tail is not None
        return LabelMap(ids[0], scores[0], tail[0] if self._layout.tail else tail)

    def __repr__(self) -> str:
        (rows, columns), what = self.manifest.grid, self.manifest
        return f"LabelStore({str(self.path)!r}: {len(self):,} maps of {rows}x{columns}, top {what.kept}, {what.form})"

    def read(self, keys: Sequence[str]) -> LabelMap:
        """The maps of these pictures (B, ...), in their order. A key that is not there is an error."""
        places = self._index.find(keys)
        if (places < 0).any():
            raise self._missing([keys[at] for at in np.flatnonzero(places < 0).tolist()])
        if not len(self):
            return self._layout.decode(np.empty((0, self._layout.row_bytes), dtype=np.uint8))
        return self._layout.decode(self._index.rows(places))

    def keys(self) -> Iterator[str]:
        """The keys of all pictures, in the order in which their maps lie on the disk."""
        return self._index.keys()

    def check(
        self,
        keys: Sequence[str],
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        *,
        subset: bool = False,
    ) -> None:
        """Whether this store fits a training on the pictures `keys`; call it before the first step.

        Every picture needs its map, and the store must count the same classes; with `subset` it may have more
        pictures. Names are compared where both sides have them and they are the same names in another order.
        """
        missing = np.flatnonzero(self._index.find(keys) < 0).tolist()
        if missing:
            raise self._missing([keys[at] for at in missing])
        if len(keys) != len(self) and not subset:
            raise UserError(
                f"{self.path} has the label maps of {len(self):,} pictures, the data set {len(keys):,} pictures: are "
                "these the labels of this data set? To train on a part of it, say subset=True"
            )
        if num_classes is None and class_names:
            num_classes = len(class_names)
        if num_classes is not None and num_classes != self.manifest.num_classes:
            raise UserError(
                f"{self.path} holds labels of {self.manifest.num_classes} classes, the model has {num_classes}: "
                "annotate with a map between the classes, or train a model of as many classes"
            )
        stored = self.manifest.class_names
        if class_names and stored and set(stored) == set(class_names) and tuple(class_names) != stored:
            at = next(at for at, (own, other) in enumerate(zip(stored, class_names, strict=True)) if own != other)
            raise UserError(
                f"{self.path} counts the classes in another order: class {at} is {stored[at]!r} there and "
                f"{class_names[at]!r} in the data set; annotate again with the data set's order"
            )

    def verify(self) -> list[str]:
        """What is wrong with the store's files, see `verify_store`."""
        return verify_store(self.path)

    def _missing(self, keys: Sequence[str]) -> UserError:
        near = self._index.nearest(keys[0])
        more = f" ({len(keys):,} pictures have none)" if len(keys) > 1 else ""
        return UserError(
            f"{self.path} has no label map for {keys[0]!r}{more}."
            f"{f' Nearest: {near!r}.' if near else ''} Keys are paths below the folder of the pictures, with "
            "extension; annotate the missing pictures, or look whether the store belongs to this data set"
        )


def verify_store(path: str | Path) -> list[str]:
    """Read every byte; a line for each file that is not as it was written. An empty list means that all is well."""
    path = Path(path).expanduser()
    try:
        manifest = _manifest_of(path)
    except UserError as error:
        return [str(error)]
    problems: list[str] = []
    for expected in (*manifest.shards, manifest.index):
        try:
            check_digest(path / expected.name, expected)
        except (UserError, OSError) as error:
            problems.append(str(error))
    strangers = {entry.name for entry in path.iterdir() if is_shard_name(entry.name)}
    strangers -= {expected.name for expected in manifest.shards}
    problems += [f"{path / name} does not belong to this store: {MANIFEST_NAME} does not list it" for name in strangers]
    if problems:
        return problems
    try:
        return _contradictions(LabelStore.open(path))
    except UserError as error:
        return [str(error)]


def _contradictions(store: LabelStore) -> list[str]:
    """What unharmed files cannot be excused for: an index of other keys, class ids that do not exist."""
    problems: list[str] = []
    start = 0
    hashes, places = map_index(store.path / INDEX_NAME, len(store))
    by_place = np.zeros(len(store), dtype=np.uint64)
    by_place[places[places < len(store)]] = hashes[places < len(store)]
    if (hashes[1:] < hashes[:-1]).any():
        problems.append(f"{store.path / INDEX_NAME} is not sorted")
    for shard, expected in zip(store._index.shards, store.manifest.shards, strict=True):
        own = hash_keys(map(encode_key, shard.keys()))
        if not np.array_equal(own, by_place[start : start + len(own)]):
            problems.append(f"{store.path / INDEX_NAME} does not list the pictures of {expected.name}")
        for first in range(0, len(own), 512):
            ids = store._layout.decode(np.array(shard.rows[first : first + 512])).ids
            if int(ids.min()) < 0 or int(ids.max()) >= store.manifest.num_classes:
                problems.append(f"{store.path / expected.name} has class ids beyond {store.manifest.num_classes - 1}")
                break
        start += len(own)
    return problems


def _manifest_of(path: Path) -> Manifest:
    file = path / MANIFEST_NAME
    if file.is_file():
        return read_manifest(file)
    if (path / UNFINISHED_NAME).is_file():
        done = sum(is_shard_name(entry.name) for entry in path.iterdir())
        raise UserError(
            f"{path} is an unfinished label store with {done} shard(s) of maps; "
            "go on with the command that began it, with the same --out"
        )
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.5)
    guess = f" Did you mean {path.parent / near[0]}?" if near and near[0] != path.name else ""
    what = f"it has no {MANIFEST_NAME}" if path.exists() else "no such folder"
    raise UserError(f"{path} is not a label store: {what}.{guess} alltokens annotate makes one")
