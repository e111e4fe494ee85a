"""Whose turn is next: one owner's in order of arrival, and the owners one after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coord.actions import Action, Admitted
from coord.http.keys import derive_salt
from tests.desk import LIMITS, Desk, runs

ANN, BOB, CAT = (derive_salt(name, None) for name in (b"ann", b"bob", b"cat"))
MANY = replace(LIMITS, queue_turns=200)


class Line:
    """One slot; every turn is one frame and one token long."""

    def __init__(self) -> None:
        self.desk = Desk(limits=MANY, slots=1).form()
        self.order: list[int] = []
        self._last: list[Action] = []
        self._turn = 0

    def come(self, salt: bytes, count: int = 1) -> list[int]:
        """So many turns arrive; their numbers."""
        numbers = []
        for _ in range(count):
            self._turn += 1
            numbers.append(self._turn)
            prompt = (self._turn % 60, self._turn // 60 + 1)
            self._note(self.desk.submit(self._turn, prompt, budget=1, salt=salt))
        return numbers

    def end_one(self) -> None:
        """The turn that has the slot ends."""
        (run,) = runs(self._last)
        self._note(self.desk.verdict(run, 61))

    def end_all(self) -> None:
        while self.desk.core.turns:
            self.end_one()

    def _note(self, actions: list[Action]) -> None:
        admitted = [action.turn for action in actions if isinstance(action, Admitted)]
        self.order += admitted
        if admitted:
            self._last = actions


def test_one_owners_turns_keep_their_order() -> None:
    line = Line()
    came = line.come(ANN, 20)
    line.end_all()
    assert line.order == came


def test_a_hundred_turns_of_one_key_hold_a_single_one_up_by_one_turn() -> None:
    line = Line()
    hundred = line.come(ANN, 100)
    line.end_one()
    (single,) = line.come(BOB)
    line.end_all()
    assert line.order == [*hundred[:2], single, *hundred[2:]]


def test_owners_take_turns_however_many_each_has() -> None:
    line = Line()
    ann, bob, cat = line.come(ANN, 6), line.come(BOB, 2), line.come(CAT, 3)
    line.end_all()
    assert line.order == [ann[0], bob[0], cat[0], ann[1], bob[1], cat[1], ann[2], cat[2], *ann[3:]]


def test_two_salts_of_one_tenant_are_one_owner() -> None:
    """Else a key would get as much as it can think of salts."""
    line = Line()
    first = line.come(derive_salt(b"ann", "one"), 3)
    (bobs,) = line.come(BOB)
    second = line.come(derive_salt(b"ann", "two"), 3)
    line.end_all()
    assert line.order == [first[0], bobs, *first[1:], *second]


def test_who_asks_one_by_one_alternates_with_who_asked_for_all_at_once() -> None:
    line = Line()
    ann = line.come(ANN, 4)
    bob = line.come(BOB)
    while line.desk.core.turns:
        line.end_one()
        if line.order[-1] == bob[-1] and len(bob) < 4:
            line.end_one()
            bob += line.come(BOB)
    assert line.order[:6] == [ann[0], bob[0], ann[1], bob[1], ann[2], bob[2]]


def test_an_owner_who_cancelled_its_queue_waits_for_nothing() -> None:
    line = Line()
    line.come(BOB)
    for turn in line.come(ANN, 50):
        line.desk.cancel(turn)
    bob = line.come(BOB, 5)
    (ann,) = line.come(ANN)
    line.end_all()
    assert line.order == [1, ann, *bob]


@given(st.lists(st.tuples(st.sampled_from((ANN, BOB, CAT, b"")), st.integers(0, 3)), max_size=40))
def test_nobody_is_passed_twice_by_the_same_owner(steps: list[tuple[bytes, int]]) -> None:
    """Between an arrival at an empty own queue and its slot, each other owner gets at most two:
    one in that round, and one that is ahead of it by arrival.
    """
    line = Line()
    owner: dict[int, bytes] = {}
    came_at: dict[int, int] = {}
    first: list[int] = []
    for salt, ends in steps:
        alone = all(turn.submit.salt != salt for turn in line.desk.core.turns.values())
        (turn,) = line.come(salt)
        owner[turn] = salt
        came_at[turn] = len(line.order)
        if alone:
            first.append(turn)
        for _ in range(ends):
            if line.desk.core.turns:
                line.end_one()
    line.end_all()
    assert sorted(line.order) == sorted(owner)
    for turn in first:
        between = line.order[came_at[turn] : line.order.index(turn)]
        for other in set(owner.values()) - {owner[turn]}:
            assert sum(owner[each] == other for each in between) <= 2, (turn, between)
    for salt in set(owner.values()):
        mine = [turn for turn in line.order if owner[turn] == salt]
        assert mine == sorted(mine)


@pytest.mark.parametrize("lost", [False, True])
def test_a_turn_that_lost_its_ring_goes_on_before_those_that_wait(lost: bool) -> None:
    line = Line()
    ann = line.come(ANN, 2)
    bob = line.come(BOB, 2)
    if lost:
        line.desk.beat(1, incarnation=99)  # a stage was started anew
        assert all(turn.slot is None for turn in line.desk.core.turns.values())
        line._last = line.desk.reform()
    line.end_all()
    assert line.order == [ann[0], bob[0], ann[1], bob[1]]
