"""Large parts travel in pieces, and nonsense for pieces is a FrameError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.frame import FrameError
from transport.numbering import Inbox
from transport.pieces import INDEX, PIECE_BYTES, join, most_pieces, split


@pytest.mark.parametrize("sizes", [(0,), (1, 0), (PIECE_BYTES, 7), (9, 2 * PIECE_BYTES + 1)])
def test_what_was_cut_is_whole_again(sizes: tuple[int, ...]) -> None:
    parts = [bytes([1 + n]) * size for n, size in enumerate(sizes)]
    cut = split(parts)
    assert all(len(piece) <= PIECE_BYTES for piece in cut)
    assert len(cut) <= most_pieces(sum(sizes))
    assert [bytes(part) for part in join(cut)] == parts


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_anything_is_pieces_or_is_refused(parts: list[bytes]) -> None:
    for some in (parts, [bytes([INDEX]) + b"".join(parts), *parts]):
        try:
            join(some)
        except FrameError:
            continue


def test_a_message_of_no_parts_is_counted_as_undecodable() -> None:
    inbox = Inbox("l", None)
    assert inbox.take([]) == []
    assert inbox.counts.undecodable == 1
