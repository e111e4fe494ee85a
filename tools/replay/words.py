"""Owns how a recorded frame, an action and a difference between two frames are said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from tools.framelogs.read import Entry
from transport.frame import (
    Cancel,
    Copy,
    Drafted,
    Forwarded,
    Frame,
    Free,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    LinkGap,
    Ping,
    Reject,
    Result,
    RollCall,
    Run,
    Segment,
    StageLost,
    Submit,
    Tensor,
    Verdict,
)
from transport.framelog import Direction

FEW = 8  # token ids that are shown of a longer list
LONG = 100  # characters of a value in a difference


def of_entry(entry: Entry) -> str:
    """A record: its number, which way it went, and its frame."""
    way = Direction(entry.record.direction).name.lower()
    return f"#{entry.index:<6} {way:6} {of_frame(entry.frame)}"


def of_frame(frame: Frame) -> str:
    """A frame's kind, numbers, and what it is about."""
    name = type(frame).__name__
    match frame:
        case Run():
            parts = "; ".join(_segment(each) for each in frame.segments) or "nothing"
            return f"Run {frame.epoch},{frame.seq}: {parts}{_shape(frame.payload)}"
        case Verdict():
            parts = "; ".join(_result(each) for each in frame.results) or "nothing"
            return f"Verdict {frame.epoch},{frame.seq}: {parts}"
        case Forwarded():
            parts = "; ".join(_result(each) for each in frame.results)
            return f"Forwarded {frame.epoch},{frame.seq}{_shape(frame.payload)} {parts}".rstrip()
        case Reject():
            what = f"turn {frame.turn} " if frame.turn is not None else ""
            where = f"{frame.epoch},{frame.seq}"
            return f"Reject {where}: {what}by {frame.stage}: {frame.code.value}: {frame.detail}"
        case RollCall():
            met = ", ".join(entry.name for entry in frame.entries) or "nobody yet"
            return f"RollCall of epoch {frame.epoch}: {met}"
        case Copy():
            rows = f"rows [0, {frame.length}) of {frame.source} to {frame.target}"
            return f"Copy {frame.epoch},{frame.seq}: turn {frame.turn}, {rows}"
        case Free():
            return f"Free {frame.epoch},{frame.seq}: slot {frame.slot}"
        case Ping():
            return f"Ping {frame.epoch},{frame.seq}"
        case Heartbeat():
            return f"Heartbeat of {frame.stage}: {frame.state.value} {frame.detail}".rstrip()
        case Submit():
            what = f"{len(frame.prompt)} tokens {_tokens(frame.prompt)}, budget {frame.budget}"
            return f"Submit turn {frame.turn}: {what}"
        case Cancel():
            return f"Cancel turn {frame.turn}: {frame.reason}"
        case Drafted():
            return f"Drafted turn {frame.turn} from {frame.start}: {_tokens(frame.tokens)}"
        case LinkGap():
            return f"LinkGap of {frame.link}: {frame.got} came, not {frame.expected}"
        case StageLost() | FreeSlot() | KeepSlot():
            return str(frame)
    return name


def _segment(segment: Segment) -> str:
    rows = f"rows [{segment.start}, {segment.end})"
    turn = f"turn {segment.turn} slot {segment.slot}"
    return f"{turn} {segment.kind.value} {rows} {_tokens(segment.tokens)}"


def _result(result: Result) -> str:
    return f"turn {result.turn} from {result.start} {_tokens(result.tokens)}"


def _tokens(tokens: tuple[int, ...]) -> str:
    shown = " ".join(map(str, tokens[:FEW]))
    return f"<{shown}>" if len(tokens) <= FEW else f"<{shown} ... {tokens[-1]}>"


def _shape(payload: Tensor | None) -> str:
    return "" if payload is None else f", {payload.dtype} {list(payload.shape)}"


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
