"""Bounds of the HTTP API on a real ring in this process: queue, deadlines, keys, bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from coord.actions import Action, TurnError
from coord.gateway import Settings
from coord.http.keys import Caller, hold, parse_keys
from coord.http.limits import MAX_RETRY_S, BodyBudget, Door, Pace
from tests.localring import Call, LocalRing, play
from transport.frame import Heartbeat, StageState

TEXT = "/v1/completions"
KEYS = (hold("ann", "key-a"), hold("bob", "key-b"), hold("cat", "key-c", turns=1))

Pending = asyncio.Task[httpx.Response]


def asking(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def prompt_of(number: int) -> str:
    """One that begins like no other."""
    return f"{number:05d} is the number of this prompt"


def begin(call: Coroutine[Any, Any, httpx.Response]) -> Pending:
    return asyncio.ensure_future(call)


async def settle(ring: LocalRing, running: int, waiting: int) -> None:
    """Wait until so many turns run and wait."""
    async with asyncio.timeout(20):
        while (ring.scheduler.running(), ring.scheduler.waiting()) != (running, waiting):
            await asyncio.sleep(0.001)


@contextmanager
def stalled(ring: LocalRing) -> Iterator[None]:
    """No frame gets through."""
    ring.held = True
    yield
    ring.held = False
    ring.pump()


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# ---- when to come back --------------------------------------------------------------------------


def test_the_estimate_follows_how_long_turns_take() -> None:
    pace = Pace()
    assert pace.wait_s(10, 4) is None, "nothing was measured"
    pace.took(6.0)
    assert [pace.wait_s(turns, 4) for turns in (1, 10, 64)] == [2, 15, 96]
    assert pace.wait_s(1, 0) == 6
    assert pace.wait_s(10_000, 1) == MAX_RETRY_S
    for _ in range(50):
        pace.took(0.01)
    assert pace.wait_s(10, 4) == 1


def test_a_full_queue_is_a_429_with_an_estimate_and_the_others_still_run() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        assert (await call("POST", TEXT, asking("measured"))).status_code == 200
        with stalled(ring):
            running = begin(call("POST", TEXT, asking(prompt_of(0))))
            await settle(ring, 1, 0)
            waiting = [begin(call("POST", TEXT, asking(prompt_of(n)))) for n in range(1, 5)]
            await settle(ring, 1, 4)
            refused = await call("POST", TEXT, asking(prompt_of(9)))
            streamed = await call("POST", TEXT, asking(prompt_of(9), stream=True))
        for response in (refused, streamed):
            assert error_of(response) == (429, "queue_full")
            seconds = int(response.headers["retry-after"])
            assert 1 <= seconds <= MAX_RETRY_S
            assert f"try again in {seconds} s" in response.json()["error"]["message"]
        for each in (running, *waiting):
            assert (await each).status_code == 200

    play(scene, slots=1, queue_turns=4)


def test_the_estimate_counts_a_quarter_of_the_queue() -> None:
    counters = {"num_requests_waiting": 80.0, "num_requests_running": 4.0}
    door = Door(lambda: counters)
    door._pace.took(3.0)
    refusal = door.full(TurnError(429, "queue_full", "full"))
    assert refusal.retry_after_s == 15  # 20 turns, four at a time, 3 s each
    other = TurnError(503, "not_ready", "no ring")
    assert door.full(other) is other


def test_a_queued_turn_of_a_gone_client_never_runs() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        with stalled(ring):
            first = begin(call("POST", TEXT, asking(prompt_of(1))))
            await settle(ring, 1, 0)
            gone = begin(call("POST", TEXT, asking(prompt_of(2) * 20)))
            await settle(ring, 1, 1)
            gone.cancel()
            await settle(ring, 1, 0)
        assert (await first).status_code == 200
        assert sum(ring.prefilled()) == len(prompt_of(1))

    play(scene, slots=1)


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["queued", "running"])
@pytest.mark.parametrize("whose", ["request", "server"])
def test_a_deadline_ends_a_turn(whose: str, place: str, stream: bool) -> None:
    more = {"kvring": {"timeout_s": 0.1}} if whose == "request" else {}

    async def scene(ring: LocalRing, call: Call) -> None:
        with stalled(ring):
            if place == "queued":
                patient = asking(prompt_of(1), kvring={"timeout_s": 60})
                begin(call("POST", TEXT, patient))
                await settle(ring, 1, 0)
            response = await call("POST", TEXT, asking(prompt_of(2), stream=stream, **more))
            if stream:
                assert response.status_code == 200
                assert response.text.count("event: error") == 1
                assert response.text.count('"code":"deadline_exceeded"') == 1
                assert response.text.endswith("data: [DONE]\n\n")
            else:
                assert error_of(response) == (504, "deadline_exceeded")
                assert "0.1 s" in response.json()["error"]["message"]
            if place == "queued" and whose == "request":
                await settle(ring, 1, 0)
        await settle(ring, 0, 0)
        assert (await call("POST", TEXT, asking(prompt_of(3)))).status_code == 200

    deadline_s = 0.1 if whose == "server" else 3600.0
    play(scene, slots=1, settings=Settings(deadline_s=deadline_s))


def test_what_was_computed_before_a_deadline_stays_resident() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        long = asking("a" * 300, max_tokens=500, kvring={"timeout_s": 0.2})

        perform = ring._perform

        def stalling(action: Action) -> None:
            perform(action)
            ring.held = len(ring.last_tokens) >= 3

        ring._perform = stalling  # type: ignore[method-assign]
        late = await call("POST", TEXT, long)
        ring._perform = perform  # type: ignore[method-assign]
        ring.held = False
        ring.pump()
        assert error_of(late) == (504, "deadline_exceeded")
        again = await call("POST", TEXT, asking("a" * 300))
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 299
        ring.scheduler.check()

    play(scene, slots=1)


@pytest.mark.parametrize("value", [0, -1, 86401, "5", True])
def test_a_timeout_is_a_number_of_seconds(value: object) -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        response = await call("POST", TEXT, asking("x", kvring={"timeout_s": value}))
        assert error_of(response) == (400, "invalid_value")
        assert response.json()["error"]["param"] == "kvring.timeout_s"

    play(scene)


# ---- turns of one key ---------------------------------------------------------------------------


def test_a_keys_surplus_is_a_429_and_other_keys_go_on() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        with stalled(ring):
            anns = [begin(call("POST", TEXT, asking(prompt_of(n)), key="key-a")) for n in (1, 2)]
            await settle(ring, 2, 0)
            surplus = await call("POST", TEXT, asking(prompt_of(3)), key="key-a")
            bobs = begin(call("POST", TEXT, asking(prompt_of(4)), key="key-b"))
            await settle(ring, 3, 0)
            cats = begin(call("POST", TEXT, asking(prompt_of(5)), key="key-c"))
            await settle(ring, 4, 0)
            own = await call("POST", TEXT, asking(prompt_of(6)), key="key-c")
        for response, limit in ((surplus, 2), (own, 1)):
            assert error_of(response) == (429, "too_many_turns")
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert f"{limit} may" in response.json()["error"]["message"]
        for each in (*anns, bobs, cats):
            assert (await each).status_code == 200
        assert (await call("POST", TEXT, asking(prompt_of(7)), key="key-a")).status_code == 200

    play(scene, keys=KEYS, settings=Settings(per_key_turns=2))


def test_every_choice_is_a_turn() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        assert (await call("POST", TEXT, asking("x", n=2), key="key-a")).status_code == 200
        never = await call("POST", TEXT, asking("x", n=3), key="key-a")
        assert error_of(never) == (400, "invalid_value")
        assert never.json()["error"]["param"] == "n"

    play(scene, keys=KEYS, settings=Settings(per_key_turns=2))


def test_a_turn_that_was_refused_counts_no_more() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        for _ in range(5):
            late = await call("POST", TEXT, asking("x", kvring={"timeout_s": 1e-4}), key="key-c")
            bad = await call("POST", TEXT, asking("y" * 5000), key="key-c")
            assert late.status_code in (200, 504)
            assert bad.status_code == 400
        assert (await call("POST", TEXT, asking("x"), key="key-c")).status_code == 200

    play(scene, keys=KEYS)


def test_turns_stand_behind_a_key() -> None:
    text = "ann:one turns=4\nbob:two admin turns=2\ncat:three turns=9 admin\ndan:four\n"
    callers = [key.caller for key in parse_keys(text)]
    assert callers == [
        Caller(b"ann", admin=False, turns=4),
        Caller(b"bob", admin=True, turns=2),
        Caller(b"cat", admin=True, turns=9),
        Caller(b"dan", admin=False),
    ]
    lines = "\n".join(key.line() for key in parse_keys(text))
    assert [key.caller for key in parse_keys(lines)] == callers


@pytest.mark.parametrize(
    "marks",
    ["turns=0", "turns=", "turns=-1", "turns=1 turns=2", "admin admin", "turns=٣", "Turns=1"],
)
def test_a_wrong_mark_names_its_line(marks: str) -> None:
    with pytest.raises(ValueError, match=r"line 2: only 'admin' and 'turns=N'"):
        parse_keys(f"ann:one\nbob:two {marks}\n")


# ---- bodies -------------------------------------------------------------------------------------


def test_all_bodies_together_are_bounded() -> None:
    budget = BodyBudget(100)
    with budget.body() as one, budget.body() as other:
        one(60)
        other(40)
        with pytest.raises(TurnError) as refused, budget.body() as third:
            third(1)
        assert (refused.value.status, refused.value.code) == (503, "too_many_bodies")
        assert budget.held == 100
    assert budget.held == 0


def test_a_refused_body_is_given_back() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        for _ in range(3):
            full = await call("POST", TEXT, asking("x" * 2000))
            assert error_of(full) == (503, "too_many_bodies")
            assert full.headers["connection"] == "close"
            assert (await call("POST", TEXT, asking("x"))).status_code == 200

    play(scene, settings=Settings(bodies_limit_bytes=1000))


# ---- while a ring is away ------------------------------------------------------------------------


def lost(ring: LocalRing) -> None:
    """A stage begins anew; the ring does not form before it is `loaded`."""
    ring._step(Heartbeat("r0", "s1", 1, StageState.LOADING, 0.5, "", 1, 1))
    assert not ring.ready()[0]


def loaded(ring: LocalRing) -> None:
    ring._step(Heartbeat("r0", "s1", 1, StageState.READY, 1.0, "", 1, 1))


def test_new_requests_wait_for_a_ring_that_was_lost() -> None:
    """They count as others in the queue: its limit, a deadline, and clients that go hold."""

    async def scene(ring: LocalRing, call: Call) -> None:
        lost(ring)
        waiting = begin(call("POST", TEXT, asking(prompt_of(1))))
        streamed = begin(call("POST", TEXT, asking(prompt_of(2), stream=True)))
        await settle(ring, 0, 2)
        assert error_of(await call("POST", TEXT, asking("x"))) == (429, "queue_full")
        streamed.cancel()
        await settle(ring, 0, 1)
        late = await call("POST", TEXT, asking(prompt_of(3), kvring={"timeout_s": 0.1}))
        assert error_of(late) == (504, "deadline_exceeded")
        assert not waiting.done()
        loaded(ring)
        answer = await waiting
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        await settle(ring, 0, 0)

    play(scene, queue_turns=2)


def test_a_ring_that_stays_away_refuses_them_after_resume_s() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        lost(ring)
        waited = await call("POST", TEXT, asking(prompt_of(1)))
        assert error_of(waited) == (503, "ring_lost")
        assert int(waited.headers["retry-after"]) >= 1
        refused = await call("POST", TEXT, asking(prompt_of(1)))
        assert error_of(refused) == (503, "not_ready")
        assert "stage s1 is loading" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1

    play(scene, resume_s=0.3)


# ---- draining -----------------------------------------------------------------------------------


def test_readiness_tells_how_many_turns_a_drain_waits_for() -> None:
    door = Door(dict)

    async def scene(ring: LocalRing, call: Call) -> None:
        def missing(response: httpx.Response) -> object:
            body = response.json()
            assert (response.status_code, body["state"]) == (503, "draining")
            return body["missing"]

        with stalled(ring):
            running = [begin(call("POST", TEXT, asking(prompt_of(n)))) for n in (1, 2)]
            await settle(ring, 2, 0)
            closing = asyncio.ensure_future(door.drain(30.0))
            await asyncio.sleep(0)
            assert missing(await call("GET", "/ready")) == "draining: 2 turns are still running"
        for each in running:
            assert (await each).status_code == 200
        assert await closing
        said = missing(await call("GET", "/ready"))
        assert said == "drained: no turn is running, and no new one is taken"

    play(scene, door=door)


def test_a_closed_door_says_when_to_come_back() -> None:
    async def main() -> None:
        door = Door(dict)
        assert await door.drain(30.0), "nobody runs"
        assert door.draining
        with pytest.raises(TurnError) as refused:
            door.check(Caller(b"", admin=True), 1)
        assert (refused.value.status, refused.value.code) == (503, "draining")
        assert refused.value.retry_after_s == 30
        door.start(b"", "one")
        assert not await door.drain(0.01)
        waiting = asyncio.ensure_future(door.drain(30.0))
        await asyncio.sleep(0)
        door.drop(b"", "one")
        assert await waiting

    asyncio.run(main())
