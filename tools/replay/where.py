"""Owns how a frame of a log is named on the command line: N, EPOCH,SEQ or FILE:BYTE."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.errors import USAGE, ToolError
from tools.framelogs.read import Entry


@dataclass(frozen=True, slots=True)
class Where:
    """index: a record's number. numbers: (epoch, seq). file, byte: where the record lies."""

    index: int | None = None
    numbers: tuple[int, int] | None = None
    file: str | None = None
    byte: int = 0

    def names(self, entry: Entry) -> bool:
        """Whether this record is the one."""
        if self.index is not None:
            return entry.index == self.index
        if self.numbers is not None:
            frame = entry.frame
            found = getattr(frame, "epoch", None), getattr(frame, "seq", None)
            return found == self.numbers
        return (entry.path.name, entry.record.offset) == (self.file, self.byte)


def parse_where(text: str) -> Where:
    """Raises ToolError for what names no frame."""
    if re.fullmatch(r"#?\d{1,18}", text):
        return Where(index=int(text.removeprefix("#")))
    if found := re.fullmatch(r"(\d{1,18}),(\d{1,18})", text):
        return Where(numbers=(int(found[1]), int(found[2])))
    if found := re.fullmatch(r"(?:.*/)?([^/]+):(\d{1,18})", text):
        return Where(file=found[1], byte=int(found[2]))
    wanted = "a record's number, EPOCH,SEQ or FILE:BYTE"
    raise ToolError(f"--until {text}: must be {wanted}", code=USAGE)
