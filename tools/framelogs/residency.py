"""Owns the proof of residency over the frames of a ring's processes, from wherever they come.

Fed with frames, of log files or of rings in memory; raises the first Violation. What each rule
says is in docs/log-check.md. Nothing here is shared with the cores but the frames' classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from tools.framelogs.proof.claims import CoordinatorProof
from tools.framelogs.proof.rows import RULES, Hasher, Tally, Violation
from tools.framelogs.proof.stage import StageProof
from transport.frame import Envelope, Frame, Heartbeat, LinkGap, Run, Tensor
from transport.framelog import Direction

__all__ = ["RULES", "Residency", "Tally", "Violation", "Who"]

MAX_PENDING = 65_536  # frames of one sender that wait for the other end's record
MAX_RETIRED = 64  # earlier lives of one sender that are remembered

Where: TypeAlias = "str | object"  # anything whose str() names the frame's place


@dataclass(frozen=True, slots=True)
class Who:
    """One life of one process. role: "coordinator" or "stage"; name: the stage's."""

    role: str
    name: str
    incarnation: int


@dataclass(slots=True)
class _Link:
    """The frames of one sender as one process saw them."""

    incarnation: int
    expected: int | None
    told: bool = False  # a LinkGap came just before
    retired: tuple[int, ...] = ()


class _Life:
    """What is known of one process."""

    def __init__(self, proof: StageProof | CoordinatorProof, *, whole: bool) -> None:
        self.proof = proof
        self.whole = whole
        self.links: dict[tuple[str, bool], _Link] = {}


class Residency:
    """Proves the rules over any number of processes; each one's frames must come in its order.

    The order between processes does not matter: frames are matched by envelope. pair: keep what one
    end of a link recorded until the other end is seen. repeats: see CoordinatorProof.
    """

    def __init__(
        self, *, max_model_len: int | None = None, pair: bool = True, repeats: bool = False
    ) -> None:
        self.tally = Tally()
        self._hasher = Hasher()
        self._max, self._pair, self._repeats = max_model_len, pair, repeats
        self._lives: dict[Who, _Life] = {}
        self._pending: dict[tuple[str, int], dict[int, tuple[bool, Any, bytes | None, Where]]] = {}

    def begin(self, who: Who, *, whole: bool = True, max_model_len: int | None = None) -> None:
        """A process's frames come next. whole False: not from its start on.

        max_model_len: the limit that a coordinator runs with; None: as for all.
        """
        proof: StageProof | CoordinatorProof
        if who.role == "stage":
            proof = StageProof(who.name, self.tally, self._hasher, whole=whole)
        else:
            proof = CoordinatorProof(
                self.tally,
                self._hasher,
                whole=whole,
                max_model_len=max_model_len or self._max,
                repeats=self._repeats,
            )
        self._lives[who] = _Life(proof, whole=whole)

    def missing(self, who: Who) -> None:
        """Records of a process are missing here: what it holds is unknown until it is written."""
        life = self._life(who)
        life.proof.restart(whole=False)
        life.links.clear()
        life.whole = False

    def observe(
        self,
        who: Who,
        direction: Direction,
        frame: Frame,
        envelope: Envelope | None,
        place: Where,
        *,
        wire: bytes | None = None,
        data: bytes | None = None,
    ) -> None:
        """Take one frame; raises the Violation that it shows.

        envelope: None for a local or unsent frame, or where links have no numbers. wire: the
        frame's header as recorded; None: the frame itself is compared. data: the digest of its
        tensor, if kept.
        """
        self.tally.records += 1
        life = self._life(who)
        try:
            if envelope is not None and direction in (Direction.IN, Direction.OUT):
                self._numbered(life, direction, frame, envelope)
                if self._pair and not isinstance(frame, (LinkGap, Heartbeat)):
                    self._match(direction, frame, envelope, place, wire, data)
            if direction in (Direction.OUT, Direction.UNSENT):
                life.proof.sent(frame)
            elif isinstance(life.proof, CoordinatorProof):
                life.proof.took(frame, envelope if direction is Direction.IN else None)
            else:
                life.proof.took(frame)
        except Violation as found:
            found.place = found.place or str(place)
            raise

    def waiting(self) -> int:
        """Frames of which only one end of the link was seen."""
        return sum(map(len, self._pending.values()))

    def _life(self, who: Who) -> _Life:
        if who not in self._lives:
            self.begin(who)
        return self._lives[who]

    def _numbered(
        self, life: _Life, direction: Direction, frame: Frame, envelope: Envelope
    ) -> None:
        """R6: a sender's numbers go up by one, or a LinkGap says that they don't."""
        key = envelope.sender, direction is Direction.OUT
        link = life.links.get(key)
        if link is None:
            link = _Link(envelope.incarnation, 0 if life.whole else None)
            life.links[key] = link
        if envelope.incarnation != link.incarnation:
            if envelope.incarnation in link.retired:
                if not isinstance(frame, LinkGap):  # else it lived after all: see docs/frames.md
                    raise Violation("R6", f"{_named(envelope)} is of an earlier life of its sender")
                link.retired = tuple(x for x in link.retired if x != envelope.incarnation)
            link.retired = (*link.retired[1 - MAX_RETIRED :], link.incarnation)
            link.incarnation, link.expected, link.told = envelope.incarnation, 0, False
        if isinstance(frame, LinkGap):
            if (frame.link, frame.got) != (envelope.sender, envelope.number):
                raise Violation("R6", f"a gap of {frame.link} before {_named(envelope)}")
            link.told = True
            return
        expected, told = link.expected, link.told
        if expected is None:
            self.tally.note("R6", known=False)
        elif envelope.number < expected:
            raise Violation("R6", f"{_named(envelope)} again; number {expected} was expected")
        elif envelope.number > expected and not told:
            text = f"{_named(envelope)}: from number {expected} on frames are missing"
            raise Violation("R6", text)
        else:
            self.tally.note("R6")
        link.expected, link.told = envelope.number + 1, False

    def _match(
        self,
        direction: Direction,
        frame: Frame,
        envelope: Envelope,
        place: Where,
        wire: bytes | None,
        data: bytes | None,
    ) -> None:
        """R7: both ends of a link recorded the same frame."""
        out = direction is Direction.OUT
        what = _bare(frame) if wire is None else blake2b(wire, digest_size=16).digest()
        pending = self._pending.setdefault((envelope.sender, envelope.incarnation), {})
        other = pending.get(envelope.number)
        if other is None or other[0] is out:
            pending[envelope.number] = out, what, data, place
            if len(pending) > MAX_PENDING:
                del pending[next(iter(pending))]
                self.tally.note("R7", known=False)
            return
        del pending[envelope.number]
        if what != other[1]:
            text = f"{_named(envelope)} is not the same frame at its other end ({other[3]})"
            raise Violation("R7", text)
        if data is not None and other[2] is not None and data != other[2]:
            text = f"the tensor of {_named(envelope)} is not the same at its other end ({other[3]})"
            raise Violation("R7", text)
        self.tally.note("R7")


def _bare(frame: Frame) -> Frame:
    """Without the tensor's bytes, which not both ends may have kept."""
    if not isinstance(frame, Run) or frame.payload is None:
        return frame
    return replace(frame, payload=Tensor(frame.payload.dtype, frame.payload.shape, b""))


def _named(envelope: Envelope) -> str:
    return f"frame {envelope.number} of {envelope.sender}"
