"""Owns the replay of one process: its recorded inputs into a fresh core, whose sends must be equal.

The core is the one that production runs, so a log shows at which frame it would decide otherwise
now, or lets somebody stop there and look. Knows nothing of tensors; see tools.replay.compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

from coord.actions import Action as CoordAction
from coord.actions import Send as CoordSend
from pipeline.stage import Action as StageAction
from pipeline.stage import Send as StageSend
from pipeline.stage import Stage
from tools.errors import ToolError
from tools.framelogs.read import Entry, LogDamageError, Process, entries
from tools.replay import words
from tools.replay.fresh import Core, fresh_core
from tools.replay.where import Where
from transport.frame import Copy, Frame, Free, RollCall, Run
from transport.framelog import Direction

AROUND = 8  # steps of the story that a difference tells
BEHIND = 3  # records after it
INPUTS = (Direction.IN, Direction.LOCAL)
STARTS = (Run, Copy, Free, RollCall)  # frames from the link that tell a stage its epoch

Action = CoordAction | StageAction


@dataclass(frozen=True, slots=True)
class Step:
    """One input, what the core did, and the records of what was sent then.

    cut: actions that the log's end cuts off.
    """

    input: Entry
    actions: list[Action]
    sent: list[Entry]
    cut: int = 0


class DifferenceError(ToolError):
    """The replay differs from the recording. at: the record where; story: lines around it."""

    def __init__(self, at: Entry, what: str, story: list[str]) -> None:
        super().__init__(f"{at.process.name}: record {at.index} ({at.place}) differs: {what}")
        self.at = at
        self.what = what
        self.story = story


class Replayer:
    """Steps through one process's log; `core` is at the state after the last step.

    Raises ToolError where the log lacks what the core must know, and LogDamageError (from any step)
    where it is damaged.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.inputs = 0
        self.sends = 0  # actions that were compared with a record
        self.others = 0  # actions that leave no record: what clients are told, forwards, copies
        self.unsent = 0  # sends that the link refused, as recorded
        self.cut = 0  # sends behind the end of the log
        self.last: Entry | None = None  # of the last step
        self._steps: deque[Step] = deque(maxlen=AROUND)
        self._rewritten: dict[int, None] = {}  # slots that a log which begins late wrote from 0
        if process.missing and process.missing != list(range(len(process.missing))):
            gap = next(n for at, n in enumerate(process.missing) if at != n)
            raise ToolError(f"{process.name}: its segment {gap} is missing: nothing to go on with")
        self.core: Core = fresh_core(process)
        if process.missing and not isinstance(self.core, Stage):
            raise ToolError(
                f"{process.name}: its segments 0 to {process.missing[-1]} are missing, and a "
                "coordinator can only be replayed from its start"
            )
        self._entries: Iterator[Entry] = entries(process)
        if process.missing:
            self._begin_late()

    def __iter__(self) -> Iterator[Step]:
        """All steps that are left. Raises DifferenceError at the first that differs."""
        while (step := self.step()) is not None:
            yield step

    def step(self) -> Step | None:
        """Feed the next input; None at the end of the log. Raises DifferenceError."""
        entry = next(self._entries, None)
        if entry is None:
            return None
        if entry.record.direction not in INPUTS:
            raise self._difference(entry, "it was sent, and the core sends nothing here")
        self.last = entry
        self.inputs += 1
        self._known(entry)
        try:
            actions: list[Action] = list(self.core.handle(entry.frame, entry.record.mono_ns / 1e9))
            self.core.check()
        except AssertionError as error:
            raise self._difference(entry, f"the core can't take it: {error}") from None
        step = Step(entry, actions, [])
        self._steps.append(step)
        sends = [each.frame for each in actions if isinstance(each, (CoordSend, StageSend))]
        self.others += len(actions) - len(sends)
        for at, frame in enumerate(sends):
            sent = self._sent(step, frame)
            if sent is None:
                self.cut += len(sends) - at
                return Step(entry, actions, step.sent, len(sends) - at)
            step.sent.append(sent)
        return step

    def run_until(self, where: Where | None) -> Step | None:
        """Step until the step that holds the record; None when the log ends before."""
        while (step := self.step()) is not None:
            if where is not None and any(map(where.names, (step.input, *step.sent))):
                return step
        return None

    def _sent(self, step: Step, frame: Frame) -> Entry | None:
        """The record of a frame that the core sends; None when the log ends before it."""
        entry = next(self._entries, None)
        if entry is None:
            return None
        said = words.of_frame(frame)
        if entry.record.direction in INPUTS:
            raise self._difference(entry, f"before it the core sends: {said}", step)
        if entry.frame != frame:
            raise self._difference(
                entry, f"{words.difference(entry.frame, frame)}; the core sends: {said}", step
            )
        self.sends += 1
        self.unsent += entry.record.direction is Direction.UNSENT
        return entry

    # ---- a stage's log whose beginning is gone ----

    def _begin_late(self) -> None:
        """Go on at the first frame from the link, in its epoch: no forward was running there."""
        assert isinstance(self.core, Stage)
        for entry in self._entries:
            frame = entry.frame
            if entry.record.direction is Direction.IN and isinstance(frame, STARTS):
                self.core.epoch = None if isinstance(frame, RollCall) else frame.epoch
                self._entries = chain((entry,), self._entries)
                return

    def _known(self, entry: Entry) -> None:
        """What a frame reads must have been written since the log begins."""
        frame = entry.frame
        if not self.process.missing or not isinstance(frame, (Run, Copy, RollCall)):
            return
        written: list[int] = []
        if isinstance(frame, RollCall):
            read = {each.number: each.length for each in frame.claims}
        elif isinstance(frame, Copy):
            read = {frame.source: frame.length}
            written = [frame.target]
        else:
            read = {each.slot: each.start for each in frame.segments if each.start}
            written = [each.slot for each in frame.segments if not each.start]
        for slot, rows in read.items():
            if slot not in self._rewritten:
                raise ToolError(
                    f"{entry.place}: {words.of_frame(frame)} reads rows [0, {rows}) of slot {slot},"
                    f" written before this log begins (segments 0 to {self.process.missing[-1]} "
                    "are missing)"
                )
        self._rewritten.update(dict.fromkeys(written))

    # ---- differences ----

    def _difference(self, at: Entry, what: str, step: Step | None = None) -> DifferenceError:
        story: list[str] = []
        for each in self._steps:
            story += _told(each)
        if step is not None:
            story.append(f"  here   {'':6} {what}")
        story.append(f"> {words.of_entry(at)}")
        with suppress(LogDamageError):
            story += [f"  {words.of_entry(each)}" for each in islice(self._entries, BEHIND)]
        return DifferenceError(at, what, story)


def _told(step: Step) -> list[str]:
    """A step as lines: the input, the records of what was sent, and what else the core did."""
    lines = [f"  {words.of_entry(step.input)}"]
    lines += [f"  {words.of_entry(each)}" for each in step.sent]
    for action in step.actions:
        if not isinstance(action, (CoordSend, StageSend)):
            lines.append(f"  {'':7} did    {_action(action)}")
    return lines


def _action(action: Action) -> str:
    text = repr(action)
    return text if len(text) <= words.LONG else f"{text[: words.LONG - 3]}..."
