"""The fault matrix: what may happen to whom and when, and how what came of it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STAGES = ("s0", "s1", "s2")  # head, middle, tail
COORDINATOR = "coord"
PHASES = ("idle", "prefill", "decode", "copy", "park", "restore")
RETURNS = ("restart", "pause", "blink")  # faults after which every stream equals the undisturbed
STAYS = ("other", "gone")  # and after which it ends with one error event


@dataclass(frozen=True, slots=True)
class Case:
    """One fault. victim: a stage's name, or COORDINATOR.

    restart: SIGKILL, and started again at once. pause: SIGSTOP until the ring is lost, SIGCONT.
    blink: the same, too short to be noticed. other: started again with other weights. gone: killed,
    and nobody starts it.
    """

    victim: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.victim}-{self.phase}-{self.fault}"


def matrix() -> list[Case]:
    """Every case; those of one ring file together."""
    return [
        Case(victim, phase, fault)
        for fault in (*RETURNS, *STAYS)
        for phase in PHASES
        for victim in (*STAGES, *((COORDINATOR,) if fault in RETURNS else ()))
    ]


def selection() -> list[Case]:
    """For CI: every stage in every phase and with every fault, and the coordinator in every phase.

    Cases of one ring file together.
    """
    faults = (*RETURNS, *STAYS)
    cases = [
        Case(victim, phase, faults[(row + column) % len(faults)])
        for row, victim in enumerate(STAGES)
        for column, phase in enumerate(PHASES)
    ]
    cases += [Case(COORDINATOR, phase, RETURNS[index % 2]) for index, phase in enumerate(PHASES)]
    return sorted(cases, key=lambda case: case.fault in STAYS)


@dataclass(slots=True)
class Outcome:
    """What a case showed. Seconds; None where there is nothing to measure.

    detected_s: from the fault until the ring is given up. ended_s: until the last stream's error
    event. back_s: from when the process is back (loaded, or continued) until the ring serves.
    """

    case: Case
    equal: int = 0
    errors: int = 0
    cut: int = 0  # the HTTP connection itself ended: the coordinator's own death
    detected_s: float | None = None
    ended_s: float | None = None
    back_s: float | None = None


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each fault of a stage and of the coordinator; seconds are min / median / max."""
    lines = [
        "| fault | cases | equal | error event | cut | detected s | ended s | back s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for who in ("a stage", "the coordinator"):
        for fault in (*RETURNS, *STAYS):
            mine = [
                each
                for each in outcomes
                if each.case.fault == fault
                and (each.case.victim == COORDINATOR) is (who == "the coordinator")
            ]
            if mine:
                streams = [sum(getattr(o, n) for o in mine) for n in ("equal", "errors", "cut")]
                times = [_spread([getattr(o, name) for o in mine]) for name in _TIMES]
                cells = [f"{who}: {fault}", len(mine), *streams, *times]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


_TIMES = ("detected_s", "ended_s", "back_s")


def _spread(found: Sequence[float | None]) -> str:
    times = [each for each in found if each is not None]
    if not times:
        return ""
    return " / ".join(f"{each:.2f}" for each in (min(times), median(times), max(times)))
