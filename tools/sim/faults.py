"""Owns how a script's faults happen to the processes of a world."""

from __future__ import annotations

from tools.sim.clients import Clients
from tools.sim.coordinator import CoordinatorProcess
from tools.sim.heap import MICROSECOND, Heap
from tools.sim.script import Confuse, Crash, Damage, Fault, Gap, Pause, Restart, Stale, Stall
from tools.sim.stage import StageProcess
from transport.frame import Copy, Envelope, Free, StageLost


class Faults:
    """What goes wrong. `ends`: virtual time from which on nothing does any more."""

    def __init__(
        self,
        heap: Heap,
        coordinator: CoordinatorProcess,
        stages: dict[str, list[StageProcess]],
        clients: Clients,
    ) -> None:
        self.ends = 0
        self._heap = heap
        self._coordinator = coordinator
        self._rings = list(stages.values())
        self._clients = clients
        self._ghosts = 0

    def happen(self, fault: Fault) -> None:
        """Its time has come."""
        match fault:
            case Stall():
                stage = self._rings[fault.ring][fault.stage]
                stand = stage.pause if fault.whole else stage.stall
                stand(fault.for_us * MICROSECOND)
                self._until(fault.for_us)
            case Crash():
                self._crash(fault)
            case Gap():
                self._gap(fault)
            case Stale():
                self._stale(fault)
            case Confuse():
                name = self._rings[fault.ring][0].ring.name
                self._coordinator.confused[name] = self._ghost(name)
            case Pause():
                if self._coordinator.up:
                    for_ns = fault.for_us * MICROSECOND
                    self._coordinator.pause(for_ns, timer_first=fault.timer_first)
                    self._until(fault.for_us)
            case Restart():
                self._restart(fault)
            case Damage():
                self._damage(fault)

    def _until(self, for_us: int) -> None:
        self.ends = max(self.ends, self._heap.now + for_us * MICROSECOND)

    def _crash(self, fault: Crash) -> None:
        stage = self._rings[fault.ring][fault.stage]
        if not stage.up:
            return
        stage.crash(fault.lost)
        if fault.stage:
            self._rings[fault.ring][fault.stage - 1].say_lost()
        elif self._coordinator.awake:
            name = stage.spec.name
            self._coordinator.take(StageLost(stage.ring.name, name, "the link to it ended"))
        back = self._heap.now + fault.down_us * MICROSECOND
        self._heap.at(back, stage.start, fault.load_us * MICROSECOND)
        self._until(fault.down_us + fault.load_us)

    def _gap(self, fault: Gap) -> None:
        stages = self._rings[fault.ring]
        if fault.link == 0:
            if self._coordinator.up:
                name = stages[0].ring.name
                self._coordinator.pushes[name].lose(fault.count, from_copy=fault.copies)
        elif stages[fault.link - 1].up:
            stages[fault.link - 1].out.lose(fault.count, from_copy=fault.copies)

    def _stale(self, fault: Stale) -> None:
        name = self._rings[fault.ring][0].ring.name
        old = [each for each in self._coordinator.replies if getattr(each[0], "ring", "") == name]
        if not old or not self._coordinator.up:
            return
        frame, envelope = old[-1 - fault.back % len(old)]
        self._coordinator.arrive(frame, self._ghost(name) if fault.ghost else envelope)

    def _ghost(self, ring: str) -> Envelope:
        """The first frame of a sender that nobody has heard of."""
        self._ghosts += 1
        return Envelope(f"{ring}/ghost{self._ghosts}", self._ghosts, 0)

    def _restart(self, fault: Restart) -> None:
        if not self._coordinator.up:
            return
        self._coordinator.crash()
        self._clients.restarted()
        back = self._heap.now + fault.down_us * MICROSECOND
        self._heap.at(back, self._coordinator.start, fault.jump_s)
        self._until(fault.down_us)

    def _damage(self, fault: Damage) -> None:
        """A frame that the coordinator never sent: so a log of it replays like any other."""
        stage = self._rings[fault.ring][fault.stage]
        if not stage.up or stage.core.epoch is None:
            return
        table, ring, epoch = stage.core.slots, stage.ring.name, stage.core.epoch
        held = [number for number in stage.model.buffers if table.tokens(number)]
        if not held:
            return
        number, other = held[fault.pick % len(held)], held[fault.other % len(held)]
        frame: Copy | Free = Free(ring, epoch, 0, number)
        if fault.copied and other != number and number < len(table):
            length = len(table.tokens(other))
            digest = table._chain(other).hash_before(length)
            frame = Copy(ring, epoch, 0, 0, other, number, length, digest)
        stage.arrive(frame, self._ghost(ring))
