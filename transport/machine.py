"""Owns what a stage says of the computer that it runs on: a record of the frame Measure.

Knows no way of finding it out; pipeline.measure does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Look(StrEnum):
    """What a Measure finds out."""

    MACHINES = "machines"  # every stage adds its Machine
    MARK = "mark"  # starts a link's clock at its receiver, which keeps it
    BULK = "bulk"  # stops it; a new mark goes before it on the next link


@dataclass(frozen=True, slots=True)
class Machine:
    """What one stage says of itself and of the computer that it runs on; see docs/frames.md.

    machine is equal for stages that share a computer. *_bytes of one row: row_bytes of the block's
    KV, wire_bytes of the activations. weight_bytes: of the block, end_bytes of them are embedding
    and LM head. *_ns: came and left by the wall clock; a forward of one row, one of prefill_rows,
    and what picking a token adds. trips: (whom, ns) that connecting to them took.
    """

    name: str
    machine: str
    device: str
    software: str
    fingerprint: bytes
    layers: tuple[int, int]
    layers_total: int
    slots: int
    capacity: int
    row_bytes: int
    wire_bytes: int
    weight_bytes: int
    end_bytes: int
    free_bytes: int
    total_bytes: int
    files: int
    came_ns: int
    left_ns: int
    decode_ns: int
    end_ns: int
    prefill_rows: int
    prefill_ns: int
    trips: tuple[tuple[str, int], ...] = ()
