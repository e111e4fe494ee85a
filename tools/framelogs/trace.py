"""Owns `kvring log trace`: recorded frames as a Chrome trace, for ui.perfetto.dev.

Format: "Trace Event Format" (Chrome), JSON object form; X, C and M events, microseconds. Written
as it is read; in memory are live turns, frames in flight and the tracks' names.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tools.errors import RUNTIME, ToolError
from tools.framelogs.events import Answered, Ended, Event, Formed, Lost, Placed, Submitted
from tools.framelogs.life import Life
from tools.framelogs.read import Entry, Process
from tools.framelogs.stream import Stream
from transport.frame import Forwarded, Run, Verdict
from transport.framelog import Direction

TURNS, STAGES, LINKS, RINGS = 1, 2, 3, 4  # process ids of the trace: its groups of tracks
GROUPS = {TURNS: "turns", STAGES: "stages", LINKS: "links", RINGS: "rings"}
MAX_PENDING = 100_000  # frames of which only one end was seen: a log may be missing
Args = dict[str, Any]


class Writer:
    """The trace file. Times are Entry.at_ns; tracks are made as they are named."""

    def __init__(self, file: IO[str]) -> None:
        self.start_ns: int | None = None
        self._file = file
        self._tracks: dict[tuple[int, str], int] = {}
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for order, (pid, name) in enumerate(GROUPS.items()):
            self._meta("process_name", pid, 0, {"name": name}, first=order == 0)
            self._meta("process_sort_index", pid, 0, {"sort_index": order})

    def span(self, pid: int, track: str, name: str, begin: int, end: int, args: Args) -> None:
        """A slice of a track, from begin to end."""
        took = max(0, end - begin) / 1e3
        fields = {"name": name, "ts": self._us(begin), "dur": took, "args": args}
        self._event("X", pid, self._tid(pid, track), fields)

    def count(self, pid: int, name: str, at: int, args: dict[str, int]) -> None:
        """A counter's new value."""
        self._event("C", pid, 0, {"name": name, "ts": self._us(at), "args": args})

    def close(self, summary: Args) -> None:
        """The end of the file. summary: what viewers show as the trace's own data."""
        self._file.write(f'\n],"otherData":{json.dumps(summary)}}}\n')

    def _us(self, at_ns: int) -> float:
        if self.start_ns is None:
            self.start_ns = at_ns
        return max(0, at_ns - self.start_ns) / 1e3

    def _tid(self, pid: int, track: str) -> int:
        tid = self._tracks.get((pid, track))
        if tid is None:
            tid = self._tracks[pid, track] = len(self._tracks) + 1
            self._meta("thread_name", pid, tid, {"name": track})
            self._meta("thread_sort_index", pid, tid, {"sort_index": tid})
        return tid

    def _meta(self, name: str, pid: int, tid: int, args: Args, *, first: bool = False) -> None:
        self._event("M", pid, tid, {"name": name, "args": args}, first=first)

    def _event(self, ph: str, pid: int, tid: int, more: Args, *, first: bool = False) -> None:
        event = {"ph": ph, "pid": pid, "tid": tid, **more}
        self._file.write(("" if first else ",\n") + json.dumps(event, separators=(",", ":")))


@dataclass(slots=True)
class Work:
    """One stage's forwards. first_ns to last_ns is the time in which it could have computed."""

    first_ns: int | None = None
    last_ns: int = 0
    busy_ns: int = 0
    forwards: int = 0

    def add(self, begin: int, end: int) -> int | None:
        """Note a forward; the idle time before it, None for the first."""
        idle = None if self.first_ns is None else max(0, begin - self.last_ns)
        if self.first_ns is None:
            self.first_ns = begin
        self.busy_ns += end - begin
        self.last_ns = max(self.last_ns, end)
        self.forwards += 1
        return idle

    @property
    def idle(self) -> float:
        """Share of the time between its first and its last forward in which it computed nothing."""
        span = 0 if self.first_ns is None else self.last_ns - self.first_ns
        return 0.0 if not span else 1.0 - self.busy_ns / span


class Stages:
    """Forward spans: of a stage's own log, else estimated from the verdicts' timings."""

    def __init__(self, writer: Writer, recorded: Sequence[str]) -> None:
        self.work: dict[str, Work] = {}
        self._writer = writer
        self._recorded = frozenset(recorded)
        self._begun: dict[Process, OrderedDict[tuple[int, int], tuple[int, Run]]] = {}
        self._free: dict[str, int] = {}

    def take(self, entry: Entry) -> None:
        """An entry of a stage's log."""
        frame = entry.frame
        begun = self._begun.setdefault(entry.process, OrderedDict())
        if isinstance(frame, Run) and entry.record.direction is Direction.IN:
            begun[frame.epoch, frame.seq] = entry.at_ns, frame
            if len(begun) > MAX_PENDING:
                begun.popitem(last=False)
        elif isinstance(frame, Forwarded):
            found = begun.pop((frame.epoch, frame.seq), None)
            if found is not None:
                self._span(entry.process.name, found[0], entry.at_ns, found[1], {})

    def estimate(self, run: Run, verdict: Verdict, sent_ns: int, back_ns: int) -> None:
        """Lay a frame's forwards between its leaving and its verdict, the hops all alike."""
        timings = verdict.timings
        if not timings:
            return
        spent = sum(each.wait_us + each.forward_us for each in timings) * 1000
        hop = max(0, back_ns - sent_ns - spent) // (len(timings) + 1)
        at = sent_ns
        for each in timings:
            at += hop + each.wait_us * 1000
            end = at + each.forward_us * 1000
            if each.stage not in self._recorded:
                self._span(each.stage, at, end, run, {"estimated": True})
            at = end

    def _span(self, stage: str, arrived: int, end: int, run: Run, args: Args) -> None:
        begin = min(end, max(arrived, self._free.get(stage, 0)))  # one forward at a time
        self._free[stage] = max(end, self._free.get(stage, 0))
        idle = self.work.setdefault(stage, Work()).add(begin, end)
        args |= {"epoch": run.epoch, "seq": run.seq, "segments": [_said(s) for s in run.segments]}
        if idle is not None:
            args["idle_before_us"] = idle / 1e3
        if arrived < begin:
            args["waited_us"] = (begin - arrived) / 1e3
        self._writer.span(STAGES, stage, _title(run), begin, end, args)

    def summary(self) -> dict[str, Args]:
        """Per stage: forwards, busy milliseconds, idle share."""
        return {
            name: {
                "forwards": each.forwards,
                "busy_ms": round(each.busy_ns / 1e6, 3),
                "idle_share": round(each.idle, 4),
            }
            for name, each in sorted(self.work.items())
        }


class Links:
    """Transit spans: a frame that left one log and arrived in another, by its envelope."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._left: OrderedDict[tuple[str, int, int], tuple[int, str, str]] = OrderedDict()
        self._came: OrderedDict[tuple[str, int, int], tuple[int, str]] = OrderedDict()
        self._lanes: dict[str, list[int]] = {}

    def take(self, entry: Entry) -> None:
        """Any entry. A sender notes a frame once it is gone, so that its arrival may come first."""
        if (
            entry.record.direction not in (Direction.IN, Direction.OUT)
            or entry.record.number != entry.envelope.number
        ):
            return
        envelope, kind = entry.envelope, type(entry.frame).__name__
        key = envelope.sender, envelope.incarnation, envelope.number
        name = f"{kind} {getattr(entry.frame, 'seq', '')}".rstrip()
        if entry.record.direction is Direction.OUT:
            came = self._came.pop(key, None)
            if came is None:
                _keep(self._left, key, (entry.at_ns, entry.process.name, name))
            else:
                self._span(entry.process.name, came[1], name, entry.at_ns, came[0], key)
        elif kind != "LinkGap":
            left = self._left.pop(key, None)
            if left is None:
                _keep(self._came, key, (entry.at_ns, entry.process.name))
            else:
                self._span(left[1], entry.process.name, left[2], left[0], entry.at_ns, key)

    def _span(
        self, source: str, target: str, name: str, left: int, came: int, key: tuple[str, int, int]
    ) -> None:
        link = f"{source} -> {target}"
        lanes = self._lanes.setdefault(link, [])
        # slices of one track must not overlap: the first lane that is free by then
        lane = next((i for i, free in enumerate(lanes) if free <= left), len(lanes))
        lanes[lane:] = lanes[lane:] or [0]
        lanes[lane] = max(came, left)
        track = link if lane == 0 else f"{link} ({lane + 1})"
        self._writer.span(LINKS, track, name, left, came, {"sender": key[0], "number": key[2]})


@dataclass(slots=True)
class Times:
    """When a turn entered its phases."""

    submitted: int
    prompt: int
    phases: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0


class Turns:
    """One track per turn: waiting, prefill, decode, lost."""

    def __init__(self, writer: Writer, prefix: str) -> None:
        """prefix: of the tracks' names, where several lives of coordinators have a turn 1."""
        self._writer = writer
        self._prefix = prefix
        self._turns: dict[int, Times] = {}

    def take(self, event: Event) -> None:
        """What happened, in order."""
        if isinstance(event, Lost):
            for number in event.turns:
                self._enter(number, "ring lost", event.at_ns)
        elif isinstance(event, Submitted):
            times = Times(event.at_ns, len(event.submit.prompt), [("waiting", event.at_ns)])
            self._turns[event.turn] = times
        elif isinstance(event, Placed):
            self._enter(event.turn, "prefill", event.at_ns)
        elif isinstance(event, Answered) and event.tokens and event.turn in self._turns:
            times = self._turns[event.turn]
            times.tokens += len(event.tokens)
            times.drafts += event.accepted
            if times.phases[-1][0] != "decode":
                self._enter(event.turn, "decode", event.at_ns)
        elif isinstance(event, Ended):
            self._end(event.turn, event.at_ns, event.reason)

    def close(self, at_ns: int) -> None:
        """The log is over."""
        for number in list(self._turns):
            self._end(number, at_ns, "the log ends")

    def _enter(self, number: int, phase: str, at_ns: int) -> None:
        if number in self._turns:
            self._turns[number].phases.append((phase, at_ns))

    def _end(self, number: int, at_ns: int, reason: str) -> None:
        times = self._turns.pop(number, None)
        if times is None:
            return
        track = f"{self._prefix}turn {number}"
        args = {
            "prompt": times.prompt,
            "tokens": times.tokens,
            "drafts_accepted": times.drafts,
            "end": reason,
        }
        self._writer.span(TURNS, track, f"turn {number}", times.submitted, at_ns, args)
        ends = [begin for _, begin in times.phases[1:]] + [at_ns]
        for (phase, begin), end in zip(times.phases, ends, strict=True):
            self._writer.span(TURNS, track, phase, begin, end, {})


class _Coordinator:
    """One life of a coordinator: its turns, counters and losses."""

    def __init__(self, process: Process, writer: Writer, stages: Stages, prefix: str) -> None:
        self.turns = Turns(writer, prefix)
        self._life = Life(process.header.config)
        self._writer = writer
        self._stages = stages
        self._counts: dict[str, tuple[int, int]] = {}
        self._lost: dict[str, tuple[int, str]] = {}

    def take(self, entry: Entry) -> None:
        frame = entry.frame
        if isinstance(frame, Verdict) and frame.ring in self._life.rings:
            flight = self._life.rings[frame.ring].flying.get(frame.seq)
            if flight is not None and isinstance(flight.frame, Run):
                self._stages.estimate(flight.frame, frame, flight.sent_ns, entry.at_ns)
        for event in self._life.take(entry):
            self.turns.take(event)
            if isinstance(event, Lost):
                self._lost[event.ring] = event.at_ns, event.why
            elif isinstance(event, Formed) and event.ring in self._lost:
                at, why = self._lost.pop(event.ring)
                self._writer.span(RINGS, event.ring, f"lost: {why}", at, event.at_ns, {})
        for name, ring in self._life.rings.items():
            runs = [each.frame for each in ring.flying.values() if isinstance(each.frame, Run)]
            rows = sum(len(segment.tokens) for run in runs for segment in run.segments)
            if self._counts.get(name) != (len(ring.flying), rows):
                self._counts[name] = len(ring.flying), rows
                frames = {"frames": len(ring.flying)}
                self._writer.count(RINGS, f"{name}: frames in flight", entry.at_ns, frames)
                self._writer.count(RINGS, f"{name}: rows in flight", entry.at_ns, {"rows": rows})


def run_trace(*, paths: Sequence[Path], out: Path) -> int:
    """Write the trace; the exit code: 1 when something could not be read."""
    stream = Stream(paths)
    try:
        with out.open("w", encoding="utf-8") as file:
            stages = write_trace(stream, file)
    except OSError as error:
        raise ToolError(f"-o {out}: {error.strerror or error}") from None
    for name, each in stages.summary().items():
        print(
            f"{name}: {each['forwards']} forwards, busy {each['busy_ms']:.1f} ms, "
            f"idle {each['idle_share']:.0%} of the time from the first to the last"
        )
    print(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing")
    for text in stream.notes + stream.damages:
        print(f"kvring: {text}", file=sys.stderr)
    return RUNTIME if stream.damages else 0


def write_trace(stream: Stream, file: IO[str]) -> Stages:
    """Everything of a stream as one trace; the stages' sums."""
    writer = Writer(file)
    recorded = [each.name for each in stream.processes if each.header.role == "stage"]
    stages, links = Stages(writer, recorded), Links(writer)
    lives = [each for each in stream.processes if each.header.role == "coordinator"]
    coordinators = {
        each: _Coordinator(each, writer, stages, f"{each.name} {i}: " if len(lives) > 1 else "")
        for i, each in enumerate(lives)
    }
    last = 0
    for entry in stream:
        if writer.start_ns is None:
            writer.start_ns = entry.at_ns
        last = entry.at_ns
        if entry.process in coordinators:
            coordinators[entry.process].take(entry)
        else:
            stages.take(entry)
        links.take(entry)
    for coordinator in coordinators.values():
        coordinator.turns.close(last)
    writer.close({"stages": stages.summary(), "start_ns": writer.start_ns or 0})
    return stages


def _keep(table: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    table[key] = value
    if len(table) > MAX_PENDING:
        table.popitem(last=False)


def _title(run: Run) -> str:
    kinds = dict.fromkeys(str(segment.kind) for segment in run.segments)
    rows = sum(len(segment.tokens) for segment in run.segments)
    return f"{'+'.join(kinds) or 'empty'} {rows}"


def _said(segment: Any) -> str:
    return f"{segment.turn}/{segment.slot}/[{segment.start},{segment.end})/{segment.kind}"
