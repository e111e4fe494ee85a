"""Owns what a terminal gets and a pipe does not: colour, lines rewritten in place, whole words."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
TAB = 8  # columns
SEPARATOR = " · "
GAP = 2  # columns between those of a table
WIDTH = 80  # of a terminal that does not say
Painter: TypeAlias = Callable[[str, str], str]  # (text, style) -> text


def paint(text: str, style: str, stream: TextIO) -> str:
    """`text` in one of STYLES if the stream is a terminal, unchanged elsewhere."""
    return painted(text, style) if in_place(stream) else text


def painted(text: str, style: str) -> str:
    """`text` in one of STYLES."""
    return f"\033[{STYLES[style]}m{text}\033[0m"


def in_place(stream: TextIO) -> bool:
    """Whether what was written there can be rewritten: a terminal, and ours at this moment.

    Not of a program in the background: someone types there.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:  # nobody's terminal but ours
        return True


def width(stream: TextIO) -> int:
    """Columns of the terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH


def printable(text: str) -> str:
    """Without the characters that would steer a terminal; line ends and tabs stay."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cs"} else "\ufffd"
        for c in text.replace("\r\n", "\n")
    )


def console(stream: TextIO, columns: int | None = None) -> Console:
    """For tables and live lines; adds no colours of its own to words and numbers.

    columns: make it so wide, and plain, whatever the stream is.
    """
    from rich.console import Console

    plain = None if columns is None else False  # None: as the stream is
    return Console(
        file=stream,
        width=columns,
        force_terminal=plain,
        highlight=False,
        markup=False,
        emoji=False,
    )


@contextmanager
def region(stream: TextIO, *, leave: bool) -> Iterator[Callable[[RenderableType], None]]:
    """Lines at the end of a terminal; call with what they are from now on.

    leave: they stay when the block is left. What does not fit into the terminal is cut.
    """
    from rich.live import Live

    live = Live(
        console=console(stream),
        auto_refresh=False,
        transient=not leave,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live:
        yield lambda lines: live.update(lines, refresh=in_place(stream))


def wrapped(line: str, columns: int) -> list[str]:
    """A line of parts with " · " between them, as lines that fit; a part is never broken."""
    from rich.text import Text

    found: list[str] = []
    for part in line.split(SEPARATOR):
        longer = SEPARATOR.join((*found[-1:], part))
        if found and Text.from_ansi(longer).cell_len <= columns:
            found[-1] = longer
        else:
            found.append(part)
    return found


def laid_out(lines: Iterable[str], columns: int) -> RenderableType:
    """Painted lines for `region`: indented ones (tables) are cut at the margin, others wrapped."""
    from rich.console import Group
    from rich.text import Text

    whole = (
        part
        for line in lines
        for part in ([line] if line.startswith("  ") else wrapped(line, columns))
    )
    return Group(*(Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in whole))


def pieces(widths: Sequence[int], columns: int | None, indent: int = 0) -> list[list[int]]:
    """Which columns of a table stand side by side, so that each piece fits; the first is in all.

    widths: of its columns, with GAP between them. columns: of the place, None for any width.
    """
    found = [[0]]
    for column in range(1, len(widths)):
        piece = [*found[-1], column]
        taken = indent + sum(widths[each] + GAP for each in piece) - GAP
        if columns is None or taken <= columns or len(found[-1]) == 1:
            found[-1] = piece
        else:
            found.append([0, column])
    return found


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
            self._stream.write(f"\r\033[K{text[: width(self._stream) - 1]}")
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


class Flow:
    """Text that comes in pieces: with `wraps`, on a terminal, broken between words.

    A word is shown as it comes; the one that reaches the margin is taken to the next line.
    """

    def __init__(self, stream: TextIO, *, wraps: bool) -> None:
        self._stream = stream
        self._wraps = wraps and in_place(stream)
        self._column = 0
        self._word = ""  # what stands since the last space, and may have to move

    def write(self, text: str) -> None:
        """Show more of it."""
        if self._wraps:
            margin = (
                width(self._stream) - 1
            )  # in the last column a terminal waits to wrap by itself
            text = "".join(self._placed(c, margin) for c in printable(text))
        elif self._stream.isatty():
            text = printable(text)
        self._stream.write(text)
        self._stream.flush()

    def _placed(self, character: str, margin: int) -> str:
        """What to send to the terminal for it."""
        from rich.cells import cell_len

        if character == "\n":
            self._column, self._word = 0, ""
            return "\n"
        cells = TAB - self._column % TAB if character == "\t" else cell_len(character)
        blank = character.isspace()
        before = ""
        if self._column + cells > margin:
            moved = "" if blank else self._word
            back = cell_len(moved)
            if back >= self._column:  # it fills the line: to be cut somewhere
                moved, back = "", 0
            before = f"\033[{back}D\033[K\n{moved}" if back else "\n"
            self._column = back
            if blank:
                self._word = ""
                return before
            self._word = moved
        self._column += cells
        self._word = "" if blank else self._word + character
        return before + character
