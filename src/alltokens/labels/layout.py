"""How the label map of one picture becomes one row of bytes, and back.

Shapes: B batch, k kept labels, h and w cells of a map, c = h * w, R bytes of a row.

`plain`: ids as uint16 (int32 beyond 65,536 classes), scores and tail as float16, one after the other.
`packed`: ids in as many bits as the classes need, scores and tail quantised for each picture (see `packing.py`).
Ids are exact in both. `packed` sorts the kept labels of each cell by score, as an annotator gives them anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from alltokens.core.label_maps import NO_TAIL, LabelMap
from alltokens.errors import UserError, unknown
from alltokens.labels import packing
from alltokens.labels.packing import TAIL_BITS, Quantised, field_bytes, pack_field, score_bits, unpack_field

Form = Literal["plain", "packed"]
FORMS: tuple[Form, ...] = get_args(Form)

_AT_A_TIME = 64  # rows unpacked together: what they need stays in a core's cache


class Rows(NamedTuple):
    """The maps of some pictures as they are written."""

    content: np.ndarray  # (B, R) uint8
    score_errors: np.ndarray  # (B,) how far the scores and tails that will be read lie from the given ones, at most


@dataclass(frozen=True)
class RowLayout:
    """What the row of a picture holds. Equal for all pictures of a store."""

    grid: tuple[int, int]  # (h, w)
    kept: int  # k
    num_classes: int
    tail: bool = True  # whether the log-sum-exp of the classes that are not kept is there
    form: Form = "plain"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise unknown("form of label maps", self.form, FORMS)
        if min(self.grid) < 1 or not 1 <= self.kept <= self.num_classes or self.num_classes > 2**31:
            raise UserError(
                f"label maps need a grid of 1x1 or more and between 1 and all classes kept, got grid {self.grid}, "
                f"{self.kept} kept of {self.num_classes} classes"
            )

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def id_bits(self) -> int:
        return max(1, (self.num_classes - 1).bit_length())

    @property
    def row_bytes(self) -> int:
        labels = self.kept * self.cells
        if self.form == "plain":
            return labels * (self._id_type.itemsize + 2) + 2 * self.cells * self.tail
        scores = sum(field_bytes(self.cells, score_bits(rank)) for rank in range(self.kept))
        tail = field_bytes(self.cells, TAIL_BITS) * self.tail
        return 2 * self._scales + field_bytes(labels, self.id_bits) + scores + tail

    def encode(self, maps: LabelMap) -> Rows:
        """Maps (B, k, h, w) of any number types -> rows. What no row can hold is an error."""
        ids, scores, tail = self._checked(maps)
        with np.errstate(over="ignore"):  # what does not fit is said below
            kept, stored_tail = scores.astype(np.float16), None if tail is None else tail.astype(np.float16)
        if not np.isfinite(kept).all() or (stored_tail is not None and not (stored_tail < np.inf).all()):
            raise UserError(
                "scores must be finite and fit into float16 (up to 65,504), and a tail too or be -inf (no class left); "
                f"got scores from {scores.min()} to {scores.max()}"
                + ("" if tail is None else f", tails from {tail.min()} to {tail.max()}")
            )
        if self.form == "plain":
            parts = [ids.astype(self._id_type), kept, stored_tail]
            content = np.concatenate([_bytes(part) for part in parts if part is not None], axis=1)
            return Rows(content, _greatest_errors((scores, kept), (tail, stored_tail)))
        if (kept[:, 1:] > kept[:, :-1]).any():
            order = np.argsort(-kept, axis=1, kind="stable")
            ids, kept, scores = (np.take_along_axis(part, order, axis=1) for part in (ids, kept, scores))
        quantised = packing.quantise(kept, stored_tail)
        content = np.concatenate(
            [
                _bytes(quantised.scales),
                pack_field(ids.reshape(len(ids), -1), self.id_bits),
                *(pack_field(codes, score_bits(rank)) for rank, codes in enumerate(quantised.scores)),
                *([] if quantised.tail is None else [pack_field(quantised.tail, TAIL_BITS)]),
            ],
            axis=1,
        )
        read, read_tail = packing.dequantise(quantised)
        read_tail = None if read_tail is None else read_tail.numpy()
        return Rows(content, _greatest_errors((scores, read.numpy()), (tail, read_tail)))

    def decode(self, rows: np.ndarray) -> LabelMap:
        """(B, R) uint8 -> ids int32, scores and tail float16."""
        assert rows.shape[1:] == (self.row_bytes,)
        batch = len(rows)
        ids = torch.empty((batch, self.kept, *self.grid), dtype=torch.int32)
        scores = torch.empty((batch, self.kept, *self.grid), dtype=torch.float16)
        tail = torch.empty((batch, *self.grid), dtype=torch.float16) if self.tail else NO_TAIL
        decode = self._decode_plain if self.form == "plain" else self._decode_packed
        for start in range(0, batch, _AT_A_TIME):
            some = slice(start, start + _AT_A_TIME)
            part_ids, part_scores, part_tail = decode(rows[some])
            ids[some] = part_ids.view(-1, self.kept, *self.grid)
            scores[some] = part_scores.view(-1, self.kept, *self.grid)
            if part_tail is not None:
                tail[some] = part_tail.view(-1, *self.grid)
        return LabelMap(ids, scores, tail)

    @property
    def _id_type(self) -> np.dtype:
        return np.dtype("<u2") if self.num_classes <= 1 << 16 else np.dtype("<i4")

    @property
    def _scales(self) -> int:
        return self.kept + 1 + 2 * self.tail

    def _checked(self, maps: LabelMap) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """ids (B, k, c) int64, scores (B, k, c) and tail (B, c) float32, of the shapes and ids that the layout says."""
        shape = (self.kept, *self.grid)
        tail = maps.tail if maps.has_tail else None
        if tuple(maps.ids.shape[1:]) != shape or maps.scores.shape != maps.ids.shape:
            raise UserError(
                f"this store holds maps of (kept, h, w) = {shape}; "
                f"got ids {tuple(maps.ids.shape)} and scores {tuple(maps.scores.shape)} for (B, kept, h, w)"
            )
        if (tail is not None) != self.tail or (tail is not None and tail.shape != (len(maps.ids), *self.grid)):
            wanted = f"a tail of (B, {self.grid[0]}, {self.grid[1]})" if self.tail else "no tail"
            raise UserError(f"this store wants {wanted}, got {None if tail is None else tuple(tail.shape)}")
        ids = _numbers(maps.ids.to(torch.int64), self.kept, self.cells)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_classes):
            raise UserError(
                f"class ids must lie in 0 to {self.num_classes - 1} ({self.num_classes} classes), "
                f"got {ids.min()} to {ids.max()}"
            )
        scores = _numbers(maps.scores.to(torch.float32), self.kept, self.cells)
        return ids, scores, None if tail is None else _numbers(tail.to(torch.float32), self.cells)

    def _decode_plain(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        labels = self.kept * self.cells
        ids_end = labels * self._id_type.itemsize
        ids = rows[:, :ids_end].view(self._id_type).astype(np.int32)
        scores = rows[:, ids_end : ids_end + 2 * labels].copy().view("<f2")
        tail = torch.from_numpy(rows[:, ids_end + 2 * labels :].copy().view("<f2")) if self.tail else None
        return torch.from_numpy(ids), torch.from_numpy(scores), tail

    def _decode_packed(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        start = 0

        def take(size: int) -> np.ndarray:
            nonlocal start
            start += size
            return rows[:, start - size : start]

        def field(count: int, bits: int) -> Tensor:
            return unpack_field(take(field_bytes(count, bits)), count, bits)

        scales = take(2 * self._scales).copy().view("<f2")
        ids = field(self.kept * self.cells, self.id_bits).contiguous()
        scores = tuple(field(self.cells, score_bits(rank)).numpy() for rank in range(self.kept))
        tail = field(self.cells, TAIL_BITS).numpy() if self.tail else None
        return ids, *packing.dequantise(Quantised(scales, scores, tail))


def _numbers(tensor: Tensor, *shape: int) -> np.ndarray:
    return tensor.detach().cpu().reshape(len(tensor), *shape).numpy()


def _bytes(numbers: np.ndarray) -> np.ndarray:
    """(B, ...) -> (B, bytes) uint8."""
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(len(numbers), -1).view(np.uint8)


def _greatest_errors(*pairs: tuple[np.ndarray | None, np.ndarray | None]) -> np.ndarray:
    """(B,): the greatest distance of given and read numbers; -inf, which is read as it is, counts as none."""
    worst = []
    for given, read in pairs:
        if given is not None and read is not None:
            finite = np.isfinite(given)
            distance = np.abs(np.where(finite, given, 0) - np.where(finite, read.astype(np.float32), 0))
            worst.append(distance.reshape(len(given), -1).max(axis=1))
    return np.max(worst, axis=0)
