"""The ledger against a naive model of what is resident where; placement by its invariants only.

CASES 4, 5, 13 to 16, 38: which slot is given up is policy and may change; what may never be given
up, claimed, or forgotten is tested here.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from coord.ledger import FORK_ROWS, PARK_ROWS, Ledger, Placement, Wanted, longest
from transport.chain import Chain, pack_tokens, root_hash

ROOT, OTHER = root_hash(b"model", b""), root_hash(b"model", b"tenant")
LONG = tuple(range(100, 130))


def held(ledger: Ledger, index: int) -> tuple[int, ...]:
    chain = ledger.holding(index).chain
    return () if chain is None else chain.tokens()


def put(ledger: Ledger, index: int, *tokens: int, root: bytes = ROOT, now: float = 0.0) -> None:
    """A turn prefilled these tokens into the slot and is over."""
    ledger.pin(index, 1)
    ledger.truncate(index, 0)
    ledger.extend(index, Chain(root, tokens), len(tokens))
    ledger.release(index, 1, now)


def wanted(*prompt: int, root: bytes = ROOT, reuse: bool = True, hint: str = "") -> Wanted:
    return Wanted(pack_tokens(prompt), root, len(prompt) - 1, reuse, hint)


def place(ledger: Ledger, *prompt: int, now: float = 100.0) -> Placement:
    found = ledger.place(wanted(*prompt), now)
    assert found is not None
    return found


# ---- match ---------------------------------------------------------------------------------------


def test_the_longest_common_prefix_and_who_has_it() -> None:
    """CASES 15: of any length."""
    ledger = Ledger(4, 64)
    put(ledger, 0, 1, 2, 3)
    put(ledger, 1, 1, 2, 9, 9, 9)
    put(ledger, 2, 7)
    chains = {i: slot.chain for i, slot in enumerate(ledger.slots) if slot.chain is not None}
    assert longest(chains, pack_tokens((1, 2, 3, 4)), ROOT) == (3, [0])
    assert longest(chains, pack_tokens((1, 2, 8)), ROOT) == (2, [0, 1])
    assert longest(chains, pack_tokens((1, 2)), ROOT) == (2, [0, 1])
    assert longest(chains, pack_tokens((8,)), ROOT) == (0, [])
    assert longest(chains, pack_tokens((1, 2, 3, 4)), OTHER) == (0, []), "CASES 19"


# ---- place ---------------------------------------------------------------------------------------


def test_an_extension_goes_on_in_place() -> None:
    ledger = Ledger(3, 64)
    put(ledger, 1, *LONG)
    assert place(ledger, *LONG, 5) == Placement(1, len(LONG))


def test_the_last_token_of_a_prompt_is_never_matched() -> None:
    """CASES 4: its logits are wanted; losing that one row is no reason to fork."""
    ledger = Ledger(3, 64)
    put(ledger, 1, *LONG)
    assert place(ledger, *LONG) == Placement(1, len(LONG) - 1)


def test_nothing_to_reuse_takes_an_empty_slot_first() -> None:
    ledger = Ledger(3, 64)
    put(ledger, 0, *LONG)
    put(ledger, 2, *LONG[::-1])
    assert place(ledger, 1, 2, 3) == Placement(1, 0)


def test_then_the_least_recently_used() -> None:
    """CASES 13, 16: of equals."""
    ledger = Ledger(3, 64)
    for index, (first, used) in enumerate(((20, 50.0), (30, 10.0), (40, 90.0))):
        put(ledger, index, *range(first, first + 9), now=used)
    assert place(ledger, 1, 2, 3) == Placement(1, 0)


def test_no_place_while_every_slot_is_pinned() -> None:
    ledger = Ledger(2, 64)
    ledger.pin(0, 1)
    ledger.pin(1, 2)
    assert ledger.place(wanted(1, 2), 0.0) is None
    ledger.release(1, 2, 0.0)
    assert ledger.place(wanted(1, 2), 0.0) == Placement(1, 0)


def test_a_pinned_prefix_is_forked() -> None:
    """CASES 5: its turn still writes there."""
    ledger = Ledger(2, 64)
    put(ledger, 0, *LONG)
    ledger.pin(0, 7)
    assert place(ledger, *LONG, 5) == Placement(1, len(LONG), source=0)
    assert place(ledger, *LONG[:FORK_ROWS], 5) == Placement(1, FORK_ROWS, source=0)


def test_a_longer_neighbour_keeps_its_tail() -> None:
    """CASES 5: two conversations share a system prompt, and a slot is free."""
    ledger = Ledger(2, 64)
    put(ledger, 0, *LONG)
    assert place(ledger, *LONG[:20], 5, 6) == Placement(1, 20, source=0)


@pytest.mark.parametrize("more", [{"reuse": False}, {"root": OTHER}])
def test_no_reuse_without_leave(more: dict[str, bool | bytes]) -> None:
    """CASES 19."""
    ledger = Ledger(2, 64)
    put(ledger, 0, *LONG)
    asked = wanted(*LONG, 5, **more)  # type: ignore[arg-type]
    found = ledger.place(asked, 0.0)
    assert found == Placement(1, 0)


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    slots=st.lists(st.tuples(TEXTS, st.booleans(), st.integers(0, 50)), min_size=1, max_size=4),
    prompt=TEXTS,
    reuse=st.booleans(),
)
def test_a_placement_is_always_sound(
    slots: list[tuple[tuple[int, ...], bool, int]], prompt: tuple[int, ...], reuse: bool
) -> None:
    """Never a pinned slot, never more rows than are there, never all of the prompt."""
    ledger = Ledger(len(slots), 64)
    for index, (text, pinned, used) in enumerate(slots):
        put(ledger, index, *text, now=float(used))
        if pinned:
            ledger.pin(index, 10 + index)
    before = [held(ledger, index) for index in range(len(slots))]
    found = ledger.place(wanted(*prompt, reuse=reuse), 100.0)
    assert [held(ledger, index) for index in range(len(slots))] == before, "place changes nothing"
    if found is None:
        assert all(pinned for _, pinned, _ in slots)
        return
    assert not slots[found.slot][1]
    assert found.matched <= len(prompt) - 1
    assert found.matched == 0 or reuse
    assert found.source != found.slot
    origin = found.slot if found.source is None else found.source
    assert slots[origin][0][: found.matched] == prompt[: found.matched]
    best = max(naive(text, prompt) for text, _, _ in slots) if reuse else 0
    if best >= FORK_ROWS or any(naive(t, prompt) == best and not p for t, p, _ in slots):
        longest = min(best, len(prompt) - 1)
        assert found.matched in ((longest,) if longest >= FORK_ROWS else (0, longest))


def naive(text: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Length of the common prefix, one token at a time."""
    length = 0
    for mine, theirs in zip(text, prompt, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


# ---- park ----------------------------------------------------------------------------------------


def test_what_is_lost_is_parked_while_there_is_room() -> None:
    ledger = Ledger(1, 128, park_rows=PARK_ROWS + 10)
    put(ledger, 0, *range(PARK_ROWS))
    found = place(ledger, 200, 201)
    assert (found.slot, found.park, found.dropped) == (0, 1, ())
    assert found.park is not None
    ledger.reserve(found.park, ledger.slots[0])
    chain = ledger.slots[0].chain
    assert chain is not None
    ledger.extend(found.park, chain.clone(), PARK_ROWS)
    ledger.check()
    put(ledger, 0, *range(300, 300 + PARK_ROWS))
    again = place(ledger, 200, 201)
    assert (again.park, again.dropped) == (2, (1,)), "the park is full: the older one goes"
    assert place(ledger, *range(PARK_ROWS), 5).source == 1, "and back it comes"


@pytest.mark.parametrize("rows", [PARK_ROWS - 1, PARK_ROWS + 11])
def test_too_little_or_too_much_is_not_parked(rows: int) -> None:
    ledger = Ledger(1, 128, park_rows=PARK_ROWS + 10)
    put(ledger, 0, *range(rows))
    assert place(ledger, 200, 201) == Placement(0, 0)


# ---- pins ----------------------------------------------------------------------------------------


def test_a_slot_has_one_owner() -> None:
    ledger = Ledger(1, 64)
    ledger.pin(0, 1)
    with pytest.raises(AssertionError):
        ledger.pin(0, 2)
    with pytest.raises(AssertionError):
        ledger.release(0, 2, 0.0)


def test_rows_are_extended_only_over_the_same_text() -> None:
    """CASES 5: an acknowledgement for another text than what is resident is our own fault."""
    ledger = Ledger(1, 64)
    put(ledger, 0, 1, 2, 3)
    with pytest.raises(AssertionError):
        ledger.extend(0, Chain(ROOT, (1, 9, 3, 4)), 4)


# ---- against a naive model -----------------------------------------------------------------------

SLOT = st.integers(0, 2)


class Model(RuleBasedStateMachine):
    """One tuple of tokens per slot, and who pins it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(3, 24)
        self.texts: list[tuple[int, ...]] = [(), (), ()]
        self.pins: list[int | None] = [None] * 3
        self.turn = 0

    @rule(slot=SLOT)
    def pin(self, slot: int) -> None:
        if self.pins[slot] is None:
            self.turn += 1
            self.ledger.pin(slot, self.turn)
            self.pins[slot] = self.turn

    @rule(slot=SLOT)
    def release(self, slot: int) -> None:
        turn = self.pins[slot]
        if turn is not None:
            self.ledger.release(slot, turn, float(self.turn))
            self.pins[slot] = None

    @rule(slot=SLOT, length=st.integers(0, 24))
    def truncate(self, slot: int, length: int) -> None:
        self.ledger.truncate(slot, length)
        self.texts[slot] = self.texts[slot][:length]

    @rule(slot=SLOT, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, slot: int, more: list[int]) -> None:
        text = (*self.texts[slot], *more)[:24]
        self.ledger.extend(slot, Chain(ROOT, (*text, 5, 5)), len(text))
        self.texts[slot] = text

    @rule(slot=SLOT)
    def forget(self, slot: int) -> None:
        self.ledger.forget(slot)
        self.texts[slot] = ()

    @rule(slot=SLOT, length=st.integers(0, 24))
    def give_up(self, slot: int, length: int) -> None:
        self.ledger.give_up(slot, length, "evicted")
        self.texts[slot] = self.texts[slot][:length]

    @rule(prompt=TEXTS)
    def match(self, prompt: tuple[int, ...]) -> None:
        chains = {i: s.chain for i, s in enumerate(self.ledger.slots) if s.chain is not None}
        common = {i: naive(text, prompt) for i, text in enumerate(self.texts) if text}
        best = max(common.values(), default=0)
        having = [i for i, length in common.items() if length == best and best]
        assert longest(chains, pack_tokens(prompt), ROOT) == (best, having)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        assert [held(self.ledger, slot) for slot in range(3)] == self.texts
        assert [slot.turn for slot in self.ledger.slots] == self.pins
        assert [slot.resident for slot in self.ledger.slots] == [len(t) for t in self.texts]
        empty = [i for i, t in enumerate(self.texts) if not t and self.pins[i] is None]
        coldest = self.ledger.coldest(0.0)
        assert coldest is None or self.pins[coldest] is None
        assert not empty or coldest in empty


def test_the_ledger_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        Model, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
