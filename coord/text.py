"""Owns the life of generated text: bytes to whole characters, and the cut at a stop string.

Pure: knows no tokenizer, no request and no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class CharacterDecoder:
    """Bytes in, whole characters out; half a character waits for its other bytes.

    Invalid bytes become U+FFFD, one for each maximal invalid part (Unicode 15, section 3.9), as
    soon as they cannot be completed any more. All pieces joined equal one decode of all bytes.
    strip: drop one leading space of the whole text (sentencepiece's word mark).
    """

    def __init__(self, *, strip: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for half a character, else nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    @property
    def whole(self) -> bool:
        """True when no half character waits."""
        return not self._decoder.getstate()[0]

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopScanner:
    """Passes text through up to the earliest stop string; withholds what might begin one.

    All output joined is the whole text cut before the earliest occurrence (by where it starts) of
    any stop string, however the text was cut into pieces. At most one character less than the
    longest stop string is withheld, so that a piece costs its own length, not the text's.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that is now certain. Nothing comes after `stopped`."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._earliest(text)
        open_at = self._undecided(text)
        if found is not None and found <= open_at:
            self.stopped, self._held = True, ""
            return text[:found]
        self._held = text[open_at:]
        return text[:open_at]

    def flush(self) -> str:
        """The end of the text: what was withheld began no stop string, or holds a whole one."""
        text, self._held = self._held, ""
        found = self._earliest(text)
        if found is None:
            return text
        self.stopped = True
        return text[:found]

    def _earliest(self, text: str) -> int | None:
        return min((at for at in map(text.find, self._stops) if at >= 0), default=None)

    def _undecided(self, text: str) -> int:
        """Where the first suffix starts that some stop string may still grow from."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(text)
