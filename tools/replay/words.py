"""Owns how a recorded frame, an action and a difference between two frames are said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from tools.framelogs.read import Entry
from tools.framelogs.words import essentials, way
from transport.frame import Frame

LINE = 200  # characters of a frame
LONG = 100  # characters of a value in a difference


def of_entry(entry: Entry) -> str:
    """A record: its number, which way it went, and its frame."""
    return f"#{entry.index:<6} {way(entry):6} {of_frame(entry.frame)}"


def of_frame(frame: Frame) -> str:
    """A frame's kind, and what `kvring log show --tokens` says of it, cut where it is long."""
    text = f"{type(frame).__name__} {essentials(frame, tokens=True)}".rstrip()
    return text if len(text) <= LINE else f"{text[: LINE - 3]}..."


def difference(recorded: object, replayed: object) -> str:
    """The first place where two frames differ: its path, and both values."""
    found = next(_differences(recorded, replayed, ""), None)
    assert found is not None, (recorded, replayed)
    path, mine, theirs = found
    return f"{path}: recorded {_short(mine)}, replayed {_short(theirs)}"


def _differences(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if one == other and type(one) is type(other):
        return
    if type(one) is type(other) and is_dataclass(one):
        for each in fields(one):
            deeper = f"{path}.{each.name}" if path else each.name
            yield from _differences(getattr(one, each.name), getattr(other, each.name), deeper)
    elif isinstance(one, tuple) and isinstance(other, tuple):
        for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from _differences(mine, theirs, f"{path}[{at}]")
        if len(one) != len(other):
            yield f"{path}, length", len(one), len(other)
    elif type(one) is not type(other) or one != other:
        yield path or "kind", one, other


def _short(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."
