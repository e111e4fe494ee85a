"""Tenants: whose key is it, what the others must not see, and what they must not profit from."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coord.http.engine import Resident
from coord.http.keys import (
    ANYBODY,
    Key,
    Keyring,
    derive_hint,
    derive_salt,
    hold,
    new_key,
    owns,
    parse_keys,
)
from tests.localring import Call, LocalRing, play

KEYS = (hold("ann", "key-a"), hold("bob", "key-b"), hold("ops", "key-o", admin=True))
LONG = "You are a very patient assistant of a large library, and answer in full sentences. " * 2
TEXT = "/v1/completions"


def asking(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---- keys ---------------------------------------------------------------------------------------


def test_a_new_key_is_let_in_and_its_line_does_not_hold_it() -> None:
    text, key = new_key("ann")
    line = key.line()
    assert text not in line
    assert line.startswith("ann:blake2b$")
    ring = Keyring(parse_keys(line))
    caller = ring.caller(text.encode())
    assert caller is not None
    assert (caller.tenant, caller.admin) == (b"ann", False)
    assert ring.caller(text.encode() + b"x") is None
    assert ring.caller(line.split(":")[1].encode()) is None
    assert new_key("ann")[0] != text


def test_a_file_has_plain_and_hashed_keys_and_admins() -> None:
    text, hashed = new_key("ops", admin=True)
    keys = parse_keys(
        f"# keys\n\nann:plain:with:colons\n  bob:schlüssel\tadmin \n{hashed.line()}\n"
    )
    ring = Keyring(keys)
    for given, tenant, admin in (
        (b"plain:with:colons", b"ann", False),
        ("schlüssel".encode(), b"bob", True),
        (text.encode(), b"ops", True),
    ):
        caller = ring.caller(given)
        assert caller is not None
        assert (caller.tenant, caller.admin) == (tenant, admin)
    assert ring.caller(b"\xff\x00") is None
    assert ring.caller(b"") is None
    assert "plain" not in repr(keys)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("just-a-key", "line 2: must be NAME:KEY"),
        ("ann:", "line 2: must be NAME:KEY"),
        ("an n:key", "line 2: must be NAME:KEY"),
        ("ä:key", "line 2: a key's name"),
        ("ann:key root", "line 2: only 'admin'"),
        ("ann:blake2b$00$11", "line 2: only hashes"),
        ("ann:scrypt$x", "line 2: only hashes"),
    ],
)
def test_a_wrong_line_of_the_file_is_named(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_keys(f"# first\n{line}\n")


def test_case_20_what_is_derived_never_meets_by_accident() -> None:
    assert derive_salt(b"org_1", "2345") != derive_salt(b"org_12345", None)
    assert derive_hint(b"org_1", "2345") != derive_hint(b"org_12345", "")
    assert derive_hint(b"a", "session") != derive_hint(b"b", "session")
    assert derive_hint(b"a", "session") == derive_hint(b"a", "session")
    assert derive_hint(b"a", None) == ""
    assert len(derive_hint(b"a", "x" * 512)) == 32
    assert owns(b"org_1", derive_salt(b"org_1", "2345"))
    assert not owns(b"org_1", derive_salt(b"org_12345", None))
    assert not owns(b"org_1", b"")
    assert ANYBODY.admin


# ---- reuse --------------------------------------------------------------------------------------


def test_case_19_another_tenants_prompt_is_as_cold_as_none() -> None:
    """Hits, rows, frames and their sizes: all that timing is made of."""

    async def work(ring: LocalRing, call: Call, key: str, **more: Any) -> tuple[int, list[Any]]:
        before = len(ring.sent)
        answer = (await call("POST", TEXT, asking(LONG, **more), key=key)).json()
        frames = [
            [len(s.tokens) for s in f.segments] if hasattr(f, "segments") else type(f).__name__
            for f in ring.sent[before:]
        ]
        return cached(answer), frames

    async def scene(ring: LocalRing, call: Call) -> None:
        cold = await work(ring, call, "key-a")
        assert cold[0] == 0
        assert await work(ring, call, "key-b") == cold
        assert await work(ring, call, "key-a", cache_salt="s") == cold
        assert await work(ring, call, "key-b", cache_salt="s") == cold
        again, frames = await work(ring, call, "key-a")
        assert again == len(LONG) - 1
        assert frames[:2] == ["Copy", [1]]
        salted, _ = await work(ring, call, "key-b", cache_salt="s")
        assert salted == len(LONG) - 1

    play(scene, keys=KEYS, slots=6)


def test_two_keys_of_one_tenant_share() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking(LONG), key="old")
        assert cached((await call("POST", TEXT, asking(LONG), key="new")).json()) == len(LONG) - 1

    play(scene, keys=(hold("ann", "old"), hold("ann", "new")))


def test_what_one_tenant_was_told_is_not_spliced_for_another() -> None:
    """The toy's replies are no text, so that a splice would show in what is prefilled."""

    async def scene(ring: LocalRing, call: Call) -> None:
        first = [{"role": "user", "content": "hello"}]
        body = {"messages": first, "max_tokens": 30, "seed": 1}
        answer = (await call("POST", "/v1/chat/completions", body, key="key-a")).json()
        text = answer["choices"][0]["message"]["content"]
        assert "\ufffd" in text
        history = [*first, {"role": "assistant", "content": text}, *first]
        sizes = []
        for key in ("key-a", "key-b"):
            body = {"messages": history, "max_tokens": 1}
            reply = (await call("POST", "/v1/chat/completions", body, key=key)).json()
            sizes.append(reply["usage"]["prompt_tokens"])
        plain = len("user: hello\nassistant: \nuser: hello\nassistant: ") + len(text.encode())
        assert sizes == [plain - len(text.encode()) + 30, plain]

    play(scene, keys=KEYS)


def test_a_reply_is_cancelled_only_by_its_own_tenant() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        for key in ("key-a", "key-b"):
            answer = await call("POST", "/v1/cancel/cmpl-1", key=key)
            assert answer.status_code == 404

    play(scene, keys=KEYS)


def test_case_13_conversations_of_one_session_name_do_not_overwrite_each_other() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        start = {"role": "system", "content": LONG}
        chats = {name: [start, {"role": "user", "content": name * 50}] for name in "AB"}
        for turn in range(3):
            for chat in chats.values():
                body = {"messages": chat, "max_tokens": 8, "prompt_cache_key": "app"}
                answer = (await call("POST", "/v1/chat/completions", body)).json()
                assert turn == 0 or answer["kvring"]["prefilled"] < 30
                text = answer["choices"][0]["message"]["content"]
                chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]

    play(scene)


# ---- what the others see ------------------------------------------------------------------------


async def slots(call: Call, key: str | None, query: str = "") -> list[dict[str, Any]]:
    [ring] = (await call("GET", f"/ring{query}", key=key)).json()["rings"]
    found: list[dict[str, Any]] = ring["slots"]
    return found


def test_a_tenant_sees_its_own_slots_and_an_admin_all() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking("ann's text", user="u"), key="key-a")
        await call("POST", TEXT, asking("bob's text"), key="key-b")
        mine = await slots(call, "key-a", "?preview=1")
        own = [slot for slot in mine if "resident" in slot]
        assert [slot["preview"][:10] for slot in own] == ["ann's text"]
        assert (own[0]["resident"], own[0]["turn"], own[0]["proven"]) == (13, None, False)
        assert own[0]["session"] == derive_hint(b"ann", "u")[:8]
        others = [slot for slot in mine if slot not in own]
        assert all(set(slot) == {"slot", "capacity", "occupied"} for slot in others)
        assert sum(slot["occupied"] for slot in mine) == 2
        every = await slots(call, "key-o", "?preview=1")
        assert sorted(slot.get("preview", "")[:3] for slot in every) == ["", "", "ann", "bob"]
        assert not any("preview" in slot for slot in await slots(call, "key-o"))
        [whole] = (await call("GET", "/ring", key="key-o")).json()["rings"]
        [part] = (await call("GET", "/ring", key="key-a")).json()["rings"]
        assert set(whole) - set(part) == {"evictions", "parked_rows"}
        assert {"rates", "park_limit_rows", "parked"} <= set(part)

    play(scene, keys=KEYS)


def test_without_keys_all_is_shown_but_no_salted_text() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking("everybody's"))
        await call("POST", TEXT, asking("for those who know the salt", cache_salt="s"))
        seen = [slot for slot in await slots(call, None, "?preview=1") if slot["resident"]]
        assert [slot.get("preview", "")[:11] for slot in seen] == ["everybody's", ""]
        answer = await call("GET", "/metrics")
        assert answer.status_code == 200
        assert 'kvring:evictions_total{reason="self-check"}' not in answer.text
        assert "kvring:parked_rows 0.0" in answer.text

    play(scene)


def test_a_running_turn_of_another_tenant_is_only_taken() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        ring.held = True
        task = asyncio.create_task(call("POST", TEXT, asking("ann's"), key="key-a"))
        while not any(slot["occupied"] for slot in await slots(call, "key-o")):
            await asyncio.sleep(0)
        [busy] = [slot for slot in await slots(call, "key-b") if slot["occupied"]]
        assert set(busy) == {"slot", "capacity", "occupied"}
        [busy] = [slot for slot in await slots(call, "key-a") if slot["occupied"]]
        assert busy["turn"] == 1
        answer = await call("DELETE", f"/ring/slots/{busy['slot']}", key="key-a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "slot_busy")
        answer = await call("DELETE", f"/ring/slots/{busy['slot']}", key="key-b")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_your_slot")
        ring.held = False
        ring.pump()
        assert (await task).status_code == 200

    play(scene, keys=KEYS)


def test_metrics_are_for_admins() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        refused = await call("GET", "/metrics", key="key-a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
        assert refused.json()["error"]["type"] == "permission_error"
        await call("POST", TEXT, asking("x" * 20, user="secret-user"), key="key-a")
        page = (await call("GET", "/metrics", key="key-o")).text
        assert not any(word in page for word in ("ann", "bob", "secret-user"))

    play(scene, keys=KEYS)


def test_a_forgotten_owner_is_nobody() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking("ann's"), key="key-a")
        ring._salts.clear()
        assert not any("resident" in slot for slot in await slots(call, "key-a"))
        assert [each.salt for each in ring.residents()].count(b"\0") == 1

    play(scene, keys=KEYS)


def test_salts_of_what_is_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coord.coordinator.MAX_SALTS", 8)

    async def scene(ring: LocalRing, call: Call) -> None:
        for number in range(30):
            answer = await call("POST", TEXT, asking("x", cache_salt=f"s{number}"))
            assert answer.status_code == 200
            assert len(ring._salts) <= 9
        known = [each for each in ring.residents() if each.salt]
        assert all(each.salt != b"\0" for each in known)
        assert len(known) == 4

    play(scene)


# ---- slots --------------------------------------------------------------------------------------


def test_a_slot_is_evicted_and_kept_through_the_api() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking(LONG))
        [slot] = [each["slot"] for each in await slots(call, None) if each["resident"]]
        answer = await call("PUT", f"/ring/slots/{slot}", {"keep_s": 60})
        assert answer.json() == {"ring": "r0", "slot": slot, "keep_s": 60.0}
        assert 59 < (await slots(call, None))[slot]["kept_s"] <= 60
        answer = await call("DELETE", f"/ring/slots/{slot}?ring=r0")
        assert answer.json() == {"ring": "r0", "slot": slot, "evicted": len(LONG) + 3}
        again = (await call("POST", TEXT, asking(LONG))).json()
        assert cached(again) == 0
        assert again["kvring"]["miss"]["reason"] == "request"
        assert (
            'kvring:evictions_total{reason="request"} 1.0' in (await call("GET", "/metrics")).text
        )

    play(scene)


def test_the_last_slot_that_can_be_given_up_cannot_be_kept() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        for prompt in ("first prompt", "second prompt"):
            await call("POST", TEXT, asking(prompt))
        assert (await call("PUT", "/ring/slots/0", {"keep_s": 60})).status_code == 200
        refused = await call("PUT", "/ring/slots/1", {"keep_s": 60})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "nothing_left_to_give_up"
        assert (await call("PUT", "/ring/slots/0", {"keep_s": 0})).status_code == 200
        assert (await call("PUT", "/ring/slots/1", {"keep_s": 60})).status_code == 200

    play(scene, slots=2)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("DELETE", "/ring/slots/9", None, 404, "slot_not_found"),
        ("DELETE", "/ring/slots/0?ring=other", None, 404, "slot_not_found"),
        ("DELETE", "/ring/slots/x", None, 404, "not_found"),
        ("DELETE", "/ring/slots/-1", None, 404, "not_found"),
        ("GET", "/ring/slots/0", None, 405, "method_not_allowed"),
        ("PUT", "/ring/slots/0", {"keep_s": 5}, 409, "slot_empty"),
        ("PUT", "/ring/slots/0", {"keep_s": -1}, 400, "invalid_value"),
        ("PUT", "/ring/slots/0", {}, 400, "missing_parameter"),
        ("PUT", "/ring/slots/0", {"keep": 1}, 400, "missing_parameter"),
    ],
)
def test_what_is_no_slot_is_refused(
    method: str, path: str, body: object, status: int, code: str
) -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        answer = await call(method, path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    play(scene)


def test_keep_s_of_a_request_keeps_its_slot() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking("keep me, please", kvring={"keep_s": 60}))
        for number in range(8):
            await call("POST", TEXT, asking(f"{number} is another prompt, and a longer one"))
        assert cached((await call("POST", TEXT, asking("keep me, please"))).json()) == 14

    play(scene, slots=2)


def test_parked_prefixes_are_listed_for_their_tenant() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        await call("POST", TEXT, asking("ann: " + LONG), key="key-a")
        for number in range(3):
            await call("POST", TEXT, asking(f"{number} {LONG}{LONG}"), key="key-b")
        [seen] = (await call("GET", "/ring?preview=1", key="key-a")).json()["rings"]
        [parked] = seen["parked"]
        assert parked["preview"].startswith("ann: You are")
        assert parked["resident"] == len(LONG) + 8
        [every] = (await call("GET", "/ring", key="key-o")).json()["rings"]
        assert len(every["parked"]) == 2
        assert every["parked_rows"] == sum(each["resident"] for each in every["parked"])
        assert every["evictions"]["parked"] == 2
        other = next(e["slot"] for e in every["parked"] if e["slot"] != parked["slot"])
        answer = await call("DELETE", f"/ring/slots/{other}", key="key-a")
        assert answer.status_code == 404
        answer = await call("PUT", f"/ring/slots/{parked['slot']}", {"keep_s": 1}, key="key-a")
        assert answer.json()["error"]["code"] == "slot_parked"
        answer = await call("DELETE", f"/ring/slots/{parked['slot']}", key="key-a")
        assert answer.json()["evicted"] == parked["resident"]
        page = (await call("GET", "/metrics", key="key-o")).text
        assert "kvring:parked_prefixes 1.0" in page

    play(scene, keys=KEYS, slots=2, park_bytes=1 << 20)


def test_a_resident_of_nobody_is_seen_by_admins_only() -> None:
    held = Resident("r0", 0, 5, writing=False, parked=False, salt=b"\0", tokens=(1,))
    assert not owns(b"ann", held.salt or b"")
    assert Key(KEYS[0].caller, b"", b"").caller.tenant == b"ann"
