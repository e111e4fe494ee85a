"""Owns ring replay: the turns of a coordinator's log once more, on a live ring, tokens compared.

What clients asked is in the log; what they were told is made again by core replay. The live ring's
stages run, its coordinator does not: this process is it, without HTTP. A request waits until every
turn that was over before it is over again, so that a slower ring sees no other order.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from coord.actions import Admitted, Failed, Finished, Tokens, TurnError
from coord.coordinator import Coordinator, TurnStream
from tools.errors import ToolError
from tools.framelogs.read import Entry, Process
from tools.replay.core import Replayer
from tools.replay.where import Where
from tools.security import trust_of_coordinator
from transport.config import Config
from transport.frame import Cancel, Frame, FreeSlot, KeepSlot, StageState, Submit
from transport.link import LinkError

READY_S = 60.0  # for the live ring to form, not counting the time in which a stage loads


@dataclass(slots=True)
class Told:
    """What a turn's client was told: tokens in order, and the end ("" where the log ends first)."""

    tokens: list[int] = field(default_factory=list)
    admitted: bool = False
    end: str = ""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's or operator's request. after: turns that were over; tokens: of a Cancel's turn."""

    entry: Entry
    frame: Frame
    at_s: float
    after: frozenset[int]
    tokens: int = 0


@dataclass(slots=True)
class Script:
    """A coordinator's log as its clients saw it."""

    asked: list[Asked] = field(default_factory=list)
    told: dict[int, Told] = field(default_factory=dict)


@dataclass(slots=True)
class Driven:
    """What came of it. differences: in words, first first."""

    turns: int = 0
    tokens: int = 0
    left_out: int = 0  # turns that were refused at once, or never got a slot
    cancelled: int = 0  # compared as far as both went
    differences: list[str] = field(default_factory=list)


def read_script(process: Process, until: Where | None = None) -> Script:
    """Requests and replies, by core replay. Raises DifferenceError where that fails."""
    replayer = Replayer(process)
    script, over, start_ns = Script(), frozenset[int](), None
    for step in replayer:
        entry, frame = step.input, step.input.frame
        if isinstance(frame, (Submit, Cancel, FreeSlot, KeepSlot)):
            start_ns = entry.at_ns if start_ns is None else start_ns
            known = 0
            if isinstance(frame, Submit):
                script.told[frame.turn] = Told()
            elif isinstance(frame, Cancel) and frame.turn in script.told:
                known = len(script.told[frame.turn].tokens)
                script.told[frame.turn].cancelled = frame.turn not in over
            at_s = (entry.at_ns - start_ns) / 1e9
            script.asked.append(Asked(entry, frame, at_s, over, known))
        for action in step.actions:
            match action:
                case Admitted():
                    script.told[action.turn].admitted = True
                case Tokens():
                    script.told[action.turn].tokens += action.tokens
                case Finished():
                    script.told[action.turn].end = action.reason
                    over |= {action.turn}
                case Failed():
                    script.told[action.turn].end = f"{action.status} {action.code}"
                    over |= {action.turn}
        if until is not None and any(map(until.names, (entry, *step.sent))):
            break
    return script


def drive(script: Script, config: Config, speed: float) -> Driven:
    """Play the script on the ring that `config` names. speed: 2 is twice as fast, 0 without pauses.

    Raises ToolError where the ring is not there.
    """
    return asyncio.run(_Driver(script, _for_replay(config), speed).run())


def _for_replay(config: Config) -> Config:
    """No cold runs of its own, and no draft model: tokens do not depend on drafts."""
    spec = config.coordinator
    drafter = "lookup" if spec.drafter == "model" else spec.drafter
    return replace(config, coordinator=replace(spec, drafter=drafter, verify_share=0.0))


def _loading(progress: dict[str, Any]) -> bool:
    stages = [stage for ring in progress.values() for stage in ring.values()]
    return any(stage["state"] == StageState.LOADING.value for stage in stages)


class _Driver:
    """One run of a script; heard: what each turn's client is told now."""

    def __init__(self, script: Script, config: Config, speed: float) -> None:
        self._script = script
        self._config = config
        self._speed = speed
        self._heard = {turn: Told() for turn in script.told}
        self._streams: dict[int, TurnStream] = {}
        self._news = asyncio.Condition()
        self._done = Driven()

    async def run(self) -> Driven:
        submits = [each.frame for each in self._script.asked if isinstance(each.frame, Submit)]
        vocabulary = 1 + max((max(each.prompt, default=0) for each in submits), default=0)
        trust = trust_of_coordinator(self._config)
        coordinator = Coordinator(self._config, secrets.randbits(63), vocabulary, trust=trust)
        try:
            await coordinator.open()
        except LinkError as error:
            raise ToolError(f"{error}: does its coordinator run?") from None
        try:
            await self._ready(coordinator)
            async with asyncio.TaskGroup() as group:
                started = asyncio.get_running_loop().time()
                for asked in self._script.asked:
                    await self._due(asked, started)
                    self._ask(coordinator, asked, group)
        finally:
            await coordinator.close()
        for turn, told in self._script.told.items():
            self._compare(turn, told, self._heard[turn])
        return self._done

    async def _ready(self, coordinator: Coordinator) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_S
        while not coordinator.ready()[0]:
            if _loading(coordinator.progress()):
                deadline = loop.time() + READY_S
            if loop.time() > deadline:
                raise ToolError(f"no ring within {READY_S:g} s: {coordinator.ready()[1]}")
            await asyncio.sleep(0.05)

    async def _due(self, asked: Asked, started: float) -> None:
        if self._speed:
            pause = started + asked.at_s / self._speed - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, pause))
        turn = asked.frame.turn if isinstance(asked.frame, Cancel) else None

        def reached() -> bool:
            if turn is not None and turn in self._streams and not self._heard[turn].end:
                return len(self._heard[turn].tokens) >= asked.tokens
            return all(self._heard[each].end for each in asked.after if each in self._streams)

        async with self._news:
            await self._news.wait_for(reached)

    def _ask(self, coordinator: Coordinator, asked: Asked, group: asyncio.TaskGroup) -> None:
        frame = asked.frame
        try:
            match frame:
                case Submit() if self._script.told[frame.turn].admitted:
                    stream = coordinator.submit(
                        frame.prompt,
                        budget=frame.budget,
                        stops=frame.stops,
                        sampling=frame.sampling,
                        salt=frame.salt,
                        reuse=frame.reuse,
                        hint=frame.hint,
                        keep_s=frame.keep_s,
                    )
                    self._streams[frame.turn] = stream
                    group.create_task(self._listen(frame.turn, stream))
                case Cancel() if frame.turn in self._streams:
                    self._streams[frame.turn].cancel(frame.reason)
                case FreeSlot():
                    coordinator.free(frame.ring, frame.slot)
                case KeepSlot():
                    coordinator.keep(frame.ring, frame.slot, frame.keep_s)
        except TurnError as error:
            if isinstance(frame, Submit):  # a slot that can't be freed or kept changes no token
                self._heard[frame.turn].end = f"{error.status} {error.code}"

    async def _listen(self, turn: int, stream: TurnStream) -> None:
        heard = self._heard[turn]
        async for event in stream:
            match event:
                case Tokens():
                    heard.tokens += event.tokens
                case Finished():
                    heard.end = event.reason
                case Failed():
                    heard.end = f"{event.status} {event.code}"
            async with self._news:
                self._news.notify_all()

    def _compare(self, turn: int, told: Told, heard: Told) -> None:
        if not told.admitted:
            self._done.left_out += 1
            return
        self._done.turns += 1
        self._done.cancelled += told.cancelled
        partial = told.cancelled or not told.end or told.end[:1].isdigit()
        for at, (was, token) in enumerate(zip(told.tokens, heard.tokens, strict=False)):
            self._done.tokens += 1
            if was != token:
                self._differs(turn, at, f"recorded {was}, the live ring says {token}")
                return
        lengths = len(told.tokens), len(heard.tokens)
        if heard.end[:1].isdigit():
            self._differs(turn, lengths[1], f"the live ring failed: {heard.end}")
        elif not partial and (lengths[0] != lengths[1] or told.end != heard.end):
            ends = f"recorded {lengths[0]} tokens ({told.end})"
            self._differs(turn, min(lengths), f"{ends}, the live ring {lengths[1]} ({heard.end})")

    def _differs(self, turn: int, position: int, what: str) -> None:
        self._done.differences.append(f"turn {turn}, reply token {position}: {what}")
