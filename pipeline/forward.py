"""Owns how a Forward is performed: the kept rows of its activations through the block.

The daemon's compute thread, the simulator and the replayer call it. Knows no socket and no clock.
"""

from __future__ import annotations

from pipeline.model import StageModel
from pipeline.stage import Forward
from transport.frame import Forwarded, Tensor


def perform_forward(model: StageModel, action: Forward) -> Forwarded:
    """Run the block; the answer goes into the core."""
    run, payload = action.run, action.run.payload
    if payload is not None and action.rows is not None:
        payload = _pick_rows(payload, action.rows)
    output = model.forward(run.segments, payload, action.histories)
    return Forwarded(run.epoch, run.seq, output.payload, output.results)


def _pick_rows(payload: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    data = memoryview(payload.data).cast("B")
    row = len(data) // payload.shape[0]
    kept = b"".join(data[start * row : end * row] for start, end in rows)
    count = sum(end - start for start, end in rows)
    return Tensor(payload.dtype, (count, *payload.shape[1:]), kept)
