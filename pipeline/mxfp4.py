"""Owns what the bytes of MXFP4 mean: 32 values of 4 bits (e2m1) that share a power of two (e8m0).

Read some rows at a time: beside the tensor that is made there are never more than some megabytes.
Format: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 5.4; that the even value of a byte is
its low half is how gpt_oss is published (transformers.integrations.mxfp4).
"""

from __future__ import annotations

import torch

from pipeline.tensors import Entry

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
# values, 1 MB of float32: larger blocks are mapped anew each time (pipeline.heap)
_AT_ONCE = 1 << 18


def unpacked(blocks: Entry, scales: Entry, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [rows, groups, 16] and [rows, groups] -> [rows, 32 * groups], exact where dtype can.

    A scale of 255, which the format keeps for NaN, is 2^128 here as in the library: no number.
    """
    rows, groups, size = blocks.shape
    values = torch.tensor([*_POSITIVE, *(-each for each in _POSITIVE)])
    byte = torch.arange(256)
    # both values of a byte as one number of 8 bytes: looked up three times as fast as a row of two
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.int64)[:, 0]
    powers = torch.pow(2.0, byte - float(_BIAS))
    made = torch.empty(rows, groups, 2 * size, dtype=dtype)
    step = max(1, _AT_ONCE // (2 * groups * size))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        halves = pairs[_bytes(blocks, start, count).int()].view(torch.float32)
        shared = powers[_bytes(scales, start, count).int()]
        part = halves.mul_(shared[..., None])
        made[start : start + count].copy_(part)
    return made.flatten(1)


def _bytes(entry: Entry, start: int, count: int) -> torch.Tensor:
    """Some rows of stored bytes; their pages of the file are given back."""
    row = entry.size // entry.shape[0]
    at = entry.offset + start * row
    copied = torch.frombuffer(entry.file.data, dtype=torch.uint8, count=count * row, offset=at)
    copied = copied.reshape(count, *entry.shape[1:]).clone()
    entry.file.release(at, count * row)
    return copied
