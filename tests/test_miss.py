"""Why a prompt was not reused: position, reason and both texts (case 17)."""

from __future__ import annotations

from typing import Any

import pytest

from coord.actions import Admitted, Finished, Tokens
from coord.http.keys import derive_hint
from coord.http.miss import explain
from coord.ledger import Miss
from coord.tokenizer import ByteTokenizer, load_tokenizer
from tests.fake_engine import FakeEngine, Step
from tests.localring import Call, LocalRing, play
from tests.modelfile import default_model
from tests.test_gateway import CHAT, HI, post
from tests.test_isolation import KEYS, TEXT, asking, cached

PROMPT = list(b"It is 12:03:55 now. Be kind and answer.")


def miss_of(admitted: Admitted, **changes: Any) -> dict[str, Any] | None:
    settings = {"reuse": True, "corrected": False, "other_salt": False, **changes}
    return explain(admitted, PROMPT, ByteTokenizer(), **settings)


def admitted(matched: int, miss: Miss | None = None) -> Admitted:
    return Admitted(1, "r0", 0, len(PROMPT), matched, miss=miss)


def test_a_whole_hit_has_no_miss() -> None:
    assert miss_of(admitted(len(PROMPT) - 1)) is None


def test_what_was_never_seen_is_new() -> None:
    assert miss_of(admitted(14)) == {
        "position": 14,
        "reason": "new",
        "text": " now. Be",
        "resident_text": None,
    }


@pytest.mark.parametrize("reason", ["edited", "evicted", "ttl", "request", "ring lost", "refused"])
def test_the_cores_reasons_come_with_what_stood_there(reason: str) -> None:
    found = miss_of(admitted(9, Miss(9, reason, tuple(b"4:10 now"))))
    assert found is not None
    assert (found["position"], found["reason"]) == (9, reason)
    assert (found["text"], found["resident_text"]) == ("03:55 no", "4:10 now")


def test_a_refusal_is_a_reason_of_its_own() -> None:
    found = miss_of(admitted(0), corrected=True)
    assert found is not None
    assert (found["position"], found["reason"]) == (0, "refused")


def test_reuse_that_was_not_wanted_is_said() -> None:
    found = miss_of(admitted(0, Miss(0, "evicted")), reuse=False)
    assert found is not None
    assert found["reason"] == "reuse off"


@pytest.mark.model
def test_other_ids_of_the_same_text_are_the_templates_fault() -> None:
    tokenizer = load_tokenizer(default_model())
    prompt = tokenizer.encode("please hello world again")
    resident = [token for letter in " hello" for token in tokenizer.encode(letter)]
    event = Admitted(1, "r0", 0, len(prompt), 1, miss=Miss(1, "edited", tuple(resident)))
    settings = {"reuse": True, "corrected": False, "other_salt": False}
    found = explain(event, prompt, tokenizer, **settings)
    assert found is not None
    assert found["reason"] == "template"
    assert str(found["text"]).startswith(str(found["resident_text"]))


# ---- through the API ----------------------------------------------------------------------------


def test_refused_rows_correct_what_is_reported() -> None:
    """Case 22: a resume's own rows never count; a refusal takes back what did not come true."""
    script: list[Step] = [
        Admitted(1, "r0", 0, 20, 12),
        Admitted(1, "r0", 0, 20, 0),
        Tokens(1, (65,)),
        Admitted(1, "r0", 1, 20, 20, resumed=True),
        Tokens(1, (66,)),
        Finished(1, "length"),
    ]
    answer = post(FakeEngine(script), CHAT, HI)
    assert cached(answer) == 0
    assert answer["kvring"]["miss"]["reason"] == "refused"
    assert (answer["kvring"]["matched"], answer["kvring"]["slot"]) == (0, 1)


def test_case_17_a_timestamp_shows_up_with_both_texts() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        for time in ("12:03:55", "12:04:10"):
            messages = [{"role": "system", "content": f"It is {time}. Be kind."}, *HI["messages"]]
            body = {"messages": messages, "max_tokens": 4}
            answer = (await call("POST", CHAT, body)).json()
        miss = answer["kvring"]["miss"]
        assert miss["position"] == cached(answer) == len("system: It is 12:0")
        assert (miss["reason"], miss["text"], miss["resident_text"]) == (
            "edited",
            "4:10. Be",
            "3:55. Be",
        )

    play(scene)


def test_another_salt_of_the_same_session_is_said_to_nobody_else() -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        async def reason(key: str, salt: str | None, **more: Any) -> str:
            body = asking("The prompt of all of them.", cache_salt=salt, **more)
            miss = (await call("POST", TEXT, body, key=key)).json()["kvring"]["miss"]
            return str(miss and miss["reason"])

        assert await reason("key-a", "one", user="u") == "new"
        assert await reason("key-b", "two", user="u") == "new"
        assert await reason("key-a", "two") == "new"  # names no session
        assert await reason("key-a", "three", prompt_cache_key="u") == "salt"
        assert await reason("key-a", "three", user="u") == "None"

    play(scene, keys=KEYS, slots=8)


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        ({}, None, None),
        ({"user": "u"}, None, "u"),
        ({"user": "u"}, "x", "x"),
        ({"user": "u", "prompt_cache_key": "p"}, "x", "p"),
        ({"safety_identifier": "s"}, None, None),
    ],
)
def test_a_session_is_named_by_the_first_of_three(
    body: dict[str, Any], header: str | None, session: str | None
) -> None:
    async def scene(ring: LocalRing, call: Call) -> None:
        more = {} if header is None else {"x_session_id": header}
        await call("POST", TEXT, asking("a prompt", **body), **more)
        hints = {slot.hint for slot in ring.scheduler.rings["r0"].ledger.slots}
        assert hints == {"", derive_hint(b"", session)}

    play(scene)


def test_a_hint_and_keep_s_reach_the_engine() -> None:
    engine = FakeEngine([Finished(1, "length")])
    post(engine, CHAT, HI | {"prompt_cache_key": "p", "kvring": {"keep_s": 2.5}})
    post(engine, CHAT, HI)
    assert [(len(turn.hint), turn.keep_s) for turn in engine.submitted] == [(32, 2.5), (0, 0.0)]
