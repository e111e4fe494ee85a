"""Owns what a terminal gets and a pipe does not: colour, and a line rewritten in place."""

from __future__ import annotations

from typing import TextIO

STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in one of STYLES if the stream is a terminal, unchanged elsewhere."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if stream.isatty() else text


class ProgressLine:
    """The latest state of a long wait: rewritten on a terminal, one line per change elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace what is shown; nothing happens if it is the same."""
        if text == self._shown:
            return
        if self._stream.isatty():
            self._stream.write(f"\r\033[K{text}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
        self._shown = text

    def close(self) -> None:
        """Take the line away from a terminal, so that the next output starts clean."""
        if self._shown and self._stream.isatty():
            self._stream.write("\r\033[K")
            self._stream.flush()
        self._shown = ""
