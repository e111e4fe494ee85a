"""Owns one ring as its coordinator may see it: what each slot will hold, and what of it is sure.

Truncated on send, extended on answer; shares no code with the coordinator's ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tools.framelogs.proof.rows import Hasher, Rows, Tally, Violation, struck_out
from tools.framelogs.proof.turns import Sent, Turn
from transport.frame import Claim, Copy, Free, Ping, Remembered, RollCall, Run, Segment, StageEntry

Number: TypeAlias = Run | Copy | Free | Ping


class Copied(NamedTuple):
    """A copy, and its turn's text where that is known."""

    copy: Copy
    text: list[int] | None
    salt: bytes


@dataclass(slots=True)
class Sending:
    """A numbered frame without its answer. refused: turns; None stands for the whole frame."""

    frame: Number
    sent: list[Sent] = field(default_factory=list)
    low: int = 0  # of a copy: as Sent.low
    refused: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class View:
    """One slot. rows, tokens: as if all that was sent were run; the first `sure` were acknowledged.

    tokens: None where not all of them were seen.
    """

    rows: Rows = field(default_factory=Rows)
    tokens: list[int] | None = field(default_factory=list)
    sure: int = 0
    owner: int | None = None
    refused: bool = False
    unknown: bool = False

    def cut(self, length: int) -> None:
        """Rows from `length` on are void."""
        self.rows.cut(length)
        if self.tokens is not None:
            del self.tokens[length:]
        self.sure = min(self.sure, length)


class RingProof:
    """One ring of one coordinator."""

    def __init__(self, name: str, tally: Tally, hasher: Hasher, *, whole: bool) -> None:
        self.name = name
        self.epoch: int | None = None
        self.highest = 0  # sequence number sent
        self.flying: dict[int, Sending] = {}
        self.recent: list[tuple[Turn, int, bool]] = []  # answers since the last frame: see `call`
        self.lost = False  # a roll call must come before the next frame
        self.blind = False  # numbers before the last frame's are missing: no socket took them
        self.answers_from: str | None = None  # the tail, as a sender
        self.limit: int | None = None  # of a turn's tokens
        self.capacity: int | None = None
        self._whole = whole
        self._first: int | None = None if not whole else 0  # lowest number known
        self._views: dict[int, View] = {}
        self._called: RollCall | None = None  # has not come back
        self._answer: RollCall | None = None  # came back; a frame that is sent next believes it
        self._entries: tuple[StageEntry, ...] = ()
        self._fingerprint: bytes | None = None
        self._tally, self._hasher = tally, hasher

    def view(self, slot: int) -> View:
        """What is known of a slot or parked prefix."""
        found = self._views.get(slot)
        if found is None:
            found = self._views[slot] = View(unknown=not self._whole)
        return found

    # ---- forming ----

    @property
    def forming(self) -> bool:
        """Whether a roll call is out: no frame of this coordinator waits for an answer."""
        return self._called is not None

    def remember(self, said: Remembered) -> None:
        """What an earlier coordinator knew: sure as far as the first roll call confirms it."""
        if self._entries or self.epoch is not None:
            return
        root = self._hasher.root(said.fingerprint, said.salt)
        view = View(tokens=list(said.tokens), sure=len(said.tokens))
        view.rows.write(0, root, self._hasher.after(root, said.tokens))
        self._views[said.number] = view

    def call(self, frame: RollCall) -> None:
        """A roll call goes out: nothing in flight will be believed."""
        if self.epoch is not None and frame.epoch <= self.epoch:
            raise Violation("R4", f"a roll call of epoch {frame.epoch} after epoch {self.epoch}")
        self._tally.note("R4")
        self.recent.clear()
        self.epoch, self.lost = frame.epoch, False
        self.flying.clear()
        for view in self._views.values():
            view.cut(view.sure)
            view.owner, view.refused = None, False
        for claim in frame.claims:
            view = self.view(claim.number)
            if view.unknown or claim.length < view.rows.base:
                self._tally.note("R3", known=False)
            else:
                who = f"the roll call of number {claim.number}"
                self._claims(view, claim.length, claim.digest, who, foreign=True)
        self._called, self._answer = frame, None

    def unsure(self, turn: Turn) -> None:
        """The turn's ring was lost: what was answered since the last frame may not count."""
        turn.at = None
        for other, length, over in self.recent:
            if other is turn:
                turn.least, turn.over = length, over
                break

    def answered(self, frame: RollCall) -> None:
        """A roll call came round; whether it was good enough, the next frame tells."""
        called = self._called
        if called is None or frame.epoch != called.epoch or not frame.entries:
            return
        if struck_out(called.claims, frame.claims) is None:
            raise Violation("R8", "a claim came back that was not made, or in another order")
        self._tally.note("R8")
        self._called, self._answer = None, frame

    def _formed(self, frame: RollCall) -> None:
        """What every stage has confirmed is there, and nothing else."""
        views: dict[int, View] = {}
        for claim in frame.claims:
            views[claim.number] = self._kept(self.view(claim.number), claim)
        self._views = views
        self._whole = True
        self._entries = frame.entries
        self._fingerprint = frame.entries[0].fingerprint
        capacities = [entry.capacity for entry in frame.entries]
        self.capacity = min(capacities if self.limit is None else [*capacities, self.limit])

    @staticmethod
    def _kept(view: View, claim: Claim) -> View:
        if view.unknown or view.rows.before(claim.length) != claim.digest:
            return View(Rows(claim.length, claim.digest), None, claim.length)
        view.cut(claim.length)
        view.sure = claim.length
        return view

    def _slots(self) -> int:
        return min(entry.slots for entry in self._entries)

    # ---- numbers ----

    def number(self, frame: Number) -> Sending:
        """Note a frame that goes out."""
        if self.epoch is None and not self._whole:
            self.epoch = frame.epoch
        if self._first is None:
            self._first = frame.seq
            self.highest = frame.seq - 1
        if self._answer is not None:
            self._formed(self._answer)
            self._answer = None
        if frame.epoch != self.epoch:
            text = f"a frame of epoch {frame.epoch}; the last roll call was of {self.epoch}"
            raise Violation("R4", text)
        if self.lost:
            raise Violation("R6", f"frames of {self.answers_from} were lost: a roll call is due")
        if frame.seq <= self.highest:
            raise Violation("R4", f"number {frame.seq} again; the last one was {self.highest}")
        self.blind = frame.seq > self.highest + 1
        if self.blind:
            for view in self._views.values():
                view.unknown = True
            self._whole = False
        self.highest = frame.seq
        made = self.flying[frame.seq] = Sending(frame)
        return made

    def knows(self, seq: int) -> bool:
        """Whether the log would show the frame that an answer belongs to."""
        return self._first == 0 or (self._first is not None and seq >= self._first)

    def behind(self, sending: Sending, turn: int) -> list[Sent]:
        """What is in flight of a turn and was sent after a frame."""
        seq = sending.frame.seq
        return [
            sent
            for number, each in self.flying.items()
            if number > seq
            for sent in each.sent
            if sent.segment.turn == turn
        ]

    def asked(self, turn: int) -> int:
        """Up to which row a turn's answers are on their way."""
        ends = [
            sent.segment.end
            for each in self.flying.values()
            for sent in each.sent
            if sent.segment.turn == turn and sent.segment.want and not sent.void
        ]
        return max(ends, default=0)

    def flies(self, turn: int) -> bool:
        """Whether anything of a turn is in flight."""
        return any(_owner(each, None) == turn for each in self.flying.values()) or any(
            sent.segment.turn == turn for each in self.flying.values() for sent in each.sent
        )

    def flier(self, slot: int, but: int | None) -> int | None:
        """Another turn that has frames in flight that write in a slot."""
        for each in self.flying.values():
            for sent in each.sent:
                if sent.segment.slot == slot and sent.segment.turn != but:
                    return sent.segment.turn
            owner = _owner(each, slot)
            if owner is not None and owner != but:
                return owner
        return None

    # ---- rows ----

    def fits(self, segment: Segment) -> None:
        """Inside the tables."""
        if self.capacity is not None and segment.end > self.capacity:
            text = f"turn {segment.turn} writes {segment.end} of {self.capacity} rows"
            raise Violation("R5", text)
        if self._entries and segment.slot >= self._slots():
            raise Violation("R5", f"turn {segment.turn} writes in slot {segment.slot}")

    def write(self, segment: Segment, text: list[int] | None) -> None:
        """A segment goes out: it may build on what is sure, or on its own turn's rows ahead."""
        view, start, who = self.view(segment.slot), segment.start, f"turn {segment.turn}"
        foreign = view.owner != segment.turn or view.refused
        if start == 0:
            self._rooted(segment, who)
        elif view.unknown or start < view.rows.base:
            self._anchor(view, start, segment.parent_hash, segment.salt, text)
        else:
            self._claims(view, start, segment.parent_hash, who, foreign=foreign)
            if foreign and text is not None:
                self._text(view, start, segment.salt, text, who)
        digests = self._hasher.after(segment.parent_hash, segment.tokens)
        view.sure = min(view.sure, start)
        self._overwritten(segment.slot, start)
        view.rows.write(start, segment.parent_hash, digests)
        if start == 0:
            view.tokens = list(segment.tokens)
        elif view.tokens is not None:
            del view.tokens[start:]
            view.tokens += segment.tokens
        view.owner, view.refused, view.unknown = segment.turn, False, False

    def _rooted(self, segment: Segment, who: str) -> None:
        if self._fingerprint is None:
            self._tally.note("R3", known=False)
        elif segment.parent_hash != self._hasher.root(self._fingerprint, segment.salt):
            raise Violation("R3", f"{who}: the root is not this model's and salt's")
        else:
            self._tally.note("R3")

    def _anchor(
        self, view: View, start: int, digest: bytes, salt: bytes, text: list[int] | None
    ) -> None:
        """What the slot holds is unknown; that the claim is of the turn's text may be known."""
        known = text is not None and self._fingerprint is not None and start <= len(text)
        if known and text is not None and self._fingerprint is not None:
            root = self._hasher.root(self._fingerprint, salt)
            if self._hasher.of(root, text[:start]) != digest:
                raise Violation("R3", f"rows [0, {start}) are claimed, of another text")
        self._tally.note("R3", known=False)
        view.rows, view.tokens, view.sure = Rows(start, digest), None, start

    def _claims(self, view: View, length: int, digest: bytes, who: str, *, foreign: bool) -> None:
        most = min(view.sure, view.rows.end) if foreign else view.rows.end
        if length > most:
            what = "acknowledged" if foreign else "acknowledged or on their way"
            raise Violation("R3", f"{who} claims {length} rows, of which {most} are {what}")
        if view.rows.before(length) != digest:
            raise Violation("R3", f"{who} claims rows [0, {length}) of another text")
        self._tally.note("R3")

    def _text(self, view: View, length: int, salt: bytes, text: list[int], who: str) -> None:
        if view.tokens is not None and view.tokens[:length] != text[:length]:
            raise Violation("R3", f"{who} reuses rows [0, {length}), which are not its text")
        root, fingerprint = view.rows.before(0), self._fingerprint
        known = root is not None and fingerprint is not None
        if known and fingerprint is not None and root != self._hasher.root(fingerprint, salt):
            raise Violation("R3", f"{who} reuses rows of another salt")

    def _overwritten(self, slot: int, start: int) -> None:
        for each in self.flying.values():
            for sent in each.sent:
                if sent.segment.slot == slot:
                    sent.low = min(sent.low, start)
            if isinstance(each.frame, Copy) and each.frame.target == slot:
                each.low = min(each.low, start)

    def copy(self, copied: Copied) -> None:
        """A copy goes out: its source must be sure."""
        copy, text = copied.copy, copied.text
        source, who = self.view(copy.source), f"the copy for turn {copy.turn}"
        self._overwritten(copy.target, 0)
        self.flying[copy.seq].low = copy.length
        if source.unknown or copy.length < source.rows.base:
            self._tally.note("R3", known=False)
            made = View(Rows(copy.length, copy.parent_hash), None)
        else:
            self._claims(source, copy.length, copy.parent_hash, who, foreign=True)
            if text is not None:
                self._text(source, copy.length, copied.salt, text, who)
            tokens = None if source.tokens is None else source.tokens[: copy.length]
            made = View(source.rows.fork(copy.length), tokens)
        made.owner = copy.turn or None
        self._views[copy.target] = made

    def copied(self, sending: Sending, answer: Copy) -> None:
        """A copy came back."""
        copy = sending.frame
        assert isinstance(copy, Copy)
        same = copy.source, copy.target, copy.length, copy.parent_hash, copy.turn
        back = answer.source, answer.target, answer.length, answer.parent_hash, answer.turn
        if same != back:
            raise Violation("R4", "the copy that came back is another one")
        names = tuple(entry.name for entry in self._entries)
        if names and answer.done != names:
            raise Violation("R4", f"the copy was made by {answer.done}, not by {names}")
        view = self.view(copy.target)
        view.sure = max(view.sure, sending.low)

    def freed(self, slot: int) -> None:
        """A Free goes out."""
        self._overwritten(slot, 0)
        if self._whole:
            self._views.pop(slot, None)  # parked numbers never return
        else:
            self._views[slot] = View()


def _owner(sending: Sending, slot: int | None) -> int | None:
    """The turn of a copy into a slot (None: any), else None."""
    frame = sending.frame
    if isinstance(frame, Copy) and frame.turn and slot in (None, frame.target):
        return frame.turn
    return None
