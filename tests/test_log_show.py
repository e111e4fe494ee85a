"""kvring log show: every frame once, in order of time; filters, damage, and logs that grow."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recordedring import RecordedRing, played, prompt
from tests.recording import COORDINATOR, Taken, save
from tools import cli
from tools.framelogs.read import entries, processes
from tools.framelogs.stream import Stream
from transport.frame import (
    Claim,
    Envelope,
    Kind,
    Remembered,
    RollCall,
    Run,
    Segment,
    StageLost,
    Submit,
)
from transport.framelog import Direction, FrameLogReader
from transport.recorder import segments

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A played scene; treat it as read-only."""
    folder = tmp_path_factory.mktemp("logs")
    played(folder, segment_bytes=20_000)
    return folder


def show(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    code = cli.run(["log", "show", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def objects(*arguments: object, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, lines, errors = show(*arguments, "--json", capsys=capsys)
    assert (code, errors) == (0, "")
    return [json.loads(line) for line in lines]


def test_every_record_is_one_line_in_order_of_time(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = sum(1 for each in processes([logs]) for _ in entries(each))
    code, lines, errors = show(logs, capsys=capsys)
    assert (code, errors) == (0, "")
    assert lines[0] == f"# 0.000000 is {lines[0].removeprefix('# 0.000000 is ')}"
    assert len(lines) == count + 1 > 800
    times = [float(line.split()[0]) for line in lines[1:]]
    assert times == sorted(times)
    found = objects(logs, capsys=capsys)
    assert len(found) == count
    assert len({(each["file"], each["byte"]) for each in found}) == count
    assert {each["process"] for each in found} == {"coord", "s0", "s1", "s2"}
    assert {each["direction"] for each in found} == {"in", "out", "local"}
    assert not any("tokens" in line for line in lines)


def test_a_line_says_the_frame(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = show(logs, "--process", "s1", "--kind", "run", "--turn", 1, capsys=capsys)
    said = lines[1].split()
    assert said[1:4] == ["s1", "in", "r/s0"]
    assert said[5:8] == ["Run", "e1/3", "1/0/[0,16)/prefill"]
    assert said[8:] == ["uint8[16,8]", "128", "B"]


@pytest.mark.parametrize(
    ("options", "check"),
    [
        (["--process", "s2"], lambda each: each["process"] == "s2"),
        (["--direction", "out"], lambda each: each["direction"] == "out"),
        (["--kind", "verdict"], lambda each: each["kind"] == "Verdict"),
        (["--kind", "Copy", "--kind", "rollcall"], lambda e: e["kind"] in ("Copy", "RollCall")),
        (
            ["--kind", "verify"],
            lambda each: any(s["kind"] == "verify" for s in each["frame"].get("segments", ())),
        ),
        (["--since", "2.0313"], lambda each: each["s"] >= 2.0313),
        (["--until", "0.01"], lambda each: each["s"] < 0.01),
        (["--since", "0.005", "--until", "0.01"], lambda each: 0.005 <= each["s"] < 0.01),
        (["--ring", "r"], lambda e: e["kind"] not in ("Submit", "Cancel", "Tick")),
        (["--ring", "other"], lambda each: False),
    ],
)
def test_filters(
    options: list[str], check: Any, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = objects(logs, capsys=capsys)
    assert objects(logs, *options, capsys=capsys) == [each for each in every if check(each)]


def test_a_turn_takes_its_answers_along(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A middle stage's Forwarded names no turn; its frame did."""
    found = objects(logs, "--turn", 1, capsys=capsys)
    assert {each["kind"] for each in found} == {"Submit", "Run", "Forwarded", "Verdict"}
    runs = [each for each in found if each["kind"] == "Run" and each["process"] == "s1"]
    arrived = [each for each in runs if each["direction"] == "in"]
    done = [each for each in found if each["kind"] == "Forwarded" and each["process"] == "s1"]
    assert [e["frame"]["seq"] for e in arrived] == [e["frame"]["seq"] for e in done] != []
    slots = {segment["slot"] for run in runs for segment in run["frame"]["segments"]}
    assert slots == {0}
    beside = objects(logs, "--turn", 1, "--slot", 2, capsys=capsys)
    assert [each["kind"] for each in beside] == []


def test_clock_times(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = show(logs, capsys=capsys)
    day, clock = lines[0].removeprefix("# 0.000000 is ").split()
    late = f"{clock[:6]}{float(clock[6:]) + 2:09.6f}"
    expected = [line for line in lines[1:] if float(line.split()[0]) >= 2]
    assert show(logs, "--since", late, capsys=capsys)[1][1:] == expected
    assert show(logs, "--since", f"{day}T{late}", capsys=capsys)[1][1:] == expected


def test_tokens_only_on_request(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = prompt(1, 40)
    hidden = objects(logs, "--kind", "submit", capsys=capsys)
    assert hidden[0]["frame"]["prompt"] == len(mine)
    assert hidden[-1]["frame"]["salt"] is True
    shown = objects(logs, "--kind", "submit", "--tokens", capsys=capsys)
    assert tuple(shown[0]["frame"]["prompt"]) == mine
    assert shown[-1]["frame"]["salt"] is True
    _, lines, _ = show(logs, "--kind", "submit", "--tokens", capsys=capsys)
    assert ",".join(map(str, mine)) in lines[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kind", "runn"], ["--kind runn", "verdict", "prefill"]),
        (["--direction", "up"], ["--direction up"]),
        (["--since", "yesterday"], ["yesterday", "HH:MM:SS"]),
        (["--until", "25:61"], ["25:61"]),
    ],
)
def test_wrong_options_are_named(
    options: list[str], words: list[str], logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = show(logs, *options, capsys=capsys)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in words)


def test_no_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(tmp_path, capsys=capsys)[0] == 1
    code, _, errors = show(tmp_path / "none", capsys=capsys)
    assert code == 1
    assert "none" in errors


# ---- damage ------------------------------------------------------------------------------------


def copied(logs: Path, tmp_path: Path) -> dict[str, Path]:
    """Files of a copy, by process; of the last segment where there are several."""
    found = {}
    for path in segments(logs):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        found[path.name.partition(".")[0]] = copy
    return found


def test_a_torn_tail_is_said_and_the_rest_shown(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(logs, tmp_path)["s2"]
    with path.open("rb") as file:
        last = [record.offset for record in FrameLogReader(file)][-1]
    path.write_bytes(path.read_bytes()[: last + 30])
    whole = show(logs, capsys=capsys)[1]
    code, lines, errors = show(tmp_path, capsys=capsys)
    assert code == 1
    assert len(lines) == len(whole) - 1
    assert len(errors.splitlines()) == 1
    assert f"{path}: byte {last}: torn, 30 bytes" in errors


def test_a_flipped_byte_ends_its_process_only(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(logs, tmp_path)["s0"]
    with path.open("rb") as file:
        offsets = [record.offset for record in FrameLogReader(file)]
    data = bytearray(path.read_bytes())
    data[offsets[10] + 60] ^= 1
    path.write_bytes(data)
    code, lines, errors = show(tmp_path, "--json", capsys=capsys)
    assert code == 1
    assert f"{path}: byte {offsets[10]}: a damaged record" in errors
    whole = objects(logs, capsys=capsys)
    found = [json.loads(line) for line in lines]

    def of(each: dict[str, Any]) -> tuple[str, int]:
        return Path(each["file"]).name, each["byte"]

    lost = [key for key in map(of, whole) if key not in set(map(of, found))]
    assert lost == [(path.name, offset) for offset in offsets[10:]]


def test_a_missing_segment_is_a_note(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(logs, tmp_path)
    gone = next(path for path in segments(tmp_path) if path.name.startswith("s0"))
    gone.unlink()
    code, _, errors = show(tmp_path, "--process", "coord", capsys=capsys)
    assert code == 0
    assert errors == "kvring: s0: segments 0 are not among the files\n"


def test_head_ends_it_without_a_trace(logs: Path) -> None:
    command = [sys.executable, "-m", "tools.cli", "log", "show", str(logs)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("# ")
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


# ---- following ---------------------------------------------------------------------------------


def test_following_sees_all_that_is_appended(tmp_path: Path) -> None:
    """Records, rotated segments, and processes that start later; each exactly once."""
    ring = RecordedRing(tmp_path, segment_bytes=4000)
    ring.recorder("coord", 1)
    steps = iter(_steps(ring))
    stream = Stream([tmp_path])
    seen: list[tuple[str, int]] = []
    with contextlib.closing(stream.follow(lambda: None)) as followed:
        for entry in followed:
            if entry is not None:
                seen.append((entry.path.name, entry.record.offset))
            elif next(steps, None) is None:
                break
    ring.close()
    assert stream.damages == []
    expected = [(e.path.name, e.record.offset) for p in processes([tmp_path]) for e in entries(p)]
    assert len(segments(tmp_path)) > 8
    assert sorted(seen) == sorted(expected)
    assert len(seen) == len(set(seen)) > 300


def _steps(ring: RecordedRing) -> Iterator[int]:
    yield 1  # the first look finds the coordinator alone, with nothing recorded
    ring.form()
    yield 2
    for seed in range(4):
        ring.submit(prompt(seed, 30), 10)
        for step in itertools.count():
            if not ring.choices():
                break
            ring.happen(ring.choices()[0])
            if step % 7 == 0:
                yield 3
    yield 4  # the last look comes after the last record


def test_following_waits_for_a_record_that_is_being_written(logs: Path, tmp_path: Path) -> None:
    source = segments(logs)[0].read_bytes()
    path = tmp_path / segments(logs)[0].name
    with segments(logs)[0].open("rb") as file:
        offsets = [record.offset for record in FrameLogReader(file)]
    cuts = iter([*range(offsets[0] + 1, len(source), 997), len(source), None])
    path.write_bytes(source[: offsets[0]])
    stream = Stream([tmp_path])
    seen = []
    with contextlib.closing(stream.follow(lambda: None)) as followed:
        for entry in followed:
            if entry is not None:
                seen.append(entry.record.offset)
                continue
            cut = next(cuts)
            if cut is None:
                break
            path.write_bytes(source[:cut])
    assert stream.damages == []
    assert seen == offsets


def test_what_is_remembered_claimed_and_unsent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prompt(3, 12)
    told = Remembered("r", 1, b"model", b"salt", tokens, "session", idle_s=7, keep_s=60)
    claims = tuple(Claim(number, 12 + number, b"1" * 16) for number in range(11))
    lost = Run("r", 1, 1, (Segment(1, 1, 0, tokens, Kind.PREFILL, b"1" * 16, 1),))
    envelope = Envelope("r/coordinator", 1, 0)
    submit = Submit(1, tokens, 3)
    log = [
        Taken(COORDINATOR, Direction.LOCAL, told, None),
        Taken(COORDINATOR, Direction.OUT, RollCall("r", 1, claims), envelope),
        Taken(COORDINATOR, Direction.LOCAL, submit, None),
        Taken(COORDINATOR, Direction.UNSENT, lost, None),
        Taken(COORDINATOR, Direction.LOCAL, StageLost("r", "s0", "its link ended"), None),
    ]
    save(log, tmp_path)
    code, lines, errors = show(tmp_path, capsys=capsys)
    assert (code, errors) == (0, "")
    assert lines[1].endswith("Remembered 1/[0,12) idle 7 s kept for 60 s salted")
    assert lines[2].endswith(
        "RollCall  e1 claims "
        + " ".join(f"{number}/[0,{12 + number})" for number in range(8))
        + " and 3 more"
    )
    assert " unsent link " in lines[4]
    ids = ",".join(map(str, tokens))
    assert not any(ids in line for line in lines)
    _, lines, _ = show(tmp_path, "--direction", "unsent", "--tokens", capsys=capsys)
    assert len(lines) == 2
    assert ids in lines[1]
    (said,) = objects(tmp_path, "--kind", "remembered", capsys=capsys)
    assert said["frame"]["tokens"] == 12
    assert (said["frame"]["salt"], said["frame"]["hint"]) == (True, True)
    assert len(objects(tmp_path, "--slot", 1, capsys=capsys)) == 3
    assert [each["kind"] for each in objects(tmp_path, "--slot", 9, capsys=capsys)] == ["RollCall"]
    code, _, errors = show(tmp_path, "--direction", "up", capsys=capsys)
    assert code == 2
    assert errors.endswith("there are in, out, local, unsent\n")
    assert cli.run(["log", "story", "1", str(tmp_path)]) == 0
    assert "frame 1 takes prefill [0, 12), but its link does not take it" in capsys.readouterr().out
