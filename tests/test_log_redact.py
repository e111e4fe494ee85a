"""kvring log redact: the copy holds no text, and everything that could be checked still can.

Every prefix hash of the copy is computed again here, from its own tokens; and the copy of a
coordinator's log, fed to a fresh scheduler, gives exactly the frames that the copy says were sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coord.actions import Send
from coord.scheduler import Scheduler
from tests.memoryring import VOCABULARY, ring_spec
from tests.memoryworld import HalfRight
from tests.recordedring import RecordedRing, played, prompt
from tests.recording import record, save
from tests.test_log_life import random_ring
from tests.world import Plan
from tools import cli
from tools.framelogs.check import prove
from tools.framelogs.hiding import Hiding
from tools.framelogs.read import Entry, entries, processes
from tools.sim.oracle import Oracle
from transport.chain import Chain, pack_tokens, root_hash
from transport.config import loads
from transport.frame import (
    Copy,
    Frame,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    Shaping,
    Submit,
    Verdict,
)
from transport.framelog import Direction, FrameLogReader, Payloads
from transport.recorder import segments

KEY = b"sixteen or more bytes"
LONG = 6  # tokens in a row that no copy may hold: fewer come about by chance among 64 ids


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    played(folder)
    return folder


def redact(source: Path, out: Path, key: bytes | None = KEY, *options: str) -> int:
    arguments = ["log", "redact", str(source), "-o", str(out), *options]
    if key is not None:
        (out.parent / "key").write_bytes(key)
        arguments += ["--key-file", str(out.parent / "key")]
    return cli.run(arguments)


def recorded(folder: Path) -> dict[str, list[Entry]]:
    return {
        f"{process.name}/{process.header.incarnation}": list(entries(process))
        for process in processes([folder])
    }


def check_chains(found: dict[str, list[Entry]]) -> Counter[str]:
    """Follow every slot of every process; each hash must be that of the rows before it.

    Unless a stage refuses it for that: one that was restarted, or forgot rows. Then it is counted.
    """
    seen: Counter[str] = Counter()
    fingerprints = {
        entry.fingerprint
        for each in found.values()
        for record in each
        if isinstance(record.frame, RollCall)
        for entry in record.frame.entries
    }
    for name, mine in found.items():
        chains: dict[int, Chain] = {}
        way = Direction.OUT if name.startswith("coord") else Direction.IN
        for entry in mine:
            if entry.record.direction is not way:
                continue
            frame = entry.frame
            if isinstance(frame, Run):
                for segment in frame.segments:
                    follows = _follow(chains, segment, fingerprints, seen)
                    assert follows or not name.startswith("coord"), (name, segment)
                    seen["refused"] += not follows
            elif isinstance(frame, Copy):
                source = chains.get(frame.source)
                if source is not None and len(source) >= frame.length:
                    if source.hash_before(frame.length) != frame.parent_hash:
                        seen["refused"] += 1
                        continue
                    seen["copies"] += 1
                    chains[frame.target] = source.clone()
                    chains[frame.target].truncate(frame.length)
    return seen


def _follow(
    chains: dict[int, Chain], segment: Segment, fingerprints: set[bytes], seen: Counter[str]
) -> bool:
    chain = chains.get(segment.slot)
    if segment.start == 0:
        seen["roots"] += 1
        roots = {root_hash(fingerprint, segment.salt) for fingerprint in fingerprints}
        assert segment.parent_hash in roots
        chain = chains[segment.slot] = Chain(segment.parent_hash)
    else:
        if chain is None or len(chain) < segment.start:
            return False
        if chain.hash_before(segment.start) != segment.parent_hash:
            return False
        seen["parents"] += 1
        chain.truncate(segment.start)
    chain.extend(segment.tokens)
    return True


def texts(found: dict[str, list[Entry]]) -> list[tuple[int, ...]]:
    """Every token sequence in the frames of clients' turns."""
    said: list[tuple[int, ...]] = []
    for each in found.values():
        for entry in each:
            frame = entry.frame
            if isinstance(frame, Submit):
                said.append(frame.prompt)
            elif isinstance(frame, Remembered):
                said.append(frame.tokens)
            elif isinstance(frame, Run):
                said += [segment.tokens for segment in frame.segments if segment.turn]
            elif hasattr(frame, "results"):
                said += [result.tokens for result in frame.results if result.turn]
    return said


def digests(found: dict[str, list[Entry]]) -> set[bytes]:
    """Every hash of a text."""
    return {digest for each in found.values() for entry in each for digest in _digests(entry.frame)}


def _digests(frame: Frame) -> list[bytes]:
    match frame:
        case Run():
            return [each.parent_hash for each in frame.segments if each.turn and each.start]
        case Copy():
            return [frame.parent_hash]
        case RollCall():
            return [each.digest for each in frame.claims]
    return []


def windows(said: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {text[at : at + LONG] for text in said for at in range(len(text) - LONG + 1)}


def test_no_text_is_left(logs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert redact(logs, out) == 0
    before, after = recorded(logs), recorded(out)
    assert before.keys() == after.keys()
    plain = windows(texts(before))
    assert len(plain) > 150
    assert not plain & windows(texts(after))
    data = b"".join(path.read_bytes() for path in segments(out))
    for window in plain:
        assert pack_tokens(window) not in data
    for secret in (b"secret", b"10.0.0.", b"/home", b"someone"):
        assert secret in b"".join(path.read_bytes() for path in segments(logs))
        assert secret not in data
    records = [entry.record for each in after.values() for entry in each]
    assert all(record.payloads is Payloads.NONE and not record.data for record in records)
    assert sum(record.payload_bytes for record in records) > 0


def test_all_else_stays(logs: Path, tmp_path: Path) -> None:
    """Times, order, links, sizes, turns, slots, rows: all that the other commands look at."""
    out = tmp_path / "out"
    redact(logs, out)
    assert [path.name for path in segments(out)] == [path.name for path in segments(logs)]
    before, after = recorded(logs), recorded(out)
    hiding = Hiding(KEY, VOCABULARY)
    for name, mine in before.items():
        for old, new in zip(mine, after[name], strict=True):
            assert (old.at_ns, old.index, old.envelope) == (new.at_ns, new.index, new.envelope)
            assert old.record.direction is new.record.direction
            assert old.record.payload_bytes == new.record.payload_bytes
            assert type(old.frame) is type(new.frame)
            if isinstance(old.frame, Submit) and isinstance(new.frame, Submit):
                assert new.frame.prompt == hiding.tokens(old.frame.prompt)
                assert replace(new.frame, prompt=(), salt=b"") == replace(
                    old.frame, prompt=(), salt=b""
                )
            if isinstance(old.frame, Verdict) and isinstance(new.frame, Verdict):
                for a, b in zip(old.frame.results, new.frame.results, strict=True):
                    expected = a if a.turn == 0 else _hidden(a, hiding)
                    assert b == expected
    (coordinator,) = (each for each in processes([out]) if each.name == "coord")
    config = loads(coordinator.header.config)
    assert [stage.name for stage in config.rings[0].stages] == ["s0", "s1", "s2"]
    assert config.limits.chunk_tokens == 16
    assert config.model.path == "toy" or config.model.path.startswith("/")


def _hidden(result: Result, hiding: Hiding) -> Result:
    return replace(result, tokens=hiding.tokens(result.tokens), logprobs=(), top=())


@given(st.integers(0, 10_000), st.binary(min_size=16, max_size=40))
@settings(max_examples=25, deadline=None)
def test_chains_and_the_schedule_hold_under_any_key(seed: int, key: bytes) -> None:
    with TemporaryDirectory() as name:
        source, out = Path(name) / "logs", Path(name) / "out"
        ring = random_ring(source, Random(seed))
        assert redact(source, out, key) == 0
        before, after = recorded(source), recorded(out)
        assert not windows(texts(before)) & windows(texts(after))
        seen = check_chains(after)
        assert seen == check_chains(before)
        assert seen["parents"] > 0
        if ring.scheduler._drafter is None:
            replayed(ring, after["coord/1"])


@pytest.mark.parametrize("seed", range(3, 7))
def test_what_a_successor_is_told_is_hidden_and_proved_alike(seed: int, tmp_path: Path) -> None:
    """Coordinators that remember, and roll calls with claims that are right, old, cut or lies."""
    source, out = tmp_path / "logs", tmp_path / "out"
    plan = Plan(seed, 1 + seed % 3, 3, park=8000, trouble="successors")
    save(record(plan, steps=60), source)
    assert redact(source, out, KEY + bytes([seed])) == 0
    before, after = recorded(source), recorded(out)
    plain = {text for text in windows(texts(before)) if len(set(text)) > 3}  # not one id repeated
    assert len(plain) > 100
    assert not plain & windows(texts(after))
    assert digests(before)
    assert not digests(before) & digests(after)
    assert counted(out) == counted(source)


def counted(folder: Path) -> dict[str, object]:
    """All counts of `kvring log check`."""
    proved = prove([folder])
    return {**asdict(proved.tally), "one_end": proved.one_end}


def test_what_is_remembered_is_what_is_claimed_in_the_copy(tmp_path: Path) -> None:
    """Right or not, salted or not: each claim of a first roll call is of the hidden tokens."""
    hiding, salted, seen = Hiding(KEY, VOCABULARY), 0, 0
    for seed in (4, 6):
        folder = tmp_path / str(seed)
        save(record(Plan(seed, 1, 3, park=8000, trouble="successors"), steps=60), folder / "logs")
        redact(folder / "logs", folder / "out")
        before, after = recorded(folder / "logs"), recorded(folder / "out")
        for name, mine in before.items():
            told: dict[int, bytes] = {}
            for old, new in zip(mine, after[name], strict=True):
                if isinstance(new.frame, RollCall) and new.frame.ring and told:
                    seen += len(told)
                    assert {c.number: c.digest for c in new.frame.claims} == told
                    told = {}
                if not isinstance(new.frame, Remembered) or not isinstance(old.frame, Remembered):
                    continue
                assert new.frame.tokens == hiding.tokens(old.frame.tokens)
                assert new.frame.salt == hiding.salt(old.frame.salt)
                chain = Chain(root_hash(new.frame.fingerprint, new.frame.salt), new.frame.tokens)
                told[new.frame.number] = chain.hash_before(len(chain))
                salted += bool(new.frame.salt)
    assert seen
    assert salted


def replayed(ring: RecordedRing, mine: list[Entry]) -> None:
    """A fresh scheduler that hears what the copy's did says what the copy's said."""
    spec = ring_spec("r", len(ring.stages), 2)
    scheduler = Scheduler((spec,), ring.limits, drafter=None)
    sent: list[Frame] = []
    for entry in mine:
        if entry.record.direction is not Direction.OUT:
            actions = scheduler.handle(entry.frame, entry.record.mono_ns / 1e9)
            sent += [action.frame for action in actions if isinstance(action, Send)]
    assert sent == [entry.frame for entry in mine if entry.record.direction is Direction.OUT]
    assert len(sent) > 3


def test_one_key_hides_alike_in_all_files(logs: Path, tmp_path: Path) -> None:
    """Also one process at a time, as logs are collected from several machines."""
    for name in ("a", "b", "c", "each"):
        (tmp_path / name).mkdir()
    redact(logs, tmp_path / "a" / "out")
    redact(logs, tmp_path / "b" / "out")
    redact(logs, tmp_path / "c" / "out", b"another key of some length")
    for path in segments(logs):
        redact(path, tmp_path / "each" / "out")
    for path in segments(logs):
        first = (tmp_path / "a" / "out" / path.name).read_bytes()
        assert (tmp_path / "b" / "out" / path.name).read_bytes() == first
        assert (tmp_path / "c" / "out" / path.name).read_bytes() != first
    whole, apart = recorded(tmp_path / "a" / "out"), recorded(tmp_path / "each" / "out")
    asked = 0
    for name, mine in whole.items():
        for one, other in zip(mine, apart[name], strict=True):
            if one.frame == other.frame:
                continue
            assert name == "s1/102", "a stage that restarted is asked about rows that it never had"
            assert isinstance(one.frame, RollCall)
            assert isinstance(other.frame, RollCall)
            assert replace(one.frame, claims=other.frame.claims) == other.frame
            asked += 1
    assert asked == 1


def test_without_a_key_nobody_has_one(logs: Path, tmp_path: Path) -> None:
    copies = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert redact(logs, tmp_path / name / "out", None) == 0
        copies.append(recorded(tmp_path / name / "out"))
        assert check_chains(copies[-1]) == check_chains(recorded(logs))
    assert texts(copies[0]) != texts(copies[1])


def test_a_log_that_begins_in_the_middle(tmp_path: Path) -> None:
    """Rows from before it have no tokens; their hashes are still the same in all files."""
    source = tmp_path / "logs"
    ring = RecordedRing(
        source, segment_bytes=3000, drafter=partial(HalfRight, Oracle(6, VOCABULARY))
    )
    ring.form()
    text = prompt(3, 60)
    for _ in range(4):
        text = (*text, *ring.ask(text, 12).tokens, 5, 6)
    ring.close()
    for path in segments(source, "coord")[:-2]:
        path.unlink()
    assert redact(source, tmp_path / "out") == 0
    after = recorded(tmp_path / "out")
    sent = {
        segment.parent_hash
        for entry in after["coord/1"]
        if isinstance(entry.frame, Run)
        for segment in entry.frame.segments
    }
    named = {
        segment.parent_hash
        for entry in after["s0/1"]
        if isinstance(entry.frame, Run)
        for segment in entry.frame.segments
    }
    assert sent
    assert sent <= named
    assert check_chains({"s0/1": after["s0/1"]})["parents"] > 10


def test_every_field_with_tokens_is_hidden(tmp_path: Path) -> None:
    source = tmp_path / "logs"
    shaping = Shaping(repetition=1.5, bias=((3, 1.0), (9, -2.0)), min_tokens=2)
    ring = RecordedRing(source)
    ring.form()
    wanted = Sampling(temperature=0.7, seed=5, logprobs=2, shaping=shaping)
    ring.submit(prompt(1, 20), 5, (11, 12), sampling=wanted)
    ring.pump()
    ring.close()
    redact(source, tmp_path / "out")
    hiding = Hiding(KEY, VOCABULARY)
    bias = tuple((hiding.token(token), value) for token, value in shaping.bias)
    after = recorded(tmp_path / "out")
    (submit,) = (e.frame for e in after["coord/1"] if isinstance(e.frame, Submit))
    assert submit.stops == hiding.tokens((11, 12))
    assert submit.sampling.shaping == replace(shaping, bias=bias)
    shaped = [
        segment.sampling.shaping
        for each in after.values()
        for entry in each
        if isinstance(entry.frame, Run)
        for segment in entry.frame.segments
        if segment.turn
    ]
    ends = hiding.tokens((11, 12))
    assert set(shaped) == {replace(shaping, bias=bias, prompt=20, ends=ends)}
    results = [
        result
        for each in after.values()
        for entry in each
        for result in getattr(entry.frame, "results", ())
        if result.turn
    ]
    assert all(result.logprobs == () and result.top == () for result in results)


def test_the_permutation() -> None:
    hiding = Hiding(KEY, 1000)
    hidden = hiding.tokens(range(1000))
    assert sorted(hidden) == list(range(1000))
    assert sum(a == b for a, b in enumerate(hidden)) < 10
    assert hidden == Hiding(KEY, 1000).tokens(range(1000))
    assert hidden != Hiding(KEY + b"x", 1000).tokens(range(1000))
    for token in (1000, 1001, 2**31 - 1, 2**32 - 1):
        assert 1000 <= hiding.token(token) < 2**31
    assert hiding.token(1000) != 1000


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("token 70, vocabulary 64", "token ?, vocabulary 64"),
        ("slot 1 holds 10 rows, the frame names 12", "slot 1 holds 10 rows, the frame names 12"),
        ("can't read /home/someone/model.gguf: no such file", "can't read x"),
        ("stage s1 (tcp://10.0.0.2:7000) is late", "stage s1 (x"),
    ],
)
def test_details_lose_places_and_tokens(text: str, hidden: str) -> None:
    found = Hiding(KEY, 64).text(text)
    assert found.startswith(hidden)
    assert "someone" not in found
    assert "10.0.0" not in found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--key-file", "missing"], ["--key-file", "missing"]),
        (["--key-file", "short"], ["5 bytes", "16"]),
    ],
)
def test_bad_keys(
    arguments: list[str],
    words: list[str],
    logs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_bytes(b"short")
    assert cli.run(["log", "redact", str(logs), "-o", "out", *arguments]) == 2
    errors = capsys.readouterr().err
    assert all(word in errors for word in words)
    assert not Path("out").exists()


def test_a_copy_is_never_written_over(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in segments(logs)}
    assert redact(logs, tmp_path / "out") == 0
    capsys.readouterr()
    assert redact(logs, tmp_path / "out") == 1
    assert "File exists" in capsys.readouterr().err
    (tmp_path / "key").write_bytes(KEY)
    assert cli.run(["log", "redact", str(logs), "-o", str(logs)]) == 1
    assert {path: path.read_bytes() for path in segments(logs)} == before


def test_a_log_without_a_roll_call_needs_a_vocabulary(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = segments(logs, "coord")[0]
    path = tmp_path / source.name
    with source.open("rb") as file:
        reader = FrameLogReader(file)
        first = reader.offset
        start = next(r.offset for r in reader if isinstance(r.decode()[0], Submit))
    data = source.read_bytes()
    whole = data[:first] + data[start:]
    path.write_bytes(whole)
    path.write_bytes(whole[: _until_rollcall(path)])
    assert redact(path, tmp_path / "out") == 2
    assert "--vocabulary" in capsys.readouterr().err
    assert redact(path, tmp_path / "out", KEY, "--vocabulary", str(VOCABULARY)) == 0


def _until_rollcall(path: Path) -> int:
    with path.open("rb") as file:
        return next(r.offset for r in FrameLogReader(file) if isinstance(r.decode()[0], RollCall))
