"""A ring in memory whose every process records, through the same Recorder as the daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.memoryring import MemoryRing
from transport.config import Config, Model, dumps
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import Envelope, Frame, Heartbeat, LinkGap, Wire
from transport.framelog import Direction, LogHeader, Payloads
from transport.recorder import Recorder

EPOCH_NS = 1_700_000_000_000_000_000


class RecordedRing(MemoryRing):
    """As MemoryRing; `close` ends the recordings. now: whole nanoseconds, as a log has them."""

    def __init__(
        self,
        directory: Path,
        *,
        payloads: Payloads = Payloads.FULL,
        segment_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        self._ns = 0
        self._directory = directory
        self._kept = payloads
        self._segment_bytes = segment_bytes
        self._recorders: dict[str, Recorder] = {}
        self._sent_by: dict[str, int] = {}
        self._envelopes: dict[int, tuple[Frame, Envelope]] = {}
        self._arriving: Envelope | None = None
        super().__init__(**options)

    @property
    def now(self) -> float:
        return self._ns / 1e9

    @now.setter
    def now(self, seconds: float) -> None:
        self._ns = round(seconds * 1e9)

    def close(self) -> None:
        for recorder in self._recorders.values():
            assert recorder.error is None
            recorder.close()

    def config(self) -> str:
        """A ring.toml of this ring."""
        stages = tuple(
            StageSpec(name, f"tcp://10.0.0.{i + 1}:7000", layers)
            for i, (name, layers) in enumerate(zip(self.names, self.layers, strict=True))
        )
        ring = RingSpec(self.name, "tcp://10.0.0.9:7000", stages)
        return dumps(
            Config(Model("/home/someone/toy", "toy", "float32"), (ring,), limits=self.limits)
        )

    def recorder(self, name: str, incarnation: int) -> Recorder:
        key = f"{name}/{incarnation}"
        if key not in self._recorders:
            role = "coordinator" if name == "coord" else "stage"
            born = EPOCH_NS + self._ns + len(self._recorders)
            config = self.config() if name == "coord" else ""
            header = LogHeader(role, name, incarnation, "test", born, 0, config)
            self._recorders[key] = Recorder(
                self._directory, header, self._kept, segment_bytes=self._segment_bytes
            )
        return self._recorders[key]

    def _note(
        self,
        name: str,
        incarnation: int,
        way: Direction,
        link: str,
        frame: Frame,
        envelope: Envelope | None,
    ) -> None:
        recorder = self.recorder(name, incarnation)
        recorder.record(self._ns, EPOCH_NS + self._ns, way, link, frame, envelope=envelope)

    def _stamp(self, sender: str, incarnation: int, frame: Frame) -> Envelope:
        key = f"{sender}/{incarnation}"
        number = self._sent_by.get(key, 0)
        self._sent_by[key] = number + 1
        envelope = Envelope(sender, incarnation, number)
        self._envelopes[id(frame)] = frame, envelope  # kept alive, so that its id stays its own
        return envelope

    # ---- what MemoryRing does, noted ----

    def tell(self, frame: Frame) -> None:
        envelope, self._arriving = self._arriving, None
        if isinstance(frame, Heartbeat):
            envelope = self._stamp(f"r/{frame.stage}/control", frame.incarnation, frame)
        way = Direction.LOCAL if envelope is None else Direction.IN
        link = "coordinator" if envelope is None else envelope.sender
        self._note("coord", 1, way, link, frame, envelope)
        super().tell(frame)

    def send(self, wire: Wire) -> None:
        super().send(wire)
        frame = self.links[0][-1]
        envelope = self._stamp("r/coordinator", 1, frame)
        self._note("coord", 1, Direction.OUT, self.name, frame, envelope)

    def happen(self, choice: int) -> None:
        index = choice // 2
        self._arriving = None
        if not choice % 2:
            frame = self.links[index][0]
            if isinstance(frame, LinkGap):
                self._arriving = Envelope(frame.link, 1, frame.got)
            else:
                self._arriving = self._envelopes.pop(id(frame))[1]
        super().happen(choice)

    def _stage_takes(self, index: int, frame: Frame) -> None:
        name, incarnation = self.names[index], self.incarnations[index]
        envelope, self._arriving = self._arriving, None
        way = Direction.LOCAL if envelope is None else Direction.IN
        link = name if envelope is None else f"tcp://10.0.0.{index + 1}:7000"
        self._note(name, incarnation, way, link, frame, envelope)
        known = len(self.links[index + 1])
        super()._stage_takes(index, frame)
        for sent in list(self.links[index + 1])[known:]:
            stamped = self._stamp(f"r/{name}", incarnation, sent)
            to = f"tcp://10.0.0.{index + 2}:7000"
            self._note(name, incarnation, Direction.OUT, to, sent, stamped)


def played(directory: Path, **options: Any) -> RecordedRing:
    """A scene with all that logs are looked at for: reuse, a fork, drafts, a loss, a cancel.

    Turn 1 is cold; 2 goes on behind it; 3 and 4 share a long new prompt; 5 is cut by the restart of
    stage s1 and resumed; 6 is cancelled; 7 has a salt and samples.
    """
    ring = RecordedRing(directory, **options)
    ring.form()
    first = prompt(1, 40)
    reply = ring.ask(first, 12)
    ring.ask((*first, *reply.tokens, *prompt(2, 9)), 8)
    shared = prompt(3, 50)
    ring.submit(shared, 6)
    ring.submit((*shared, 7, 8), 6)
    ring.pump()
    lost = ring.submit(prompt(4, 30), 20)
    for _ in range(60):
        ring.happen(ring.choices()[0])
    assert not ring.replies[lost].over
    ring.restart(1)
    ring.now += 2.0
    for name, incarnation in zip(ring.names, ring.incarnations, strict=True):
        ring.beat(name, incarnation)
    ring.pump()
    gone = ring.submit(prompt(5, 35), 20)
    for _ in range(50):
        ring.happen(ring.choices()[0])
    ring.cancel(gone)
    ring.pump()
    ring.ask(prompt(6, 20), 5, salt=b"tenant's own secret")
    assert all(reply.over for reply in ring.replies.values())
    ring.close()
    return ring


def prompt(seed: int, count: int) -> tuple[int, ...]:
    """Token ids that no other seed's prompt contains two of in a row, repeated in part."""
    return tuple((seed * 17 + i * i * (seed + 3) + i // 7) % 64 for i in range(count))
