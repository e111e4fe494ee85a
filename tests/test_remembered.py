"""What an earlier coordinator knew, in the scheduler core: exact actions, and how it is proven.

CASES 8, 22: believed is what every stage confirms; everything else is computed again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from coord.actions import Admitted, Send
from coord.ring import PROBE_TOKENS
from tests.desk import PRINT, Desk, entry, prefill, runs
from transport.chain import Chain, root_hash
from transport.frame import (
    Claim,
    Free,
    Remembered,
    Result,
    RollCall,
    Run,
    StageLost,
    Submit,
    Verdict,
)

TOLD = (1, 2, 3, 4, 5, 6)
SAID = Remembered("r", 1, PRINT, b"", TOLD, "session", True, 30.0)


def claim(number: int, tokens: tuple[int, ...], salt: bytes = b"", print_: bytes = PRINT) -> Claim:
    chain = Chain(root_hash(print_, salt), tokens)
    return Claim(number, len(tokens), chain.hash_before(len(tokens)))


def told(*said: Remembered) -> Desk:
    """A coordinator that has just started and is told; its stages are not heard of yet."""
    desk = Desk()
    for each in said:
        assert desk.tell(each) == []
    return desk


def test_the_first_roll_call_claims_what_was_remembered() -> None:
    desk = told(SAID, replace(SAID, number=0, salt=b"tenant", tokens=(7,)))
    claims = (claim(1, TOLD), claim(0, (7,), b"tenant"))
    assert desk.beats() == [Send(RollCall("r", 1, claims))]
    assert desk.ring.ledger.slots == [], "nothing is believed before it comes back"


def test_a_confirmed_claim_is_reused() -> None:
    """The self-check takes the empty slot, and the session's slot is as it was."""
    desk = told(SAID)
    desk.beats()
    actions = desk.answer()
    assert [run.segments[0].slot for run in runs(actions)] == [0]
    assert desk.probe(actions) == []
    holding = desk.ring.ledger.slots[1]
    assert (desk.resident(1), holding.hint, holding.proven) == (TOLD, "session", True)
    assert holding.used == desk.now - 30.0
    assert desk.submit(1, (*TOLD, 9), hint="session") == [
        Admitted(1, "r", 1, prompt=7, matched=6),
        desk.run(3, prefill(1, 1, TOLD, (9,), want=1)),
    ]
    assert desk.core.totals.prefix_cache_hits == 0, "case 22: counted when a stage has used it"


def test_a_struck_claim_is_lost_and_a_miss_says_so() -> None:
    desk = told(SAID)
    desk.beats()
    desk.probe(desk.answer(claims=()))
    assert desk.resident(1) == ()
    assert desk.ring.ledger.evictions == {"ring lost": 1}
    (admitted,) = [
        a for a in desk.core.handle(Submit(1, (*TOLD, 9), 1), desk.now) if isinstance(a, Admitted)
    ]
    assert admitted.miss is not None
    assert (admitted.matched, admitted.miss.reason) == (0, "ring lost")


@pytest.mark.parametrize(
    "said",
    [
        replace(SAID, tokens=TOLD[:-1]),
        replace(SAID, salt=b"tenant"),
        replace(SAID, fingerprint=b"model-2"),
        replace(SAID, number=0),
    ],
    ids=["shorter", "salt", "model", "slot"],
)
def test_only_the_very_claim_is_confirmed(said: Remembered) -> None:
    """What comes back must be what was asked, whatever a stage makes of it."""
    desk = told(said)
    desk.beats()
    desk.answer(claims=(claim(1, TOLD),))
    assert all(each.chain is None for each in desk.ring.ledger.slots)


def test_parked_rows_come_back_and_their_number_is_not_given_again() -> None:
    parked = replace(SAID, number=7)
    desk = told(parked, replace(SAID, number=9, tokens=(8, 8)))
    desk.beats()
    roomy = {"row_bytes": 1, "park_bytes": 100}
    entries = [replace(entry(index), **roomy) for index in (0, 1)]  # type: ignore[arg-type]
    freed, probe = desk.answer(entries, (claim(7, TOLD),))
    assert freed == Send(Free("r", 1, 1, 9)), "an earlier stage may hold what a later one lost"
    assert isinstance(probe, Send)
    assert list(desk.ring.ledger.parked) == [7]
    assert desk.ring.ledger._next_park == 8


def test_parked_rows_beyond_the_park_are_freed() -> None:
    """A peer's nonsense: no stage can hold more than it has room for."""
    desk = told(replace(SAID, number=7))
    desk.beats()
    freed, _ = desk.answer(desk.entries(), (claim(7, TOLD),))
    assert freed == Send(Free("r", 1, 1, 7))
    assert not desk.ring.ledger.parked


def test_a_ring_that_has_formed_needs_no_memory() -> None:
    desk = Desk().form()
    assert desk.tell(SAID) == []
    assert desk.tell(replace(SAID, ring="q")) == []
    assert not desk.ring.remembered
    assert desk.resident(1) == ()


def test_a_kept_slot_is_kept_for_what_is_left() -> None:
    desk = told(replace(SAID, keep_s=60.0), replace(SAID, number=0, tokens=(9,)))
    desk.beats()
    desk.answer()
    kept = [slot.keep_until for slot in desk.ring.ledger.slots]
    assert kept == [0.0, desk.now + 60.0]


def test_a_full_ring_is_checked_without_giving_anything_up() -> None:
    """The self-check writes behind a slot's rows: those stay resident."""
    desk = told(SAID, replace(SAID, number=0, tokens=(9, 8)))
    desk.beats()
    (probe,) = runs(desk.answer())
    (segment,) = probe.segments
    held = TOLD if segment.slot else (9, 8)
    parent = Chain(root_hash(PRINT, b""), held).hash_before(len(held))
    assert (segment.start, segment.tokens) == (len(held), PROBE_TOKENS)
    assert segment.parent_hash == parent
    desk.probe([Send(probe)])
    assert (desk.resident(0), desk.resident(1)) == ((9, 8), TOLD)


def test_unequal_tokens_behind_a_text_are_checked_again_in_an_empty_slot() -> None:
    """Two tokens may be as likely there; the promise is broken only where no text stands before."""
    desk = told(SAID, replace(SAID, number=0, tokens=(9, 8)))
    desk.beats()
    actions = desk.answer()
    for token in (5, 6):  # another token the second time
        (run,) = runs(actions)
        (segment,) = run.segments
        answer = Result(0, segment.slot, segment.end - 1, (token,), (-0.5,))
        actions = desk.tell(Verdict("r", run.epoch, run.seq, (answer,), ()))
    (run,) = runs(actions)
    assert (run.segments[0].start, run.segments[0].parent_hash) == (0, root_hash(PRINT, b""))
    assert desk.probe(actions) == []
    assert desk.ring.reuse
    assert desk.ring.ledger.evictions == {"self-check": 1}


def test_a_living_coordinators_ledger_is_proven_too() -> None:
    """A stage that lost rows without a restart: the roll call after a gap sets it right."""
    desk = told(SAID)
    desk.beats()
    desk.probe(desk.answer())
    desk.tick(1.0)
    assert desk.tell(StageLost("r", "s1", "gone")) == [Send(RollCall("r", 2, (claim(1, TOLD),)))]
    actions = desk.answer(claims=())
    assert isinstance(runs(actions)[0], Run)
    assert desk.ring.ledger.evictions == {"refused": 1}
