"""Owns the coordinator process's links and turn queues: a thin asyncio shell around the Scheduler.

Receive, stamp, record, handle, execute; decides nothing. Everything runs in one event loop, so the
core needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import structlog

from coord.actions import Action, Admitted, Draft, Failed, Finished, Send, Tokens, TurnError
from coord.draft import MAX_DEPTH, MAX_DRAFT, Bounds, Drafter, LookupDrafter
from coord.draft_model import ModelDrafter
from coord.drafting import DraftRunner
from coord.http.engine import Limits as Served
from coord.http.engine import Resident
from coord.ledger import Holding
from coord.ring import Phase, Ring
from coord.saving import Saver
from coord.scheduler import Scheduler
from coord.store import Store
from coord.survey import Survey
from coord.verify import MAX_WRITTEN, Mismatch, Record, Verifier, report
from coord.view import (
    beat,
    counters,
    describe_ring,
    holdings,
    idle_ring,
    link_counters,
    residents,
)
from transport.chain import root_hash
from transport.config import Config
from transport.config import Ring as RingSpec
from transport.frame import (
    Buffer,
    Cancel,
    Drafted,
    Envelope,
    Frame,
    FreeSlot,
    KeepSlot,
    Sampling,
    StageLost,
    Submit,
    Tick,
)
from transport.framelog import Direction, LogHeader
from transport.link import AsyncPull, AsyncPush, LinkError, open_pull, open_push
from transport.peers import SAME_KEYS, PeerEvent, Refusals
from transport.recorder import Recorder
from transport.trust import CoordinatorTrust

Event = Admitted | Tokens | Finished | Failed
DRAFTERS: dict[str, Callable[[], Drafter] | None] = {
    "off": None,
    "lookup": LookupDrafter,
    "model": ModelDrafter,
}
MAX_SALTS = 4096  # salts by their chain's root, beyond which those of no resident prefix go


def new_epoch() -> int:
    """Greater than any epoch of an earlier coordinator, unless the clock went back."""
    return time.time_ns() // 1_000_000


def fresh_scheduler(config: Config, first_epoch: int, vocabulary: int) -> Scheduler:
    """The core of a coordinator that starts; a replay needs the very same one."""
    scheduler = Scheduler(
        config.rings,
        config.limits,
        first_epoch=first_epoch,
        vocabulary=vocabulary,
        drafter=DRAFTERS[config.coordinator.drafter],
    )
    depth, tokens = config.coordinator.draft_depth, config.coordinator.draft_tokens
    for ring in scheduler.rings.values():
        ring.bounds = Bounds(
            MAX_DRAFT if tokens is None else tokens, MAX_DEPTH if depth is None else depth
        )
    return scheduler


class TurnStream:
    """One turn as its client sees it: iterate over its events; the last is Finished or Failed."""

    def __init__(self, coordinator: Coordinator, turn: int) -> None:
        self.turn = turn
        self._coordinator = coordinator
        # holds at most budget + 2 events: a turn commits no more tokens than its budget
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False

    def put(self, event: Event) -> None:
        """The coordinator's side: hand over the next event."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._over:
            event = await self._events.get()
            self._over = isinstance(event, (Finished, Failed))
            yield event

    def cancel(self, reason: str = "cancelled") -> None:
        """End the turn (a frame to the core); idempotent."""
        self._coordinator.cancel(self.turn, reason)


class Coordinator:
    """Implements the gateway's Engine over the rings of one Config. Use within `run`."""

    def __init__(
        self,
        config: Config,
        incarnation: int,
        vocabulary: int,
        recorder: Recorder | None = None,
        logs: Path = Path("logs"),
        drafts: DraftRunner | None = None,
        trust: CoordinatorTrust | None = None,
        store: Store | None = None,
        first_epoch: int | None = None,
    ) -> None:
        """logs: where verify mode writes the frames of turns that differ.

        drafts: runs the draft model where the drafter is "model"; the caller runs it. store: what
        is resident is read from it, and written to it; `close` closes it. first_epoch: as the
        recorder's header has it; None for new_epoch().
        """
        assert drafts is not None or config.coordinator.drafter != "model", config.coordinator
        self._drafts = drafts
        self.config = config
        self.limits = Served(config.limits.max_model_len, (config.model.name,))
        self.started_at = time.time()
        epoch = new_epoch() if first_epoch is None else first_epoch
        self.scheduler = fresh_scheduler(config, epoch, vocabulary)
        share = config.coordinator.verify_share
        self._verify = Verifier(share, self.scheduler) if share else None
        self._logs = logs
        self._incarnation = incarnation
        self._trust = trust
        self._refusals, self._refused = Refusals(), Refusals()  # of others, and by heads
        self._recorder = recorder
        self._log = structlog.get_logger()
        self._streams: dict[int, TurnStream] = {}
        self._last_turn = 0
        self._pulls: list[AsyncPull] = []
        self._pushes: dict[str, AsyncPush] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._phases: dict[str, tuple[Phase, str]] = {}
        self._salts: dict[bytes, bytes] = {}  # root of a chain -> salt: whose rows they are
        self._survey = Survey(config.limits, config.emulate)
        rings = self.scheduler.rings
        self._saver = None if store is None else Saver(store, rings, self._salts)

    # ---- life ----

    async def open(self) -> None:
        """Bind the verdict links, connect to the heads. Raises LinkError, then nothing is open."""
        try:
            for ring in self.config.rings:
                pull = await open_pull(
                    ring.listen,
                    self._received,
                    link=ring.name,
                    max_bytes=self.config.limits.max_frame_bytes,
                    security=self._trust.verdicts[ring.name] if self._trust else None,
                    on_drop=lambda reason: self._log.warning("message_dropped", reason=reason),
                    on_peer=self._count_refused,
                )
                self._pulls.append(pull)
                self._pushes[ring.name] = await open_push(
                    ring.stages[0].address,
                    sender=f"{ring.name}/coordinator",
                    incarnation=self._incarnation,
                    max_bytes=self.config.limits.max_frame_bytes,
                    security=self._trust.heads[ring.name] if self._trust else None,
                    emulate=self.config.emulate,
                    on_peer=partial(self._see_head, ring),
                )
        except LinkError:
            await self.close()
            raise
        self._recall()
        self._step(Tick())

    def move(self, rings: Sequence[RingSpec]) -> None:
        """The same rings with other addresses: the heads' are taken in."""
        for ring in rings:
            self.scheduler.rings[ring.name].spec = ring
            if self._pushes[ring.name].address != ring.head.address:
                self._pushes[ring.name].redirect(ring.head.address)

    def _recall(self) -> None:
        """Tell the core what an earlier coordinator wrote down."""
        count = 0
        for said in self._saver.remembered() if self._saver else ():
            self._salts[root_hash(said.fingerprint, said.salt)] = said.salt
            self._step(said)
            count += 1
        if self._saver is not None:
            self._log.info("remembered", prefixes=count)

    async def wait(self) -> None:
        """Return when a link is closed; raise what went wrong in a callback."""
        waits = [asyncio.ensure_future(pull.wait()) for pull in self._pulls]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            for future in waits:
                future.cancel()

    async def close(self) -> None:
        """Close the links and end every stream with an error event."""
        if self._timer is not None:
            self._timer.cancel()
        if self._saver is not None:
            self._saver.close()
        for pull in self._pulls:
            await pull.close()
        for push in self._pushes.values():
            await push.close()
        self._pulls.clear()
        self._pushes.clear()
        for stream in list(self._streams.values()):
            stream.put(Failed(stream.turn, 503, "shutting_down", "the server is shutting down"))
        self._streams.clear()

    # ---- the gateway's Engine ----

    def submit(
        self,
        prompt: Sequence[int],
        *,
        budget: int,
        stops: Sequence[int] = (),
        sampling: Sampling,
        salt: bytes = b"",
        reuse: bool = True,
        hint: str = "",
        keep_s: float = 0.0,
    ) -> TurnStream:
        """Start a turn. Raises TurnError when it is refused at once."""
        interrupt = self._verify.interrupt() if self._verify else None
        if interrupt is not None:
            self._step(interrupt)
        self._last_turn += 1
        turn = self._last_turn
        stream = self._streams[turn] = TurnStream(self, turn)
        refused = self._step(
            Submit(turn, tuple(prompt), budget, tuple(stops), sampling, salt, reuse, hint, keep_s)
        )
        for action in refused:
            if isinstance(action, Failed) and action.turn == turn:
                raise TurnError(action.status, action.code, action.message)
        return stream

    def cancel(self, turn: int, reason: str = "cancelled") -> bool:
        """End a turn; False when there is no such turn (any more)."""
        if turn not in self._streams:
            return False
        self._step(Cancel(turn, reason))
        return True

    def free(self, ring: str, slot: int) -> int:
        """Drop what is resident in a slot or parked prefix; see coord.http.engine."""
        found, holding = self._holding(ring, slot)
        if found.phase is not Phase.READY:
            raise TurnError(503, "not_ready", f"ring {ring}: {found.detail}")
        if holding.turn is not None:
            raise TurnError(409, "slot_busy", f"a turn writes in slot {slot} of ring {ring}")
        rows = holding.resident
        if rows:
            self._step(FreeSlot(ring, slot))
        return rows

    def keep(self, ring: str, slot: int, keep_s: float) -> None:
        """Don't give a slot up for keep_s seconds; see coord.http.engine."""
        found, holding = self._holding(ring, slot)
        if slot >= len(found.ledger.slots):
            raise TurnError(409, "slot_parked", f"{slot} is parked: only slots can be kept")
        if keep_s and holding.turn is None and not holding.resident:
            raise TurnError(409, "slot_empty", f"slot {slot} of ring {ring} holds nothing")
        before = holding.keep_until
        self._step(KeepSlot(ring, slot, keep_s))
        if keep_s and holding.keep_until == before:
            text = f"no slot of ring {ring} would be left to give up: all others are kept"
            raise TurnError(409, "nothing_left_to_give_up", text)

    async def measure(self, ring: str, *, wide: bool) -> dict[str, object]:
        """Measure a ring's machines and links; see coord.http.engine."""
        found = idle_ring(self.scheduler, ring, time.monotonic())
        security = self._trust.heads[ring] if self._trust else None
        return await self._survey.measure(found, security, wide=wide)

    def _holding(self, ring: str, slot: int) -> tuple[Ring, Holding]:
        found = self.scheduler.rings.get(ring)
        if found is None or not found.ledger.has(slot):
            raise TurnError(404, "slot_not_found", f"no slot {slot} in a ring {ring!r}", "slot")
        return found, found.ledger.holding(slot)

    def residents(self) -> list[Resident]:
        """Every slot and parked prefix; see coord.http.engine."""
        return residents(self.scheduler, self._salts)

    def ready(self) -> tuple[bool, str]:
        """(True, "") when a token has been round some ring, else what is missing, in words."""
        rings = self.scheduler.rings.values()
        if self._pushes and any(ring.phase is Phase.READY for ring in rings):
            return True, ""
        return False, "; ".join(f"{ring.name}: {ring.detail}" for ring in rings)

    def progress(self) -> dict[str, object]:
        """Per ring and stage: state, progress (0..1) and detail, for GET /ready."""
        return {
            name: {
                stage.name: beat(ring.heartbeats.get(stage.name), time.monotonic())
                for stage in ring.spec.stages
            }
            for name, ring in self.scheduler.rings.items()
        }

    def counters(self) -> dict[str, float]:
        """Counters and gauges for GET /metrics, by name without prefix."""
        found = counters(self.scheduler) | link_counters([pull.counts for pull in self._pulls])
        found["refused_peers_total"] = self._refusals.total
        if self._verify is not None:
            found["verify_runs_total"] = self._verify.runs
            found["verify_mismatches_total"] = self._verify.mismatches
            found["verify_skipped_total"] = self._verify.skipped
        if self._saver is not None:
            found["state_looks_total"] = self._saver.looks
            found["state_look_seconds_total"] = self._saver.look_s
        return found

    def describe(self) -> dict[str, object]:
        """GET /ring: rings, stages, slots and residency, as JSON values."""
        now = time.monotonic()
        return {
            "model": self.config.model.name,
            "max_model_len": self.limits.max_model_len,
            "uptime_s": round(time.time() - self.started_at, 1),
            "turns": {"running": self.scheduler.running(), "waiting": self.scheduler.waiting()},
            "rings": [describe_ring(ring, now) for ring in self.scheduler.rings.values()],
        }

    # ---- the core's shell ----

    def drafted(self, frame: Drafted) -> None:
        """The draft model has answered."""
        self._step(frame)

    def _received(self, frame: Frame, envelope: Envelope) -> None:
        self._survey.heard(frame)
        self._step(frame, Direction.IN, envelope)

    def _see_head(self, ring: RingSpec, event: PeerEvent) -> None:
        if self._refused.note(event, time.monotonic()) is not None:
            self._log.warning("link_refused", address=event.address, advice=SAME_KEYS)
        if event.event == "disconnected" and ring.name in self._pushes:
            self._step(StageLost(ring.name, ring.head.name, "the link to it ended"))

    def _count_refused(self, event: PeerEvent) -> None:
        said = self._refusals.note(event, time.monotonic())
        if said is not None:
            self._log.warning("peer_refused", **said)

    def _step(
        self,
        frame: Frame,
        direction: Direction = Direction.LOCAL,
        envelope: Envelope | None = None,
    ) -> list[Action]:
        now_ns = time.monotonic_ns()
        link = envelope.sender if envelope is not None else "coordinator"
        self._record(Record(now_ns, time.time_ns(), direction, link, frame, envelope))
        try:
            actions = self.scheduler.handle(frame, now_ns / 1e9)
            for action in actions:
                self._perform(action)
                found = self._verify.heard(action, now_ns / 1e9) if self._verify else None
                if found is not None:
                    self._report(found)
        finally:  # what came in and what was sent, in one write
            if self._recorder is not None:
                self._recorder.flush()
        if self._saver is not None:
            self._saver.note(frame, actions)
        self._note_phases()
        self._set_timer(now_ns / 1e9)
        return actions

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self._send(action)
            return
        if isinstance(action, Draft):
            assert self._drafts is not None
            self._drafts.ask(action)
            return
        if isinstance(action, Admitted):
            self._note_salt(action)
        if self._drafts is not None and isinstance(action, (Finished, Failed)):
            self._drafts.forget(action.turn)
        stream = self._streams.get(action.turn)
        if stream is not None:
            stream.put(action)
            if isinstance(action, (Finished, Failed)):
                del self._streams[action.turn]

    def _note_salt(self, admitted: Admitted) -> None:
        turn = self.scheduler.turns[admitted.turn]
        assert turn.chain is not None, turn
        self._salts[turn.chain.root] = turn.submit.salt
        if len(self._salts) > MAX_SALTS:
            rings = self.scheduler.rings.values()
            chains = [holding.chain for ring in rings for _, holding in holdings(ring)]
            roots = {chain.root for chain in chains if chain is not None} | {turn.chain.root}
            for root in [root for root in self._salts if root not in roots]:
                del self._salts[root]

    def _send(self, action: Send) -> None:
        frame = action.frame
        push = self._pushes.get(frame.ring)
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()  # before anybody can have it
        direction, envelope = Direction.UNSENT, None
        if push is not None:  # else closing
            try:
                direction, envelope = Direction.OUT, push.send(frame)
            except LinkError as error:  # the frame's timeout will call the roll
                self._log.warning("frame_not_sent", ring=frame.ring, error=str(error))
        record = Record(now_ns, wall_ns, direction, frame.ring, frame, envelope)
        self._record(record, None if push is None or envelope is None else push.header)

    def _record(self, record: Record, header: Buffer | None = None) -> None:
        if self._verify is not None:
            self._verify.record(record)
        if self._recorder is not None:
            self._recorder.record(
                record.mono_ns,
                record.wall_ns,
                record.direction,
                record.link,
                record.frame,
                envelope=record.envelope,
                header=header,
                wait=True,
            )

    def _note_phases(self) -> None:
        for name, ring in self.scheduler.rings.items():
            if self._phases.get(name) != (ring.phase, ring.detail):
                self._phases[name] = ring.phase, ring.detail
                self._log.info(
                    "ring", ring=name, state=ring.phase.value, detail=ring.detail, epoch=ring.epoch
                )

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        verify = self._verify.deadline() if self._verify else None
        deadlines = [at for at in (self.scheduler.deadline(), verify) if at is not None]
        if deadlines:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(deadlines) - now), self._tick)

    def _tick(self) -> None:
        self._step(Tick())
        if self._verify is not None:
            submit = self._verify.next(self._last_turn + 1, time.monotonic())
            if submit is not None:
                self._last_turn += 1
                self._step(submit)

    def _report(self, found: Mismatch) -> None:
        """Warm and cold differ: say so, and write both turns' frames down."""
        assert self._verify is not None
        header = LogHeader("coordinator", "verify", self._incarnation, "", time.time_ns())
        write = self._verify.mismatches <= MAX_WRITTEN
        said = report(found, self._logs if write else None, header)
        self._log.error("verify_mismatch", **said)
