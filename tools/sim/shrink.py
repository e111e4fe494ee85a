"""Owns how a failing script is cut down to what still fails in the same way.

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)
over the script's entries, then a simpler shape and simpler entries, one change at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.sim.script import Entry, Say, Script
from transport.frame import GREEDY

MAX_TRIES = 400  # replays of one shrinking

Fails = Callable[[Script], bool]


def shrink(script: Script, fails: Fails) -> tuple[Script, int]:
    """A smaller script that still fails, and how often a script was played for it."""
    search = _Search(script, fails)
    search.cut_entries()
    changed = True
    while changed and search.tries < MAX_TRIES:
        changed = False
        for simpler in _simpler(search.best):
            if search.accepts(simpler):
                changed = True
                break
        if changed:
            search.cut_entries()
    return search.best, search.tries


class _Search:
    def __init__(self, script: Script, fails: Fails) -> None:
        self.best = script
        self.tries = 0
        self._fails = fails

    def accepts(self, script: Script) -> bool:
        """Play it; keep it if it fails."""
        if self.tries >= MAX_TRIES:
            return False
        self.tries += 1
        if not self._fails(script):
            return False
        self.best = script
        return True

    def cut_entries(self) -> None:
        """Leave parts of the entries out, ever smaller ones."""
        size = len(self.best.entries)
        while size:
            at = 0
            while at < len(self.best.entries):
                entries = self.best.entries
                fewer = (*entries[:at], *entries[at + size :])
                if not self.accepts(replace(self.best, entries=fewer)):
                    at += size
            size //= 2


def _simpler(script: Script) -> Iterator[Script]:
    """The script with one thing made simpler, most promising first."""
    shape = script.shape
    rings = {getattr(entry, "ring", 0) for entry in script.entries}
    if len(shape.stages) > 1 and not rings & {len(shape.stages) - 1}:
        spares = max(0, shape.spares - 1)
        yield replace(script, shape=replace(shape, stages=shape.stages[:-1], spares=spares))
    most = max([getattr(entry, "stage", 0) for entry in script.entries], default=0)
    for ring, count in enumerate(shape.stages):
        if count > most + 1 and count > 1:
            stages = (*shape.stages[:ring], count - 1, *shape.stages[ring + 1 :])
            yield replace(script, shape=replace(shape, stages=stages))
    plain: dict[str, object] = {"codec": False, "eager": False, "jitter_us": 0, "drafter": "off"}
    plain |= {"spares": 0, "memory": False}
    for name, value in plain.items():
        if getattr(shape, name) != value:
            yield replace(script, shape=replace(shape, **{name: value}))  # type: ignore[arg-type]
    for at, entry in enumerate(script.entries):
        for simpler in _plainer(entry):
            entries = (*script.entries[:at], simpler, *script.entries[at + 1 :])
            yield replace(script, entries=entries)


def _plainer(entry: Entry) -> Iterator[Entry]:
    if not isinstance(entry, Say):
        return
    if entry.sampling != GREEDY:
        yield replace(entry, sampling=GREEDY)
    if entry.stops:
        yield replace(entry, stops=())
    if entry.salt:
        yield replace(entry, salt=b"")
    if entry.hint or entry.keep_s or not entry.reuse:
        yield replace(entry, hint="", keep_s=0.0, reuse=True)
    if entry.leave is not None:
        yield replace(entry, leave=None)
    if entry.read_us:
        yield replace(entry, read_us=0)
    if entry.budget > 1:
        yield replace(entry, budget=entry.budget // 2)
    if len(entry.more) > 1:
        yield replace(entry, more=entry.more[: len(entry.more) // 2])
