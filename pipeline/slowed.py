"""Owns the throttle of benches and tests: a block that takes a given time, whatever it computes.

It sleeps for what is missing, so that several throttled stages share a core without slowing each
other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.model import ModelInfo, Output, StageModel
from transport.frame import Segment, Tensor

ROWS = 32  # of one forward that costs what one row costs


class Slowed:
    """A StageModel whose layers take at least layer_ms each; more than ROWS rows in proportion."""

    def __init__(self, model: StageModel, layer_ms: float) -> None:
        self._model = model
        first, last = model.info.layers
        self._least_s = layer_ms / 1e3 * (last - first)

    @property
    def info(self) -> ModelInfo:
        """See StageModel."""
        return self._model.info

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """See StageModel."""
        started = time.perf_counter()
        output = self._model.forward(segments, payload, histories)
        rows = sum(len(segment.tokens) for segment in segments)
        least_s = self._least_s * max(1.0, rows / ROWS)
        time.sleep(max(0.0, started + least_s - time.perf_counter()))
        return output

    def copy(self, source: int, target: int, length: int) -> None:
        """See StageModel."""
        self._model.copy(source, target, length)

    def drop(self, parked: int) -> None:
        """See StageModel."""
        self._model.drop(parked)
