"""Owns a stage process: an asyncio shell (heartbeats, signals) and one compute thread.

The compute thread owns the data sockets and runs recv -> core -> forward -> send: a torch forward
in the event loop would delay its timers by 100 ms, beside it by 0.2 ms. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import structlog

from pipeline.forward import perform_forward
from pipeline.measure import machine_of
from pipeline.model import StageModel
from pipeline.slowed import Slowed
from pipeline.stage import Action, CopyRows, DropRows, Forward, Send, Stage, Survey
from transport.config import Limits, Ring
from transport.config import Stage as StageSpec
from transport.emulate import Emulate
from transport.frame import (
    Buffer,
    Envelope,
    Frame,
    Heartbeat,
    Measured,
    Refusal,
    Reject,
    StageState,
)
from transport.framelog import Direction
from transport.link import LinkError, PullLink, PushLink, open_push
from transport.peers import SAME_KEYS, PeerEvent, Refusals
from transport.recorder import Recorder
from transport.trust import StageTrust

LOADING_BEAT_S = 0.2  # heartbeats while loading carry the progress, and then "ready"
POLL_S = 0.2  # how long the compute thread may take to see that it should stop
LEAVE_S = 0.5  # for the last frame to reach the network when the process ends
Progress = Callable[[float, str], None]
LoadModel = Callable[[Progress], StageModel]


@dataclass(slots=True)
class Status:
    """What the heartbeat says; the compute thread writes it, the event loop reads it."""

    state: StageState = StageState.LOADING
    progress: float = 0.0
    detail: str = "starting"

    def report(self, progress: float, detail: str) -> None:
        """Loading has come this far (0..1)."""
        self.progress, self.detail = min(1.0, max(0.0, progress)), detail


class _StoppedError(Exception):
    """The process is to end while its model is being loaded."""


class Worker:
    """The compute thread's work: load the block, then serve frames until `stop` is set."""

    def __init__(
        self,
        ring: Ring,
        spec: StageSpec,
        limits: Limits,
        load: LoadModel,
        incarnation: int,
        recorder: Recorder | None = None,
        emulate: Emulate | None = None,
        trust: StageTrust | None = None,
        device: str | None = None,
    ) -> None:
        """Device: where `load` puts the block; None for where ring.toml says."""
        self.ring, self.spec, self.limits = ring, spec, limits
        self.emulate = emulate
        self.trust = trust
        self.next_lost: Callable[[], None] | None = None  # called from a thread of the link's
        self.status = Status()
        self.stop = threading.Event()
        self.bound = threading.Event()
        self._load = load
        self._device = device or spec.device
        self._incarnation = incarnation
        self._recorder = recorder
        self._log = structlog.get_logger().bind(ring=ring.name, stage=spec.name)
        self._refusals, self._refused = Refusals(), Refusals()  # of others, and by the next
        self._push: PushLink | None = None

    def move(self, ring: Ring) -> None:
        """The same ring with other addresses: the next stage's is taken in. From any thread."""
        self.ring = ring
        if self._push is not None:
            self._push.redirect(ring.next_address(self.spec))

    def run(self) -> None:
        """Blocks until stopped. Raises LinkError, the model's own errors, or a bug's."""
        pull = PullLink(
            self.spec.listen,
            link=f"{self.ring.name}/{self.spec.name}",
            max_bytes=self.limits.max_frame_bytes,
            security=self.trust.incoming if self.trust else None,
            on_drop=lambda reason: self._log.warning("message_dropped", reason=reason),
            on_peer=self._count_refused,
        )
        push = None
        self.bound.set()
        try:
            self.status.report(0.0, "loading")
            started = time.monotonic()
            model = self._load(self._progress)
            if self.spec.layer_ms:
                model = Slowed(model, self.spec.layer_ms)
            push = PushLink(
                self.ring.next_address(self.spec),
                sender=f"{self.ring.name}/{self.spec.name}",
                incarnation=self._incarnation,
                timeout_s=self.limits.send_timeout_s,
                max_bytes=self.limits.max_frame_bytes,
                security=self.trust.outgoing if self.trust else None,
                emulate=self.emulate,
                on_peer=self._see_next,
            )
            self._push = push
            self.move(self.ring)  # it may have moved since
            core = Stage(
                self.ring.name,
                self.spec.name,
                self._incarnation,
                model.info,
                self.limits.park_bytes,
            )
            self.status.state = StageState.READY
            self.status.report(1.0, "")
            took = round(time.monotonic() - started, 2)
            self._log.info("loaded", layers=list(self.spec.layers), seconds=took)
            while not self.stop.is_set():
                frame = pull.recv(POLL_S)
                if frame is not None:
                    taken = self._take(
                        core, frame, Direction.IN, pull.address, pull.envelope, pull.header
                    )
                    self._perform(core, model, push, taken)
                    if self._recorder is not None:  # now that the frames are on their way
                        self._recorder.flush()
        except _StoppedError:
            return
        finally:
            pull.close()
            if push is not None:
                push.close(LEAVE_S)

    def _count_refused(self, event: PeerEvent) -> None:
        said = self._refusals.note(event, time.monotonic())
        if said is not None:
            self._log.warning("peer_refused", **said)

    def _see_next(self, event: PeerEvent) -> None:
        if self._refused.note(event, time.monotonic()) is not None:
            self._log.warning("link_refused", address=event.address, advice=SAME_KEYS)
        if event.event == "disconnected" and self.next_lost is not None:
            self.next_lost()

    def _progress(self, progress: float, detail: str) -> None:
        if self.stop.is_set():  # a large model loads for minutes; the signal should not wait
            raise _StoppedError
        self.status.report(progress, detail)

    def _perform(
        self, core: Stage, model: StageModel, push: PushLink, actions: list[Action]
    ) -> None:
        for action in actions:  # grows while it is walked: a forward's answer adds actions
            match action:
                case Send():
                    self._send(push, action.frame)
                case CopyRows():
                    model.copy(action.source, action.target, action.length)
                case DropRows():
                    model.drop(action.parked)
                case Forward():
                    done = perform_forward(model, action)
                    actions += self._take(core, done, Direction.LOCAL, self.spec.name, None)
                case Survey():
                    found = self._survey(model, action)
                    actions += self._take(core, found, Direction.LOCAL, self.spec.name, None)

    def _survey(self, model: StageModel, survey: Survey) -> Measured:
        asked, device = survey.asked, self._device
        own = machine_of(survey, model, self.ring, self.spec, self.limits, device)
        return Measured(asked.number, asked.wide, (*asked.machines, own))

    def _take(
        self,
        core: Stage,
        frame: Frame,
        direction: Direction,
        link: str,
        envelope: Envelope | None,
        header: Buffer | None = None,
    ) -> list[Action]:
        now_ns = time.monotonic_ns()
        if self._recorder is not None:
            self._recorder.record(
                now_ns,
                time.time_ns(),
                direction,
                link,
                frame,
                envelope=envelope,
                header=header,
                wait=True,
            )
        return core.handle(frame, now_ns / 1e9)

    def _send(self, push: PushLink, frame: Frame) -> None:
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()  # before anybody can have it
        direction, envelope = Direction.UNSENT, None
        try:
            direction, envelope = Direction.OUT, push.send(frame)
        except LinkError as error:  # the coordinator's frame timeout will call the roll
            self._log.warning("frame_not_sent", error=str(error))
        if self._recorder is not None:
            self._recorder.record(
                now_ns,
                wall_ns,
                direction,
                push.address,
                frame,
                envelope=envelope,
                header=push.header if envelope is not None else None,
                wait=True,
            )


async def run_stage(worker: Worker, incarnation: int, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises what ended the compute thread, after telling the coordinator."""
    ring, spec = worker.ring, worker.spec
    push = await open_push(
        ring.verdicts,
        sender=f"{ring.name}/{spec.name}/control",
        incarnation=incarnation,
        max_bytes=worker.limits.max_frame_bytes,
        security=worker.trust.control if worker.trust else None,
        emulate=worker.emulate,
    )
    loop, process = asyncio.get_running_loop(), psutil.Process()

    def beat() -> None:
        if not worker.bound.is_set():
            return  # started twice by mistake: the ring must not hear of it and fall apart
        status = worker.status
        rss = process.memory_info().rss
        frame = Heartbeat(
            ring.name,
            spec.name,
            incarnation,
            status.state,
            status.progress,
            status.detail[:4000],
            os.getpid(),
            rss,
        )
        try:
            push.send(frame)
        except LinkError as error:
            structlog.get_logger().warning("heartbeat_not_sent", error=str(error))

    def say_lost() -> None:
        """The link's end is seen here long before the heartbeats of what was there are missed."""
        where = worker.ring.next_address(spec)
        lost = Reject(ring.name, 0, 0, spec.name, Refusal.LINK, f"its link to {where} ended")
        if where != ring.verdicts and not stop.is_set():
            with contextlib.suppress(LinkError):  # then the heartbeats will tell
                push.send(lost)

    def next_lost() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            loop.call_soon_threadsafe(say_lost)

    worker.next_lost = next_lost
    compute = asyncio.ensure_future(_in_thread(worker.run, f"compute-{spec.name}"))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not compute.done() and not stopping.done():
            beat()
            loading = worker.status.state is StageState.LOADING
            pause = LOADING_BEAT_S if loading else worker.limits.heartbeat_s
            await asyncio.wait(
                (compute, stopping), timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
        worker.stop.set()
        try:
            await compute
        except Exception as error:
            worker.status.state = StageState.FAILED
            worker.status.report(worker.status.progress, str(error))
            beat()
            raise
    finally:
        worker.stop.set()
        worker.next_lost = None
        stopping.cancel()
        await push.close(LEAVE_S)


async def _in_thread(work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread of its own; unlike a pool's it does not outlive a cancelled loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def body() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    await done
