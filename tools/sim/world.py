"""Owns one simulated world: whole rings in one heap, a script played on them, then the healing.

Safety is checked while the script runs; then nothing goes wrong any more, and every turn must end,
all capacity must be there and a follow-up must find what its conversation left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

from coord.ledger import FORK_ROWS
from coord.ring import PING_S
from tools.framelogs.residency import Residency
from tools.sim.check import Checks, Told, violated
from tools.sim.clients import Clients
from tools.sim.coordinator import CoordinatorProcess, unheard
from tools.sim.faults import Faults
from tools.sim.heap import MICROSECOND, SECOND, Heap
from tools.sim.oracle import Oracle
from tools.sim.record import Recorders
from tools.sim.script import Ask, Confuse, Damage, Leave, Operate, Say, Script, Stale
from tools.sim.stage import StageProcess
from tools.sim.survey import Surveys
from transport.config import dumps
from transport.frame import FreeSlot, KeepSlot, Submit

PROVED_EVERY = 8  # seeds
BOOT_S = 10.0  # virtual seconds in which rings form that nothing disturbs
SETTLE_S = 30.0  # the same after any trouble, beside limits.resume_s
MAX_EVENTS = 400_000  # of one world


def proved(script: Script) -> bool:
    """Whether `kvring log check` must find nothing: its rules know no made-up frames, and cost."""
    ghosts = any(isinstance(entry, (Confuse, Damage, Stale)) for entry in script.entries)
    return script.shape.seed % PROVED_EVERY == 0 and not ghosts


class World:
    """A script while it is played."""

    def __init__(self, script: Script, logs: Path | None = None) -> None:
        """logs: where the processes' frame logs go."""
        shape = script.shape
        config = shape.config()
        self.script = script
        self.heap = Heap()
        self.oracle = Oracle(shape.layers)
        self.checks = Checks(script, self.oracle)
        proof = Residency(max_model_len=shape.limits.max_model_len) if proved(script) else None
        self.recorders = Recorders(logs, dumps(config) if logs is not None else "", proof)
        self.stages = {
            ring.name: [
                StageProcess(
                    self.heap, shape, ring, index, self.oracle, self.checks, self.recorders
                )
                for index in range(len(ring.stages))
            ]
            for ring in config.rings
        }
        self.coordinator = CoordinatorProcess(
            self.heap, shape, self.stages, self.checks, self.recorders
        )
        says = [entry for entry in script.entries if isinstance(entry, (Say, Leave))]
        clients = max([entry.client for entry in says], default=0) + 1
        bases = max([entry.base for entry in says if isinstance(entry, Say)], default=0) + 1
        self.clients = Clients(self.heap, max(clients, bases), self.coordinator)
        self.surveys = Surveys(self.heap, shape, self.stages)
        self.coordinator.measured = self.surveys.came
        self.faults = Faults(self.heap, self.coordinator, self.stages, self.clients)

    def play(self) -> None:
        """From the first heartbeat to the last follow-up.

        Raises ViolationError, or what a core raises.
        """
        try:
            self._boot()
            self._script()
            self._heal()
            self._follow_up()
            self._capacity()
            self._rest()
        finally:
            self.recorders.close()

    # ---- acts ----

    def _boot(self) -> None:
        for stages in self.stages.values():
            receivers = [*stages[1:], self.coordinator]
            for stage, following in zip(stages, receivers, strict=True):
                stage.following, stage.coordinator = following, self.coordinator
        self.coordinator.start(0.0)
        for stages in self.stages.values():
            for stage in stages:
                stage.start(0)
        self._until(self.coordinator.ready, BOOT_S, "the rings form")

    def _script(self) -> None:
        start = self.heap.now
        self.faults.ends = start
        for entry in self.script.entries:
            due = start + entry.at_us * MICROSECOND
            if isinstance(entry, Say):
                self.heap.at(due, self.clients.say, entry)
            elif isinstance(entry, Leave):
                self.heap.at(due, self.clients.leave, entry.client)
            elif isinstance(entry, Operate):
                self.heap.at(due, self._operate, entry)
            elif isinstance(entry, Ask):
                self.heap.at(due, self._measure, entry)
            else:
                self.heap.at(due, self.faults.happen, entry)
            self.faults.ends = max(self.faults.ends, due)
        self._until(lambda: self.heap.now >= self.faults.ends, math.inf, "the script ends")

    def _heal(self) -> None:
        """Faults are over: everything that was asked for must end, on rings that are ready."""
        for receiver in [self.coordinator, *itertools.chain(*self.stages.values())]:
            for link in receiver.links:
                link.heal()
        bound_s = SETTLE_S + self.script.shape.limits.resume_s + self._work_s()
        self._until(self.clients.quiet, bound_s, "every turn ends")
        # a loss on an idle link shows with the next ping
        end = self.heap.now + int((PING_S + 1.0) * SECOND)
        self._until(lambda: self.heap.now >= end, bound_s, "time passes")
        self._until(self.coordinator.ready, bound_s, "every ring is ready again")
        self.checks.followed = True
        self._rest()
        if not self.checks.disturbed and self.surveys.heard != self.surveys.asked:
            violated("measurement", f"{self.surveys.heard} of {self.surveys.asked} came round")

    def _work_s(self) -> float:
        """What all turns may take that are open, one after another, on one ring."""
        shape, total = self.script.shape, 0.0
        stages = max(shape.stages)
        says = [client.saying for client in self.clients.all if client.saying is not None]
        says += [say for client in self.clients.all for say in client.says]
        for say in says:
            rows = shape.limits.max_model_len
            hop_us = shape.link_us + shape.jitter_us + shape.frame_us + 40 * shape.row_us
            trips = say.budget + rows / 8 + 4
            total += trips * (stages + 1) * hop_us / 1e6 + say.read_us * (say.budget + 4) / 1e6
        return total

    def _rest(self) -> None:
        """All that is in flight comes back; then the claims are compared with what is there."""
        self._until(self.coordinator.idle, SETTLE_S, "nothing is in flight")
        self.coordinator.scheduler.check()
        for stages in self.stages.values():
            for stage in stages:
                stage.core.check()
        self.checks.coordinator(self.coordinator.scheduler)
        self.checks.at_rest(self.coordinator.scheduler, self.stages)

    def _follow_up(self) -> None:
        """A clean turn after a clean turn reuses prompt + committed - 1 rows (DESIGN 4)."""
        client = self.clients.all[0]
        del client.history[self.script.shape.limits.max_model_len - 60 :]
        first = self._ask([*client.history, 5], 4)
        known = [*first.submit.prompt, *first.got]
        after = self._ask([*known, 1, 2, 3], 3)
        matched = after.admitted[0].matched
        fork = len(known) > FORK_ROWS or matched  # a shorter prefix is not worth a copy
        judged = len(self.stages) == 1 and fork and not self.script.shape.limits.idle_ttl_s
        if judged and matched != len(known) - 1:
            violated("follow-up", f"{matched} of {len(known) - 1} rows are reused")

    def _ask(self, prompt: list[int], budget: int) -> Told:
        submit = Submit(0, tuple(prompt), budget)
        hear, self.coordinator.hear = self.coordinator.hear, unheard
        told = self.coordinator.prepare(submit)
        self.coordinator.take(told.submit)
        self._until(lambda: told.over, SETTLE_S, "a follow-up ends")
        self.coordinator.hear = hear
        return told

    def _capacity(self) -> None:
        """As many turns as there are slots run at once, whatever was cancelled or lost before."""
        self._until(self.coordinator.idle, SETTLE_S, "nothing is in flight")
        scheduler, slots = self.coordinator.scheduler, self.script.shape.limits.slots
        self.coordinator.hear = unheard
        wanted = slots * (len(self.stages) - self.script.shape.spares)
        turns = [
            self.coordinator.prepare(Submit(0, (number, *range(9)), 1)) for number in range(wanted)
        ]
        for told in turns:
            self.coordinator.take(told.submit)
        if scheduler.running() != wanted:
            violated("slots leak", f"{scheduler.running()} of {wanted} slots take a turn")
        self._until(lambda: all(told.over for told in turns), SETTLE_S, "every slot serves")

    # ---- time ----

    def _operate(self, entry: Operate) -> None:
        if not self.coordinator.awake:
            return
        name = list(self.stages)[entry.ring]
        ledger = self.coordinator.scheduler.rings[name].ledger
        numbers = [*range(len(ledger.slots)), *ledger.parked]
        if numbers:
            number = numbers[entry.pick % len(numbers)]
            keep_s = entry.keep_s
            frame = FreeSlot(name, number) if keep_s is None else KeepSlot(name, number, keep_s)
            self.coordinator.take(frame)

    def _measure(self, entry: Ask) -> None:
        if self.coordinator.awake:
            self.surveys.begin(entry)

    def _until(self, done: Callable[[], bool], bound_s: float, what: str) -> None:
        heap, end = self.heap, self.heap.now + bound_s * SECOND
        while not done():
            if heap.now > end:
                violated("liveness", f"not within {bound_s:.1f} s: {what}")
            if heap.happened >= MAX_EVENTS:
                violated("liveness", f"{MAX_EVENTS} events, and the world does not come to rest")
            heap.step()
