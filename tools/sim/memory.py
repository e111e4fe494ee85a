"""Owns a simulated state file: what a coordinator writes of its ledgers, and tells its successor.

As coord.saving and coord.store do it, in virtual time: a look a moment after what may have changed
them, so that what a process that dies has not yet written is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from coord.actions import Action, Admitted, Failed, Finished
from coord.ring import Ring
from coord.view import holdings
from transport.frame import Copy, Frame, Free, KeepSlot, Remembered, RollCall


class Memory:
    """The file. Times in it are of the wall clock, in seconds."""

    def __init__(self) -> None:
        self._written: dict[str, list[tuple[Remembered, float, float]]] = {}

    @staticmethod
    def changes(frame: Frame, actions: Sequence[Action]) -> bool:
        """Whether a step can have changed what is resident, but for a token."""
        ends = (Admitted, Finished, Failed)
        return isinstance(frame, (RollCall, Copy, Free, KeepSlot)) or any(
            isinstance(action, ends) for action in actions
        )

    def look(self, rings: Mapping[str, Ring], salts: Mapping[bytes, bytes], clock_s: float) -> bool:
        """Write all ledgers; True while a turn writes somewhere. clock_s: wall minus heap."""
        running = False
        for name, ring in rings.items():
            if not ring.entries:
                continue  # it has not formed: what was written is still to be proven
            found = self._written[name] = []
            for number, held in holdings(ring):
                running = running or held.turn is not None
                if held.chain is None or held.chain.root not in salts or not len(held.chain):
                    continue
                said = Remembered(
                    name,
                    number,
                    ring.fingerprint,
                    salts[held.chain.root],
                    held.chain.tokens(),
                    held.hint,
                    held.proven,
                    0.0,
                    0.0,
                )
                keep_until = held.keep_until + clock_s if held.keep_until else 0.0
                found.append((said, held.used + clock_s, keep_until))
        return running

    def remembered(self, wall_s: float) -> Iterator[Remembered]:
        """What a new coordinator is told, before it hears anybody."""
        for found in self._written.values():
            for said, used_at, keep_until in found:
                idle_s = min(1e9, max(0.0, wall_s - used_at))
                keep_s = min(1e9, max(0.0, keep_until - wall_s))
                yield replace(said, idle_s=idle_s, keep_s=keep_s)
