"""Owns how one recorded frame is said: as a line for people, as a JSON object for programs.

Token ids are said only on request; salts, hints and payloads never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from tools.framelogs.read import Entry
from transport.frame import (
    Cancel,
    Claim,
    Copy,
    Drafted,
    Forwarded,
    Frame,
    Free,
    FreeSlot,
    Heartbeat,
    KeepSlot,
    LinkGap,
    Measure,
    Ping,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageLost,
    Submit,
    Tensor,
    Timing,
    Verdict,
)
from transport.framelog import Direction

MAX_CLAIMS = 8  # of a roll call that a line says
_TOKEN_FIELDS = {"tokens", "prompt", "stops", "ends", "bias", "top"}
_SECRET_FIELDS = {"salt", "hint"}
WAYS = tuple(each.name.lower() for each in Direction)  # by number


def way(entry: Entry) -> str:
    """The direction's word."""
    return WAYS[entry.record.direction]


def other_end(entry: Entry) -> str:
    """Who sent an incoming frame, or the link an outgoing one left by."""
    if entry.record.direction is Direction.IN:
        return entry.envelope.sender
    return entry.record.link if entry.record.direction in (Direction.OUT, Direction.UNSENT) else "-"


def line(entry: Entry, start_ns: int, tokens: bool) -> str:
    """Seconds, process, direction, link, number, kind, and the frame's essentials."""
    record = entry.record
    seconds = (entry.at_ns - start_ns) / 1e9
    number = "-" if record.direction in (Direction.LOCAL, Direction.UNSENT) else str(record.number)
    kind = type(entry.frame).__name__
    said = essentials(entry.frame, tokens)
    size = f" {_bytes(record.payload_bytes)}" if record.payload_bytes else ""
    return (
        f"{seconds:12.6f} {entry.process.name:<11} {way(entry):<5} {other_end(entry):<21} "
        f"{number:>6} {kind:<9} {said}{size}"
    ).rstrip()


def as_json(entry: Entry, start_ns: int, tokens: bool) -> dict[str, Any]:
    """One record as JSON values; bytes are hexadecimal."""
    record = entry.record
    return {
        "s": round((entry.at_ns - start_ns) / 1e9, 9),
        "at_ns": entry.at_ns,
        "process": entry.process.name,
        "role": entry.process.header.role,
        "direction": way(entry),
        "link": record.link,
        "sender": entry.envelope.sender,
        "number": record.number,
        "kind": type(entry.frame).__name__,
        "frame": _plain(entry.frame, tokens),
        "payload_bytes": record.payload_bytes,
        "file": str(entry.path),
        "byte": record.offset,
    }


def essentials(frame: Frame, tokens: bool) -> str:
    """What matters of a frame, in one line; segments are turn/slot/[start,end)/kind."""
    match frame:
        case Run():
            runs = [_segment(each, tokens) for each in frame.segments]
            return _join(_at(frame), *runs, _tensor(frame.payload))
        case Verdict():
            results = [_result(each, tokens) for each in frame.results]
            return _join(_at(frame), *results, timings(frame.timings))
        case Forwarded():
            results = [_result(each, tokens) for each in frame.results]
            return _join(_at(frame), *results, _tensor(frame.payload))
        case Reject():
            whose = "the frame" if frame.turn is None else f"{frame.turn}/{frame.slot}"
            return f"{_at(frame)} {whose} by {frame.stage}: {frame.code}: {frame.detail}"
        case RollCall():
            entries = [_entry(each) for each in frame.entries]
            return _join(f"e{frame.epoch}", *entries, _claims(frame.claims))
        case Copy():
            done = f"done by {','.join(frame.done)}" if frame.done else ""
            rows = f"{frame.turn}/{frame.source}->{frame.target}/[0,{frame.length})"
            return _join(_at(frame), rows, done)
        case Free():
            return f"{_at(frame)} slot {frame.slot}"
        case Ping():
            return _at(frame)
        case Measure():
            found = [f"{each.name}:{each.decode_ns / 1e6:.2f}ms" for each in frame.machines]
            gaps = [f"{gap / 1e6:.2f}ms" for gap in frame.gaps_ns]
            return _join(f"{frame.number} {frame.look}", *found, *gaps, _tensor(frame.payload))
        case Heartbeat():
            loading = "" if frame.progress >= 1 else f" {frame.progress:.0%}"
            return f"{frame.stage} {frame.state}{loading} {frame.detail}".rstrip()
        case _:
            return _local(frame, tokens)


def _local(frame: Frame, tokens: bool) -> str:
    match frame:
        case Submit():
            said = [
                f"{frame.turn}",
                f"prompt {len(frame.prompt)}{_ids(frame.prompt, tokens)}",
                f"budget {frame.budget}",
                f"stops {len(frame.stops)}{_ids(frame.stops, tokens)}" if frame.stops else "",
                sampling(frame.sampling),
                "salted" if frame.salt else "",
                "" if frame.reuse else "no reuse",
            ]
            return _join(*said)
        case Cancel():
            return f"{frame.turn}: {frame.reason}"
        case LinkGap():
            return f"{frame.link}: {frame.got} came, not {frame.expected}"
        case StageLost():
            return f"{frame.stage}: {frame.detail}"
        case FreeSlot():
            return f"slot {frame.slot}"
        case KeepSlot():
            return f"slot {frame.slot} for {frame.keep_s:g} s"
        case Remembered():
            said = [
                f"{frame.number}/[0,{len(frame.tokens)}){_ids(frame.tokens, tokens)}",
                f"idle {frame.idle_s:g} s",
                f"kept for {frame.keep_s:g} s" if frame.keep_s else "",
                "salted" if frame.salt else "",
            ]
            return _join(*said)
        case Drafted():
            end = frame.start + len(frame.tokens)
            return f"{frame.turn}/[{frame.start},{end}){_ids(frame.tokens, tokens)}"
        case _:
            return ""


def sampling(wanted: Sampling) -> str:
    """How tokens are picked."""
    if wanted.temperature == 0:
        said = ["greedy"]
    else:
        said = [f"temperature {wanted.temperature:g}", f"seed {wanted.seed}"]
        said += [f"top_k {wanted.top_k}"] if wanted.top_k else []
        said += [f"top_p {wanted.top_p:g}"] if wanted.top_p < 1 else []
        said += [f"min_p {wanted.min_p:g}"] if wanted.min_p else []
    said += ["shaped"] if wanted.shaping is not None else []
    return ", ".join(said)


def timings(found: Sequence[Timing]) -> str:
    """Each stage's waiting and computing, in milliseconds."""
    return " ".join(
        f"{each.stage}:{each.wait_us / 1e3:.2f}+{each.forward_us / 1e3:.2f}ms" for each in found
    )


def _at(frame: Run | Verdict | Forwarded | Reject | Copy | Free | Ping) -> str:
    return f"e{frame.epoch}/{frame.seq}"


def _segment(segment: Segment, tokens: bool) -> str:
    want = f"+{segment.want}" if segment.want else ""
    rows = f"[{segment.start},{segment.end})"
    ids = _ids(segment.tokens, tokens)
    return f"{segment.turn}/{segment.slot}/{rows}/{segment.kind}{want}{ids}"


def _result(result: Result, tokens: bool) -> str:
    end = result.start + len(result.tokens)
    rows = f"[{result.start},{end})"
    return f"{result.turn}/{result.slot}/{rows}{_ids(result.tokens, tokens)}"


def _entry(entry: StageEntry) -> str:
    return f"{entry.name}[{entry.layers[0]},{entry.layers[1]})"


def _claims(claims: Sequence[Claim]) -> str:
    said = [f"{each.number}/[0,{each.length})" for each in claims[:MAX_CLAIMS]]
    more = f"and {len(claims) - MAX_CLAIMS} more" if len(claims) > MAX_CLAIMS else ""
    return _join("claims", *said, more) if said else ""


def _tensor(tensor: Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}".replace(" ", "")


def _ids(found: Sequence[int], wanted: bool) -> str:
    return f"={','.join(map(str, found))}" if wanted and found else ""


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError(count)


def _plain(value: Any, tokens: bool) -> Any:
    if is_dataclass(value):
        found = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, Tensor):
            del found["data"]
        for name in _SECRET_FIELDS & found.keys():
            found[name] = bool(found[name])
        if not tokens:
            for name in _TOKEN_FIELDS & found.keys():
                found[name] = len(found[name])
        return {name: _plain(each, tokens) for name, each in found.items()}
    if isinstance(value, tuple):
        return [_plain(each, tokens) for each in value]
    return value.hex() if isinstance(value, bytes) else value
