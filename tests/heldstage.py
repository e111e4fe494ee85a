"""A stage process of the toy that stands still where a test says: `python -m tests.heldstage`.

Takes the options of `kvring stage`, and two before them: --hold FOLDER, where NAME holds a phase
("prefill", "decode", "copy", "park", "restore", or "probe" for the self-check) and the first row
that counts; when the stage NAME comes to it, it writes FOLDER/NAME.held and waits until FOLDER/NAME
is gone. --weights other: a toy of other answers and another fingerprint. Every row takes ROW_S, so
that copying one pays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pipeline.load
from pipeline.model import TOY_FINGERPRINT, Output, StageModel, ToyModel
from tools.cli import run
from transport.config import Config, Ring, Stage
from transport.frame import Kind, Segment, Tensor

ROW_S = 0.001
HELD_S = 60.0  # nobody waits for a test that has died
LOOK_S = 0.002


class HeldToy(ToyModel):
    """The toy, held; `other` turns every activation into another one."""

    def __init__(self, hold: Path, other: bool, config: Config, ring: Ring, spec: Stage) -> None:
        super().__init__(
            spec.layers,
            ring.layers_total,
            slots=config.limits.slots,
            capacity=config.limits.max_model_len,
            fingerprint=b"kvring-toy-other" if other else TOY_FINGERPRINT,
        )
        self._hold, self._held = hold / spec.name, hold / f"{spec.name}.held"
        self._other = other

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        for segment in segments:
            kind = "prefill" if segment.kind is Kind.PREFILL else "decode"
            self._reach(kind if segment.turn else "probe", segment.start)
        time.sleep(ROW_S * sum(len(segment.tokens) for segment in segments))
        return super().forward(segments, payload, histories)

    def copy(self, source: int, target: int, length: int) -> None:
        slots = self.info.slots
        self._reach("park" if target >= slots else "restore" if source >= slots else "copy", length)
        super().copy(source, target, length)

    def _layer(
        self, layer: int, buffer: bytearray, segment: Segment, rows: Sequence[bytes]
    ) -> list[bytes]:
        made = super()._layer(layer, buffer, segment, rows)
        return [bytes(byte ^ 0x55 for byte in row) for row in made] if self._other else made

    def _reach(self, phase: str, row: int) -> None:
        try:
            wanted, least = self._hold.read_text().split()
        except FileNotFoundError:
            return
        if phase != wanted or row < int(least):
            return
        self._held.write_text(phase)
        deadline = time.monotonic() + HELD_S
        while self._hold.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


def main() -> None:
    """Run the stage with the toy in place of its model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hold", type=Path, required=True)
    parser.add_argument("--weights", choices=["right", "other"], default="right")
    wanted, rest = parser.parse_known_args()

    def load(
        config: Config, ring: Ring, spec: Stage, device: str, progress: Callable[[float, str], None]
    ) -> StageModel:
        return HeldToy(wanted.hold, wanted.weights == "other", config, ring, spec)

    pipeline.load.load_model = load
    sys.exit(run(["stage", *rest]))


if __name__ == "__main__":
    main()
