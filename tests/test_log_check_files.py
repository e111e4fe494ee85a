"""`kvring log check` on files: rings in memory and of real processes, recorded, cut and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.processes import Fleet, fleet, idle, write_ring
from tests.recording import Taken, record, save
from tests.toyclient import complete, streaming, truth
from tests.world import Plan
from tools.cli import run
from tools.errors import ToolError
from tools.framelogs.check import OffendingFrame, prove
from tools.framelogs.read import LogDamageError
from transport.codec import decode_header
from transport.frame import Kind, Run
from transport.framelog import Direction, FrameLogReader, FrameLogWriter, Payloads
from transport.recorder import segments

PLAN = Plan(5, stages=3, slots=3, chunk=8, park=8000)
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def log() -> list[Taken]:
    return record(PLAN, steps=60)


@pytest.fixture
def logs(log: list[Taken], tmp_path: Path) -> Path:
    save(log, tmp_path / "logs", payloads=Payloads.FULL)
    return tmp_path / "logs"


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `kvring log check`."""
    code = run(["log", "check", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def rewrite(path: Path, change: Callable[[Run], Run], which: int) -> int:
    """Change the which-th Run of a file that goes on with a prefill; its offset.

    Whatever it was, the file's checksums are right after it.
    """
    with path.open("rb") as file:
        reader = FrameLogReader(file)
        header, records = reader.header, list(reader)
    found, count = 0, 0
    with path.open("wb") as file:
        writer = FrameLogWriter(file, header, Payloads.FULL)
        for each in records:
            frame, envelope = each.decode()
            first = frame.segments[:1] if isinstance(frame, Run) else ()
            if first and first[0].turn and first[0].start and first[0].kind is Kind.PREFILL:
                assert isinstance(frame, Run)
                count += change(frame) != frame
                if count == which and not found:
                    frame, found = change(frame), writer.bytes_written
            local = each.direction is Direction.LOCAL
            writer.record(
                each.mono_ns,
                each.wall_ns,
                each.direction,
                each.link,
                frame,
                envelope=None if local else envelope,
            )
    return found


def other_token(run: Run) -> Run:
    first = run.segments[0]
    changed = replace(first, tokens=(first.tokens[0] ^ 1, *first.tokens[1:]))
    return replace(run, segments=(changed, *run.segments[1:]))


def test_a_clean_recording_is_proved(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, logs)
    assert (code, err) == (0, "")
    for words in ("coordinator coord", "stage s2", "no segment and no copy reads past", "R1, R2"):
        assert words in out
    code, out, _ = check(capsys, logs, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["proved"] is True
    assert told["segments"]
    assert [each["name"] for each in told["processes"]] == ["coord", "s0", "s1", "s2"]


@pytest.mark.parametrize("name", ["coord", "s0", "s1", "s2"])
def test_one_process_alone_is_proved(logs: Path, name: str) -> None:
    tally = prove(segments(logs, name)).tally
    rules = ("R3", "R4", "R5") if name == "coord" else ("R1", "R2", "R6")
    assert all(tally.proved[rule] and not tally.unproved[rule] for rule in rules), tally


@pytest.mark.parametrize("ahead_s", [0.5, -3600.0])
def test_clocks_that_differ_change_nothing(
    log: list[Taken], tmp_path: Path, ahead_s: float
) -> None:
    save(log, tmp_path, skews={"s1": int(ahead_s * SECOND_NS), "coord": SECOND_NS})
    proved = prove([tmp_path])
    assert proved.tally.proved["R7"] > 100
    assert proved.one_end == 0


def test_tensors_are_compared_by_digest(log: list[Taken], tmp_path: Path) -> None:
    """One end kept the digest and the other one all of it."""
    for payloads, role in ((Payloads.FULL, "s0"), (Payloads.DIGEST, "s1")):
        save([each for each in log if each.who.name == role], tmp_path, payloads=payloads)
    assert prove([tmp_path]).tally.proved["R7"]
    sent = rewrite(segments(tmp_path, "s0")[0], flipped, 1)
    assert sent
    with pytest.raises(OffendingFrame, match="tensor") as found:
        prove([tmp_path])
    assert found.value.rule == "R7"


def flipped(run: Run) -> Run:
    if run.payload is None:  # the head takes tokens alone
        return run
    data = bytes([run.payload.data[0] ^ 1, *run.payload.data[1:]])
    return replace(run, payload=replace(run.payload, data=data))


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["coord", "s0", "s1", "s2"])
def test_a_changed_record_is_named_by_file_and_byte(
    logs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = segments(logs, name)[0]
    offset = rewrite(path, other_token, 1)
    code, out, err = check(capsys, logs)
    assert (code, out) == (1, "")
    assert f"{path}: byte {offset}: {name} " in err
    assert "Run " in err
    assert len(err.splitlines()) == 1
    code, out, _ = check(capsys, logs, "--json")
    told = json.loads(out)
    assert (code, told["proved"], told["file"], told["byte"]) == (1, False, str(path), offset)
    assert told["rule"].startswith("R")
    assert told["expected"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_byte_is_named_by_file_and_byte(
    log: list[Taken], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped length at the end may read as a torn tail in no case."""
    folder = tmp_path_factory.mktemp("flip")
    save([each for each in log[:400] if each.who.name in ("coord", "s1")], folder)
    path = data.draw(st.sampled_from(segments(folder)))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    with pytest.raises(LogDamageError) as found:
        prove([folder])
    assert found.value.path == path
    assert found.value.offset <= at
    assert f"byte {found.value.offset}" in found.value.message


def test_damage_ends_with_code_1(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segments(logs, "s1")[0]
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 4
    path.write_bytes(whole)
    code, _, err = check(capsys, logs)
    assert code == 1
    assert str(path) in err
    assert "damaged record" in err
    code, out, _ = check(capsys, logs, "--json")
    assert code == 1
    assert json.loads(out)["damage"]


def test_bad_paths_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capsys, tmp_path / "none")
    assert code == 1
    assert "no such file" in err
    code, _, err = check(capsys, tmp_path)
    assert code == 1
    assert "no frame logs" in err


# ---- what is not there ---------------------------------------------------------------------------


def test_a_torn_tail_is_cut_and_said(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segments(logs, "s1")[0]
    path.write_bytes(path.read_bytes()[:-7])
    code, out, _ = check(capsys, logs)
    assert code == 0
    assert "stage s1: " in out
    assert "of a torn record are cut off" in out


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_segments_that_were_rotated_away_are_no_alarm(
    log: list[Taken], tmp_path: Path, gone: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one, or one in the middle; of every process, or of one."""
    save(log, tmp_path, segment_bytes=4_000)
    for name in ("coord", "s0", "s1", "s2"):
        files = segments(tmp_path, name)
        assert len(files) > 3
        files[gone].unlink()
        code, out, err = check(capsys, tmp_path)
        assert code == 0, err
        assert f"{name}: 1 segments are missing" in out
    tally = prove([tmp_path]).tally
    assert tally.unproved["R1"] + tally.unproved["R3"]
    assert tally.proved["R1"]
    assert tally.proved["R3"]


def test_extracts_of_one_turn_are_left_out(logs: Path, tmp_path: Path) -> None:
    """Verify mode writes some of a coordinator's frames beside the log."""
    coord = segments(logs, "coord")[0]
    with coord.open("rb") as file:
        reader = FrameLogReader(file)
        header, records = reader.header, list(reader)[5:9]
    path = logs / f"verify-3-warm.{header.wall_ns:020d}.000000.kvrlog"
    with path.open("xb") as file:
        writer = FrameLogWriter(file, replace(header, name="verify-3-warm"))
        for each in records:
            frame, envelope = decode_header(each.header)
            writer.record(1, 1, each.direction, each.link, frame, envelope=envelope)
    assert prove([logs]).left_out == ["verify-3-warm"]
    with pytest.raises(ToolError, match="only extracts"):
        prove([path])


# ---- real processes ------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path / "fleet") as started:
        yield started


def test_a_real_ring_with_a_killed_stage_is_proved(made: Fleet, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ring = write_ring(tmp_path / "ring.toml", stages=3)
    record_to = ("--record", logs, "--record-payloads", "digest")
    made.coord(ring, *record_to)
    running = {name: made.stage(ring, name, *record_to) for name in ring.names}
    made.ready(ring.url)
    prompt = list(range(5, 60))
    first = complete(ring.url, prompt, 20)
    again = complete(ring.url, [*prompt, *first.tokens, 7], 10)
    assert again.cached
    with streaming(ring.url, prompt[::-1], 3000) as reading:
        reading.read(5)
    with streaming(ring.url, prompt, 300) as reading:
        reading.read(10)
        running["s1"].kill()
        made.stage(ring, "s1", *record_to)
        reading.rest()
    made.ready(ring.url)
    idle(ring.url)
    assert complete(ring.url, prompt, 20).tokens == truth(prompt, 20)
    proved = prove([logs])
    assert len(proved.processes) == 5
    assert all(proved.tally.proved.values()), proved.tally
    known = {rule: count for rule, count in proved.tally.unproved.items() if rule != "R6"}
    assert not any(known.values()), proved.tally
    for path in segments(logs):
        prove([path])
