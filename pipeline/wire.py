"""Owns activations on the wire: a block's rows as a frame's tensor, and back.

As the block's dtype has them, or in "fp8": each number as float8_e4m3fn with a scale for its row
(pipeline.narrow), at half of bfloat16's bytes. Knows no layer and no link.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.narrow import FP8, SCALE_BYTES, narrowed, widen
from transport.frame import Tensor


class Wire:
    """Rows of `hidden` numbers of `dtype`; fp8: each in one byte."""

    def __init__(self, dtype: torch.dtype, hidden: int, *, fp8: bool) -> None:
        self._dtype, self._hidden, self._fp8 = dtype, hidden, fp8

    @property
    def row(self) -> tuple[str, int]:
        """A row's dtype and length on the wire."""
        if self._fp8:
            return "uint8", self._hidden + SCALE_BYTES  # behind the row's numbers
        return str(self._dtype).removeprefix("torch."), self._hidden

    def pack(self, rows: torch.Tensor) -> Tensor:
        """[tokens, hidden] as a frame's tensor; without a copy on CPU: the buffer keeps it."""
        rows = rows.cpu().contiguous()
        if self._fp8:
            numbers, scales = narrowed(rows, FP8)
            rows = torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), 1)
        return Tensor(self.row[0], tuple(rows.shape), as_bytes(rows))

    def unpack(self, payload: Tensor, rows: int) -> torch.Tensor:
        """The payload as [1, rows, hidden] on CPU; rows behind its own are zeros."""
        name, length = self.row
        assert (payload.dtype, payload.shape[1:]) == (name, (length,)), (payload, self.row)
        count = payload.shape[0]
        tensor = torch.zeros(1, rows, self._hidden, dtype=self._dtype)
        if not self._fp8:  # one copy, which also makes the padding rows
            as_bytes(tensor)[: len(payload.data)] = payload.data
            return tensor
        whole = torch.frombuffer(bytearray(payload.data), dtype=torch.uint8).view(count, length)
        numbers = whole[:, : self._hidden].view(FP8)
        scales = whole[:, self._hidden :].contiguous().view(torch.float32)
        widen(numbers[None], scales[None], tensor[:, :count])
        return tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory as one row of bytes (numpy has no bfloat16)."""
    raw: Any = tensor.view(torch.uint8).numpy().reshape(-1)
    return memoryview(raw)
