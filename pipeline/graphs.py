"""Owns replaying the layers over a few tokens of one sequence: on CUDA, one launch for all kernels.

A decoding step is hundreds of kernels that take longer to launch than to run. Recorded once for a
slot and a length of its view (torch.cuda.CUDAGraph), they run from static buffers. A recorded step
always has ROWS rows; those after the last token are a draft that nobody asked about. On a CPU the
same steps run without a recording, for the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeline.attention import Part, Plan
from pipeline.kernels import KEYS, ROWS, Kernels, padded, spans

Through: TypeAlias = Callable[[Tensor, Tensor, Plan], Tensor]
Run: TypeAlias = Callable[[], Tensor]
MAX_RECORDED = 64  # a recording holds its activations: below 1 MB for 8 rows of 4096


class Steps:
    """Forwards of at most ROWS tokens of one segment.

    through: (hidden [1, rows, width], positions [rows], plan) -> hidden, by all layers. like: a
    tensor of the activations' dtype and device and their width. group: query heads per key head.
    """

    def __init__(self, through: Through, plan: Plan, like: Tensor, group: int, kernels: Kernels):
        self._through, self._caches = through, plan.caches
        self._group, self._kernels = group, kernels
        self._hidden = like.new_zeros(1, ROWS, like.shape[-1])
        self._positions = torch.zeros(ROWS, dtype=torch.long, device=like.device)
        self._pool = torch.cuda.graph_pool_handle() if like.is_cuda else None
        self._recorded: dict[tuple[int, int], Run] = {}

    def run(self, part: Part, hidden: Tensor) -> Tensor:
        """The layers over `part`, the frame's only one: [1, ROWS, width] -> the same.

        The result is overwritten by the next call.
        """
        count = torch.arange(part.start, part.start + ROWS, pin_memory=hidden.is_cuda)
        self._positions.copy_(count, non_blocking=True)
        self._hidden.copy_(hidden)
        key = part.slot, padded(part.start + ROWS, KEYS)
        recorded = self._recorded.pop(key, None)
        if recorded is None:
            if len(self._recorded) == MAX_RECORDED:
                del self._recorded[next(iter(self._recorded))]  # the one unused for longest
            recorded = self._record(*key)
        self._recorded[key] = recorded
        return recorded()

    def _record(self, slot: int, keys: int) -> Run:
        def run() -> Tensor:
            cut = [
                replace(span, keys=keys, positions=self._positions[span.start : span.end])
                for span in spans(0, ROWS, self._group, self._kernels)
            ]
            part = Part(slot, 0, ROWS, 0, cut, self._positions)
            return self._through(self._hidden, self._positions, Plan([part], self._caches))

        if self._pool is None:
            return run
        with torch.cuda.device(self._hidden.device):
            return _captured(run, self._pool)


def fits(plan: Plan, capacity: int) -> bool:
    """True when a forward is a step: one segment of few tokens, with room behind it."""
    if len(plan.parts) != 1:
        return False
    part = plan.parts[0]
    return part.end - part.start <= ROWS and part.start + ROWS <= capacity


def _captured(run: Run, pool: Any) -> Run:
    """Record `run` after one run that is not recorded, in which libraries make what they keep."""
    current: Any = torch.cuda.current_stream()
    beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        run()
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
