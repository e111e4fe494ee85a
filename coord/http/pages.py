"""Owns the page at /: its files, read once, and the headers that keep it to itself.

Knows bytes and paths; what the page does is its own business (docs/page.md).
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

_FOLDER = "page"
_INDEX = "index.html"
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing inline, nothing from elsewhere, and no site may frame it.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time, and get a 304: a new version is seen at once
}


class Pages:
    """The page's files by name. key_needed: the page asks for an API key before anything else."""

    def __init__(self, *, key_needed: bool) -> None:
        found = sorted(files("coord.http").joinpath(_FOLDER).iterdir(), key=lambda each: each.name)
        self._files = {
            each.name: (_KINDS[each.name.rpartition(".")[2]], each.read_bytes()) for each in found
        }
        if key_needed:
            kind, body = self._files[_INDEX]
            self._files[_INDEX] = kind, body.replace(b'data-key="open"', b'data-key="needed"')
        state = hashlib.blake2b(digest_size=12)  # one tag for all: modules belong together
        for name, (_, body) in self._files.items():
            state.update(name.encode() + len(body).to_bytes(8, "little") + body)
        self._tag = f'"{state.hexdigest()}"'

    @property
    def paths(self) -> tuple[str, ...]:
        """What needs no API key: they hold nothing of anybody's, and the page asks for the key."""
        return ("/", *(f"/{_FOLDER}/{name}" for name in self._files))

    def add_to(self, app: FastAPI) -> None:
        """GET / and the files that it asks for."""
        app.add_api_route("/", self.index, methods=["GET"])
        app.router.routes.append(Mount(f"/{_FOLDER}", self._file))

    async def index(self, request: Request) -> Response:
        """GET /."""
        return self._answer(_INDEX, request)

    async def _file(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /page/NAME: only the names that were found at the start."""
        request = Request(scope, receive)
        name = scope["path"].removeprefix(f"/{_FOLDER}/")
        if name not in self._files:
            raise HTTPException(404)
        if request.method != "GET":
            raise HTTPException(405, headers={"allow": "GET"})
        await self._answer(name, request)(scope, receive, send)

    def _answer(self, name: str, request: Request) -> Response:
        headers = {**_HEADERS, "etag": self._tag}
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        kind, body = self._files[name]
        return Response(body, headers={**headers, "content-type": kind})
