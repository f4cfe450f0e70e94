"""Finding pictures by their keys without loading the keys.

Shapes: N pictures of a store, B keys asked for.

An index is the sorted 64-bit hashes of all keys, each with the picture's place; places count through the shards in
their order. A hash only says where to look: a key is found when the bytes stored there are the same.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from alltokens.errors import UserError
from alltokens.labels.files import Shard, decode_key, encode_key

_MOST_LOOKED_AT = 64  # keys compared in search of the nearest one


def hash_keys(keys: Iterable[bytes]) -> np.ndarray:
    """(B,) uint64."""
    digests = b"".join([hashlib.blake2b(key, digest_size=8).digest() for key in keys])
    return np.frombuffer(digests, dtype="<u8")


def sort_index(shards: Sequence[Shard]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (N,) uint64, rising, and places (N,) uint32 of all keys in these shards. A key twice is an error."""
    hashes = np.concatenate([np.empty(0, np.uint64), *(hash_keys(map(encode_key, shard.keys())) for shard in shards)])
    assert len(hashes) < 2**32, "places are 32 bits wide"
    places = np.argsort(hashes, kind="stable").astype(np.uint32)
    hashes = hashes[places]
    index = KeyIndex(shards, hashes, places)
    for same in np.flatnonzero(hashes[1:] == hashes[:-1]):
        run = places[hashes == hashes[same]]
        keys = [index.key_at(int(place)) for place in run]
        if len(set(keys)) < len(keys):
            raise UserError(f"the picture {decode_key(keys[0])!r} has two label maps; annotate each picture once")
    return hashes, places


class KeyIndex:
    """Places of keys in some shards."""

    def __init__(self, shards: Sequence[Shard], hashes: np.ndarray, places: np.ndarray) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(len(shard.rows) for shard in shards)], dtype=np.int64)
        self._hashes, self._places = hashes, places

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """(B,) int64: each key's place, -1 for one that is not there."""
        encoded = [encode_key(key) for key in keys]
        hashes = hash_keys(encoded)
        first = np.searchsorted(self._hashes, hashes)
        found = np.full(len(keys), -1, dtype=np.int64)
        inside = np.flatnonzero(first < len(self._hashes))
        inside = inside[self._hashes[first[inside]] == hashes[inside]]
        places = self._places[first[inside]].astype(np.int64)
        homes = (np.searchsorted(self.starts, places, side="right") - 1).tolist()
        rows = places - self.starts[homes]
        for asked, at, home, row in zip(inside.tolist(), places.tolist(), homes, rows.tolist(), strict=True):
            if home < len(self.shards) and self.shards[home].key(row) == encoded[asked]:
                found[asked] = at
            else:
                found[asked] = self._search_on(int(first[asked]) + 1, encoded[asked], int(hashes[asked]))
        return found

    def key_at(self, place: int) -> bytes:
        home = int(np.searchsorted(self.starts, place, side="right")) - 1
        return self.shards[home].key(place - int(self.starts[home]))

    def keys(self) -> Iterator[str]:
        for shard in self.shards:
            yield from shard.keys()

    def rows(self, places: np.ndarray) -> np.ndarray:
        """(B, R) uint8: the rows at these places (B,), read shard by shard."""
        rows = np.empty((len(places), self.shards[0].rows.shape[1]), dtype=np.uint8)
        homes = np.searchsorted(self.starts, places, side="right") - 1
        for home in np.unique(homes).tolist():
            part = np.flatnonzero(homes == home)
            rows[part] = self.shards[home].rows[places[part] - self.starts[home]]
        return rows

    def nearest(self, key: str) -> str | None:
        """A stored key like this one: of the same name (with another ending or folder), or else in the same folder."""
        folder, _, name = key.rpartition("/")
        stem = name.rpartition(".")[0] or name
        for part in (stem, folder + "/", ""):
            candidates = self._containing(encode_key(part)) if part != "/" else []
            if near := difflib.get_close_matches(key, candidates, n=1, cutoff=0.5 if part else 0.0):
                return near[0]
        return None

    def _containing(self, part: bytes) -> list[str]:
        """Some keys that have `part` in them."""
        found: dict[str, None] = {}
        for shard in self.shards:
            whole, at = shard.key_bytes.tobytes(), -1
            while len(found) < _MOST_LOOKED_AT and (at := whole.find(part, at + 1)) >= 0 and at < len(whole):
                row = int(np.searchsorted(shard.key_ends, at, side="right"))
                if part in (key := shard.key(row)):
                    found[decode_key(key)] = None
                at = int(shard.key_ends[row]) - 1
        return list(found)

    def _search_on(self, at: int, key: bytes, key_hash: int) -> int:
        """Keys of the same hash stand one after the other."""
        while at < len(self._hashes) and self._hashes[at] == key_hash:
            place = int(self._places[at])
            if place < len(self) and self.key_at(place) == key:
                return place
            at += 1
        return -1
