"""Owns the HTTP API: requests in, turns to the engine, answers out. Decides nothing about rings.

See docs/api.md. The engine is a protocol, so that tests script it and the coordinator is one of it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from coord.actions import TurnError
from coord.help import pointer
from coord.history import History, spelling
from coord.http.answer import Answer, ChatAnswer, TextAnswer
from coord.http.choices import Choices
from coord.http.connection import OPEN_PATHS
from coord.http.engine import Engine
from coord.http.errors import ClientGoneError, Edge, install, read_body, sse_error
from coord.http.keys import SESSION_CHARS, Caller, Key, Keyring, derive_hint, derive_salt
from coord.http.limits import BodyBudget, Door
from coord.http.live import LiveRing
from coord.http.metrics import CONTENT_TYPE, Metrics
from coord.http.openapi import document
from coord.http.pages import Pages
from coord.http.prompting import Prompt, check_tools, prompt_of
from coord.http.reply import Delta, Reply, Wanted
from coord.http.rings import RingApi
from coord.http.sampling import sampling_of, seeds_of
from coord.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from coord.http.sse import DONE, EventStream, encode_event, until_gone
from coord.http.strict import Strict
from coord.tokenizer import Tokenizer
from coord.toolcalls import sent_back

R = TypeVar("R", bound=Strict)
MAX_SESSIONS = 16384  # hints whose last salt is remembered, to explain a miss: 3 MB

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """The API's own configuration. No api_keys: everybody may come in.

    deadline_s, per_key_turns: docs/ring-toml.md.
    """

    api_keys: tuple[Key, ...] = ()
    served_models: tuple[str, ...] = ()  # names to answer to, instead of the engine's
    body_limit_bytes: int = 4 << 20  # text of 1 M tokens; the worst JSON of it parses in 0.9 s
    body_timeout_s: float = 30.0
    bodies_limit_bytes: int = 256 << 20  # of all requests together while they are received
    deadline_s: float = 3600.0
    per_key_turns: int = 0
    keep_alive_s: float = 5.0
    retry_after_s: int = 1


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: Settings,
    door: Door | None = None,
    history: History | None = None,
) -> FastAPI:
    """The ASGI app of one coordinator.

    door: one's own, where the server shall be able to drain. history: what was said before it
    started.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    door = door or Door(engine.counters, per_key_turns=settings.per_key_turns)
    gateway = _Gateway(engine, tokenizer, settings, door, History() if history is None else history)
    rings, pages = RingApi(engine, tokenizer), Pages(key_needed=bool(settings.api_keys))
    live = LiveRing(rings, door, settings.keep_alive_s)
    for path, handler in (
        ("/v1/chat/completions", gateway.chat),
        ("/v1/completions", gateway.complete),
        ("/v1/cancel/{reply}", gateway.cancel),
        ("/tokenize", gateway.tokenize),
        ("/detokenize", gateway.detokenize),
        ("/ring/measure", rings.measure),
    ):
        app.add_api_route(path, handler, methods=["POST"])
    for path, view in (
        ("/v1/models", gateway.models),
        ("/v1/models/{name:path}", gateway.model),
        ("/health", gateway.health),
        ("/ready", gateway.ready),
        ("/metrics", gateway.metrics),
        ("/ring", rings.view),
        ("/ring/events", live.watch),
        ("/openapi.json", gateway.describe),
    ):
        app.add_api_route(path, view, methods=["GET"])
    app.add_api_route("/ring/slots/{number}", rings.evict, methods=["DELETE"])
    app.add_api_route("/ring/slots/{number}", rings.keep, methods=["PUT"])
    pages.add_to(app)
    install(app, retry_after_s=settings.retry_after_s)
    open_paths = (*OPEN_PATHS, *pages.paths)
    app.add_middleware(Edge, keys=Keyring(settings.api_keys), open_paths=open_paths)
    return app


class _Gateway:
    """The handlers, and the replies that run."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        door: Door,
        history: History,
    ) -> None:
        self._engine = engine
        self._door = door
        self._bodies = BodyBudget(settings.bodies_limit_bytes)
        self._tokenizer = tokenizer
        self._settings = settings
        self._models = settings.served_models or engine.limits.models
        self._metrics = Metrics(engine.counters)
        self._created = int(time.time())
        self._history = history
        self._salts: OrderedDict[str, bytes] = OrderedDict()  # a session's hint -> its last salt

    # ---- completions ----

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self._door.check_open()  # before a body is read for nothing
        wanted = await self._parse(request, ChatRequest)
        model = self._known_model(wanted.model)
        salt = derive_salt(_caller(request).tenant, wanted.cache_salt)
        prompt = await prompt_of(self._tokenizer, self._history, salt, wanted)
        answer = ChatAnswer(
            f"chatcmpl-{uuid.uuid4().hex}",
            int(time.time()),
            model,
            logprobs=wanted.logprobs,
            null_usage=wanted.include_usage,
        )
        return await self._answer(request, wanted, prompt, answer)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        self._door.check_open()
        wanted = await self._parse(request, CompletionRequest)
        model = self._known_model(wanted.model)
        prompt = wanted.single
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._tokenizer.encode, prompt)
        self._check_tokens(prompt, "prompt")
        answer = TextAnswer(
            f"cmpl-{uuid.uuid4().hex}",
            int(time.time()),
            model,
            logprobs=wanted.logprobs is not None,
            null_usage=wanted.include_usage,
        )
        return await self._answer(request, wanted, Prompt(prompt), answer)

    async def cancel(self, request: Request, reply: str) -> Response:
        """POST /v1/cancel/{id}: ids are random, so knowing a tenant's is the right to use it."""
        running = self._door.find(_caller(request).tenant, reply)
        if running is None:
            raise TurnError(404, "reply_not_found", f"no running reply has the id {reply}", "id")
        for choice in running:
            choice.cancel()
        return JSONResponse({"id": reply, "cancelled": True})

    async def _answer(
        self,
        request: Request,
        wanted: ChatRequest | CompletionRequest,
        prompt: Prompt,
        answer: Answer,
    ) -> Response:
        try:
            choices = self._submit(request, wanted, prompt, answer.id)
        except TurnError as refusal:
            self._metrics.failed(refusal.code)
            raise
        _log.info("turn", id=answer.id, prompt=len(prompt.whole), stream=wanted.stream)
        headers = {
            "x-request-id": answer.id,
            "x-kvring-session": _hint(request, wanted)[:SESSION_CHARS],
        }
        if wanted.stream:
            return EventStream(
                _events(choices, answer, include_usage=wanted.include_usage),
                keep_alive_s=self._settings.keep_alive_s,
                on_close=choices.close,
                headers=headers,
            )
        deltas = await _collect(choices, request)
        return JSONResponse(answer.whole(choices, deltas), headers=headers)

    def _submit(
        self,
        request: Request,
        wanted: ChatRequest | CompletionRequest,
        prompt: Prompt,
        reply_id: str,
    ) -> Choices:
        """Start a turn for each choice, or none. Their prompt is computed once (single flight)."""
        whole = prompt.whole
        budget = self._budget(len(whole), wanted.limit)
        if wanted.min_tokens > budget:
            text = f"min_tokens: {wanted.min_tokens}, but the answer has at most {budget}"
            raise TurnError(400, "invalid_value", text, "min_tokens")
        self._check_tokens(wanted.stop_token_ids, "stop_token_ids")
        self._check_tokens([int(token) for token in wanted.logit_bias], "logit_bias")
        stops = {*wanted.stop_token_ids, *(() if wanted.ignore_eos else self._tokenizer.stops)}
        self._door.check(_caller(request), wanted.n)
        tenant = _caller(request).tenant
        salt, chat = derive_salt(tenant, wanted.cache_salt), isinstance(wanted, ChatRequest)
        session = wanted.session(request.headers.get("x-session-id"))
        common = Wanted(
            prompt=whole,
            stops=frozenset(stops),
            stop_strings=tuple(wanted.stops),
            logprobs=wanted.wanted_logprobs is not None,
            strip=chat,
            seed=0,
            timeout_s=min(self._settings.deadline_s, wanted.kvring.timeout_s),
            reuse=wanted.kvring.reuse,
            other_salt=self._salt_changed(derive_hint(tenant, session), salt),
            min_tokens=wanted.min_tokens,
            forced=prompt.forced,
            calling=prompt.calling,
        )
        running = self._door.start(tenant, reply_id)
        try:
            for index, seed in enumerate(seeds_of(wanted)):
                stream = self._engine.submit(
                    whole,
                    budget=budget,
                    stops=sorted(stops),
                    sampling=sampling_of(wanted, seed),
                    salt=salt,
                    reuse=wanted.kvring.reuse,
                    hint=_hint(request, wanted),
                    keep_s=wanted.kvring.keep_s,
                )
                running[index] = Reply(
                    stream,
                    self._tokenizer,
                    replace(common, seed=seed, index=index),
                    self._metrics,
                    on_close=partial(
                        self._ended, tenant, reply_id, index, prompt.ids, salt if chat else None
                    ),
                )
        except TurnError as refusal:
            for reply in list(running.values()):
                reply.close()
            self._door.drop(tenant, reply_id)
            raise self._door.full(refusal) from None
        return Choices(list(running.values()))

    def _salt_changed(self, session: str, salt: bytes) -> bool:
        """Note the salt of a session's request; True if its last one had another."""
        if not session:
            return False
        last = self._salts.pop(session, salt)
        self._salts[session] = salt
        if len(self._salts) > MAX_SESSIONS:
            self._salts.popitem(last=False)
        return last != salt

    def _ended(
        self, tenant: bytes, reply_id: str, index: int, prompt: Sequence[int], salt: bytes | None
    ) -> None:
        """Forget a reply; remember what it said. salt: of a chat's history, None for no chat."""
        reply = self._door.end(tenant, reply_id, index)
        if reply is None:
            return
        tokens, text = reply.spoken
        if salt is not None and text:
            spelled = spelling(self._tokenizer, tokens, text, strip=True)
            if spelled is not None:
                self._history.add(salt, text, prompt, *spelled)
                if (called := reply.called) is not None:
                    self._history.mean(salt, sent_back(*called), text)
        report = reply.report()
        miss = report.pop("miss")  # a client's text belongs in no log
        reason = miss["reason"] if isinstance(miss, dict) else None
        _log.info("turn ended", id=reply_id, tokens=reply.completion_tokens, miss=reason, **report)

    def _budget(self, prompt: int, asked: int | None) -> int:
        length = self._engine.limits.max_model_len
        if prompt == 0:
            raise TurnError(400, "empty_prompt", "the prompt has no tokens", "prompt")
        if prompt >= length or prompt + (asked or 1) > length:
            wish = f" and {asked} for the answer" if asked is not None else ""
            raise TurnError(
                400,
                "context_length_exceeded",
                f"the context length is {length} tokens, but the request needs "
                f"{prompt + (asked or 1)}: {prompt} in the prompt{wish}",
                "messages" if asked is None else "max_tokens",
            )
        return asked if asked is not None else length - prompt

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self._tokenizer.vocabulary:
            raise TurnError(
                400,
                "invalid_value",
                f"{param}: {max(tokens)} is not a token id (below {self._tokenizer.vocabulary})",
                param,
            )

    async def _parse(self, request: Request, kind: type[R]) -> R:
        with self._bodies.body() as take:
            body = await read_body(
                request,
                limit_bytes=self._settings.body_limit_bytes,
                timeout_s=self._settings.body_timeout_s,
                take=take,
            )
        return parse(kind, body)

    def _known_model(self, name: str | None) -> str:
        if name is None:
            return self._models[0]
        if name not in self._models:
            served = ", ".join(self._models)
            raise TurnError(
                404, "model_not_found", f"no model {name!r} here, only {served}", "model"
            )
        return name

    # ---- models, tokens ----

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card(n) for n in self._models]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        return JSONResponse(self._card(self._known_model(name)))

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvring",
            "max_model_len": self._engine.limits.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        wanted = await self._parse(request, TokenizeRequest)
        self._known_model(wanted.model)
        if wanted.messages is not None:
            check_tools(self._tokenizer, wanted.messages, wanted.tools)
            messages = [message.plain() for message in wanted.messages]
            tools = [tool.plain() for tool in wanted.tools]
            tokens = await asyncio.to_thread(self._tokenizer.render, messages, tools)
        else:
            tokens = await asyncio.to_thread(
                self._tokenizer.encode, wanted.prompt or "", special=wanted.add_special_tokens
            )
        length = self._engine.limits.max_model_len
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: control tokens are spelled out."""
        wanted = await self._parse(request, DetokenizeRequest)
        self._known_model(wanted.model)
        self._check_tokens(wanted.tokens, "tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(wanted.tokens, special=True)})

    # ---- the ring ----

    async def health(self) -> Response:
        """GET /health: this process answers. Whether the ring does is /ready's (case 27)."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: 200, or 503 with what is missing and how far loading is."""
        ready, missing = self._engine.ready()
        state = "ready" if ready else "not ready"
        if self._door.draining:
            ready, state = False, "draining"
            missing = _draining(self._door.running)
        body = {"ready": ready, "state": state, "missing": missing, **self._engine.progress()}
        if not ready:
            body["doc"] = pointer(missing, "draining" if self._door.draining else "not_ready")
        headers = {} if ready else {"retry-after": str(self._settings.retry_after_s)}
        return JSONResponse(body, 200 if ready else 503, headers)

    async def describe(self) -> Response:
        """GET /openapi.json."""
        return JSONResponse(document())

    async def metrics(self, request: Request) -> Response:
        """GET /metrics. Totals tell how long others' prompts are, so it takes an admin's key."""
        if not _caller(request).admin:
            raise TurnError(403, "not_an_admin", "GET /metrics is for API keys marked admin")
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _draining(running: int) -> str:
    if not running:
        return "drained: no turn is running, and no new one is taken"
    many = "1 turn is" if running == 1 else f"{running} turns are"
    return f"draining: {many} still running"


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _hint(request: Request, wanted: ChatRequest | CompletionRequest) -> str:
    session = wanted.session(request.headers.get("x-session-id"))
    opening = wanted.opening if isinstance(wanted, ChatRequest) else ""
    return derive_hint(_caller(request).tenant, session, opening)


async def _events(
    choices: Choices, answer: Answer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """A stream's events: a finish_reason for each choice or one error, and [DONE] (cases 40-42)."""
    try:
        for chunk in answer.opening(len(choices.replies)):
            yield encode_event(chunk)
        async with aclosing(choices.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Delta):
                    yield encode_event(answer.chunk(piece))
                else:
                    yield encode_event(answer.closing(piece))
    except TurnError as error:
        yield sse_error(error)
        return
    if include_usage:
        yield encode_event(answer.usage_chunk(choices))
    yield DONE


async def _collect(choices: Choices, request: Request) -> list[Delta]:
    """All deltas. TurnError where a turn failed; ClientGoneError, and the turns are given up."""
    deltas: list[Delta] = []
    failure: TurnError | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(until_gone(request.receive))
            try:
                async with aclosing(choices.pieces()) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Delta):
                            deltas.append(piece)
            except TurnError as error:
                failure = error
            watcher.cancel()
    except* ClientGoneError:
        failure = TurnError(499, "client_gone", "the client closed the connection")
    finally:
        choices.close()
    if failure is not None:
        raise failure
    return deltas
