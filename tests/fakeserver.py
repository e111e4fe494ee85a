"""A scripted server with kvring's API, for the tests of the tools: one token per word, no model.

It answers with words derived from the whole prompt, remembers the last prompt as resident, and
counts what a test wants to see. Runs in a thread on a free port of this machine.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

RING: dict[str, Any] = {
    "model": "fake",
    "max_model_len": 4096,
    "uptime_s": 75.5,
    "turns": {"running": 1, "waiting": 0},
    "rings": [
        {
            "name": "r0",
            "state": "ready",
            "detail": "",
            "epoch": 3,
            "fingerprint": "ab12cd34ef567890",
            "exact": True,
            "reuse": True,
            "frames_in_flight": 2,
            "window_frames": 4,
            "hop_ms": 0.413,
            "stages": [
                {
                    "name": "s0",
                    "address": "tcp://127.0.0.1:7000",
                    "state": "ready",
                    "progress": 1.0,
                    "detail": "",
                    "layers": [0, 10],
                    "pid": 4711,
                    "rss_bytes": 812_000_000,
                    "busy_share": 0.43,
                    "heartbeat_age_s": 0.21,
                },
                {"name": "s1", "state": "loading", "progress": 0.4, "detail": "layer 14"},
            ],
            "slots": [
                {"slot": 0, "resident": 2048, "capacity": 4096, "turn": 17, "idle_s": 0.0},
                {"slot": 1, "resident": 0, "capacity": 4096, "turn": None, "idle_s": None},
            ],
        }
    ],
}


class FakeServer:
    """What a test sets and reads. `replies`: texts to send before the derived ones."""

    def __init__(self) -> None:
        self.url = ""
        self.port = 0
        self.stop: Callable[[], None] = lambda: None
        self.not_ready = 0  # how many times /ready still says 503
        self.replies: list[str] = []
        self.endless = False  # the reply goes on until the client is gone
        self.error_after: int | None = None  # words before an error event
        self.reject: tuple[int, str, str] | None = None  # status, message, code of the next turn
        self.cold_differs = False  # a server that breaks the promise
        self.api_key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.started = threading.Event()
        self._resident: list[str] = []

    def app(self) -> FastAPI:
        """The routes."""
        app = FastAPI()
        app.add_api_route("/ready", self._ready, methods=["GET"], response_model=None)
        app.add_api_route("/ring", self._ring, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"], response_model=None)
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        return app

    async def _ready(self) -> Response:
        if self.not_ready > 0:
            self.not_ready -= 1
            stages = {"s0": {"state": "ready", "progress": 0.6}, "s1": {"progress": 0.2}}
            body = {"ready": False, "missing": "r0: waiting for s1", "r0": stages}
            return JSONResponse(body, status_code=503)
        return JSONResponse({"ready": True, "missing": ""})

    async def _ring(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse(RING)

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        words = str(body["prompt"]).split()
        return JSONResponse({"tokens": list(range(len(words))), "count": len(words)})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        denied = self._denied(request)
        if denied is not None:
            return denied
        if self.reject is not None:
            (status, message, code), self.reject = self.reject, None
            return _error(status, message, code)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    def _denied(self, request: Request) -> Response | None:
        if self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return _error(401, "wrong API key", "invalid_api_key")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt = [word for message in body["messages"] for word in message["content"].split()]
        reuse = body.get("kvring", {}).get("reuse", True)
        matched = min(_common(prompt, self._resident), len(prompt) - 1) if reuse else 0
        words = self._reply(prompt, reuse, int(body.get("max_tokens") or 6))
        try:
            yield ": prefilling\n\n"
            for index, word in enumerate(words):
                if index == self.error_after:
                    yield "event: error\n"
                    yield _event({"error": {"message": "ring lost", "code": "ring_lost"}})
                    yield "data: [DONE]\n\n"
                    return
                text = word if index == 0 else f" {word}"
                yield _event({"choices": [{"index": 0, "delta": {"content": text}}]})
                self.started.set()
            while self.endless:
                yield _event({"choices": [{"index": 0, "delta": {"content": " more"}}]})
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if reuse:
            self._resident = prompt + words[:-1]
        finish = "length" if len(words) >= int(body.get("max_tokens") or 1000) else "stop"
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        last["kvring"] = {
            "ring": "r0",
            "slot": 1,
            "matched": matched,
            "prefilled": len(prompt) - matched,
            "ttft_ms": 1.5,
            "tokens_per_s": 123.4,
        }
        if matched:
            last["kvring"]["miss"] = {"position": matched, "reason": "edited"}
            last["kvring"] |= {"drafts_accepted": 3, "drafts_rejected": 1}
        yield _event(last)
        if body.get("stream_options", {}).get("include_usage"):
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(words)}
            usage["prompt_tokens_details"] = {"cached_tokens": matched}
            yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _reply(self, prompt: list[str], reuse: bool, count: int) -> list[str]:
        if self.replies:
            return self.replies.pop(0).split()
        salt = "" if reuse or not self.cold_differs else "cold"
        digest = blake2b((salt + " ".join(prompt)).encode()).hexdigest()
        return [digest[i * 4 : i * 4 + 4] for i in range(min(count, 8))]


@contextmanager
def serve(port: int = 0) -> Iterator[FakeServer]:
    """A fake server that listens until the block is left, or it is told to stop."""
    fake = FakeServer()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(16)  # connections wait here until the thread below accepts them
    fake.port = listener.getsockname()[1]
    fake.url = f"http://127.0.0.1:{fake.port}"
    config = uvicorn.Config(
        fake.app(), log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()
        listener.close()

    fake.stop = stop
    try:
        yield fake
    finally:
        stop()


def _common(first: list[str], second: list[str]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error(status: int, message: str, code: str) -> Response:
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return JSONResponse(body, status_code=status)
