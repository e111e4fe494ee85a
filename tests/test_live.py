"""GET /ring/events: what a watcher puts together is what GET /ring says, at a bounded cost."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coord.http import live
from coord.http.engine import Resident
from coord.http.keys import ANYBODY, derive_salt, hold
from coord.http.live import differences
from coord.http.rings import RingApi
from coord.http.sse import encode_named
from coord.tokenizer import ByteTokenizer
from pipeline.model import ToyModel
from tests.fake_engine import FakeEngine
from tests.localring import LocalRing
from tests.test_gateway import ask
from tests.test_gateway_live import serving
from transport.frame import Sampling

values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 2) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=12,
)


def put(document: Any, changes: Any) -> Any:
    """What the page does with a `change` event."""
    holder = [document]
    for path, value in changes:
        place: Any = holder
        *way, last = 0, *list(path)
        for key in way:
            place = place[key]
        place[last] = value
    return holder[0]


@given(values, values)
def test_the_old_and_its_differences_make_the_new(old: Any, new: Any) -> None:
    changes = json.loads(json.dumps(list(differences(old, new))))
    made = put(copy.deepcopy(old), changes)
    assert json.dumps(made, sort_keys=True) == json.dumps(new, sort_keys=True)


@given(values)
def test_what_has_not_changed_makes_no_difference(value: Any) -> None:
    assert list(differences(value, copy.deepcopy(value))) == []


class Watcher:
    """One client of GET /ring/events."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.names: list[str] = []
        self.seen: Any = None

    async def step(self) -> None:
        """Take one event."""
        name = None
        async for line in self._lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                body = json.loads(line.removeprefix("data: "))
                self.seen = body if name == "ring" else put(self.seen, body["set"])
                assert name is not None
                self.names.append(name)
                return
        raise EOFError


@asynccontextmanager
async def watching(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[Watcher]:
    async with client.stream("GET", "/ring/events", headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert response.status_code == 200
        yield Watcher(response.aiter_lines())


def resident(slot: int, rows: int, salt: bytes | None = b"") -> Resident:
    return Resident("r0", slot, rows, False, False, salt, ())


def on(engine: FakeEngine, scene: Any, **settings: Any) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            serving(engine, **settings) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            await scene(client)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.02)


def test_a_watcher_sees_what_get_ring_says() -> None:
    engine = FakeEngine(held=[resident(0, 5), resident(1, 0, None)])

    async def scene(client: httpx.AsyncClient) -> None:
        async with watching(client) as watcher:
            await watcher.step()
            assert watcher.seen == (await client.get("/ring")).json()
            for held in ([resident(0, 9), resident(1, 0, None)], [resident(0, 9)]):
                engine.held = held  # a number changes, then a list gets shorter
                await watcher.step()
                assert watcher.seen == (await client.get("/ring")).json()
            assert watcher.names == ["ring", "change", "change"]

    on(engine, scene)


def test_an_idle_ring_says_nothing_and_what_only_ages_is_told_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "AGING_S", 0.5)
    engine = FakeEngine()
    age = iter(range(10_000))
    describe = engine.describe
    monkeypatch.setattr(
        engine, "describe", lambda: {**describe(), "uptime_s": next(age)}, raising=True
    )

    async def scene(client: httpx.AsyncClient) -> None:
        async with watching(client) as watcher:
            await watcher.step()
            first = watcher.seen["uptime_s"]
            await watcher.step()
        assert watcher.seen["uptime_s"] >= first + 5, "many looks, one event"

    on(engine, scene)


def test_a_watcher_sees_no_more_than_its_key_may() -> None:
    ann, bob = hold("ann", "key-a"), hold("bob", "key-b")
    engine = FakeEngine(held=[resident(0, 5, derive_salt(b"ann", None))])

    async def scene(client: httpx.AsyncClient) -> None:
        refused = await client.get("/ring/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for key, rows in (("key-a", 5), ("key-b", None)):
            async with watching(client, authorization=f"Bearer {key}") as watcher:
                await watcher.step()
            [slot] = watcher.seen["rings"][0]["slots"]
            assert slot.get("resident") == rows
            assert "evictions" not in watcher.seen["rings"][0]

    on(engine, scene, api_keys=(ann, bob))


def test_watchers_are_bounded_and_their_places_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 1)
    engine = FakeEngine()

    async def scene(client: httpx.AsyncClient) -> None:
        async with watching(client) as watcher:
            await watcher.step()
            refused = await client.get("/ring/events")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_watchers"
            assert "retry-after" in refused.headers
        for _ in range(100):
            async with client.stream("GET", "/ring/events") as response:
                if response.status_code == 200:
                    return
            await asyncio.sleep(0.02)
        raise AssertionError("the place never came back")

    on(engine, scene)


def test_a_look_is_cheap_with_eight_full_slots_and_sixteen_turns() -> None:
    """At two looks a second it stays under 5 % of a core; it takes 0.05 %."""

    async def main() -> float:
        ring = LocalRing(models=[ToyModel((i, i + 1), 2, slots=8, capacity=8192) for i in range(2)])
        await ring.open()
        prompts = [[number, *range(256)] * 32 for number in range(16)]
        for prompt in prompts[:8]:
            async for _ in ring.submit(prompt[:8000], budget=1, sampling=Sampling()):
                pass
        ring.held = True  # from here on no frame arrives
        for prompt in prompts:
            ring.submit(prompt[:8000], budget=9, sampling=Sampling())
        assert ring.describe()["turns"] == {"running": 8, "waiting": 8}
        rings = RingApi(ring, ByteTokenizer())
        told = rings.seen_by(ANYBODY)
        began = time.process_time()
        for _ in range(20):
            encode_named("change", {"set": list(differences(told, rings.seen_by(ANYBODY)))})
        return (time.process_time() - began) / 20

    assert asyncio.run(main()) / 0.5 < 0.05


# ---- the page's files ----------------------------------------------------------------------------


def test_the_page_needs_no_key_and_keeps_to_itself() -> None:
    keys = (hold("ann", "key-a"),)
    index = ask(FakeEngine(), "GET", "/", api_keys=keys)
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    policy = index.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    script = ask(FakeEngine(), "GET", "/page/app.js", api_keys=keys)
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert script.headers["content-security-policy"] == policy
    assert script.headers["x-content-type-options"] == "nosniff"
    assert ask(FakeEngine(), "GET", "/page/app.py", api_keys=keys).status_code == 401
    assert ask(FakeEngine(), "GET", "/page/%2e%2e/live.py").status_code == 404
    assert ask(FakeEngine(), "POST", "/page/app.js").status_code == 405


def test_the_page_has_no_address_of_another_origin_and_no_inner_html() -> None:
    for name in ("", "page/style.css", "page/app.js", "page/markdown.js", "page/ring.js"):
        text = ask(FakeEngine(), "GET", f"/{name}").text
        assert "innerHTML" not in text
        for scheme in ("http://", "https://"):
            found = [part.split('"')[0] for part in text.split(scheme)[1:]]
            assert set(found) <= {"www.w3.org/2000/svg"}, name
