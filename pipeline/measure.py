"""Owns what a stage finds out for a Machine: its memory, how fast its block is, whom it reaches.

Runs in the compute thread, between two frames. Trial forwards write behind what a slot holds, where
nobody reads; how long they may take is bounded here.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from pipeline.model import StageModel
from pipeline.stage import Survey
from transport.codec import ITEM_BYTES
from transport.config import Limits, Ring, Stage
from transport.frame import Kind, Machine, Segment, Tensor
from transport.memory import computer, host_memory, open_files
from transport.reach import round_trip

DECODE_S = 0.5  # of all trial forwards of one row; the first of them is not counted
PREFILL_S = 1.5  # of all trial prefills: one that would take longer gets fewer rows
ROUNDS = 5
ROW_STEP = 8  # rows that cost what one costs: docs/exactness.md
REACH_S = 1.0  # for a peer to answer
ALL_S = 5.0  # for all peers together


def machine_of(
    survey: Survey, model: StageModel, ring: Ring, spec: Stage, limits: Limits, device: str
) -> Machine:
    """Answer a survey. Takes at most DECODE_S + PREFILL_S + ALL_S and a few forwards."""
    came_ns = time.time_ns()
    info = model.info
    trial = _Trial(model, survey, device)
    decode_s, end_s = trial.decode()
    rows, prefill_s = trial.prefill(limits.chunk_tokens, decode_s + end_s)
    free, total = device_memory(device)
    trips = tuple(_trips(ring, spec, wide=survey.asked.wide))
    return Machine(
        name=spec.name,
        machine=computer(),
        device=device_name(device),
        software=software(),
        fingerprint=info.fingerprint,
        layers=info.layers,
        layers_total=info.layers_total,
        slots=info.slots,
        capacity=info.capacity,
        row_bytes=info.row_bytes,
        wire_bytes=_wire_bytes(info.activations),
        weight_bytes=info.weight_bytes,
        end_bytes=info.end_bytes,
        free_bytes=free,
        total_bytes=total,
        files=open_files(),
        came_ns=came_ns,
        left_ns=time.time_ns(),
        decode_ns=round(decode_s * 1e9),
        end_ns=round(end_s * 1e9),
        prefill_rows=rows,
        prefill_ns=round(prefill_s * 1e9),
        trips=trips,
    )


class _Trial:
    """Forwards of made-up rows behind what a slot holds."""

    def __init__(self, model: StageModel, survey: Survey, device: str) -> None:
        self._model, self._survey, self._device = model, survey, device
        info = model.info
        self._room = info.capacity - survey.start
        self._possible = self._room > 0 and (info.head or info.activations is not None)

    def decode(self) -> tuple[float, float]:
        """Seconds of a forward of one row, and what picking a token adds; zeros without room."""
        if not self._possible:
            return 0.0, 0.0
        plain = self._timed(1, 0, DECODE_S)
        if not self._model.info.tail:
            return plain, 0.0
        return plain, max(0.0, self._timed(1, 1, DECODE_S) - plain)

    def prefill(self, chunk: int, decode_s: float) -> tuple[int, float]:
        """Rows of a prefill that is quick enough, and its seconds; (0, 0.0) without room."""
        rows = min(chunk, self._room)
        if not self._possible or rows < 1:
            return 0, 0.0
        while rows > ROW_STEP and decode_s * rows / ROW_STEP > PREFILL_S:
            rows //= 2
        return rows, self._timed(rows, 0, PREFILL_S)

    def _timed(self, rows: int, want: int, limit_s: float) -> float:
        """The lower quartile of some forwards, the first left out unless it is the only one.

        Half of them may be slow by what else the machine does, and none is quick by chance.
        """
        took: list[float] = []
        started = time.perf_counter()
        while len(took) <= ROUNDS and (time.perf_counter() - started < limit_s or not took):
            took.append(self._forward(rows, want))
        some = sorted(took[1:] or took)
        return some[len(some) // 4]

    def _forward(self, rows: int, want: int) -> float:
        info, survey = self._model.info, self._survey
        segment = Segment(
            0, survey.slot, survey.start, (0,) * rows, Kind.PREFILL, bytes(16), want
        )  # fmt: skip
        payload = None
        if not info.head:  # zeros: nothing that is written there may be no number
            assert info.activations is not None
            dtype, length = info.activations
            data = bytes(rows * _wire_bytes(info.activations))
            payload = Tensor(dtype, (rows, length), data)
        started = time.perf_counter()
        self._model.forward((segment,), payload)
        _settle(self._device)
        return time.perf_counter() - started


def _trips(ring: Ring, spec: Stage, *, wide: bool) -> Iterator[tuple[str, int]]:
    """Who is reached, the one behind this stage first; the coordinator's name is empty."""
    following = ring.next_address(spec)
    all_of_them = [("", ring.verdicts), *((stage.name, stage.address) for stage in ring.stages)]
    wanted = [(name, address) for name, address in all_of_them if address == following]
    if wide:
        others = [each for each in all_of_them if each not in wanted]
        wanted += [each for each in others if each[0] != spec.name]
    deadline = time.monotonic() + ALL_S
    for name, address in wanted:
        left_s = min(REACH_S, deadline - time.monotonic())
        took = round_trip(address, left_s) if left_s > 0 else None
        if took is not None:
            yield name, round(took * 1e9)


def _wire_bytes(activations: tuple[str, int] | None) -> int:
    return 0 if activations is None else ITEM_BYTES[activations[0]] * activations[1]


def _settle(device: str) -> None:
    """Wait for what a device still computes."""
    torch = sys.modules.get("torch")
    if torch is None or device == "cpu":
        return
    kind = getattr(torch, device.partition(":")[0], None)
    if kind is not None:
        kind.synchronize()


def device_memory(device: str) -> tuple[int, int]:
    """Bytes that a device has left, and has. Raises RuntimeError where there is no such device."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    if kind == "mps":
        import torch

        total = int(torch.mps.recommended_max_memory())
        return max(0, total - int(torch.mps.driver_allocated_memory())), total
    return host_memory()


def device_name(device: str) -> str:
    """The device with its maker's name, where there is one; at most a frame's 128 characters."""
    if device.startswith("cuda"):
        import torch

        return f"{device} {torch.cuda.get_device_name(device)}"[:128]
    return device


def software() -> str:
    """The versions that decide what a stage computes."""
    found = [f"python {platform.python_version()}"]
    for package in ("kvring", "torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
