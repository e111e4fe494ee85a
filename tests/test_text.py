"""The life of generated text: whole characters, and the cut at a stop string (case 35)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coord.text import CharacterDecoder, StopScanner

relaxed = settings(deadline=None)  # a shared machine stalls now and then
SHORT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    at = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def cut(text: str, stops: list[str]) -> str:
    """The oracle: the whole text up to where the earliest stop string starts."""
    return text[: min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=None)]


@relaxed
@given(SHORT, STOPS, st.lists(st.integers(0, 1000), max_size=8))
def test_case_35_any_splitting_gives_the_text_cut_at_the_earliest_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    out = [scanner.feed(piece) for piece in pieces_of(text, cuts)]
    decided_early = scanner.stopped
    out.append(scanner.flush())
    assert "".join(out) == cut(text, stops)
    assert scanner.stopped == any(stop in text for stop in stops)
    if decided_early:
        assert out[-1] == ""


@relaxed
@given(SHORT, STOPS)
def test_what_is_withheld_is_shorter_than_the_longest_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    sent = 0
    for count, character in enumerate(text, 1):
        sent += len(scanner.feed(character))
        if scanner.stopped:
            break
        assert count - sent < max([1, *map(len, stops)])


def test_a_stop_that_is_whole_waits_for_an_earlier_one_that_is_not() -> None:
    scanner = StopScanner(["abcd", "bc"])
    assert (scanner.feed("xabc"), scanner.stopped) == ("x", False)
    assert (scanner.feed("d"), scanner.stopped) == ("", True)
    other = StopScanner(["abcd", "bc"])
    assert (other.feed("xabc"), other.feed("e"), other.stopped) == ("x", "a", True)


def test_text_without_stops_passes_at_once() -> None:
    scanner = StopScanner([])
    assert scanner.feed("anything\n") == "anything\n"
    assert scanner.flush() == ""


def test_nothing_comes_after_the_stop() -> None:
    scanner = StopScanner(["\n"])
    assert scanner.feed("one\ntwo") == "one"
    assert scanner.feed("three") == ""
    assert scanner.flush() == ""


@relaxed
@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=10))
def test_characters_joined_equal_one_decode(data: bytes, cuts: list[int]) -> None:
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    decoder = CharacterDecoder()
    parts = [decoder.feed(data[a:b]) for a, b in zip([0, *at], [*at, len(data)], strict=True)]
    assert "".join([*parts, decoder.flush()]) == data.decode("utf-8", "replace")


@relaxed
@given(st.text(max_size=30))
def test_no_replacement_character_for_bytes_that_complete_later(text: str) -> None:
    decoder = CharacterDecoder()
    parts = [decoder.feed(bytes((byte,))) for byte in text.encode()]
    assert "".join(parts) == text
    assert decoder.flush() == ""


def test_half_a_character_at_the_end_is_replaced() -> None:
    decoder = CharacterDecoder()
    assert decoder.feed("é".encode()[:1]) == ""
    assert decoder.flush() == "\ufffd"


def test_one_leading_space_is_stripped_once() -> None:
    decoder = CharacterDecoder(strip=True)
    assert [decoder.feed(b) for b in (b"", b" ", b" a", b" b")] == ["", "", " a", " b"]
