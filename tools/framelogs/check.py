"""Owns `kvring log check`: feeds frame logs to a Residency; says what was proved, or what offends.

Also what only a file can lack: segments that were rotated away, a torn tail, a digest kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.errors import ToolError
from tools.framelogs.read import Entry, LogDamageError, Process, merged, processes
from tools.framelogs.residency import RULES, Residency, Tally, Violation, Who
from transport.config import ConfigError, loads
from transport.frame import Copy, Frame, Free, Ping, Reject, Remembered, RollCall, Run, Verdict
from transport.framelog import DIGEST_BYTES, Direction, LogRecord, Payloads

EXTRACT = "verify-"  # logs of one turn's frames that verify mode writes: no process's stream


class OffendingFrame(ToolError):  # noqa: N818 - as Violation
    """The proof fails. entry: the first offending frame."""

    def __init__(self, entry: Entry, found: Violation) -> None:
        self.entry, self.rule, self.expected = entry, found.rule, found.text
        super().__init__(
            f"{entry.path}: byte {entry.record.offset}: {entry.process.name} "
            f"{DIRECTIONS[entry.record.direction]} {words(entry.frame)}: "
            f"{found.rule} ({RULES[found.rule]}): {found.text}"
        )


DIRECTIONS = {
    Direction.IN: "took",
    Direction.OUT: "sent",
    Direction.LOCAL: "was told",
    Direction.UNSENT: "could not send",
}


@dataclass(slots=True)
class Proved:
    """What a check found. one_end: frames of which only one end of the link was recorded."""

    processes: list[Process]
    tally: Tally
    one_end: int = 0
    seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)


def prove(paths: Sequence[Path]) -> Proved:
    """Prove the logs' residency. Raises OffendingFrame, LogDamageError, or ToolError."""
    started = time.process_time()
    found = processes(paths)
    extracts = [each.name for each in found if each.name.startswith(EXTRACT)]
    found = [each for each in found if each.name not in extracts]
    if not found:
        raise ToolError("only extracts of single turns: no process's frames to check")
    proof = Residency(pair=len(found) > 1)
    whos: dict[Process, Who] = {}
    for each in found:
        header = each.header
        whos[each] = Who(header.role, header.name, header.incarnation)
        whole = 0 not in each.missing
        proof.begin(whos[each], whole=whole, max_model_len=_max_model_len(header.config))
    holes = {each: set(_behind_holes(each)) for each in found}
    for entry in merged(found):
        who = whos[entry.process]
        if entry.path in holes[entry.process]:
            holes[entry.process].remove(entry.path)
            proof.missing(who)
        _observe(proof, who, entry)
    return Proved(found, proof.tally, proof.waiting(), time.process_time() - started, extracts)


def _observe(proof: Residency, who: Who, entry: Entry) -> None:
    record = entry.record
    crossed = record.direction in (Direction.IN, Direction.OUT)
    envelope = entry.envelope if crossed else None
    data = _digest(record)
    try:
        proof.observe(
            who,
            record.direction,
            entry.frame,
            envelope,
            Place(entry.path, record.offset),
            wire=record.header,
            data=data,
        )
    except Violation as found:
        raise OffendingFrame(entry, found) from None


class Place(NamedTuple):
    """Where a record lies."""

    path: Path
    offset: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.offset}"


def _digest(record: LogRecord) -> bytes | None:
    if not record.payload_bytes or record.payloads is Payloads.NONE:
        return None
    if record.payloads is Payloads.DIGEST:
        return record.data
    return blake2b(record.data, digest_size=DIGEST_BYTES).digest()


def _max_model_len(config: str) -> int | None:
    """From the ring.toml in a log's header; None where there is none."""
    try:
        return loads(config).limits.max_model_len if config else None
    except ConfigError:
        return None


def _behind_holes(process: Process) -> Iterator[Path]:
    """The segments that come behind missing ones, but for the first."""
    count = len(process.paths) + len(process.missing)
    there = [number for number in range(count) if number not in process.missing]
    for at, (before, number) in enumerate(pairwise(there), 1):
        if number != before + 1:
            yield process.paths[at]


def words(frame: Frame) -> str:
    """A frame for people: its kind, its numbers, and what it is about."""
    kind = type(frame).__name__
    match frame:
        case Run():
            about = ", ".join(
                f"turn {s.turn} slot {s.slot} rows [{s.start}, {s.end})" for s in frame.segments[:4]
            )
            more = f" and {len(frame.segments) - 4} more" if len(frame.segments) > 4 else ""
            return f"{kind} {frame.epoch}/{frame.seq} ({about or 'no segments'}{more})"
        case Verdict():
            turns = ", ".join(str(result.turn) for result in frame.results[:8])
            return f"{kind} {frame.epoch}/{frame.seq} (turns {turns or 'none'})"
        case Copy():
            return (
                f"{kind} {frame.epoch}/{frame.seq} (rows [0, {frame.length}) of slot "
                f"{frame.source} to {frame.target})"
            )
        case Free():
            return f"{kind} {frame.epoch}/{frame.seq} (slot {frame.slot})"
        case Ping():
            return f"{kind} {frame.epoch}/{frame.seq}"
        case Reject():
            return f"{kind} {frame.epoch}/{frame.seq} ({frame.code.value}: {frame.detail})"
        case RollCall():
            return f"{kind} of epoch {frame.epoch} ({_many(len(frame.claims), 'claim')})"
        case Remembered():
            return f"{kind} (number {frame.number}: {_many(len(frame.tokens), 'row')})"
    return kind


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# ---- the command ---------------------------------------------------------------------------------


def check(paths: Sequence[Path], *, as_json: bool) -> int:
    """Run the command; returns the exit code. Raises ToolError where the proof fails."""
    try:
        proved = prove(paths)
    except OffendingFrame as error:
        if not as_json:
            raise
        entry = error.entry
        _print_json(
            proved=False,
            file=str(entry.path),
            byte=entry.record.offset,
            process=entry.process.name,
            frame=words(entry.frame),
            rule=error.rule,
            expected=error.expected,
        )
        return error.code
    except LogDamageError as error:
        if not as_json:
            raise
        _print_json(proved=False, file=str(error.path), byte=error.offset, damage=error.message)
        return error.code
    if as_json:
        _print_json(
            proved=True,
            processes=[
                {
                    "role": each.header.role,
                    "name": each.name,
                    "incarnation": each.header.incarnation,
                    "missing_segments": each.missing,
                    "torn_bytes": each.torn_bytes,
                }
                for each in proved.processes
            ],
            one_end=proved.one_end,
            cpu_s=round(proved.seconds, 3),
            left_out=proved.left_out,
            **_numbers(proved.tally),
        )
    else:
        sys.stdout.write("\n".join(summary(proved)) + "\n")
    return 0


def _numbers(tally: Tally) -> dict[str, object]:
    counts: dict[str, object] = asdict(tally)
    counts["rules"] = {
        rule: {"proved": tally.proved[rule], "unproved": tally.unproved[rule]} for rule in RULES
    }
    return {name: count for name, count in counts.items() if name not in ("proved", "unproved")}


def _print_json(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")


def summary(proved: Proved) -> list[str]:
    """The lines that a person reads when nothing contradicts."""
    tally = proved.tally
    lines = []
    for each in proved.processes:
        about = []
        if each.missing:
            about.append(f"{len(each.missing)} segments are missing")
        if each.torn_bytes:
            about.append(f"{each.torn_bytes} bytes of a torn record are cut off")
        lines.append(f"{each.header.role} {each.name}" + "".join(f": {text}" for text in about))
    if proved.left_out:
        lines.append(f"left out (one turn's frames): {', '.join(sorted(set(proved.left_out)))}")
    rate = int(tally.records / proved.seconds) if proved.seconds else 0
    lines.append(
        f"{tally.records:,} records in {proved.seconds:.1f} s of CPU ({rate:,}/s): "
        f"{tally.segments:,} segments with {tally.rows:,} rows, {tally.copies:,} copies, "
        f"{tally.answers:,} answers"
    )
    unproved = dict(tally.unproved)
    unproved["R7"] += proved.one_end
    lines.append(f"{'rule':<6}{'proved':>10}{'unproved':>10}  ")
    lines += [
        f"{rule:<6}{tally.proved[rule]:>10,}{unproved[rule]:>10,}  {text}"
        for rule, text in RULES.items()
    ]
    seen = [rule for rule in RULES if tally.proved[rule]]
    lines.append(f"nothing contradicts {', '.join(seen) or 'any rule: there was nothing to check'}")
    return lines
