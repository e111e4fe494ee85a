"""Thousands of tenants, sessions, salts and texts leave no trace that grows.

Counts every object that the app and its ring reach, so that a new structure is seen too.
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import coord.coordinator
import coord.gateway
import coord.history
import coord.ledger
from coord.http.keys import hold
from tests.localring import Call, LocalRing, play

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
BOUND = 10  # of every bounded structure, in place of thousands
ROUND = 60  # clients, each with names of its own: far more than BOUND
ENDS = (
    types.ModuleType,
    type,
    types.BuiltinFunctionType,
    types.CodeType,
    asyncio.AbstractEventLoop,  # it drops cancelled timers a hundred at a time
    asyncio.TimerHandle,
)


def reachable(*roots: object) -> Counter[str]:
    """Objects below the roots by type; not the code that they are made of."""
    seen: dict[int, object] = {}
    heap = list(roots)
    while heap:
        item = heap.pop()
        if id(item) in seen or isinstance(item, ENDS):
            continue
        seen[id(item)] = item
        if isinstance(item, types.FunctionType):
            heap.append(item.__closure__)  # its globals would be the whole program
        else:
            heap += gc.get_referents(item)
    return Counter(type(item).__name__ for item in seen.values())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds, small enough to be reached by a test."""
    monkeypatch.setattr(coord.gateway, "MAX_SESSIONS", BOUND)
    monkeypatch.setattr(coord.coordinator, "MAX_SALTS", BOUND)
    monkeypatch.setattr(coord.ledger, "GONE_PREFIXES", BOUND)
    monkeypatch.setattr(coord.ledger, "GONE_TOKENS", BOUND * 64)
    monkeypatch.setattr(coord.ledger, "MAX_PARKED", BOUND)
    original = coord.history.History.__init__
    monkeypatch.setattr(coord.history.History, "__init__", lambda self: original(self, BOUND * 600))


def requests(number: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What one of the many clients sends: each in its own way."""
    name = f"client-{number}"
    common = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    kept = {"kvring": {"keep_s": number % 3 * 0.001, "timeout_s": 10 + number}}
    prompt = f"{name} has a text of its own " * 2
    yield TEXT, name, common | kept | {"prompt": prompt, "user": name, "cache_salt": name}
    message = {"role": "user", "content": f"I am {name}"}
    yield CHAT, name, common | {"messages": [message], "prompt_cache_key": f"{name}!"}
    yield TEXT, name, common | {"prompt": prompt, "n": 2, "seed": number}
    yield TEXT, name, common | {"prompt": "x", f"unknown-{number}": 1}
    yield TEXT, name, common | {"prompt": "x", "model": name}
    yield TEXT, name, common | {"prompt": "x" * 4000}


@pytest.mark.usefixtures("small")
def test_names_that_come_once_leave_nothing_behind() -> None:
    keys = {f"client-{n % 7}": hold(f"tenant-{n % 7}", f"client-{n % 7}") for n in range(7)}

    async def scene(ring: LocalRing, call: Call) -> None:
        counts = []
        for start in range(0, 4 * ROUND, ROUND):
            for number in range(start, start + ROUND):
                for path, name, body in requests(number):
                    key = f"client-{number % 7}"
                    answer = await call("POST", path, body, key=key, x_session_id=name)
                    assert answer.status_code in (200, 400, 404), answer.text
                await call("DELETE", f"/ring/slots/{number % 3}", key="client-0")
                await call("GET", f"/nowhere/{number}", key=key)
            await call("GET", "/metrics", key="client-0")
            ring.sent.clear()  # the test's own record
            gc.collect()
            counts.append(reachable(ring, call))
        for owner in ("History", "Door", "Metrics", "Scheduler", "Ledger", "LocalRing"):
            assert counts[0][owner], f"the walk does not see {owner}"
        # The first two rounds fill what is bounded. One object for each client would be 120 more in
        # the last two; what is bounded is not always full to the same object.
        more = counts[3] - counts[1]
        assert counts[3].total() - counts[1].total() < ROUND, more

    play(scene, keys=tuple(keys.values()), slots=3, park_bytes=1 << 20)
