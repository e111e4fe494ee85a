"""Owns what a stored tensor is: bytes of a mapped file, and how a model's tensor is made of them.

Knows no file format. Experts are read one by one under the names
`model.layers.N.mlp.experts.E.{gate_up_proj,down_proj}.{weight,bias}`, each [out, in] or [out], in
whatever form a file has them, so that no stage holds a layer's experts twice.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.model import ModelError


class MappedFile:
    """A read-only file in memory; pages are private copies on write, so views may be writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # ACCESS_COPY, not ACCESS_READ: torch warns about buffers it may not write.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path}: is empty") from error

    def release(self, offset: int, size: int) -> None:
        """Give the pages of [offset, offset + size) back: they stay in the system's file cache."""
        start = offset - offset % mmap.PAGESIZE
        self.data.madvise(mmap.MADV_DONTNEED, start, offset + size - start)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: its stored dtype's name, shape, and bytes [offset, offset + size)."""

    name: str
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def split(self, count: int) -> list[Entry]:
        """Equal parts along the first dimension, each without it when it is `count`."""
        size, first = self.size // count, self.shape[0] // count
        shape = self.shape[1:] if first == 1 else (first, *self.shape[1:])
        return [
            replace(self, shape=shape, offset=self.offset + index * size, size=size)
            for index in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor made of stored ones: one transposed, the rows of several, or MXFP4's two.

    interleaved: a row of each in turn; else all rows of the first, then those of the next.
    packed: of blocks and their scales, see pipeline.mxfp4.
    """

    parts: tuple[Entry, ...]
    transposed: bool = False
    interleaved: bool = False
    packed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As the tensor is read."""
        first, *rest = self.parts[0].shape
        if self.packed:
            groups, size = self.parts[0].shape[-2:]
            return (*self.parts[0].shape[:-2], 2 * groups * size)
        if self.transposed:
            return tuple(reversed((first, *rest)))
        return (sum(part.shape[0] for part in self.parts), *rest)


Tensors = dict[str, Entry | Made]
_STACKED = re.compile(
    r"(model\.layers\.\d+\.mlp\.experts)\.(gate_proj|up_proj|gate_up_proj|down_proj)(?:[._](weight|bias))?"
)
_PACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)_blocks")
_BLOCK = 16  # bytes of 32 values of MXFP4, which share a scale
_GATE = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.\d+)\.gate_proj\.(weight|bias)")


def with_experts(entries: Mapping[str, Entry], count: int, *, in_turn: bool) -> Tensors:
    """All tensors, those of experts one by one: see the module.

    entries: by their names; experts' are stored each by itself (`experts.E.gate_proj.weight`), or
    stacked along a first dimension of `count` (`experts.gate_proj.weight`, or, as transformers has
    them, `experts.gate_up_proj` and `experts.gate_up_proj_bias`), or stacked in MXFP4
    (`experts.gate_up_proj_blocks`, whose rows are outputs, and `..._scales`).
    in_turn: gate and up lie in turn, and fused ones are [in, out], as gpt_oss has them.
    """
    found: Tensors = {}
    if not count:
        return dict(entries)
    for name, entry in entries.items():
        match = _PACKED.fullmatch(name)
        if match is not None:
            found |= _packed(entries, count, entry, *match.groups())
            continue
        match = _STACKED.fullmatch(name)
        if match is None or entry.shape[:1] != (count,) or len(entry.shape) < 2:
            found[name] = entry
            continue
        experts, which, kind = match.groups()
        turned = in_turn and kind is None
        for index, part in enumerate(entry.split(count)):
            one = Made((part,), transposed=True) if turned else part
            found[f"{experts}.{index}.{which}.{kind or 'weight'}"] = one
    for name, gate in list(found.items()):
        match = _GATE.fullmatch(name)
        if match is None:
            continue
        up = found.get(f"{match[1]}.up_proj.{match[2]}")
        if isinstance(gate, Entry) and isinstance(up, Entry) and up.shape == gate.shape:
            fused = f"{match[1]}.gate_up_proj.{match[2]}"
            found[fused] = Made((gate, up), interleaved=in_turn)
    return found


def _packed(
    entries: Mapping[str, Entry], count: int, blocks: Entry, experts: str, which: str
) -> Tensors:
    """One name's experts in MXFP4; none where the scales are in a file that is not here."""
    scales = entries.get(f"{experts}.{which}_scales")
    if scales is None:
        return {}
    bytes_each = blocks.dtype == scales.dtype == "U8"
    fit = blocks.shape == (count, *scales.shape[1:], _BLOCK) and scales.shape == blocks.shape[:3]
    if not (bytes_each and fit):
        raise ModelError(
            f"{blocks.file.path}: {experts}: {which}_blocks {list(blocks.shape)} {blocks.dtype} "
            f"and {which}_scales {list(scales.shape)} {scales.dtype} are not MXFP4 of {count} "
            "experts"
        )
    pairs = zip(blocks.split(count), scales.split(count), strict=True)
    return {
        f"{experts}.{index}.{which}.weight": Made(pair, packed=True)
        for index, pair in enumerate(pairs)
    }
