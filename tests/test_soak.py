"""`kvring bench soak`: that its judge notices what is wrong, and the whole of it on a toy ring."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.model import ToyModel
from tests.processes import TOY_LAYERS
from tests.toyclient import truth
from tools import cli
from tools.soak import run
from tools.soak.asking import Asker
from tools.soak.faults import draw
from tools.soak.fleet import COORDINATOR
from tools.soak.judge import bad_end, unexplained
from tools.soak.record import CHAT, COMPLETIONS, Choice, Outcome, Record, Wanted
from tools.soak.rest import at_rest, beyond_bounds, refuted
from tools.soak.run import Plan, Result
from tools.soak.tally import Tally
from tools.soak.truth import Toy, prompts
from tools.soak.watch import Sample, grown_at_rest, trends
from transport.frame import Kind, Sampling, Segment, Shaping

PROMPT = b"the river was quiet that winter morning, and the oak stood where it had always stood"
BODY: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "stream": True}
TOY = Toy()


def wanted(**changes: Any) -> Wanted:
    return Wanted("completion", COMPLETIONS, {**BODY, **changes}, "ann", parts=((PROMPT,),))


def record(**changes: Any) -> Record:
    """A whole and right answer to `wanted`."""
    ask = wanted(**changes)
    expected = TOY.expect(ask.body, PROMPT, 0)
    choice = Choice(expected.text, list(expected.tokens), [expected.finish])
    made = Record(ask, 10.0, [choice], 11.0, [10.5, 10.8], Outcome.COMPLETE, 200, dones=1)
    made.usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(expected.tokens)}
    return made


def judged(one: Record) -> Tally:
    tally = Tally(TOY)
    tally.add(one)
    return tally


# ---- the truth ---------------------------------------------------------------------------------


def test_the_truth_is_what_one_toy_model_gives() -> None:
    expected = TOY.expect(BODY, PROMPT, 0)
    assert list(expected.tokens) == truth(list(PROMPT), 12)
    assert expected == TOY.expect(BODY, PROMPT, 0), "a remembered prefix gives the same"
    assert (expected.finish, expected.count) == ("length", 12)


@pytest.mark.parametrize("shaped", [False, True])
def test_the_truth_of_sampled_replies_too(shaped: bool) -> None:
    body = {**BODY, "temperature": 1.0, "seed": 7, "top_k": 5}
    shaping = None
    if shaped:
        body |= {"repetition_penalty": 1.3, "presence_penalty": 1.5}
        shaping = Shaping(repetition=1.3, presence=1.5, prompt=len(PROMPT))
    model = ToyModel((0, TOY_LAYERS), TOY_LAYERS, slots=1, capacity=200)
    sampling = Sampling(temperature=1.0, top_k=5, seed=8, shaping=shaping)
    tokens, at = list(PROMPT), 0
    while len(tokens) < len(PROMPT) + 12:
        new = tuple(tokens[at:])
        segment = Segment(1, 0, at, new, Kind.PREFILL, bytes(16), 1, sampling)
        tokens += model.forward([segment], None, [tokens[:at]]).results[0].tokens
        at += len(new)
    assert list(TOY.expect(body, PROMPT, 1).tokens) == tokens[len(PROMPT) :], "seed 7, choice 1"


def test_stops_cut_the_truth() -> None:
    whole = TOY.expect(BODY, PROMPT, 0)
    stop = whole.tokens[4]
    at = whole.tokens.index(stop)
    ended = TOY.expect({**BODY, "stop_token_ids": [stop]}, PROMPT, 0)
    assert ended.tokens == whole.tokens[: at + 1]
    assert (ended.finish, ended.count, ended.stopped) == ("stop", at + 1, True)
    character = next(each for each in whole.text if each.isascii())
    cut = TOY.expect({**BODY, "stop": [character]}, PROMPT, 0)
    assert cut.text == whole.text[: whole.text.index(character)]
    assert (cut.finish, cut.count) == ("stop", None)


def test_a_history_may_be_spelled_in_two_ways() -> None:
    chat = replace(wanted(), path=CHAT, parts=((b"a",), (b"xy", b"xyz"), (b"b",)))
    assert list(prompts(chat, None)) == [b"axyb", b"axyzb"]
    assert list(prompts(chat, 5)) == [b"axyzb"]


# ---- a wrong token -----------------------------------------------------------------------------


def test_a_right_reply_passes() -> None:
    tally = judged(record())
    assert (tally.compared, tally.mismatches, tally.bad_ends) == (1, [], [])


def test_a_wrong_token_is_noticed() -> None:
    for position in (0, 5, 11):
        one = record()
        assert one.choices[0].ids is not None
        one.choices[0].ids[position] ^= 1
        assert len(judged(one).mismatches) == 1, position
    one = record()
    one.choices[0].text = one.choices[0].text[:3] + "?" + one.choices[0].text[4:]
    assert "text" in judged(one).mismatches[0]


@pytest.mark.parametrize("what", ["lost", "repeated", "finish", "count"])
def test_a_complete_reply_must_be_whole(what: str) -> None:
    one = record()
    (choice,) = one.choices
    choice.ids = None  # the text alone must tell
    if what == "lost":
        choice.text = choice.text[:-1]
    elif what == "repeated":
        choice.text += choice.text[-1]
    elif what == "finish":
        choice.finishes = ["stop"]
    else:
        one.usage["completion_tokens"] = 11
    assert len(judged(one).mismatches) == 1


def test_what_was_cut_short_must_be_a_beginning() -> None:
    one = record()
    one.outcome, one.usage = Outcome.LEFT, {}
    (choice,) = one.choices
    choice.finishes, choice.ids = [], None
    choice.text = choice.text[:5]
    assert not judged(one).mismatches
    choice.text = choice.text[1:]
    assert "no beginning" in judged(one).mismatches[0]


def test_a_prompt_that_nobody_sent_is_noticed() -> None:
    one = record()
    one.usage["prompt_tokens"] -= 1
    assert "no prompt of" in judged(one).mismatches[0]


# ---- a lost end --------------------------------------------------------------------------------


def test_a_lost_end_is_noticed() -> None:
    def ends(**changes: Any) -> str | None:
        one = record()
        for name, value in changes.items():
            setattr(one, name, value)
        return bad_end(one)

    assert ends() is None
    assert ends(dones=0) == "0 times [DONE]"
    assert ends(dones=2) == "2 times [DONE]"
    assert ends(behind=1) == "1 events behind [DONE]"
    assert ends(errors=1) == "a finish and an error"
    assert ends(choices=[Choice("x")]) == "finishes of its choices: [0]"
    assert ends(choices=[Choice("x", None, ["stop", "stop"])]) == "finishes of its choices: [2]"
    assert ends(outcome=Outcome.ENDLESS) == "it never ended"
    error = {"outcome": Outcome.ERROR, "choices": [Choice("x")]}
    assert ends(**error, errors=1) is None
    assert ends(**error, errors=2) == "2 error events"


def test_failures_need_a_fault_for_a_reason() -> None:
    one = record()  # from 10 to 11
    one.outcome = Outcome.CUT
    assert unexplained(one, [(9.0, 12.0)], []) is not None, "no coordinator died"
    assert unexplained(one, [], [(10.5, 12.0)]) is None
    assert unexplained(one, [], [(11.5, 12.0)]) is not None, "it died afterwards"
    one.outcome = Outcome.ERROR
    assert unexplained(one, [(1.0, 2.0)], []) is not None
    assert unexplained(one, [(9.0, 9.5)], []) is None
    one.outcome, one.status = Outcome.REFUSED, 429
    assert unexplained(one, [], []) is None, "a full queue is no failure"


@contextmanager
def answering(*parts: bytes) -> Iterator[str]:
    """A server that answers one request with these bytes and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                for part in parts:
                    client.sendall(part)
                # Closed with some of the request unread, it would be reset, and its answer lost.
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def event(text: str, finish: str | None = None) -> bytes:
    entry = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {"choices": [entry], "kvring": {"ended_by": "length"}}
    return f"data: {json.dumps(body)}\n\n".encode()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
ERROR = b'event: error\ndata: {"error": {"code": "ring_lost"}}\n\n'
DONE = b"data: [DONE]\n\n"
CASES: list[tuple[Sequence[bytes], Outcome, str | None]] = [
    ((HEAD, b"\r\n", event("a"), event("", "length"), DONE), Outcome.COMPLETE, None),
    ((HEAD, b"\r\n", event("a"), ERROR, DONE), Outcome.ERROR, None),
    ((HEAD, b"\r\n", event("a"), ERROR), Outcome.ERROR, "0 times [DONE]"),
    ((HEAD, b"\r\n", event("a"), DONE), Outcome.COMPLETE, "finishes of its choices: [0]"),
    ((HEAD, b"\r\n", event("a")), Outcome.CUT, None),  # is a coordinator's death the reason?
    ((HEAD, b"\r\n", event("a"), event("b")[:40]), Outcome.CUT, None),
    ((HEAD, b"\r\n", event("a"), event("b")[:-1]), Outcome.CUT, None),
    ((HEAD, b"content-length: 900\r\n\r\n", event("a")), Outcome.CUT, None),
]


@pytest.mark.parametrize(("parts", "outcome", "wrong"), CASES)
def test_a_stream_is_read_to_whatever_end(
    parts: Sequence[bytes], outcome: Outcome, wrong: str | None
) -> None:
    with answering(*parts) as url:
        asker = Asker(url, {"ann": "key"})
        found = asker.ask(wanted())
        asker.close()
    assert (found.outcome, bad_end(found)) == (outcome, wrong)
    assert found.choices[0].text == "a"
    if outcome is Outcome.CUT:
        assert unexplained(found, [], []) is not None


# ---- a leak ------------------------------------------------------------------------------------


def life(
    seconds: int = 120, *, rss: float = 0.0, fds: float = 0.0, threads: float = 0.0
) -> list[Sample]:
    """A process of 50 MB whose takings grow by so much each second, beside some noise."""
    return [
        Sample(
            float(at),
            "s0",
            7,
            int(50e6 + rss * at + at * 7919 % 13 * 1e5),
            int(30 + fds * at) + at % 3,
            int(9 + threads * at),
        )
        for at in range(seconds)
    ]


def leaks(samples: list[Sample]) -> list[str]:
    return [each.leak for each in trends(samples, 0.0, 1000.0) if each.leak is not None]


def test_a_leak_is_noticed() -> None:
    assert leaks(life()) == []
    assert leaks(life(rss=20_000)) == []
    (grown,) = leaks(life(rss=200_000))
    assert grown.startswith("memory of s0 (pid 7) within 89 s: +17")
    (grown,) = leaks(life(fds=0.1))
    assert grown.startswith("descriptors of s0")
    (grown,) = leaks(life(threads=0.1))
    assert grown.startswith("threads of s0")


def test_growth_at_the_start_and_short_lives_do_not_count() -> None:
    early = [replace(each, rss=each.rss + int(min(each.at, 25) * 1e6)) for each in life()]
    assert leaks(early) == []
    assert trends(life(60, rss=1e6), 0.0, 1000.0) == []


def test_growth_at_rest_is_noticed() -> None:
    before, after = life(1)[0], replace(life(1)[0], fds=60)
    assert grown_at_rest([before], [before]) == []
    (grown,) = grown_at_rest([before], [after])
    assert "fds of s0 at rest: 30 more" in grown


def ring_view(turn: int | None = None, running: int = 0, rows: int = 40) -> dict[str, Any]:
    slot = {"slot": 1, "turn": turn, "resident": rows, "capacity": 64}
    ring = {"name": "r0", "slots": [slot], "parked": [], "frames_in_flight": 0}
    ring |= {"parked_rows": 0, "park_limit_rows": 10}
    return {"turns": {"running": running, "waiting": 0}, "rings": [ring]}


def test_held_slots_and_turns_that_stay_are_noticed() -> None:
    assert at_rest(ring_view()) == []
    assert at_rest(ring_view(turn=5)) == ["slot 1 of r0 is held by turn 5"]
    assert at_rest(ring_view(running=1)) == ["1 turns running"]


def test_claims_that_are_not_confirmed_are_noticed() -> None:
    assert refuted(ring_view(), ring_view()) == []
    assert refuted(ring_view(), ring_view(rows=39)) == ["slot 1 of r0: 40 rows claimed, 39 proven"]
    assert beyond_bounds(ring_view()) == []
    assert beyond_bounds(ring_view(rows=65)) == ["slot 1 of r0: 65 rows"]


# ---- the whole ---------------------------------------------------------------------------------


def test_faults_are_drawn_from_the_seed() -> None:
    stages = ["r0s0", "r0s1"]
    planned = draw(5, 10.0, 20.0, stages)
    assert planned == draw(5, 10.0, 20.0, stages) != draw(6, 10.0, 20.0, stages)
    assert 20 < len(planned) < 40
    assert {each.kind for each in planned} == {"kill", "stop", "restart"}
    assert {name for each in planned for name in each.targets} == {COORDINATOR, *stages}
    assert all(20.0 < each.at_s < 580.0 for each in planned)
    assert draw(5, 10.0, 0.0, stages) == []


def test_a_finding_ends_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(1.0, "toy", 3, 1, 4, 20.0, 1)
    tally = judged(record())
    found = {"mismatches": ["chat: text 'a', not 'b'"]}
    result = Result(plan, 0.0, 60.0, tally, [], life(), [], {"resumed_total": 3.0}, findings=found)
    monkeypatch.setattr(run, "soak", lambda *_: result)
    assert cli.run(["bench", "soak", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "1 findings, first of mismatches: chat: text 'a', not 'b'" in said.err
    assert "mismatches" in said.out
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["findings"]["mismatches"]["count"] == 1


def test_a_toy_ring_is_soaked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes; a fault every 4 s."""
    options = ["--minutes=0.25", "--clients=3", "--kill-every=4", "--stages=2", "--seed=3"]
    code = cli.run(["bench", "soak", *options, "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["findings"] == {}
    assert report["outcomes"]["complete"] > 10
    assert report["compared"] >= report["outcomes"]["complete"]
    assert len(report["faults"]) >= 2
    assert all(fault["whole_s"] > 0 for fault in report["faults"])
    assert {series["name"] for series in report["samples"]} == {"coord", "r0s0", "r0s1"}
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    assert "of 0:15" in said.err
