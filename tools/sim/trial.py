"""Owns what a simulated stage finds out for a Machine: nothing true but its name, at a real cost.

Its trial forwards write where pipeline.measure's do, so that what must not be read is spoilt.
"""

from __future__ import annotations

from pipeline.model import ROW_BYTES
from pipeline.stage import Survey
from tools.sim.toy import TreeToy
from transport.frame import Kind, Machine, Measured, Segment, Tensor

ROWS = 16  # of a trial's forward


def tried(survey: Survey, model: TreeToy, name: str, busy_us: int) -> Measured:
    """The answer to a survey, its forward done."""
    info, asked = model.info, survey.asked
    rows = min(ROWS, info.capacity - survey.start)
    if rows:
        segment = Segment(0, survey.slot, survey.start, (0,) * rows, Kind.PREFILL, bytes(16), 0)
        data = Tensor("uint8", (rows, ROW_BYTES), bytes(rows * ROW_BYTES))
        model.forward((segment,), None if info.head else data)
    own = Machine(
        name=name,
        machine="simulated",
        device="cpu",
        software="",
        fingerprint=info.fingerprint,
        layers=info.layers,
        layers_total=info.layers_total,
        slots=info.slots,
        capacity=info.capacity,
        row_bytes=info.row_bytes,
        wire_bytes=ROW_BYTES,
        weight_bytes=0,
        end_bytes=0,
        free_bytes=0,
        total_bytes=0,
        files=0,
        came_ns=0,
        left_ns=0,
        decode_ns=1000 * busy_us,
        end_ns=0,
        prefill_rows=rows,
        prefill_ns=1000 * busy_us,
    )
    return Measured(asked.number, asked.wide, (*asked.machines, own))
