"""The coordinator and stage cores of one ring in this process, behind the real HTTP API.

Links are queues and time stands still between events, so that a request costs milliseconds and
every number is exact. By default two stages of the toy: its tokens are bytes, and its answers bytes
that are seldom text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import httpx

from coord.actions import Action, Admitted, Send, Tokens
from coord.coordinator import Coordinator
from coord.gateway import Settings, build_app
from coord.http.keys import Key
from coord.http.limits import Door
from coord.tokenizer import ByteTokenizer, Tokenizer
from pipeline.model import StageModel, ToyModel
from pipeline.stage import CopyRows, DropRows, Forward, Stage
from pipeline.stage import Send as StageSend
from transport.config import Config, Limits, Model
from transport.config import Coordinator as CoordinatorSpec
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import Forwarded, Frame, Heartbeat, Run, StageState

Call = Callable[..., Coroutine[Any, Any, httpx.Response]]


class LocalRing(Coordinator):
    """models: one for each stage. sent: every frame that left the coordinator."""

    def __init__(
        self,
        *,
        slots: int = 4,
        park_bytes: int = 0,
        models: Sequence[StageModel] = (),
        queue_turns: int = 256,
        resume_s: float = 60.0,
    ) -> None:
        self.models = models or [
            ToyModel((i, i + 1), 2, slots=slots, capacity=1024) for i in range(2)
        ]
        infos = [model.info for model in self.models]
        stages = tuple(
            StageSpec(f"s{i}", f"tcp://s{i}:1", info.layers) for i, info in enumerate(infos)
        )
        bounds = Limits(
            slots=infos[0].slots,
            max_model_len=infos[0].capacity,
            chunk_tokens=64,
            park_bytes=park_bytes,
            queue_turns=queue_turns,
            resume_s=resume_s,
            lost_after_s=1e6,  # nobody beats after the start
            frame_timeout_s=1e6,
        )
        config = Config(
            Model("toy", "toy", "float32"),
            (RingSpec("r0", "tcp://c:1", stages),),
            CoordinatorSpec("127.0.0.1:0"),
            bounds,
        )
        super().__init__(config, 1, infos[0].vocabulary)
        self._stages = [Stage("r0", f"s{i}", 1, info, park_bytes) for i, info in enumerate(infos)]
        self._links: list[deque[Frame]] = [deque() for _ in range(len(stages) + 1)]
        self._pumping = False
        self.held = False  # frames wait on the first link
        self.sent: list[Frame] = []
        self.last_tokens: list[int] = []  # of the newest turn

    def _perform(self, action: Action) -> None:
        if isinstance(action, Admitted):
            self.last_tokens = []
        elif isinstance(action, Tokens):
            self.last_tokens.extend(action.tokens)
        super()._perform(action)

    async def open(self) -> None:
        """Form the ring."""
        for index in range(len(self._stages)):
            self._step(Heartbeat("r0", f"s{index}", 1, StageState.READY, 1.0, "", 1, 1))
        self._pushes = {"r0": None}  # type: ignore[dict-item] # no link is used
        while not self.ready()[0]:
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._pushes = {}
        await super().close()

    def prefilled(self) -> list[int]:
        """Rows of every prefill segment so far, in order."""
        return [
            len(segment.tokens)
            for frame in self.sent
            if isinstance(frame, Run)
            for segment in frame.segments
            if segment.kind == "prefill" and segment.turn
        ]

    def _send(self, action: Send) -> None:
        self.sent.append(action.frame)
        self._links[0].append(action.frame)
        if not self._pumping and not self.held:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Deliver all frames."""
        self._pumping = True
        while any(self._links) and not self.held:
            at = next(index for index, link in enumerate(self._links) if link)
            frame = self._links[at].popleft()
            if at == len(self._stages):
                self._step(frame)
                self.scheduler.check()
            else:
                self._take(at, frame)
        self._pumping = False

    def _take(self, index: int, frame: Frame) -> None:
        stage, model = self._stages[index], self.models[index]
        for action in stage.handle(frame, 0.0):
            match action:
                case StageSend():
                    self._links[index + 1].append(action.frame)
                case Forward():
                    assert action.rows is None, "no row was refused"
                    run = action.run
                    output = model.forward(run.segments, run.payload, action.histories)
                    done = Forwarded(run.epoch, run.seq, output.payload, output.results)
                    self._take(index, done)
                case CopyRows():
                    model.copy(action.source, action.target, action.length)
                case DropRows():
                    model.drop(action.parked)


def play(
    scene: Callable[[LocalRing, Call], Awaitable[None]],
    *,
    keys: tuple[Key, ...] = (),
    tokenizer: Tokenizer | None = None,
    settings: Settings | None = None,
    door: Door | None = None,
    **options: Any,
) -> None:
    """Run a scene against the HTTP API of a fresh ring; call(method, path, body, key=...)."""

    async def main() -> None:
        ring = LocalRing(**options)
        await ring.open()
        used = replace(settings or Settings(), api_keys=keys)
        app = build_app(ring, tokenizer or ByteTokenizer(), used, door)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def call(
                method: str, path: str, body: object = None, key: str | None = None, **more: str
            ) -> httpx.Response:
                headers = {name.replace("_", "-"): value for name, value in more.items()}
                if key is not None:
                    headers["authorization"] = f"Bearer {key}"
                return await client.request(method, path, json=body, headers=headers)

            await scene(ring, call)
        await ring.close()

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())
