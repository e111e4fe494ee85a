"""Owns the proof of one stage's life: what it read had been written, and what it sent it had taken.

Rebuilt from what the stage took and sent alone; shares no code with the stage's own slot table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tools.framelogs.proof.rows import Hasher, Rows, Tally, Violation, struck_out
from transport.frame import (
    Claim,
    Copy,
    Forwarded,
    Frame,
    Free,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    Segment,
    Verdict,
)

Passing: TypeAlias = Run | Copy | Free | Ping | Reject | RollCall
HOLDS = (Refusal.GAP, Refusal.CONTENT)  # refusals that say what a slot holds


@dataclass(slots=True)
class Taken:
    """A frame that the stage took and has not sent on. refused: (segment's index, code)."""

    frame: Passing
    refused: dict[int, Refusal] = field(default_factory=dict)
    whole: bool = False  # all of it was refused
    done: tuple[Result, ...] | None = None  # its forward has ended with these results


class StageProof:
    """One life of one stage, fed with its frames in order.

    whole: they are seen from its start on; else what a slot holds is unknown until it is written.
    """

    def __init__(self, name: str, tally: Tally, hasher: Hasher, *, whole: bool) -> None:
        self.name = name
        self._tally, self._hasher = tally, hasher
        self.restart(whole=whole)

    def restart(self, *, whole: bool) -> None:
        """Forget everything: the stage has started, or records are missing."""
        self._whole = self._synced = whole
        self._slots: dict[int, Rows] = {}
        self._queue: deque[Taken] = deque()
        self._epoch: int | None = None
        self._count: int | None = None  # slots; parked prefixes have larger numbers
        self._capacity: int | None = None
        self._fingerprint: bytes | None = None
        self._gaps = 0

    # ---- what it takes ----

    def took(self, frame: Frame) -> None:
        """A frame came in, or a forward has ended."""
        if isinstance(frame, LinkGap):
            self._gaps += 1
        elif isinstance(frame, Forwarded):
            taken = self._find(
                lambda at: isinstance(at, Run) and (at.epoch, at.seq) == (frame.epoch, frame.seq),
                f"a forward of frame ({frame.epoch}, {frame.seq}) ended",
            )
            if taken is not None:
                taken.done = frame.results
        elif isinstance(frame, Passing):
            self._queue.append(Taken(frame))

    def _find(self, match: Callable[[Passing], bool], what: str) -> Taken | None:
        """The first frame taken that matches; those before it were never sent on."""
        for index, taken in enumerate(self._queue):
            if match(taken.frame):
                for _ in range(index):
                    self._swallowed(self._queue.popleft())
                self._synced = True
                return taken
        if self._synced:
            raise Violation("R6", f"{what}, but it took no such frame")
        self._tally.note("R6", known=False)
        return None

    def _swallowed(self, taken: Taken) -> None:
        """Dropped as too old, or its sending failed: then its slots may have been written."""
        frame = taken.frame
        if isinstance(frame, (Ping, Reject)) or self._epoch is None or frame.epoch < self._epoch:
            return
        if isinstance(frame, RollCall):  # what it does not claim was dropped
            claimed = dict.fromkeys(claim.number for claim in frame.claims)
            for number in self._slots:
                if self._parked(number) and number not in claimed:
                    self._forget(number)
            return
        self._tally.note("R6", known=False)
        if isinstance(frame, Run):
            for segment in frame.segments:
                self._forget(segment.slot)
        else:
            self._forget(frame.target if isinstance(frame, Copy) else frame.slot)

    def _forget(self, slot: int) -> None:
        self._slots[slot] = Rows(-1)  # before(...) is None everywhere below its end

    # ---- what it sends ----

    def sent(self, frame: Frame) -> None:
        """A frame went out: it was taken before, and now its effect is certain."""
        match frame:
            case Run() | Verdict():
                self._ran(frame)
            case Copy():
                self._copied(frame)
            case Free() | Ping():
                self._same(frame)
                if isinstance(frame, Free):
                    self._empty(frame.slot)
            case RollCall():
                self._called(frame)
            case Reject() if frame.stage == self.name:
                self._refused(frame)
            case Reject():
                self._same(frame)

    def _same(self, frame: Free | Ping | Reject) -> None:
        what = f"it sent {type(frame).__name__} ({frame.epoch}, {frame.seq})"
        if self._find(lambda at: at == frame, what) is not None:
            self._queue.popleft()
            self._tally.note("R6")

    def _called(self, frame: RollCall) -> None:
        if not frame.entries or frame.entries[-1].name != self.name:
            raise Violation("R6", f"the roll call went on without stage {self.name}'s entry")
        before = replace(frame, claims=(), entries=frame.entries[:-1])
        found = self._find(
            lambda at: isinstance(at, RollCall) and replace(at, claims=()) == before,
            f"it sent a roll call of epoch {frame.epoch}",
        )
        if found is not None:
            self._queue.popleft()
            self._tally.note("R6")
        if self._epoch is not None and frame.epoch < self._epoch:
            raise Violation("R6", f"it went back from epoch {self._epoch} to {frame.epoch}")
        mine = frame.entries[-1]
        self._epoch, self._fingerprint = frame.epoch, mine.fingerprint
        self._count, self._capacity = mine.slots, mine.capacity
        if found is not None:
            assert isinstance(found.frame, RollCall)
            self._confirmed(found.frame.claims, frame.claims)
        claimed = dict.fromkeys(claim.number for claim in frame.claims)
        for number in [each for each in self._slots if each >= mine.slots]:
            if number not in claimed:
                self._empty(number)

    def _confirmed(self, taken: tuple[Claim, ...], kept: tuple[Claim, ...]) -> None:
        """What it let pass is there, and what it struck out is not."""
        struck = struck_out(taken, kept)
        if struck is None:
            raise Violation("R8", "it confirms a claim that it did not take, or in another order")
        self._tally.note("R8")
        for claim in kept:
            holds = self._judged(claim)
            if holds is False:
                raise Violation("R8", f"it confirms {self._about(claim)}")
            if holds is None and self._parked(claim.number):
                self._slots[claim.number] = Rows(claim.length, claim.digest)
        for claim in struck:
            if self._judged(claim):
                raise Violation("R8", f"it strikes out {self._about(claim)}")

    def _judged(self, claim: Claim) -> bool | None:
        holds = self._holds(claim)
        self._tally.note("R8", known=holds is not None)
        return holds

    def _parked(self, number: int) -> bool:
        return self._count is not None and number >= self._count

    def _holds(self, claim: Claim) -> bool | None:
        """Whether the claimed rows are here, of a parked prefix no others; None: unknown."""
        rows = self._slots.get(claim.number)
        if rows is None:
            return False if self._whole else None
        if rows.base < 0 or claim.length < rows.base:
            return None
        if self._parked(claim.number) and claim.length != rows.end:
            return False
        return rows.before(claim.length) == claim.digest

    def _about(self, claim: Claim) -> str:
        what = "parked prefix" if self._parked(claim.number) else "slot"
        rows = self._slots.get(claim.number)
        end = 0 if rows is None else rows.end
        if rows is None or rows.before(claim.length) != claim.digest:
            held = f"{end} are written" if claim.length > end else "another text is written"
        else:
            held = f"{end} are, of that text"
        return f"rows [0, {claim.length}) of {what} {claim.number}, where {held}"

    def _empty(self, number: int) -> None:
        if self._whole:
            self._slots.pop(number, None)  # parked numbers never return
        else:
            self._slots[number] = Rows()

    def _refused(self, frame: Reject) -> None:
        where = f"({frame.epoch}, {frame.seq})"
        if frame.code is Refusal.LINK:
            if self._whole and not self._gaps and len(self._queue) < 2:
                raise Violation("R6", "it told of lost frames, but none were missing")
            return
        if frame.code is Refusal.EPOCH:
            what = f"it refused a frame {where} of another epoch"
            if frame.seq == 0:
                found = self._find(
                    lambda at: isinstance(at, RollCall) and at.epoch < frame.epoch, what
                )
            else:
                found = self._find(lambda at: _numbers(at) == (frame.epoch, frame.seq), what)
                if found is not None and self._epoch == frame.epoch:
                    raise Violation("R6", f"{what}, but it is in epoch {self._epoch}")
            if found is not None:
                self._queue.popleft()
                self._tally.note("R6")
            return
        found = self._find(
            lambda at: _numbers(at) == (frame.epoch, frame.seq), f"it refused a frame {where}"
        )
        if found is None:
            return
        self._tally.note("R6")
        if isinstance(found.frame, Copy):
            self._queue.popleft()
            if frame.code in HOLDS:
                copy = found.frame
                self._unjust(copy.source, copy.length, copy.parent_hash, frame)
        elif isinstance(found.frame, Run):
            self._refused_segment(found, found.frame, frame)

    def _refused_segment(self, taken: Taken, run: Run, frame: Reject) -> None:
        if frame.turn is None:
            taken.whole = True
            return
        for index in reversed(range(len(run.segments))):
            segment = run.segments[index]
            if (segment.turn, segment.slot) == (frame.turn, frame.slot) and (
                index not in taken.refused
            ):
                taken.refused[index] = frame.code
                if frame.code in HOLDS and segment.start:
                    self._unjust(segment.slot, segment.start, segment.parent_hash, frame)
                return
        text = f"it refused turn {frame.turn} in slot {frame.slot}, which the frame has not"
        raise Violation("R6", text)

    def _unjust(self, slot: int, length: int, digest: bytes, frame: Reject) -> None:
        """A refusal of rows that are there shows that the stage has lost them."""
        rows = self._rows(slot)
        if rows is not None and rows.before(length) == digest:
            text = f"slot {slot} holds the rows [0, {length}) that were refused: {frame.detail}"
            raise Violation("R2" if frame.code is Refusal.CONTENT else "R1", text)

    # ---- rows ----

    def _rows(self, slot: int) -> Rows | None:
        """What a slot holds; None where the log does not tell."""
        rows = self._slots.get(slot)
        if rows is None and self._whole:
            rows = self._slots[slot] = Rows()
        return None if rows is None or rows.base < 0 else rows

    def _ran(self, frame: Run | Verdict) -> None:
        where = f"({frame.epoch}, {frame.seq})"
        found = self._find(
            lambda at: isinstance(at, Run) and (at.epoch, at.seq) == (frame.epoch, frame.seq),
            f"it sent {type(frame).__name__} {where}",
        )
        if found is None:
            return
        self._queue.popleft()
        run = found.frame
        assert isinstance(run, Run)
        if run.epoch != self._epoch and (self._whole or self._epoch is not None):
            raise Violation("R6", f"it ran a frame of epoch {run.epoch} in epoch {self._epoch}")
        kept = [
            segment
            for index, segment in enumerate(run.segments)
            if index not in found.refused and not found.whole
        ]
        self._same_work(run, tuple(kept), frame, found)
        for segment in kept:
            self._wrote(segment)

    def _same_work(
        self, run: Run, kept: tuple[Segment, ...], frame: Run | Verdict, taken: Taken
    ) -> None:
        if frame.ring != run.ring or frame.timings[:-1] != run.timings:
            raise Violation("R6", "the ring or the timings are not those of the frame it took")
        if not frame.timings or frame.timings[-1].stage != self.name:
            raise Violation("R6", f"the last timing is not stage {self.name}'s")
        if isinstance(frame, Run):
            if frame.segments != kept:
                text = _difference(kept, frame.segments)
                raise Violation("R6", f"the segments are not those that it took: {text}")
            rows = sum(len(segment.tokens) for segment in kept)
            shape = frame.payload.shape if frame.payload is not None else (0,)
            if not shape or shape[0] != rows:
                raise Violation("R6", f"activations of shape {shape} for {rows} tokens")
        else:
            wanted = [(s.turn, s.slot, s.end - s.want, s.want) for s in kept]
            given = [(r.turn, r.slot, r.start, len(r.tokens)) for r in frame.results]
            if wanted != given:
                text = f"{given} answers {wanted} (turn, slot, start, tokens)"
                raise Violation("R4", f"the results are not those that were wanted: {text}")
            if taken.done is not None and taken.done != frame.results:
                raise Violation("R6", "the results are not those of its forward")
            self._tally.note("R4")
        self._tally.note("R6")

    def _wrote(self, segment: Segment) -> None:
        tally, start, slot = self._tally, segment.start, segment.slot
        tally.segments += 1
        tally.rows += len(segment.tokens)
        for limit, at, what in (
            (self._count, slot + 1, "slots"),
            (self._capacity, segment.end, "rows per slot"),
        ):
            if limit is not None and at > limit:
                raise Violation("R5", f"turn {segment.turn} writes {at} of {limit} {what}")
        tally.note("R5", known=self._capacity is not None)
        if start == 0:
            known = self._fingerprint is not None
            if self._fingerprint is not None:
                root = self._hasher.root(self._fingerprint, segment.salt)
                if segment.parent_hash != root:
                    text = f"turn {segment.turn}: the root is not this model's and salt's"
                    raise Violation("R2", text)
            tally.note("R1")
            tally.note("R2", known=known)
        else:
            self._reads(slot, start, segment.parent_hash, f"turn {segment.turn}")
        digests = self._hasher.after(segment.parent_hash, segment.tokens)
        rows = self._slots.get(slot)
        if rows is None or rows.base < 0:
            rows = self._slots[slot] = Rows(start, segment.parent_hash)
        rows.write(start, segment.parent_hash, digests)

    def _reads(self, slot: int, length: int, digest: bytes, who: str) -> bool:
        """Rows [0, length) of a slot are read as `digest`; False where the log can't tell."""
        rows = self._rows(slot)
        if rows is None or length < rows.base:
            self._tally.note("R1", known=False)
            self._tally.note("R2", known=False)
            return False
        if length > rows.end:
            text = f"{who} reads rows [0, {length}) of slot {slot}, where {rows.end} are written"
            raise Violation("R1", text)
        self._tally.note("R1")
        if rows.before(length) != digest:
            text = f"{who} reads rows [0, {length}) of slot {slot}, which hold another text"
            raise Violation("R2", text)
        self._tally.note("R2")
        return True

    def _copied(self, frame: Copy) -> None:
        if not frame.done or frame.done[-1] != self.name:
            raise Violation("R6", f"the copy went on without stage {self.name}'s name")
        before = replace(frame, done=frame.done[:-1])
        what = f"it sent Copy ({frame.epoch}, {frame.seq})"
        if self._find(lambda at: at == before, what) is None:
            return
        self._queue.popleft()
        self._tally.note("R6")
        self._tally.copies += 1
        known = self._reads(frame.source, frame.length, frame.parent_hash, "a copy")
        self._slots[frame.target] = (
            self._slots[frame.source].fork(frame.length)
            if known
            else Rows(frame.length, frame.parent_hash)
        )


def _numbers(frame: Passing) -> tuple[int, int] | None:
    """What an answer is paired by."""
    return (frame.epoch, frame.seq) if isinstance(frame, (Run, Copy, Free)) else None


def _difference(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> str:
    if len(one) != len(other):
        return f"{len(other)} segments, not {len(one)}"
    for mine, theirs in zip(one, other, strict=True):
        for name in ("turn", "slot", "start", "tokens", "kind", "parent_hash", "want", "salt"):
            before, after = getattr(mine, name), getattr(theirs, name)
            if before != after:
                return f"turn {mine.turn}'s {name} is {after!r:.60}, not {before!r:.60}"
    return "their sampling"
