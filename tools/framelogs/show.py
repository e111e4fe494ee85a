"""Owns `kvring log show`: one line per record, filtered, of a log that is whole or still grows."""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from tools.errors import RUNTIME, USAGE, ToolError
from tools.framelogs.read import Entry, Process
from tools.framelogs.stream import Stream
from tools.framelogs.words import WAYS, as_json, line, way
from transport import frame as frames
from transport.frame import Copy, Drafted, Forwarded, Frame, Remembered, RollCall, Run, Verdict

KINDS = tuple(
    sorted(
        each.__name__.lower()
        for each in (
            *frames.Wire.__args__,
            *frames.Local.__args__,
        )
    )
)
SEGMENT_KINDS = tuple(str(kind) for kind in frames.Kind)
MAX_REMEMBERED = 4096  # frames whose answers may still come: far above any window


@dataclass(slots=True)
class Filter:
    """What is shown; None or empty: all. since_ns, until_ns: half-open, on Entry.at_ns."""

    turn: int | None = None
    slot: int | None = None
    kinds: tuple[str, ...] = ()
    process: str | None = None
    ring: str | None = None
    direction: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    _turns: OrderedDict[tuple[Process, int, int], Run] = field(default_factory=OrderedDict)
    _rings: dict[Process, str] = field(default_factory=dict)

    def takes(self, entry: Entry) -> bool:
        """Whether to show it; call it for every entry, in order."""
        frame = entry.frame
        if (self.turn is not None or self.slot is not None) and isinstance(frame, Run):
            self._turns[entry.process, frame.epoch, frame.seq] = frame
            if len(self._turns) > MAX_REMEMBERED:
                self._turns.popitem(last=False)
        if self.ring is not None and entry.process.header.role == "stage":
            ring = getattr(frame, "ring", None)
            if ring is not None:
                self._rings.setdefault(entry.process, ring)
        return self._in_time(entry) and self._said(entry) and self._about(entry)

    def _in_time(self, entry: Entry) -> bool:
        late_enough = self.since_ns is None or entry.at_ns >= self.since_ns
        return late_enough and (self.until_ns is None or entry.at_ns < self.until_ns)

    def _said(self, entry: Entry) -> bool:
        if self.process is not None and entry.process.name != self.process:
            return False
        if self.direction is not None and way(entry) != self.direction:
            return False
        if self.kinds and not any(kind in self.kinds for kind in _kinds(entry.frame)):
            return False
        return self.ring is None or self._ring(entry) == self.ring

    def _ring(self, entry: Entry) -> str | None:
        named: str | None = getattr(entry.frame, "ring", None)
        if named is None and "/" in entry.envelope.sender:
            named = entry.envelope.sender.partition("/")[0]
        return named or self._rings.get(entry.process)

    def _about(self, entry: Entry) -> bool:
        if self.turn is None and self.slot is None:
            return True
        owners = list(_owners(entry.frame))
        if isinstance(entry.frame, (Forwarded, Verdict)):
            key = entry.process, entry.frame.epoch, entry.frame.seq
            owners += _owners(self._turns[key]) if key in self._turns else []
        return any(
            self.turn in (None, turn) and self.slot in (None, *slots) for turn, slots in owners
        )


def _kinds(frame: Frame) -> Iterator[str]:
    yield type(frame).__name__.lower()
    if isinstance(frame, Run):
        yield from (str(segment.kind) for segment in frame.segments)


def _owners(frame: Frame) -> Iterable[tuple[int | None, tuple[int | None, ...]]]:
    """Turns that a frame is about, each with its slots."""
    match frame:
        case Run():
            return [(each.turn, (each.slot,)) for each in frame.segments]
        case Verdict() | Forwarded():
            return [(each.turn, (each.slot,)) for each in frame.results]
        case Copy():
            return [(frame.turn, (frame.source, frame.target))]
        case Drafted():
            return [(frame.turn, ())]
        case RollCall():
            return [(None, (claim.number,)) for claim in frame.claims] or [(None, (None,))]
        case Remembered():
            return [(None, (frame.number,))]
        case _:
            return [(getattr(frame, "turn", None), (getattr(frame, "slot", None),))]


def run_show(
    *,
    paths: Sequence[Path],
    wanted: Filter,
    since: str | None,
    until: str | None,
    as_objects: bool,
    follow: bool,
    tokens: bool,
) -> int:
    """Print records; the exit code: 1 when something could not be read."""
    _check(wanted)
    stream = Stream(paths)
    for note in stream.notes:
        print(f"kvring: {note}", file=sys.stderr)
    start: int | None = None
    for entry in stream.follow() if follow else stream:
        if entry is None:
            sys.stdout.flush()
            _complain(stream)
            continue
        if start is None:
            start = entry.at_ns
            wanted.since_ns, wanted.until_ns = _moment(since, start), _moment(until, start)
            if not as_objects:
                print(f"# 0.000000 is {_clock(start)}")
        if wanted.until_ns is not None and entry.at_ns >= wanted.until_ns:
            break
        if wanted.takes(entry):
            said = as_json(entry, start, tokens) if as_objects else line(entry, start, tokens)
            print(json.dumps(said) if as_objects else said)
    sys.stdout.flush()
    return RUNTIME if _complain(stream) else 0


def _complain(stream: Stream) -> bool:
    damages, stream.damages = stream.damages, []
    for damage in damages:
        print(f"kvring: {damage}", file=sys.stderr)
    return bool(damages)


def _check(wanted: Filter) -> None:
    for kind in wanted.kinds:
        if kind not in KINDS + SEGMENT_KINDS:
            known = ", ".join(KINDS + SEGMENT_KINDS)
            raise ToolError(f"--kind {kind}: no such kind; there are {known}", code=USAGE)
    if wanted.direction not in (None, *WAYS):
        known = ", ".join(WAYS)
        text = f"--direction {wanted.direction}: no such direction; there are {known}"
        raise ToolError(text, code=USAGE)


def _moment(text: str | None, start_ns: int) -> int | None:
    """Seconds from the log's start, or a clock time (of the log's first day, or with its date)."""
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
            return start_ns + round(float(text) * 1e9)
        began = datetime.fromtimestamp(start_ns / 1e9)
        if re.match(r"\d\d?:\d\d", text):
            text = f"0{text}" if text[1] == ":" else text
            at = datetime.fromisoformat(f"{began.date()}T{text}")
            if at < began - timedelta(hours=12):  # a log that goes past midnight
                at += timedelta(days=1)
        else:
            at = datetime.fromisoformat(text)
        return round(at.timestamp() * 1e9)
    except (ValueError, OverflowError):
        form = "seconds from the log's start, HH:MM:SS or an ISO date and time"
        raise ToolError(f"{text}: must be {form}", code=USAGE) from None


def _clock(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).isoformat(sep=" ", timespec="microseconds")
