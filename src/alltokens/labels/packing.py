"""Whole numbers of any width and quantised scores, as rows of bytes that unpack by whole arrays.

Shapes: B batch, n numbers in a field, k kept labels, c cells of a map.

A field of w bits is laid out as w // 8 planes of bytes, lowest first, and what is left as planes of 4, 2 and 1 bits.
In a plane of b bits each byte holds 8 / b numbers that lie n * b / 8 apart, so that a plane unpacks by one shift of the
whole plane for each of them. Any width is exact and costs n * w / 8 bytes (each plane rounded up to a whole byte).

Scores are quantised for each picture: the highest between its lowest and greatest value, every further one as the
difference from the one before *as it will be read*, so that errors do not add up. Whatever is read lies within half of
the coarsest step of what was written (and float16 rounding); a probability is a softmax of such scores and lies within
tanh(error / 2) of the true one, less than half of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TAIL_BITS = 8


def score_bits(rank: int) -> int:
    """Bits of the score of this rank: 46 for five scores and the tail, which keeps 18 x 18 cells within 4 kB."""
    return 8 if rank < 3 else 7


def field_bytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    return count * (width // 8) + sum(-(-count * bits // 8) for bits, _ in _small_planes(width % 8))


def pack_field(values: np.ndarray, width: int) -> np.ndarray:
    """(B, n) whole numbers below 2 ** width -> (B, field_bytes) uint8."""
    batch, count = values.shape
    planes = [(values >> 8 * byte).astype(np.uint8) for byte in range(width // 8)]
    rest = values >> 8 * (width // 8)
    for bits, shift in _small_planes(width % 8):
        numbers = 8 // bits
        length = -(-count // numbers)
        part = np.zeros((batch, numbers * length), dtype=np.uint8)
        part[:, :count] = (rest >> shift) & ((1 << bits) - 1)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(part.reshape(batch, numbers, length) << shifts, axis=1))
    return np.concatenate(planes, axis=1)


def unpack_field(packed: np.ndarray, count: int, width: int) -> Tensor:
    """(B, field_bytes) uint8 -> (B, n): uint8 for a width of at most 8 bits, else int32."""
    whole = width // 8
    rest = _unpack_small(packed[:, whole * count :], count, width % 8) if width % 8 else None
    planes = [packed[:, byte * count : (byte + 1) * count] for byte in range(whole)]
    planes += [rest] if rest is not None else []
    low = torch.from_numpy(planes[0])
    if len(planes) == 1:
        return low
    total = low.to(torch.int32)
    for byte, plane in enumerate(planes[1:], start=1):
        total.add_(torch.from_numpy(plane), alpha=1 << 8 * byte)
    return total


class Quantised(NamedTuple):
    """The scores of some pictures in few bits."""

    scales: np.ndarray  # (B, k + 1 | k + 3) float16: lowest and step of the first, steps of the others, tail likewise
    scores: tuple[np.ndarray, ...]  # k of (B, c) uint8
    tail: np.ndarray | None  # (B, c) uint8; 0 for a tail without mass (-inf)


def quantise(scores: np.ndarray, tail: np.ndarray | None) -> Quantised:
    """(B, k, c) falling along k and (B, c), both float16. Finite, but that a tail may be -inf."""
    exact = torch.from_numpy(scores.astype(np.float32))
    lowest = exact[:, 0].amin(dim=1)
    step = _step_over(exact[:, 0].amax(dim=1) - lowest, score_bits(0))
    codes = [_code(exact[:, 0] - lowest[:, None], step, score_bits(0))]
    read = _value(lowest, step, codes[0])
    scales = [lowest, step]
    for rank in range(1, exact.shape[1]):
        difference = (read - exact[:, rank]).clamp(min=0)
        step = _step_over(difference.amax(dim=1), score_bits(rank))
        codes.append(_code(difference, step, score_bits(rank)))
        read = _value(read, -step, codes[-1])
        scales.append(step)
    tail_code = None
    if tail is not None:
        values = torch.from_numpy(tail.astype(np.float32))
        empty = torch.isinf(values)
        lowest = values.masked_fill(empty, torch.inf).amin(dim=1)
        lowest = torch.where(torch.isinf(lowest), 0.0, lowest)
        above = (values - lowest[:, None]).clamp(min=0)
        step = _step_over(above.amax(dim=1), TAIL_BITS, spare=1)
        tail_code = (_code(above, step, TAIL_BITS, spare=1) + 1).masked_fill(empty, 0).numpy()
        scales += [lowest, step]
    return Quantised(
        torch.stack(scales, dim=1).numpy().astype(np.float16), tuple(code.numpy() for code in codes), tail_code
    )


def dequantise(quantised: Quantised) -> tuple[Tensor, Tensor | None]:
    """(B, k, c) and (B, c), float16."""
    codes, tail_code = quantised.scores, quantised.tail
    scales = torch.from_numpy(quantised.scales.astype(np.float32))
    batch, cells = codes[0].shape
    scores = torch.empty((batch, len(codes), cells), dtype=torch.float16)
    read = _value(scales[:, 0], scales[:, 1], torch.from_numpy(codes[0]))
    scores[:, 0] = read
    for rank in range(1, len(codes)):
        read = _value(read, -scales[:, rank + 1], torch.from_numpy(codes[rank]))
        scores[:, rank] = read
    if tail_code is None:
        return scores, None
    code = torch.from_numpy(tail_code)
    tail = _value(scales[:, -2] - scales[:, -1], scales[:, -1], code).half()
    return scores, tail.masked_fill_(code == 0, -torch.inf)


def _small_planes(width: int) -> Iterator[tuple[int, int]]:
    """The planes of less than a byte that make up a width below 8: their bits, and where in the number they stand."""
    shift = 0
    for bits in (4, 2, 1):
        if width & bits:
            yield bits, shift
            shift += bits


def _unpack_small(packed: np.ndarray, count: int, width: int) -> np.ndarray:
    total = None
    start = 0
    for bits, shift in _small_planes(width):
        numbers = 8 // bits
        length = -(-count // numbers)
        plane = packed[:, start : start + length]
        part = np.empty((len(packed), numbers * length), dtype=np.uint8)
        for number in range(numbers):
            np.right_shift(plane, np.uint8(number * bits), out=part[:, number * length : (number + 1) * length])
        part &= np.uint8((1 << bits) - 1)
        if shift:
            part <<= np.uint8(shift)
        total = part if total is None else np.bitwise_or(total[:, :count], part[:, :count])
        start += length
    assert total is not None
    return total[:, :count]


def _step_over(span: Tensor, bits: int, spare: int = 0) -> Tensor:
    """(B,): the least float16 step with which the codes reach over `span` (B,)."""
    levels = (1 << bits) - 1 - spare
    step = (span / levels).numpy().astype(np.float16)
    short = step.astype(np.float32) * levels < span.numpy()
    return torch.from_numpy(np.where(short, np.nextafter(step, np.float16(np.inf)), step).astype(np.float32))


def _code(value: Tensor, step: Tensor, bits: int, spare: int = 0) -> Tensor:
    """(B, c) uint8: how many steps (B,) each value (B, c) is; 0 where the step is 0."""
    steps = value / torch.where(step > 0, step, 1.0)[:, None]
    return steps.nan_to_num().round().clamp(0, (1 << bits) - 1 - spare).to(torch.uint8)


def _value(base: Tensor, step: Tensor, code: Tensor) -> Tensor:
    """base (B,) or (B, c) + step (B,) * code (B, c), float32."""
    return torch.addcmul(base if base.ndim == 2 else base[:, None], step[:, None], code.to(torch.float32))
