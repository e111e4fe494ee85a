"""The numbers on a link, without sockets: what is next, lost, repeated, or from a dead sender."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.frame import Envelope
from transport.numbering import MAX_SENDERS, Arrival, Numbering


def test_numbers_of_one_life() -> None:
    numbering = Numbering()

    def place(number: int, incarnation: int = 7) -> tuple[Arrival, int]:
        return numbering.place(Envelope("a", incarnation, number))

    assert place(0) == (Arrival.NEXT, 0)
    assert place(1) == (Arrival.NEXT, 1)
    assert place(5) == (Arrival.GAP, 2)
    assert place(3) == (Arrival.DUPLICATE, 6)
    assert place(5) == (Arrival.DUPLICATE, 6)
    assert place(6) == (Arrival.NEXT, 6)
    assert place(0, 8) == (Arrival.NEXT, 0)  # restarted
    assert place(7, 7) == (Arrival.STALE, 1)  # what it had queued before
    assert place(1, 8) == (Arrival.NEXT, 1)
    assert place(4, 9) == (Arrival.GAP, 0)  # a life whose first frames were lost


def test_a_leftover_behind_the_living_one_does_not_silence_it() -> None:
    """Seed 2280 of the simulator: a restarted coordinator hears the restarted stage, and then a
    reply of the stage's earlier life."""
    numbering = Numbering()

    def place(number: int, incarnation: int) -> tuple[Arrival, int]:
        return numbering.place(Envelope("a", incarnation, number))

    assert place(0, 8) == (Arrival.NEXT, 0)
    assert place(17, 7)[0] is Arrival.GAP
    assert place(1, 8)[0] is Arrival.STALE
    assert place(2, 8)[0] is Arrival.STALE
    assert place(3, 8) == (Arrival.GAP, 0)
    assert place(4, 8) == (Arrival.NEXT, 4)
    assert place(18, 7)[0] is Arrival.STALE


def test_leftovers_between_the_living_one_s_frames_stay_dead() -> None:
    numbering = Numbering()
    numbering.place(Envelope("a", 7, 0))
    for number in range(20):
        assert numbering.place(Envelope("a", 8, number)) == (Arrival.NEXT, number)
        for left in (1, 2):
            place = numbering.place(Envelope("a", 7, 2 * number + left))
            assert place[0] is Arrival.STALE
    for _ in range(5):  # one that comes again and again is no voice
        assert numbering.place(Envelope("a", 7, 9))[0] is Arrival.STALE


def test_a_life_is_forgotten_after_eight_others() -> None:
    numbering = Numbering()
    for life in range(10):
        numbering.place(Envelope("a", life, 0))
    for life in range(1, 9):
        assert numbering.place(Envelope("a", life, 1))[0] is Arrival.STALE
    assert numbering.place(Envelope("a", 0, 1)) == (Arrival.GAP, 0)


def test_senders_are_bounded_and_the_quietest_goes_first() -> None:
    numbering = Numbering()
    for i in range(MAX_SENDERS):
        numbering.place(Envelope(str(i), 1, 0))
    assert numbering.place(Envelope("0", 1, 1)) == (Arrival.NEXT, 1)
    assert numbering.place(Envelope("new", 1, 0)) == (Arrival.NEXT, 0)
    assert numbering.place(Envelope("0", 1, 2)) == (Arrival.NEXT, 2)
    assert numbering.place(Envelope("1", 1, 1)) == (Arrival.GAP, 0)  # forgotten: never silence


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=40))
def test_lost_frames_are_counted_exactly(sent: list[tuple[str, int]]) -> None:
    """Each frame is preceded by a drawn number of lost ones; the gaps add up to them."""
    numbering = Numbering()
    numbers = {"a": 0, "b": 0}
    for sender, lost in sent:
        number = numbers[sender] + lost
        arrival, expected = numbering.place(Envelope(sender, 1, number))
        assert arrival is (Arrival.GAP if lost else Arrival.NEXT)
        assert number - expected == lost
        numbers[sender] = number + 1
