"""Verify mode over a toy ring in memory: it finds rows that are not what their hashes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from coord.actions import Action
from coord.verify import IDLE_S, MAX_QUEUED, Mismatch, Record, Verifier, write_logs
from tests.memoryring import MemoryRing, Reply, limits
from transport.frame import Cancel, Frame, Run, Submit, Verdict
from transport.framelog import Direction, FrameLogReader, LogHeader

PROMPT = list(range(1, 31))


class Verified(MemoryRing):
    """A ring whose scheduler is verified, as coord.coordinator does it."""

    def __init__(self, share: float, slots: int = 3) -> None:
        self.found: list[Mismatch] = []
        super().__init__(2, bounds=limits(slots=slots, lost_after_s=1e5), slots=slots, layers=2)
        self.verifier = Verifier(share, self.scheduler)
        self.form()

    def tell(self, frame: Frame) -> None:
        if hasattr(self, "verifier"):
            if isinstance(frame, Submit) and frame.reuse:
                cancel = self.verifier.interrupt()
                if cancel is not None:
                    super().tell(cancel)
            self.verifier.record(Record(1, 2, Direction.LOCAL, "test", frame, None))
        super().tell(frame)

    def send(self, wire: object) -> None:
        super().send(wire)  # type: ignore[arg-type]
        if hasattr(self, "verifier"):
            self.verifier.record(Record(1, 2, Direction.OUT, "r", self.sent[-1], None))

    def _perform(self, action: Action) -> None:
        super()._perform(action)
        if hasattr(self, "verifier"):
            found = self.verifier.heard(action, self.now)
            if found is not None:
                self.found.append(found)

    def idle(self, seconds: float = IDLE_S) -> int | None:
        """Time passes; the cold run that this starts."""
        self.now += seconds
        submit = self.verifier.next(self._turn + 1, self.now)
        if submit is None:
            return None
        self._turn += 1
        self.replies[self._turn] = Reply()
        self.tell(submit)
        return self._turn


def chat(ring: Verified, known: list[int], new: list[int]) -> None:
    known += new
    known += ring.ask(known, 4).tokens


def counts(ring: Verified) -> tuple[int, int, int]:
    verifier = ring.verifier
    return verifier.runs, verifier.mismatches, verifier.skipped


def test_a_warm_turn_is_run_again_cold_and_agrees() -> None:
    ring = Verified(1.0)
    known: list[int] = []
    chat(ring, known, PROMPT)
    assert ring.idle() is None, "a cold turn proves nothing"
    chat(ring, known, [5])
    assert ring.idle(IDLE_S / 2) is None, "not at once"
    run = ring.idle()
    assert run is not None
    ring.pump()
    assert ring.replies[run].admitted[0].matched == 0
    assert (counts(ring), ring.found) == ((1, 0, 0), [])
    before = ring.scheduler.totals.prefix_cache_queries
    assert before == len(PROMPT) + len(known) - 4, "it is no query of a client's"
    chat(ring, known, [6])
    assert ring.replies[run + 1].admitted[0].matched == len(known) - 4 - 2, "and takes no slot"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_damaged_row_is_found_named_and_written_down(layer: int, tmp_path: Path) -> None:
    ring = Verified(1.0)
    known: list[int] = []
    chat(ring, known, PROMPT)
    slot = next(
        i
        for i, s in enumerate(ring.scheduler.rings["r"].ledger.slots)
        if s.proven is False and s.resident > 8
    )
    ring.models[layer]._rows[0][slot][80] ^= 1  # one bit of row 10, behind every hash's back
    known.append(5)
    turn = ring.submit(known, 8)
    ring.pump()
    ring.idle()
    ring.pump()
    assert counts(ring) == (1, 1, 0)
    (found,) = ring.found
    cold = found.cold.tokens
    at = next(i for i, (a, b) in enumerate(zip(found.warm.tokens, cold, strict=True)) if a != b)
    assert (found.turn, found.position, found.what) == (turn, len(known) + at, "tokens")
    for path in write_logs(found, tmp_path, LogHeader("coordinator", "c", 1, "test", 7)):
        with path.open("rb") as file:
            frames = [record.decode()[0] for record in FrameLogReader(file)]
        kinds = {type(frame) for frame in frames}
        assert {Submit, Run, Verdict} <= kinds
    assert len(list(tmp_path.iterdir())) == 2


def test_the_share_is_counted_not_drawn() -> None:
    ring = Verified(0.25)
    known: list[int] = []
    for turn in range(9):  # the first one is cold
        chat(ring, known, [turn + 1] * 9)
        ring.idle()
        ring.pump()
    assert counts(ring) == (2, 0, 0)


def test_a_client_comes_first_and_the_run_is_tried_again() -> None:
    ring = Verified(1.0)
    known: list[int] = []
    chat(ring, known, PROMPT)
    chat(ring, known, [5])
    run = ring.idle()
    assert run is not None
    reply = ring.ask([9] * 12, 2)
    assert reply.finished == "length"
    assert (counts(ring), ring.replies[run].finished) == ((0, 0, 0), "verify interrupted")
    assert ring.idle() is not None
    ring.pump()
    assert counts(ring) == (1, 0, 0)


def test_no_conversation_is_pushed_out() -> None:
    ring = Verified(1.0, slots=2)
    one, two = [1] * 20, [2] * 20
    for known in (one, two, one, two):
        chat(ring, known, [5])
    assert ring.idle() is None
    assert ring.idle() is None
    assert counts(ring) == (0, 0, 2)
    expected = len(one) - 1
    chat(ring, one, [6])
    assert ring.replies[ring._turn].admitted[0].matched == expected


def test_the_queue_is_bounded_and_a_cancelled_turn_compares_what_it_got() -> None:
    ring = Verified(1.0)
    known: list[int] = []
    chat(ring, known, PROMPT)
    for _ in range(MAX_QUEUED + 2):
        chat(ring, known, [5])
    assert counts(ring) == (0, 0, 2)
    turn = ring.submit([*known, 7], 8)
    while len(ring.replies[turn].tokens) < 3:
        ring.happen(ring.choices()[0])
    ring.tell(Cancel(turn))
    ring.pump()
    for _ in range(MAX_QUEUED):
        assert ring.idle() is not None
        ring.pump()
    assert counts(ring)[:2] == (MAX_QUEUED, 0)


def test_looking_for_a_slot_changes_nothing() -> None:
    """Only `handle` may change the core: a replay of the log does not look."""
    ring = Verified(1.0, slots=2)
    known: list[int] = []
    for new in (PROMPT, [5], [6]):
        chat(ring, known, new)
    ledger = ring.scheduler.rings["r"].ledger
    for slot in ledger.slots:
        slot.twin = None
    assert ring.verifier.next(99, ring.now + IDLE_S) is not None
    assert [slot.twin for slot in ledger.slots] == [None, None]
