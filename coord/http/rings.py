"""Owns GET /ring and /ring/slots: who may see and give up what is resident. Knows no prompt's text.

A tenant sees its own slots; of the others' only that they are taken. See docs/isolation.md.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response

from coord.actions import TurnError
from coord.http.engine import Engine, Resident
from coord.http.errors import read_body
from coord.http.keys import Caller, derive_salt, owns
from coord.http.schema import KeepRequest, parse
from coord.tokenizer import Tokenizer

_BODY_BYTES = 1 << 16
_BODY_TIMEOUT_S = 10.0
_PREVIEW_CHARS = 80
MAX_DIGITS = 10


class RingApi:
    """The handlers."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def view(self, request: Request) -> Response:
        """GET /ring; with ?preview=1 the first words of what the caller may read."""
        preview = request.query_params.get("preview") in ("1", "true")
        return JSONResponse(self.seen_by(request.state.caller, preview=preview))

    def seen_by(self, caller: Caller, *, preview: bool = False) -> dict[str, Any]:
        """What GET /ring tells this caller, JSON-able."""
        body = self._engine.describe()
        held = {(each.ring, each.slot): each for each in self._engine.residents()}
        for ring in body["rings"]:
            for kind in ("slots", "parked"):
                entries = []
                for entry in ring.get(kind, ()):
                    resident = held.get((ring["name"], entry["slot"]))
                    shown = self._entry(entry, resident, caller, preview=preview)
                    if "resident" in shown or kind == "slots":
                        entries.append(shown)  # of others' parked prefixes not even the number
                ring[kind] = entries
            if not caller.admin:
                for total in ("parked_rows", "evictions"):
                    ring.pop(total, None)
        return body

    def _entry(
        self, entry: dict[str, Any], held: Resident | None, caller: Caller, *, preview: bool
    ) -> dict[str, Any]:
        taken = held is not None and held.salt is not None
        if not _sees(caller, held):
            return {"slot": entry["slot"], "capacity": entry.get("capacity"), "occupied": taken}
        shown = {**entry, "occupied": taken}
        if preview and held is not None and held.salt is not None and _reads(caller, held.salt):
            text = self._tokenizer.decode(held.tokens, special=True)
            shown["preview"] = text[:_PREVIEW_CHARS]
        return shown

    async def measure(self, request: Request) -> Response:
        """POST /ring/measure: machines and links; turns that come meanwhile wait."""
        caller: Caller = request.state.caller
        if not caller.admin:
            raise TurnError(403, "not_an_admin", "/ring/measure is for API keys marked admin")
        query = request.query_params
        rings = [ring["name"] for ring in self._engine.describe()["rings"]]
        name = query.get("ring") or (rings[0] if len(rings) == 1 else None)
        if name is None:
            text = f"say which ring ({', '.join(rings)})"
            raise TurnError(400, "missing_parameter", text, "ring")
        wide = query.get("wide") in ("1", "true")
        return JSONResponse(await self._engine.measure(name, wide=wide))

    async def evict(self, request: Request, number: str) -> Response:
        """DELETE /ring/slots/{slot}: give it up now."""
        slot = _slot(number)
        ring = self._own(request, slot)
        rows = self._engine.free(ring, slot)
        return JSONResponse({"ring": ring, "slot": slot, "evicted": rows})

    async def keep(self, request: Request, number: str) -> Response:
        """PUT /ring/slots/{slot} {"keep_s": seconds}: don't give it up before."""
        slot = _slot(number)
        body = await read_body(request, limit_bytes=_BODY_BYTES, timeout_s=_BODY_TIMEOUT_S)
        wanted = parse(KeepRequest, body)
        ring = self._own(request, slot)
        self._engine.keep(ring, slot, wanted.keep_s)
        return JSONResponse({"ring": ring, "slot": slot, "keep_s": wanted.keep_s})

    def _own(self, request: Request, slot: int) -> str:
        """The ring that is meant; TurnError where there is no such slot, or it is another's."""
        residents = self._engine.residents()
        rings = list(dict.fromkeys(each.ring for each in residents))
        name = request.query_params.get("ring")
        if name is None and len(rings) == 1:
            name = rings[0]
        elif name is None:
            known = ", ".join(rings) or "none is formed yet"
            raise TurnError(400, "missing_parameter", f"say which ring ({known})", "ring")
        caller: Caller = request.state.caller
        held = next((each for each in residents if (each.ring, each.slot) == (name, slot)), None)
        hidden = held is not None and held.parked and not _sees(caller, held)
        if held is None or hidden:
            raise TurnError(404, "slot_not_found", f"no slot {slot} in a ring {name!r}", "slot")
        if not _sees(caller, held):
            raise TurnError(403, "not_your_slot", f"slot {slot} holds nothing of this API key")
        return name


def _slot(number: str) -> int:
    """The router's own integers fail on more digits than Python reads, as a 500."""
    if not (number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS):
        raise HTTPException(404)
    return int(number)


def _sees(caller: Caller, held: Resident | None) -> bool:
    if caller.admin:
        return True
    return held is not None and held.salt is not None and owns(caller.tenant, held.salt)


def _reads(caller: Caller, salt: bytes) -> bool:
    """Text under a cache_salt is for who knows that salt, and for an admin's key."""
    return salt == derive_salt(caller.tenant, None) or (caller.admin and caller.tenant != b"")
