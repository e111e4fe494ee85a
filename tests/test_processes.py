"""Whole rings of real processes over tcp, serving the toy model: form, reuse, lose, resume, end.

Truth is plain serial decoding (tests.toyclient.truth), so a token that was lost, repeated or made
from a wrong prefix is seen. CASES 4, 7, 22-25, 27-31, 41, 42.
"""

from __future__ import annotations

import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import pytest

from tests import processes
from tests.processes import Fleet, Process, RingFile, get, post, until, write_ring
from tests.screen import CTRL_C, terminal
from tests.toyclient import Answer, complete, stream, streaming, truth
from transport.frame import Heartbeat, RollCall, Run, Verdict
from transport.framelog import FrameLogReader
from transport.recorder import segments

LONG = 1500  # tokens of a reply that is still running when a process is killed: about 2 s


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One ring of `kvring up` for the tests that break nothing."""
    with processes.fleet(tmp_path_factory.mktemp("shared")) as made:
        _, base = made.up("--model", "toy", "--slots", "5")
        made.ready(base)
        yield base


def prompt_of(seed: int, count: int) -> list[int]:
    """A prompt that no other seed begins like."""
    return [seed, *(Random(seed).randrange(256) for _ in range(count - 1))]


# ---- forming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["coordinator first", "stages first", "mixed"])
def test_a_ring_forms_in_any_order(order: str, fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)

    def loaded(name: str) -> None:
        process = fleet.stage(ring, name)
        until(f"{name} is loaded", lambda: '"event": "loaded"' in process.errors)

    if order == "coordinator first":
        fleet.coord(ring)
        body = fleet.not_ready(ring.url, "s0", "s1", "not been heard of")
        assert body["r"]["s0"]["state"] == "unknown"
        fleet.stage(ring, "s1")
        until("only s0 is missing", lambda: "s1" not in fleet.not_ready(ring.url, "s0")["missing"])
        fleet.stage(ring, "s0")
    elif order == "stages first":
        loaded("s1")
        loaded("s0")
        fleet.coord(ring)
    else:
        loaded("s1")
        fleet.coord(ring)
        fleet.not_ready(ring.url, "s0", "not been heard of")
        fleet.stage(ring, "s0")
    fleet.ready(ring.url)
    prompt = prompt_of(1, 50)
    assert complete(ring.url, prompt, 20).tokens == truth(prompt, 20)
    described = get(f"{ring.url}/ring").json()["rings"][0]
    assert described["reuse"] is True, "case 7"
    assert [entry["pid"] for entry in described["stages"]] == [
        process.popen.pid
        for name in ring.names
        for process in fleet.processes
        if process.name == name
    ]


# ---- serving -------------------------------------------------------------------------------------


def test_the_second_identical_request_is_cached(url: str) -> None:
    """Case 4."""
    prompt = prompt_of(2, 300)
    first = complete(url, prompt, 25)
    second = complete(url, prompt, 25)
    assert first.tokens == second.tokens == truth(prompt, 25)
    assert first.text == second.text
    assert (first.cached, second.cached) == (0, len(prompt) - 1)
    assert (first.kvring["prefilled"], second.kvring["prefilled"]) == (len(prompt), 1)


def test_a_follow_up_turn_reuses_prompt_and_reply(url: str) -> None:
    """DESIGN 4: resident after a turn is prompt + completion - 1."""
    prompt = prompt_of(3, 100)
    known = 0
    for turn in range(4):
        answer = (complete, stream)[turn % 2](url, prompt, 20 + turn)
        assert answer.tokens == truth(prompt, 20 + turn)
        assert answer.cached == answer.kvring["matched"] == known
        assert answer.kvring["prefilled"] == len(prompt) - known
        known = len(prompt) + len(answer.tokens) - 1
        prompt = [*prompt, *answer.tokens, *prompt_of(100 + turn, 30)]


def test_a_stream_equals_the_whole_answer(url: str) -> None:
    """Cases 23, 24, 41, 42."""
    for text in ("hello", "grüße €", prompt_of(4, 40)):
        complete(url, text, 1)  # both of the next are equally warm
        whole, streamed = complete(url, text, 60, seed=1), stream(url, text, 60, seed=1)
        assert streamed.tokens == whole.tokens
        assert (streamed.text, streamed.finish) == (whole.text, whole.finish)
        assert whole.usage["completion_tokens"] == len(whole.tokens) == 60
        assert whole.usage["prompt_tokens"] == streamed.usage["prompt_tokens"]
        assert isinstance(streamed.cached, int)


def test_concurrent_requests_equal_serial_ones(url: str) -> None:
    """More turns than slots, shared beginnings, streams and whole answers side by side."""
    shared = prompt_of(5, 200)
    prompts = [[*shared[: 200 - 20 * n], *prompt_of(20 + n, 10 + 7 * n)] for n in range(8)]
    asks: list[Callable[..., Answer]] = [complete, stream] * 4
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [
            pool.submit(ask, url, prompt, 60) for ask, prompt in zip(asks, prompts, strict=True)
        ]
        answers = [future.result() for future in futures]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == truth(prompt, 60)
        assert answer.finish == "length"
        assert answer.kvring["prefilled"] + answer.cached == len(prompt)
    processes.idle(url)


def test_a_client_that_goes_away_frees_its_slot(url: str) -> None:
    prompt = prompt_of(6, 120)
    with streaming(url, prompt, 3000) as reading:
        reading.read(5)
        held = [slot["slot"] for slot in processes.slots(url) if slot["turn"] is not None]
        assert len(held) == 1
        begun = reading.tokens
    processes.idle(url)
    resident = processes.slots(url)[held[0]]["resident"]
    assert len(prompt) + len(begun) - 1 <= resident < len(prompt) + 3000 - 1
    again = complete(url, prompt, 40)
    assert again.tokens == truth(prompt, 40)
    assert again.cached == len(prompt) - 1  # what was acknowledged stayed
    assert again.tokens[: len(begun)] == begun[:40]


def test_a_client_that_goes_away_unanswered_frees_its_slot(url: str) -> None:
    """Not streamed: the connection is closed before there is any answer."""
    prompt = prompt_of(7, 90)
    with pytest.raises(httpx.ReadTimeout):
        post(
            f"{url}/v1/completions",
            json={"prompt": prompt, "max_tokens": 3000, "temperature": 0},
            timeout_s=0.3,
        )
    processes.idle(url)
    assert complete(url, prompt, 10).tokens == truth(prompt, 10)


def test_a_queued_turn_of_a_gone_client_never_runs(url: str) -> None:
    """Five slots, five long streams, and a sixth that gives up while it waits."""
    long = [streaming(url, prompt_of(40 + n, 30), 3000) for n in range(5)]
    readers = [each.__enter__() for each in long]
    try:
        for reader in readers:
            reader.read(1)
        before = _metric(url, "kvring:prefilled_tokens_total")
        with pytest.raises(httpx.ReadTimeout):
            post(f"{url}/v1/completions", json={"prompt": prompt_of(50, 700)}, timeout_s=0.3)
        until("nobody waits", lambda: get(f"{url}/ring").json()["turns"]["waiting"] == 0)
    finally:
        for each in long:
            each.__exit__(None, None, None)
    processes.idle(url)
    assert _metric(url, "kvring:prefilled_tokens_total") - before < 700


def test_cancel_by_id_ends_a_stream(url: str) -> None:
    with streaming(url, prompt_of(8, 20), 3000) as reading:
        reading.read(3)
        assert post(f"{url}/v1/cancel/{reading.last['id']}").status_code == 200
        answer = reading.rest()
    assert answer.finish == "stop"
    assert answer.tokens == truth(prompt_of(8, 20), len(answer.tokens))
    assert answer.usage["completion_tokens"] == len(answer.tokens)
    processes.idle(url)


def _metric(url: str, name: str) -> float:
    for line in get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no {name} in /metrics")


# ---- losing and resuming -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hand(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Fleet, RingFile, dict[str, Process]]]:
    """A ring started by hand; each test leaves it whole."""
    folder = tmp_path_factory.mktemp("hand")
    with processes.fleet(folder / "processes") as made:
        ring = write_ring(folder / "ring.toml")
        yield made, ring, made.whole(ring)


Hand = tuple[Fleet, RingFile, dict[str, Process]]


@pytest.mark.parametrize("victim", ["s0", "s1", "s2"])
def test_a_killed_stage_loses_no_token(victim: str, hand: Hand) -> None:
    """Cases 28-31: SIGKILL mid-stream, started again by hand; the client's stream goes on."""
    fleet, ring, running = hand
    prompt = prompt_of(60 + int(victim[1]), 80)
    with streaming(ring.url, prompt, LONG) as reading:
        reading.read(10)
        running[victim].kill()
        fleet.not_ready(ring.url, victim)
        assert get(f"{ring.url}/health").status_code == 200, "case 27"
        assert len(reading.tokens) < LONG
        running[victim] = fleet.stage(ring, victim)
        answer = reading.rest()
    assert answer.tokens == truth(prompt, LONG)
    assert answer.finish == "length"
    assert answer.cached == 0, "case 22: its own work is no hit"
    fleet.ready(ring.url)
    processes.idle(ring.url)
    after = prompt_of(70 + int(victim[1]), 30)
    assert complete(ring.url, after, 30).tokens == truth(after, 30)


def test_a_request_during_a_loss_waits_for_the_ring(hand: Hand) -> None:
    """Case 28: neither whole nor streamed is it refused, while the stage is started again."""
    fleet, ring, running = hand
    prompts = [prompt_of(77 + at, 40) for at in range(2)]
    running["s1"].kill()
    fleet.not_ready(ring.url, "s1")
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(complete, ring.url, prompts[0], 20)
        streamed = pool.submit(stream, ring.url, prompts[1], 20)
        until("both wait", lambda: get(f"{ring.url}/ring").json()["turns"]["waiting"] == 2)
        assert not whole.done()
        running["s1"] = fleet.stage(ring, "s1")
        answers = [whole.result(), streamed.result()]
    assert [each.tokens for each in answers] == [truth(each, 20) for each in prompts]
    processes.idle(ring.url)


def test_a_stopped_stage_is_lost_and_comes_back(hand: Hand) -> None:
    """Case 28: SIGSTOP, then SIGCONT: the same process, the same stream."""
    fleet, ring, running = hand
    prompt = prompt_of(80, 60)
    with streaming(ring.url, prompt, LONG) as reading:
        reading.read(10)
        running["s1"].send(signal.SIGSTOP)
        try:
            fleet.not_ready(ring.url, "s1", "last heard of")
        finally:
            running["s1"].send(signal.SIGCONT)
        answer = reading.rest()
    assert answer.tokens == truth(prompt, LONG)
    processes.idle(ring.url)


def test_a_coordinator_can_be_replaced(hand: Hand) -> None:
    """The stages stay; the new coordinator calls the roll and serves."""
    fleet, ring, running = hand
    prompt = prompt_of(90, 60)
    with streaming(ring.url, prompt, LONG) as reading:
        reading.read(10)
        running["coord"].kill()
        with pytest.raises(httpx.HTTPError):
            reading.rest()
    running["coord"] = fleet.coord(ring)
    fleet.ready(ring.url)
    assert complete(ring.url, prompt, 30).tokens == truth(prompt, 30)


def test_a_lost_turn_fails_within_its_bound(fleet: Fleet, tmp_path: Path) -> None:
    """Case 28, 41: nobody restarts the stage, so the stream ends as an error event."""
    limits = replace(processes.QUICK, resume_s=1.0)
    ring = write_ring(tmp_path / "ring.toml", stages=2, limits=limits)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(91, 30), LONG) as reading:
        reading.read(5)
        running["s1"].kill()
        with pytest.raises(AssertionError, match="ring_lost"):
            reading.rest()

    def named() -> bool:  # at first the roll is called, in case that it is back
        refused = post(f"{ring.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        return "s1" in refused.json()["error"]["message"]

    until("the refusal names the stage", named, 10.0)


# ---- ending --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_ends_all_it_started(number: signal.Signals, fleet: Fleet, tmp_path: Path) -> None:
    """Logs are whole after it, and a key is asked for."""
    logs = tmp_path / "logs"
    up, url = fleet.up("--model", "toy", "--stages", "2", "--record", logs, "--api-key", "secret")
    fleet.ready(url)
    until("it says so", lambda: f"ready at {url}" in up.output)
    prompt = prompt_of(9, 20)
    assert len(fleet.alive()) == 4
    denied = post(f"{url}/v1/completions", json={"prompt": prompt})
    assert denied.status_code == 401
    key = {"Authorization": "Bearer secret"}
    answer = post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 5}, headers=key)
    assert answer.status_code == 200, answer.text
    up.send(number)
    assert up.wait() == 0, up
    assert fleet.alive() == []
    assert list(fleet.scratch.iterdir()) == []
    assert "secret" not in up.output
    assert "Traceback" not in up.errors
    kinds = {path.name.split(".")[0]: _kinds(path) for path in segments(logs)}
    assert sorted(kinds) == ["coord", "s0", "s1"]
    assert {Heartbeat, RollCall, Run, Verdict} <= kinds["coord"]
    assert {RollCall, Run} <= kinds["s0"]
    assert {RollCall, Run, Verdict} <= kinds["s1"]


def _kinds(path: Path) -> set[type]:
    """Types of all frames of one log."""
    with path.open("rb") as file:
        return {type(record.decode()[0]) for record in FrameLogReader(file)}


@pytest.mark.parametrize("ending", ["signal", "parent"])
def test_a_child_of_up_ends_with_code_0(ending: str, fleet: Fleet, tmp_path: Path) -> None:
    """Its thread that watches standard input must not disturb the interpreter's shutdown."""
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    watching = {
        "coord": fleet.start("coord", "--ring", ring.path, "--with-parent", stdin=subprocess.PIPE),
        "s0": fleet.start(
            "stage", "--ring", ring.path, "--name", "s0", "--with-parent", stdin=subprocess.PIPE
        ),
    }
    fleet.ready(ring.url)
    for process in watching.values():
        assert process.popen.stdin is not None
        if ending == "signal":
            process.send(signal.SIGTERM)
        else:
            process.popen.stdin.close()
        assert process.wait() == 0, process
        assert "Fatal" not in process.errors


def test_a_killed_up_leaves_no_process(fleet: Fleet) -> None:
    """SIGKILL: it can end nothing any more, so its children watch their standard input."""
    up, url = fleet.up("--model", "toy", "--stages", "2")
    fleet.ready(url)
    assert len(fleet.alive()) == 4
    up.kill()
    fleet.gone()


def test_up_killed_while_it_starts_leaves_no_process(fleet: Fleet) -> None:
    up, _ = fleet.up("--model", "toy", "--stages", "2")
    until("its children run", lambda: len(fleet.alive()) == 4)
    up.kill()
    fleet.gone()


def test_up_interrupted_while_it_starts_leaves_no_process(fleet: Fleet) -> None:
    up, _ = fleet.up("--model", "toy", "--stages", "2")
    until("its children run", lambda: len(fleet.alive()) == 4)
    up.send(signal.SIGINT)
    assert up.wait() == 0, up
    assert fleet.alive() == []
    assert "Traceback" not in up.errors


def test_a_stage_that_dies_ends_up_and_is_named(fleet: Fleet) -> None:
    up, url = fleet.up("--model", "toy", "--stages", "2")
    fleet.ready(url)
    stages = get(f"{url}/ring").json()["rings"][0]["stages"]
    killed = next(each for each in fleet.alive() if each.pid == stages[1]["pid"])
    killed.kill()
    processes.assert_clear(up, 1, "s1", "-9")
    assert fleet.alive() == []


def test_api_keys_come_from_a_file(fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two tenants\none:alpha-0123456789abcdef\ntwo:beta-0123456789abcdef\n")
    keys.chmod(0o600)
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    fleet.coord(ring, "--api-key-file", keys)
    fleet.stage(ring, "s0")
    fleet.ready(ring.url)  # probes need no key

    def ask(key: str | None) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"prompt": [1] * 50, "max_tokens": 2}
        return post(f"{ring.url}/v1/completions", json=body, headers=headers)

    for key in (None, "gamma", "# two tenants"):
        refused = ask(key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    cached = []
    for key in (f"{name}-0123456789abcdef" for name in ("alpha", "beta", "alpha")):
        answer = ask(key)
        assert answer.status_code == 200, answer.text
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 49], "case 19: a tenant never hits another's prefix"


def test_up_takes_a_file_of_keys_and_looks_with_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """And --api-key beside it is one more."""
    keys = tmp_path / "keys"
    keys.write_text("ann:alpha-0123456789abcdef\n")
    keys.chmod(0o644)
    processes.assert_clear(fleet.up("--model", "toy", "--api-key-file", keys)[0], 2, "chmod 600")
    keys.chmod(0o600)
    options = ("--model", "toy", "--stages", "1", "--api-key-file", keys)
    up, url = fleet.up(*options, "--api-key", "secret")
    fleet.ready(url)
    until("it says so", lambda: f"ready at {url}" in up.output)
    statuses = [
        httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}).status_code
        for key in ("alpha-0123456789abcdef", "secret", "wrong")
    ]
    assert statuses == [403, 200, 401], "one of the file is no admin, the operator's is"
    (held,) = fleet.scratch.glob("kvring-*/api-keys")
    assert stat.S_IMODE(held.stat().st_mode) == 0o600
    assert "alpha" not in held.read_text()
    up.send(signal.SIGTERM)
    assert up.wait() == 0
    with terminal("up", *map(str, options), "--http", "127.0.0.1:0", state=tmp_path) as screen:
        screen.wait_for("-H 'Authorization: Bearer KEY'")
        screen.wait_for("0 of 4 slots used")  # which GET /ring says to nobody without a key
        screen.press(CTRL_C)
        assert screen.wait() == 0


def test_a_daemon_ends_by_a_signal_with_code_0(hand: Hand) -> None:
    _, _, running = hand
    for number, name in ((signal.SIGINT, "s0"), (signal.SIGTERM, "s1"), (signal.SIGTERM, "coord")):
        running[name].send(number)
        assert running[name].wait() == 0, running[name]
        assert "Traceback" not in running[name].errors
