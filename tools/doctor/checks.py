"""Owns what a check says, and how all of them are printed. Knows no ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

from coord.help import PAGE as PAGE
from tools.terminal import paint


class Level(StrEnum):
    """How a check ended. Only a failed one makes the exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class See(StrEnum):
    """The symptoms of docs/troubleshooting.md."""

    PORT = "#port-in-use"
    STAGE = "#stage-not-heard-of"
    SERVER = "#no-server"
    MEMORY = "#not-enough-memory"
    KEYS = "#keys"
    CLOCK = "#clock"
    LINK = "#slow-link"
    MODEL = "#model-not-supported"
    TORCH = "#torch"
    WEIGHTS = "#different-weights"
    FILES = "#file-limit"


@dataclass(frozen=True, slots=True)
class Check:
    """One line. what: the thing looked at; todo: what to change; see: its symptom."""

    level: Level
    what: str
    said: str
    todo: str = ""
    see: See | None = None

    def text(self) -> str:
        """Without the level and the thing."""
        words = self.said if not self.todo else f"{self.said}: {self.todo}"
        return words if self.see is None else f"{words} ({PAGE}{self.see})"


def ok(what: str, said: str) -> Check:
    """All is well."""
    return Check(Level.OK, what, said)


def warn(what: str, said: str, todo: str = "", see: See | None = None) -> Check:
    """It works, or may, but somebody should know."""
    return Check(Level.WARN, what, said, todo, see)


def fail(what: str, said: str, todo: str = "", see: See | None = None) -> Check:
    """A ring will not work, or not as it is meant to."""
    return Check(Level.FAIL, what, said, todo, see)


STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def show(checks: Sequence[Check], stream: TextIO) -> None:
    """One line for each check, and what it comes to; painted on a terminal only."""
    width = max((len(check.what) for check in checks), default=0)
    for check in checks:
        level = paint(f"{check.level:<5}", STYLES[check.level], stream)
        shown = "".join(c if c.isprintable() else " " for c in check.text())  # others' words, too
        text = " ".join(shown.split())
        stream.write(f"{level} {check.what:<{width}}  {text}\n")
    stream.write(f"{verdict(checks)}\n")


def verdict(checks: Sequence[Check]) -> str:
    """The last line."""
    failed = sum(check.level is Level.FAIL for check in checks)
    warned = sum(check.level is Level.WARN for check in checks)
    return f"{len(checks)} checks: {failed} failed, {warned} to look at"


def as_json(checks: Sequence[Check]) -> dict[str, object]:
    """For scripts: see is the symptom's page and anchor, or null."""
    return {
        "ok": all(check.level is not Level.FAIL for check in checks),
        "checks": [
            {**asdict(check), "see": None if check.see is None else f"{PAGE}{check.see}"}
            for check in checks
        ],
    }


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
