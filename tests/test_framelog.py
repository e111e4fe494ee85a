"""The frame log: records survive, a torn tail is cut, and no flipped byte goes unnoticed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import envelopes, frames
from transport.codec import encode
from transport.frame import (
    Envelope,
    Forwarded,
    Frame,
    FrameError,
    Measure,
    Ping,
    Run,
    Tensor,
    Tick,
)
from transport.framelog import (
    Direction,
    FrameLogError,
    FrameLogReader,
    FrameLogWriter,
    LogHeader,
    LogRecord,
    Payloads,
)
from transport.recorder import MAX_WAITING, Recorder, segments

HEADER = LogHeader("stage", "s0", 77, "0.1.0", 1_700_000_000_000_000_000)
TENSOR = Tensor("float32", (2, 3), bytes(range(24)))
RUN = Run("ring0", 3, 17, (), TENSOR)
SENDER = Envelope("coordinator", 9, 41)


def log_of(*frames: Frame, payloads: Payloads = Payloads.NONE) -> bytes:
    file = io.BytesIO()
    writer = FrameLogWriter(file, HEADER, payloads)
    for at, frame in enumerate(frames):
        writer.record(at, 10**18 + at, Direction.IN, "ring0.s0", frame, envelope=SENDER)
    assert writer.bytes_written == len(file.getvalue())
    return file.getvalue()


def read(data: bytes) -> tuple[list[LogRecord], int]:
    """The records and the torn bytes of a log; FrameLogError passes through."""
    reader = FrameLogReader(io.BytesIO(data))
    records = list(reader)
    assert reader.offset + reader.torn_bytes == len(data)
    return records, reader.torn_bytes


def ends_of(data: bytes) -> list[int]:
    """Offsets at which a record ends (the first: the header)."""
    reader = FrameLogReader(io.BytesIO(data))
    ends = [reader.offset]
    for _ in reader:
        ends.append(reader.offset)
    return ends


# ---- what was written comes back -----------------------------------------------------------------


@given(st.lists(st.tuples(frames, envelopes), max_size=5), st.sampled_from(Payloads))
@settings(max_examples=100, deadline=None)
def test_frames_survive(sent: list[tuple[Frame, Envelope]], payloads: Payloads) -> None:
    file = io.BytesIO()
    writer = FrameLogWriter(file, HEADER, payloads)
    for at, (frame, envelope) in enumerate(sent):
        writer.record(at, 2 * at, Direction.OUT, f"link {at}", frame, envelope=envelope)
    reader = FrameLogReader(io.BytesIO(file.getvalue()))
    assert reader.header == HEADER
    count = 0
    for at, (record, (frame, envelope)) in enumerate(zip(reader, sent, strict=True)):
        count += 1
        assert (record.mono_ns, record.wall_ns) == (at, 2 * at)
        assert (record.direction, record.link) == (Direction.OUT, f"link {at}")
        assert record.number == envelope.number
        again, sender = record.decode()
        assert sender == envelope
        payload = getattr(frame, "payload", None)
        if payloads is Payloads.FULL or payload is None:
            assert again == frame
        else:
            assert isinstance(again, Run | Forwarded | Measure)
            assert again.payload == Tensor(payload.dtype, payload.shape, b"")
            assert record.payload_bytes == len(payload.data)
    assert count == len(sent)


def test_payloads_none_digest_full() -> None:
    kept = {mode: read(log_of(RUN, payloads=mode))[0][0].data for mode in Payloads}
    assert kept == {
        Payloads.NONE: b"",
        Payloads.DIGEST: blake2b(bytes(range(24)), digest_size=16).digest(),
        Payloads.FULL: bytes(range(24)),
    }


def test_a_local_frame_is_under_the_recorders_own_name() -> None:
    file = io.BytesIO()
    FrameLogWriter(file, HEADER).record(5, 6, Direction.LOCAL, "", Tick())
    (record,) = read(file.getvalue())[0]
    assert record.decode() == (Tick(), Envelope("s0", 77, 0))
    assert record.direction is Direction.LOCAL


def test_the_format_is_fixed() -> None:
    """Version 1, to the byte: logs outlive releases."""
    file = io.BytesIO()
    writer = FrameLogWriter(file, LogHeader("r", "n", 1, "v", 2, 3, "c", 4, 5), Payloads.FULL)
    writer.record(4, 5, Direction.OUT, "l", Ping("p", 6, 7), envelope=Envelope("s", 8, 9))
    assert file.getvalue().hex() == (
        "894b56524c4f470a010000000e0000004830ede199a172a16e01a1760203a16304054b5652433900"
        "0000c6ab354858eb6e36040000000000000005000000000000000102010010000000090000000000"
        "000000000000000000006c9601a1730809a450696e6793a1700607"
    )


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("payloads", Payloads)
def test_torn_at_every_byte(payloads: Payloads) -> None:
    data = log_of(RUN, Tick(), RUN, payloads=payloads)
    ends = ends_of(data)
    whole = read(data)[0]
    for end in range(ends[0], len(data) + 1):
        records, torn = read(data[:end])
        intact = sum(each <= end for each in ends) - 1
        assert records == whole[:intact]
        assert torn == end - ends[intact]
    for end in range(ends[0]):
        with pytest.raises(FrameLogError):
            FrameLogReader(io.BytesIO(data[:end]))


@pytest.mark.parametrize("payloads", Payloads)
def test_every_flipped_byte_is_found(payloads: Payloads) -> None:
    data = log_of(RUN, Tick(), RUN, payloads=payloads)
    ends = ends_of(data)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= flip
            with pytest.raises(FrameLogError) as caught:
                read(bytes(broken))
            starts = [0, *ends[:-1]]
            assert caught.value.offset == max(each for each in starts if each <= at)


def test_a_damaged_body_costs_one_record() -> None:
    data = bytearray(log_of(RUN, Tick(), RUN))
    ends = ends_of(bytes(data))
    data[ends[1] + 20] ^= 1
    reader = FrameLogReader(io.BytesIO(bytes(data)))
    first = next(reader)
    with pytest.raises(FrameLogError, match=f"byte {ends[1]}: a damaged record of"):
        next(reader)
    third = next(reader)
    assert (first.mono_ns, third.mono_ns) == (0, 2)
    assert list(reader) == []


def test_a_damaged_start_ends_the_reading() -> None:
    data = bytearray(log_of(RUN, Tick(), RUN))
    data[ends_of(bytes(data))[1] + 5] ^= 1
    reader = FrameLogReader(io.BytesIO(bytes(data)))
    next(reader)
    with pytest.raises(FrameLogError, match="nothing after it can be read"):
        next(reader)
    assert list(reader) == []


@pytest.mark.parametrize("zeros", [1, 15, 16, 100, 200_000])
def test_a_tail_of_zeros_is_torn(zeros: int) -> None:
    """What some file systems leave of an append after a power loss."""
    records, torn = read(log_of(RUN, Tick()) + bytes(zeros))
    assert (len(records), torn) == (2, zeros)


def test_zeros_with_data_behind_them_are_damage() -> None:
    with pytest.raises(FrameLogError):
        read(log_of(RUN, Tick()) + bytes(100_000) + b"x")


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_tails(tail: bytes) -> None:
    data = log_of(RUN)
    reader = FrameLogReader(io.BytesIO(data + tail))
    assert len([next(reader)]) == 1
    found: list[object] = []
    try:
        found += list(reader)
    except FrameLogError as error:
        found.append(error.offset)
    assert found in ([], [len(data)])


@given(st.binary(max_size=100))
def test_random_files(data: bytes) -> None:
    for file in (data, log_of()[:24] + data):
        with pytest.raises(FrameLogError):
            list(FrameLogReader(io.BytesIO(file)))


def test_another_version_says_so() -> None:
    import struct
    import zlib

    start = b"\x89KVRLOG\n" + struct.pack("<II", 2, 0)
    with pytest.raises(FrameLogError, match="version 2, this reader knows 1"):
        FrameLogReader(io.BytesIO(start + struct.pack("<I", zlib.crc32(start))))


def test_short_reads_and_writes() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:7])

        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(5, 5 if size is None or size < 0 else size))

    file = Slow()
    FrameLogWriter(file, HEADER, Payloads.FULL).record(1, 2, Direction.IN, "l", RUN)
    file.seek(0)
    (record,) = FrameLogReader(file)
    assert record.decode()[0] == RUN


def test_a_frame_that_does_not_decode_is_a_frame_error() -> None:
    record = LogRecord(0, 0, 0, Direction.IN, "l", 0, b"\xc1", Payloads.NONE, 0, b"")
    with pytest.raises(FrameError):
        record.decode()


# ---- the directory -------------------------------------------------------------------------------


def records_in(directory: Path) -> list[int]:
    """mono_ns of all records in all segments, oldest segment first."""
    found = []
    for path in segments(directory):
        with path.open("rb") as file:
            found += [record.mono_ns for record in FrameLogReader(file)]
    return found


def test_rotation_keeps_the_newest_within_the_total(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new", HEADER, segment_bytes=1000, total_bytes=5000)
    most = 0
    for at in range(1000):
        recorder.record(at, at, Direction.IN, "l", Tick(), envelope=SENDER)
        most = max(most, sum(path.stat().st_size for path in segments(tmp_path / "new")))
    recorder.close()
    kept = records_in(tmp_path / "new")
    assert most <= 5000 + 100  # a segment ends with the record that fills it
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) > 30
    with segments(tmp_path / "new")[-1].open("rb") as file:
        assert FrameLogReader(file).header.segment > 10


def test_earlier_lives_count_and_other_names_do_not(tmp_path: Path) -> None:
    other = Recorder(tmp_path, LogHeader("stage", "s0.x", 1, "v", 5), segment_bytes=500)
    other.record(1, 1, Direction.IN, "l", Tick())
    other.close()
    for life in range(20):
        header = LogHeader("stage", "s0", life, "v", 1000 + life)
        recorder = Recorder(tmp_path, header, segment_bytes=100, total_bytes=600)
        recorder.record(life, life, Direction.IN, "l", Tick())
        recorder.close()
    assert len(segments(tmp_path, "s0.x")) == 1
    lives = []
    for path in segments(tmp_path, "s0"):
        with path.open("rb") as file:
            lives.append(FrameLogReader(file).header.incarnation)
    assert lives == list(range(20 - len(lives), 20))
    assert 2 <= len(lives) <= 6


def test_a_full_disk_ends_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, HEADER, segment_bytes=200)
    recorder.record(1, 1, Direction.IN, "l", Tick())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FrameLogWriter, "write", full)
    for at in range(3):
        recorder.record(at, at, Direction.IN, "l", Tick())
    assert recorder.error is not None
    assert "No space left" in recorder.error
    recorder.close()
    assert records_in(tmp_path) == [1]


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from transport.frame import Tick
from transport.framelog import Direction, LogHeader
from transport.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), LogHeader("stage", "s0", 1, "v", 2))
for at in range(10_000_000):
    recorder.record(at, at, Direction.IN, "l", Tick())
    if at == 100:
        print("going", flush=True)
"""
    root = Path(__file__).parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"going\n"
        os.kill(child.pid, signal.SIGKILL)
    kept = records_in(tmp_path)
    assert len(kept) > 100
    assert kept == list(range(len(kept)))


@pytest.mark.parametrize("payloads", Payloads)
def test_records_that_wait_cost_one_write_and_change_no_byte(
    tmp_path: Path, payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a header that is at hand, of a frame that came or was sent."""
    frames: list[Frame] = [RUN, Tick(), Forwarded(3, 17, TENSOR), Ping("ring0", 3, 18)]
    writes: list[int] = []
    write = FrameLogWriter.write

    def counted(self: FrameLogWriter, data: bytes) -> None:
        writes.append(len(data))
        write(self, data)

    monkeypatch.setattr(FrameLogWriter, "write", counted)
    found = {}
    for way in ("at once", "waiting", "closed"):
        recorder = Recorder(tmp_path / way, HEADER, payloads)
        writes.clear()
        for at, frame in enumerate(frames):
            known = None if way == "at once" else encode(frame, SENDER)[0]
            recorder.record(
                at, at, Direction.IN, "l", frame, envelope=SENDER, header=known,
                wait=way != "at once",
            )  # fmt: skip
        assert len(writes) == (len(frames) if way == "at once" else 0)
        if way == "waiting":
            recorder.flush()
            assert len(writes) == 1
        recorder.close()
        (path,) = segments(tmp_path / way)
        found[way] = path.read_bytes()
    assert found["waiting"] == found["closed"] == found["at once"]
    records, torn = read(found["waiting"])
    assert (len(records), torn) == (len(frames), 0)


def test_only_so_many_records_wait(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, HEADER)
    (path,) = segments(tmp_path)
    for at in range(MAX_WAITING):
        assert len(read(path.read_bytes())[0]) == 0
        recorder.record(at, at, Direction.IN, "l", Tick(), wait=True)
    assert len(read(path.read_bytes())[0]) == MAX_WAITING
    recorder.close()


def test_a_reader_goes_on_where_a_record_is_finished() -> None:
    data = log_of(RUN, Tick(), RUN)
    ends = ends_of(data)
    file = io.BytesIO(data[: ends[1] + 7])
    reader = FrameLogReader(file)
    assert [record.offset for record in reader] == ends[:1]
    assert reader.torn_bytes == 7
    file.seek(0, io.SEEK_END)
    file.write(data[ends[1] + 7 :])
    reader.resume()
    assert [record.offset for record in reader] == ends[1:3]
    assert reader.torn_bytes == 0
