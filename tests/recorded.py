"""A ring in memory that records as the daemons do, random scripts with faults, and forgers.

Every process has its own Recorder: inputs before the core takes them, sends behind it, under the
envelopes that their links would have given them.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from coord.coordinator import DRAFTERS
from pipeline.stage import Stage
from tests.memoryring import LAYERS, MemoryRing, limits, ring_spec
from transport.config import Config, Coordinator, Limits, Model, dumps
from transport.frame import (
    Envelope,
    Forwarded,
    Frame,
    Heartbeat,
    LinkGap,
    Run,
    Segment,
    Submit,
    Verdict,
    Wire,
)
from transport.framelog import (
    Direction,
    FrameLogReader,
    FrameLogWriter,
    LogHeader,
    LogRecord,
    Payloads,
)
from transport.recorder import Recorder, segments

START_NS = 1_700_000_000_000_000_000


class RecordedRing(MemoryRing):
    """A MemoryRing whose processes write frame logs to `folder`.

    refusing: the first link is full. With the drafter "model" the test answers what is asked of it.
    """

    def __init__(
        self,
        folder: Path,
        stages: int = 3,
        *,
        bounds: Limits | None = None,
        payloads: Payloads = Payloads.NONE,
        segment_bytes: int = 64 << 20,
        drafter: str = "lookup",
    ) -> None:
        bounds = bounds or limits(lost_after_s=1000.0, frame_timeout_s=1000.0)
        spec = Config(
            Model("toy", "toy", "float32"),
            (ring_spec("r", stages, LAYERS),),
            Coordinator(drafter=drafter, draft_model="toy"),
            bounds,
        )
        self.folder = folder
        self.refusing = False
        self._config = dumps(spec)
        self._options: dict[str, Any] = {"payloads": payloads, "segment_bytes": segment_bytes}
        self._lives = 0
        self._numbers: dict[str, int] = {}
        self._recorders: dict[str, Recorder] = {}
        self._envelopes: list[deque[Envelope]] = [deque() for _ in range(stages + 1)]
        self._arriving: Envelope | None = None
        self._start("coord", "coordinator", 1)
        super().__init__(
            stages,
            bounds=bounds,
            slots=bounds.slots,
            drafter=DRAFTERS[drafter],
        )

    def close(self) -> list[Path]:
        """End the recording; the files, oldest life first."""
        for recorder in self._recorders.values():
            recorder.close()
        return segments(self.folder)

    def _start(self, name: str, role: str, incarnation: int) -> None:
        if name in self._recorders:
            self._recorders[name].close()
        self._lives += 1
        header = LogHeader(
            role, name, incarnation, "test", START_NS + self._lives, config=self._config
        )
        self._recorders[name] = Recorder(self.folder, header, **self._options)
        self._numbers[name] = 0

    def _stage(self, index: int) -> Stage:
        self._start(self.names[index], "stage", self.incarnations[index])
        return super()._stage(index)

    def _record(
        self, name: str, direction: Direction, frame: Frame, envelope: Envelope | None
    ) -> None:
        now_ns = round(self.now * 1e9)
        self.now = now_ns / 1e9  # what the core is told is what the record says
        link = "link" if envelope is None else envelope.sender
        self._recorders[name].record(
            now_ns, START_NS + now_ns, direction, link, frame, envelope=envelope
        )

    def _sent(self, name: str, incarnation: int, frame: Frame, link: int) -> None:
        envelope = Envelope(f"r/{name}", incarnation, self._numbers[name])
        self._numbers[name] += 1
        self._envelopes[link].append(envelope)
        self._record(name, Direction.OUT, frame, envelope)

    # ---- what MemoryRing does, recorded --------------------------------------------------------

    def tell(self, frame: Frame) -> None:
        envelope, self._arriving = self._arriving, None
        if isinstance(frame, Heartbeat):
            envelope = Envelope(f"r/{frame.stage}/control", frame.incarnation, 0)
        direction = Direction.LOCAL if envelope is None else Direction.IN
        self._record("coord", direction, frame, envelope)
        super().tell(frame)

    def send(self, wire: Wire) -> None:
        if self.refusing:
            self._record("coord", Direction.UNSENT, wire, None)
            return
        super().send(wire)
        self._sent("coord", 1, wire, 0)

    def happen(self, choice: int) -> None:
        if choice % 2 == 0:
            waiting = self._envelopes[choice // 2]
            gap = isinstance(self.links[choice // 2][0], LinkGap)
            self._arriving = Envelope("r/gap", 1, 0) if gap else waiting.popleft()
        super().happen(choice)

    def _stage_takes(self, index: int, frame: Frame) -> None:
        name = self.names[index]
        envelope, self._arriving = self._arriving, None
        local = isinstance(frame, Forwarded)
        self._record(name, Direction.LOCAL if local else Direction.IN, frame, envelope)
        before = len(self.links[index + 1])
        super()._stage_takes(index, frame)
        for sent in list(self.links[index + 1])[before:]:
            self._sent(name, self.incarnations[index], sent, index + 1)

    def restart(self, index: int, *, told: bool = True) -> None:
        self._envelopes[index].clear()
        super().restart(index, told=told)

    def lose(self, link: int, count: int) -> None:
        for frame in list(self.links[link])[:count]:
            if not isinstance(frame, LinkGap):
                self._envelopes[link].popleft()
        super().lose(link, count)


def play(ring: RecordedRing, seed: int, steps: int = 40) -> None:
    """Clients, cancels and faults at random; at the end the ring is at rest and every turn over."""
    random = Random(seed)
    ring.form()
    texts = [[random.randrange(8) for _ in range(40)] for _ in range(3)]
    turns: list[int] = []
    for _ in range(steps):
        match random.randrange(12):
            case 0 | 1 | 2 | 3:
                text = random.choice(texts)
                prompt = [*text[: random.randrange(1, 40)], *range(random.randrange(1, 5))]
                stops = (random.randrange(8),) if random.random() < 0.3 else ()
                turns.append(ring.submit(prompt, random.randrange(1, 20), stops))
            case 4 if turns:
                ring.cancel(random.choice(turns))
            case 5:
                ring.restart(random.randrange(len(ring.stages)))
            case 6:
                ring.lose(random.randrange(len(ring.links)), random.randrange(1, 3))
            case 7:
                ring.wait(random.choice((0.1, 2.0, 6.0)))
            case 8:
                ring.refusing = True
                ring.wait(0.1)
                ring.refusing = False
            case _:
                for _ in range(random.randrange(60)):
                    options = ring.choices()
                    if options:
                        ring.happen(random.choice(options))
    for _ in range(40):
        ring.wait(60.0)
        ring.pump()
    assert all(reply.over for reply in ring.replies.values()), "a turn never ends"


# ---- forgers -----------------------------------------------------------------------------------

Forge = Callable[[int, LogRecord, Frame], Frame | None]


def rewrite(path: Path, forge: Forge) -> int:
    """Write a log anew with each frame for which forge(index, record, frame) gives another one.

    Checksums are right. Returns how many records differ.
    """
    changed = 0
    out = io.BytesIO()
    with path.open("rb") as file:
        reader = FrameLogReader(file)
        records = list(reader)
    kept = max((record.payloads for record in records), default=Payloads.NONE)
    writer = FrameLogWriter(out, reader.header, Payloads(kept))
    for index, record in enumerate(records):
        frame, envelope = record.decode()
        if isinstance(frame, (Run, Forwarded)) and frame.payload is not None:
            data = frame.payload.data or bytes(record.payload_bytes)  # dropped again
            frame = replace(frame, payload=replace(frame.payload, data=data))
        forged = forge(index, record, frame)
        changed += forged is not None
        writer.record(
            record.mono_ns,
            record.wall_ns,
            record.direction,
            record.link,
            forged or frame,
            envelope=envelope,
        )
    path.write_bytes(out.getvalue())
    return changed


def other_token(frame: Frame, at: int = 0) -> Frame | None:
    """The frame with another token: a prompt's, a segment's or a result's, where there is one."""
    match frame:
        case Submit():
            return replace(frame, prompt=_other(frame.prompt, at))
        case Run() if frame.segments:
            first, *rest = frame.segments
            forged: Segment = replace(first, tokens=_other(first.tokens, at))
            return replace(frame, segments=(forged, *rest))
        case Verdict() | Forwarded() if frame.results and frame.results[0].tokens:
            result, *others = frame.results
            return replace(
                frame, results=(replace(result, tokens=_other(result.tokens, at)), *others)
            )
    return None


def _other(tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
    at = min(at, len(tokens) - 1)
    return (*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :])
