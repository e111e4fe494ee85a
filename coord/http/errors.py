"""Owns the edge of the HTTP API: who may come in, how much they may send, and how errors look.

One envelope on every path (case 43): {"error": {message, type, param, code}}, and
`doc` where docs/troubleshooting.md has more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coord.actions import TurnError
from coord.help import pointer
from coord.http.jsonline import dump_line
from coord.http.keys import ANYBODY, Caller, Keyring

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_INTERNAL = TurnError(500, "internal_error", "an internal error; the server's log has the details")

_log = structlog.get_logger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody left to answer."""


def body_of(error: TurnError) -> dict[str, object]:
    """The error envelope as JSON-able data. doc: where to read on, if there is a section."""
    kind = _TYPES.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    where = pointer(error.message, error.code)
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
            **({} if where is None else {"doc": where}),
        }
    }


def install(app: FastAPI, *, retry_after_s: int) -> None:
    """Give the app's own errors and the framework's the one envelope."""

    async def turn_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TurnError), error
        return respond(error, retry_after_s=retry_after_s)

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException), error
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = _CODES.get(error.status_code, "http_error")
        response = respond(TurnError(error.status_code, code, message))
        response.headers.update(error.headers or {})
        return response

    async def client_gone(_: Request, __: Exception) -> JSONResponse:
        return respond(TurnError(499, "client_gone", "the client closed the connection"))

    app.add_exception_handler(TurnError, turn_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(ClientGoneError, client_gone)


def respond(error: TurnError, *, retry_after_s: int = 1) -> JSONResponse:
    """The response of an error, with the headers its status asks for."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s or retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413) or error.code == "too_many_bodies":
        headers["connection"] = "close"  # the rest of the body is never read
    return JSONResponse(body_of(error), error.status, headers)


async def read_body(
    request: Request,
    *,
    limit_bytes: int,
    timeout_s: float,
    take: Callable[[int], None] = lambda _: None,
) -> bytes:
    """The whole body, refused before it is held (case 46).

    take: told of the size of each part, may refuse it. TurnError 400 for a Content-Length that is
    no count or not the body's, 413 past the limit by the header or by what really comes, 408 when
    it does not come in time.
    """
    declared: int | None = None
    header = request.headers.get("content-length")
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) <= 18):
            raise TurnError(400, "invalid_content_length", "Content-Length is not a count of bytes")
        declared = int(header)
        if declared > limit_bytes:
            raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                take(len(part))
                parts.append(part)
    except TimeoutError:
        raise TurnError(408, "body_timeout", "the request body did not arrive in time") from None
    if declared is not None and declared != size:
        raise TurnError(
            400, "invalid_content_length", f"Content-Length says {declared} bytes, {size} came"
        )
    return b"".join(parts)


def _too_large(limit_bytes: int) -> TurnError:
    return TurnError(413, "body_too_large", f"the body is larger than {limit_bytes} bytes")


class Edge:
    """Outermost middleware: API keys, and the last handler of whatever went wrong.

    Sets state.caller to whose key was used.
    """

    def __init__(self, app: ASGIApp, *, keys: Keyring, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller(scope)
        if caller is None:
            refusal = TurnError(401, "invalid_api_key", "a valid API key is required: Bearer KEY")
            await respond(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        begun: Message | None = None

        async def noting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            _log.exception("request failed", method=scope["method"], path=scope["path"])
            if begun is None:
                await respond(_INTERNAL)(scope, receive, send)
            elif (b"content-type", b"text/event-stream") in begun["headers"]:
                await send({"type": "http.response.body", "body": sse_error(_INTERNAL)})
            else:
                raise

    def _caller(self, scope: Scope) -> Caller | None:
        """Compares bytes, so no header can fail to decode (case 45)."""
        if not self._keys:
            return ANYBODY
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        caller = self._keys.caller(key.strip())
        if scheme.lower() == b"bearer" and caller is not None:
            return caller
        return Caller(b"", admin=False) if scope["path"] in self._open else None


def sse_error(error: TurnError) -> bytes:
    """The end of a stream that failed: one error object, and [DONE] (case 41)."""
    return f"event: error\ndata: {dump_line(body_of(error))}\n\ndata: [DONE]\n\n".encode()
