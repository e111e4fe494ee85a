"""Owns `kvring log story`: one turn's life in words, from the coordinator's log and the stages'."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.errors import RUNTIME, ToolError
from tools.framelogs.events import (
    Answered,
    Called,
    Copied,
    Ended,
    Event,
    Flight,
    Forked,
    Formed,
    How,
    Lost,
    Placed,
    Refused,
    Sent,
    Submitted,
)
from tools.framelogs.life import Life
from tools.framelogs.read import Process
from tools.framelogs.stream import Stream
from tools.framelogs.words import sampling
from transport.frame import Copy, Kind, Run, Segment, Submit, Timing, Verdict
from transport.framelog import Direction

MAX_NAMED = 20  # turns that an error lists
Key = tuple[str, int, int, str]  # ring, epoch, seq, stage


@dataclass(slots=True)
class Totals:
    """What is counted for the end of the story."""

    submitted_ns: int = 0
    first_ns: int | None = None
    last_ns: int = 0
    tokens: int = 0
    reused: int = 0
    prefilled: int = 0
    prefills: int = 0
    verifies: int = 0
    drafts: int = 0
    judged: int = 0
    accepted: int = 0
    losses: int = 0
    reason: str | None = None

    def lines(self, submit: Submit) -> Iterator[str]:
        """The sums, in words."""
        yield (
            f"{_many(self.tokens, 'token')} of at most {submit.budget}; prompt of "
            f"{len(submit.prompt)}: {self.reused} reused at first, "
            f"{self.prefilled} prefilled in all"
        )
        if self.first_ns is not None:
            first_ms = (self.first_ns - self.submitted_ns) / 1e6
            span_s = (self.last_ns - self.first_ns) / 1e9
            rate = ""
            if self.tokens > 1 and span_s > 0:
                rate = f", then {(self.tokens - 1) / span_s:.1f} tokens/s"
            yield f"first token after {first_ms:.1f} ms{rate}"
        yield (
            f"{_many(self.prefills + self.verifies, 'frame')}: {self.prefills} with prefill, "
            f"{self.verifies} with verify; drafts: {self.drafts} sent, {self.judged} judged, "
            f"{self.accepted} accepted"
        )


@dataclass(slots=True)
class Passed:
    """When a stage took a frame, and when it passed it on."""

    took_ns: int | None = None
    sent_ns: int | None = None


@dataclass(slots=True)
class Story:
    """One turn of one coordinator's life."""

    turn: int
    tokens: bool
    passed: dict[Key, Passed] = field(default_factory=dict)
    submit: Submit | None = None
    totals: Totals = field(default_factory=Totals)
    ring: str | None = None  # where it is, or was until it was lost
    _over: bool = False
    _flying: int = 0

    def about(self, event: Event) -> Iterator[tuple[int, str]]:
        """(time, words) of what an event means for the turn, if anything."""
        if isinstance(event, (Lost, Called, Formed)):
            if self.submit is not None and not self._over and event.ring == self.ring:
                yield event.at_ns, self._ring(event)
        elif event.turn == self.turn:
            yield from ((event.at_ns, words) for words in self._own(event))

    def _ring(self, event: Lost | Called | Formed) -> str:
        if isinstance(event, Lost):
            self.totals.losses += 1
            void = _many(event.frames, "frame")
            return f"ring {event.ring} is lost: {event.why}; {void} in flight with it"
        if isinstance(event, Called):
            return f"ring {event.ring}: the roll is called, epoch {event.epoch}"
        names = ", ".join(entry.name for entry in event.call.entries)
        kept = f"{len(event.call.claims)} of {_many(event.claimed, 'claim')} confirmed"
        return f"ring {event.ring} has formed: {names}" + (f"; {kept}" if event.claimed else "")

    def _own(self, event: Event) -> Iterator[str]:
        match event:
            case Submitted():
                self.submit, self.totals.submitted_ns = event.submit, event.at_ns
                yield from self._submitted(event.submit)
            case Placed():
                self.ring = event.ring
                yield self._placed(event)
            case Forked():
                self.ring = event.copy.ring
                yield f"{_frame(event.copy)} copies {_fork(event.copy)}{_unsent(event.flight)}"
            case Copied():
                took = (event.at_ns - event.flight.sent_ns) / 1e6
                done = ", ".join(event.copy.done)
                yield f"{_frame(event.copy)} is back after {took:.1f} ms: copied by {done}"
            case Sent():
                yield self._sent(event)
            case Answered():
                yield from self._answered(event)
            case Refused():
                refused = event.reject
                detail = f"{refused.code}: {refused.detail}"
                yield f"stage {refused.stage} refuses frame {refused.seq} ({detail})"
            case Ended():
                self._over, self.totals.reason = True, event.reason
                yield f"ends: {_REASONS.get(event.reason, event.reason)}"

    def _submitted(self, submit: Submit) -> Iterator[str]:
        said = [
            f"submitted: a prompt of {_many(len(submit.prompt), 'token')}",
            f"at most {submit.budget} to generate",
            sampling(submit.sampling),
        ]
        said += [_many(len(submit.stops), "stop token")] if submit.stops else []
        said += ["salted"] if submit.salt else []
        said += ["its session is named"] if submit.hint else []
        said += [] if submit.reuse else ["no reuse wanted"]
        yield ", ".join(said)
        if self.tokens:
            yield f"  prompt: {_ids(submit.prompt)}"

    def _placed(self, event: Placed) -> str:
        if event.how is How.ADMITTED:
            self.totals.reused = event.start
        rest = event.rows - event.start
        reuse = f"rows [0, {event.start}) are resident" if event.start else "nothing is resident"
        where = f"ring {event.ring}, slot {event.slot}"
        return f"{event.how} on {where}: {reuse}, {_many(rest, 'token')} to prefill"

    def _sent(self, event: Sent) -> str:
        segment, totals = event.segment, self.totals
        rows = f"{segment.kind} [{segment.start}, {segment.end})"
        what = f"{_frame(event.flight.frame)} takes {rows}"
        beside = len(event.flight.frame.segments) - 1 if isinstance(event.flight.frame, Run) else 0
        said = f" beside {_many(beside, 'other segment')}" if beside else ""
        said += _unsent(event.flight)
        self._flying += 1
        if segment.kind is Kind.PREFILL:
            totals.prefills += 1
            totals.prefilled += len(segment.tokens)
            return what + said + (f": {_ids(segment.tokens)}" if self.tokens else "")
        totals.verifies += 1
        totals.drafts += event.drafts
        known = len(segment.tokens) - event.drafts
        guess = f": {_many(known, 'known token')}, {_many(event.drafts, 'draft')}"
        return what + said + guess + (f": {_ids(segment.tokens)}" if self.tokens else "")

    def _answered(self, event: Answered) -> Iterator[str]:
        totals, took = self.totals, (event.at_ns - event.flight.sent_ns) / 1e6
        self._flying -= 1
        head = f"{_frame(event.flight.frame)} is back after {took:.1f} ms"
        if event.refused:
            yield f"{head}: its rows were refused"
        elif event.void:
            yield f"{head}: void, it was built on a wrong draft"
        elif not event.segment.want or self._over:
            yield f"{head}: {_rows(event.segment)} written"
        else:
            totals.tokens += len(event.tokens)
            totals.judged += event.judged
            totals.accepted += event.accepted
            if event.tokens:
                totals.last_ns = event.at_ns
                if totals.first_ns is None:
                    totals.first_ns = event.at_ns
            judged = (
                f"{event.accepted} of {_many(event.judged, 'draft')} accepted, "
                if event.judged
                else ""
            )
            ids = f": {_ids(event.tokens)}" if self.tokens else ""
            yield f"{head}: {judged}{_many(len(event.tokens), 'token')} committed{ids}"
        yield from self._stages(event.flight, event.verdict.timings)

    def _stages(self, flight: Flight, timings: Sequence[Timing]) -> Iterator[str]:
        """What each stage did with the frame; when, where the stages' logs are there."""
        frame = flight.frame
        said = []
        for each in timings:
            passed = self.passed.get((frame.ring, frame.epoch, frame.seq, each.stage), Passed())
            words = [f"waited {each.wait_us / 1e3:.2f}"] if each.wait_us else []
            words.append(f"computed {each.forward_us / 1e3:.2f}")
            words[:0] = _since("took it at", passed.took_ns, flight.sent_ns)
            words += _since("sent it at", passed.sent_ns, flight.sent_ns)
            said.append(f"{each.stage} {', '.join(words)}")
        if said:
            yield f"  ms: {'; '.join(said)}"

    def end(self) -> Iterator[str]:
        """The last lines."""
        assert self.submit is not None
        if not self._over:
            if self.ring is None:
                yield "the log ends here: it waits for a slot, or was refused at once"
            elif self._flying > 0:
                yield f"the log ends here, with {_many(self._flying, 'frame')} of it in flight"
            else:
                yield "nothing more is recorded of it"
        yield from self.totals.lines(self.submit)


_REASONS = {
    "stop": "a stop (its stop token, or its text's)",
    "length": "as long as it may be",
    "cancelled": "cancelled",
}


def run_story(*, turn: int, paths: Sequence[Path], tokens: bool) -> int:
    """Print a turn's story; the exit code: 1 when something could not be read."""
    stream = Stream(paths)
    coordinators = [each for each in stream.processes if each.header.role == "coordinator"]
    if not coordinators:
        names = ", ".join(dict.fromkeys(each.name for each in stream.processes))
        raise ToolError(f"no coordinator's log among them (of {names}): only it knows turns")
    passed = _passed(stream, turn)
    told, known = 0, dict[int, None]()
    for process in coordinators:
        story = Story(turn, tokens, passed)
        heading = f"turn {turn} of {process.name} (life {process.header.incarnation})"
        for at_ns, words in _tell(stream, process, story, known):
            if heading:
                print(heading)
                heading, told = "", told + 1
            detail = words.startswith(" ")
            since_ms = (at_ns - story.totals.submitted_ns) / 1e6
            print(f"{'':16}{words}" if detail else f"{since_ms:11.3f} ms  {words}")
        if story.submit is not None:
            for words in story.end():
                print(f"{'':15}{words}")
    for text in stream.notes + stream.damages:
        print(f"kvring: {text}", file=sys.stderr)
    if not told:
        raise ToolError(f"no turn {turn} in these logs; there are {_ranges(list(known))}")
    return RUNTIME if stream.damages else 0


def _tell(
    stream: Stream, process: Process, story: Story, known: dict[int, None]
) -> Iterator[tuple[int, str]]:
    life = Life(process.header.config)
    for entry in stream.of([process]):
        for event in life.take(entry):
            if isinstance(event, Submitted):
                known[event.turn] = None
            yield from story.about(event)


def _passed(stream: Stream, turn: int) -> dict[Key, Passed]:
    """When the stages took and sent the turn's frames."""
    found: dict[Key, Passed] = {}
    stages = [each for each in stream.processes if each.header.role == "stage"]
    for entry in stream.of(stages):
        frame = entry.frame
        match frame:
            case Run():
                mine = any(segment.turn == turn for segment in frame.segments)
            case Verdict():
                key = frame.ring, frame.epoch, frame.seq, entry.process.name
                mine = key in found
            case Copy():
                mine = frame.turn == turn
            case _:
                mine = False
        if mine:
            assert isinstance(frame, (Run, Verdict, Copy))
            key = frame.ring, frame.epoch, frame.seq, entry.process.name
            passed = found.setdefault(key, Passed())
            if entry.record.direction is Direction.IN:
                passed.took_ns = entry.at_ns
            elif entry.record.direction is Direction.OUT:
                passed.sent_ns = entry.at_ns
    return found


def _frame(frame: object) -> str:
    assert hasattr(frame, "seq")
    return f"frame {frame.seq}"


def _unsent(flight: Flight) -> str:
    return ", but its link does not take it" if flight.number is None else ""


def _fork(copy: Copy) -> str:
    return f"rows [0, {copy.length}) of slot {copy.source} into slot {copy.target}"


def _rows(segment: Segment) -> str:
    return f"rows [{segment.start}, {segment.end})"


def _since(what: str, at_ns: int | None, sent_ns: int) -> list[str]:
    return [] if at_ns is None else [f"{what} {(at_ns - sent_ns) / 1e6:.2f}"]


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _ranges(turns: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1 to 3, 7"."""
    if not turns:
        return "none at all"
    runs: list[list[int]] = []
    for turn in sorted(turns):
        if runs and turn == runs[-1][1] + 1:
            runs[-1][1] = turn
        else:
            runs.append([turn, turn])
    said = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:MAX_NAMED]]
    return ", ".join(said) + (" and more" if len(runs) > MAX_NAMED else "")
