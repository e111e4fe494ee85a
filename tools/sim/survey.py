"""Owns the measuring of a simulated ring: the frames that coord.survey sends, and what comes back.

A measurement that is under way changes nothing that a turn could see; whether it did is what all
other checks say. Here is judged that it met every stage once, in order.
"""

from __future__ import annotations

from random import Random

from tools.sim.check import violated
from tools.sim.heap import MICROSECOND, Heap
from tools.sim.links import Link
from tools.sim.script import Ask, Shape
from tools.sim.stage import StageProcess
from transport.frame import Look, Measure, Tensor

BULK_BYTES = 64


class Surveys:
    """All measurements of one world. asked, heard: Measure frames that left, and came round."""

    def __init__(self, heap: Heap, shape: Shape, stages: dict[str, list[StageProcess]]) -> None:
        self.asked = self.heard = 0
        self._heap, self._shape, self._stages = heap, shape, stages
        self._lives = 0
        self._random = Random(f"{shape.seed} surveys")

    def begin(self, ask: Ask) -> None:
        """Send all of one measurement: a mark, a bulk, and the question to every stage."""
        ring = list(self._stages)[ask.ring]
        stages, shape = self._stages[ring], self._shape
        for stage in stages:
            stage.trial_us = ask.busy_us
        self._lives += 1
        link = Link(
            self._heap,
            stages[0],
            f"{ring}/coordinator/measure",
            self._lives,
            shape.link_us * MICROSECOND,
            shape.jitter_us * MICROSECOND,
            self._random,
        )
        payload = Tensor("uint8", (BULK_BYTES,), bytes(BULK_BYTES))
        for _ in range(ask.rounds):
            number = self.asked = self.asked + 2
            link.send(Measure(ring, number, Look.MARK))
            link.send(Measure(ring, number, Look.BULK, payload=payload))
            link.send(Measure(ring, number + 1, Look.MACHINES, ask.wide))

    def came(self, frame: Measure) -> None:
        """One came round."""
        names = [stage.spec.name for stage in self._stages[frame.ring]]
        met = [machine.name for machine in frame.machines]
        if frame.look is Look.MARK:
            return
        whole = met == names if frame.look is Look.MACHINES else len(frame.gaps_ns) == len(names)
        if not whole:
            violated("measurement", f"{frame.look} met {met}, {len(frame.gaps_ns)} of {names}")
        self.heard += 1
