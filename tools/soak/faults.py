"""Owns the faults: which process is hit when, by a seed, and how long the ring takes then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tools.soak.fleet import COORDINATOR, Fleet, wait_until

KINDS = {"kill": 5, "stop": 3, "restart": 2}  # with their weights
PAUSES_S = {"kill": (0.0, 2.0), "stop": (0.3, 5.0), "restart": (0.0, 1.0)}
QUIET_SHARE, QUIET_S = 0.1, 20.0  # of the run, at both ends, without faults; at most so long
DOUBLE = 0.15  # share of the faults that hit a second process, too
COORDINATOR_SHARE = 0.3
RECOVER_S = 90.0  # after this the ring is taken for lost
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault. at_s: since the load began. pause_s: that the processes stay down or stopped."""

    at_s: float
    kind: str
    targets: tuple[str, ...]
    pause_s: float


@dataclass(slots=True)
class Fault:
    """A fault that was. Times by time.monotonic(); None: never within RECOVER_S.

    answered: a request sent behind the hit was answered. whole: every ring is ready again, with
    all its processes.
    """

    planned: Planned
    at: float
    answered: float | None = None
    whole: float | None = None

    @property
    def end(self) -> float:
        """Until when failures have this fault for a reason."""
        return self.whole if self.whole is not None else self.at + RECOVER_S + 60

    @property
    def ends_coordinator(self) -> bool:
        """Connections end with it."""
        return COORDINATOR in self.planned.targets and self.planned.kind != "stop"


def draw(seed: int, minutes: float, every_s: float, stages: Sequence[str]) -> list[Planned]:
    """The faults of a run: the same ones for the same arguments."""
    random = Random(f"faults {seed}")
    whole_s = minutes * 60
    quiet_s = min(QUIET_S, whole_s * QUIET_SHARE)
    planned: list[Planned] = []
    at_s = quiet_s
    while every_s > 0:
        at_s += random.uniform(0.5, 1.5) * every_s
        if at_s > whole_s - quiet_s:
            break
        kind = random.choices(list(KINDS), list(KINDS.values()))[0]
        first = _target(random, stages)
        second = _target(random, stages) if random.random() < DOUBLE else first
        pause_s = random.uniform(*PAUSES_S[kind])
        planned.append(Planned(at_s, kind, tuple(dict.fromkeys((first, second))), pause_s))
    return planned


def _target(random: Random, stages: Sequence[str]) -> str:
    return COORDINATOR if random.random() < COORDINATOR_SHARE else random.choice(list(stages))


class Breaker:
    """Carries the faults out, one after another, each after the ring has recovered of the last."""

    def __init__(
        self,
        fleet: Fleet,
        planned: Sequence[Planned],
        *,
        answers: Callable[[], bool],
        whole: Callable[[], bool],
        hitting: Callable[[Planned], None],
    ) -> None:
        """answers: a small request is answered. whole: all rings are ready with these processes.

        hitting: told right before.
        """
        self._fleet = fleet
        self._planned = planned
        self._answers, self._whole, self._hitting = answers, whole, hitting
        self.faults: list[Fault] = []

    def run(self, start: float, end: float, stop: threading.Event) -> None:
        """Until all have happened, or what is left would be too late."""
        for planned in self._planned:
            if wait_until(start + planned.at_s, stop) or time.monotonic() > end:
                return
            self._hitting(planned)
            fault = Fault(planned, time.monotonic())
            self.faults.append(fault)
            self._hit(fault)
            if fault.whole is None:
                return

    def _hit(self, fault: Fault) -> None:
        probing = threading.Thread(target=self._probe, args=(fault,), daemon=True)
        planned, fleet = fault.planned, self._fleet
        for name in planned.targets:
            if planned.kind == "stop":
                fleet.send(name, signal.SIGSTOP)
            else:
                fleet.down(name, signal.SIGKILL if planned.kind == "kill" else signal.SIGTERM)
        probing.start()
        time.sleep(planned.pause_s)
        for name in planned.targets:
            if planned.kind == "stop":
                fleet.send(name, signal.SIGCONT)
            else:
                fleet.up(name)
        probing.join()
        deadline = fault.at + RECOVER_S
        while fault.answered is not None and time.monotonic() < deadline:
            if self._whole():
                fault.whole = time.monotonic()
                return
            time.sleep(POLL_S)

    def _probe(self, fault: Fault) -> None:
        while time.monotonic() < fault.at + RECOVER_S:
            if self._answers():
                fault.answered = time.monotonic()
                return
            time.sleep(POLL_S)
