"""Owns `kvring log redact`: a copy of frame logs without their text, on which proofs still hold.

Token ids, salts and names are replaced under a key (framelogs.hiding) and every prefix hash is
computed again, so that chains, residency and the schedule can be checked as before. Two passes: one
finds what stands for each hash, one writes. Memory: one hash for each segment or copy that was
sent, about 200 bytes.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tools.errors import RUNTIME, USAGE, ToolError
from tools.framelogs.hiding import MIN_KEY_BYTES, Hiding
from tools.framelogs.read import Entry, Process
from tools.framelogs.stream import Stream
from transport.chain import Chain, root_hash
from transport.frame import (
    Claim,
    Copy,
    Drafted,
    Forwarded,
    Frame,
    FrameError,
    Heartbeat,
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
    Verdict,
)
from transport.framelog import Direction, FrameLogReader, FrameLogWriter, LogHeader, Payloads

_SENT = (Direction.OUT, Direction.UNSENT)
PROBE_TURN = 0  # the self-check's tokens are the same in every ring: nobody's text, a known one


@dataclass(slots=True)
class Rows:
    """A slot's rows [base, end) as they are and as they will be."""

    base: int
    sure: bool  # its prefix is known from row 0 on
    plain: Chain
    hidden: Chain

    def before(self, position: int) -> tuple[bytes, bytes] | None:
        """Both hashes of the rows before `position`, if they are known."""
        at = position - self.base
        if not 0 <= at <= len(self.plain):
            return None
        return self.plain.hash_before(at), self.hidden.hash_before(at)

    def cut(self, position: int) -> Rows:
        """A copy of the rows before `position`."""
        twin = Rows(self.base, self.sure, self.plain.clone(), self.hidden.clone())
        twin.plain.truncate(position - self.base)
        twin.hidden.truncate(position - self.base)
        return twin


@dataclass(slots=True)
class Hashes:
    """What stands for each prefix hash that a frame names. The first pass feeds it."""

    hiding: Hiding
    fingerprints: tuple[bytes, ...]
    _sure: dict[bytes, bytes] = field(default_factory=dict)
    _guessed: dict[bytes, bytes] = field(default_factory=dict)  # where a log begins in the middle
    _rows: dict[tuple[Process, str, int], Rows] = field(default_factory=dict)

    def of(self, digest: bytes) -> bytes:
        """The hash in the redacted log."""
        return self._sure.get(digest) or self._guessed.get(digest) or self.hiding.hash(digest)

    def take(self, entry: Entry) -> None:
        """Follow the rows of each process's slots: as they are sent, or arrive at a stage."""
        frame, role, way = entry.frame, entry.process.header.role, entry.record.direction
        if isinstance(frame, Remembered):
            self._remember((entry.process, frame.ring, frame.number), frame)
        if way not in (_SENT if role == "coordinator" else (Direction.IN,)):
            return
        if isinstance(frame, RollCall):
            for claim in frame.claims:
                self._claim((entry.process, frame.ring, claim.number), claim)
        elif isinstance(frame, Run):
            for segment in frame.segments:
                self._segment((entry.process, frame.ring, segment.slot), segment)
        elif isinstance(frame, Copy):
            source = self._rows.get((entry.process, frame.ring, frame.source))
            known = None if source is None else source.before(frame.length)
            if source is not None and known is not None and known[0] == frame.parent_hash:
                self._name(frame.parent_hash, known[1], source.sure)
                self._rows[entry.process, frame.ring, frame.target] = source.cut(frame.length)

    def _segment(self, key: tuple[Process, str, int], segment: Segment) -> None:
        rows, parent = self._rows.get(key), segment.parent_hash
        known = None if rows is None else rows.before(segment.start)
        if segment.start == 0:
            rows = Rows(0, True, Chain(parent), Chain(self._root(segment)))
            self._name(parent, rows.hidden.root, True)
        elif rows is not None and known is not None and known[0] == parent:
            self._name(parent, known[1], rows.sure)
            rows.plain.truncate(segment.start - rows.base)
            rows.hidden.truncate(segment.start - rows.base)
        else:
            sure = parent in self._sure
            rows = Rows(segment.start, sure, Chain(parent), Chain(self.of(parent)))
            self._name(parent, rows.hidden.root, sure)
        self._rows[key] = rows
        rows.plain.extend(segment.tokens)
        rows.hidden.extend(self.tokens(segment.turn, segment.tokens))

    def _remember(self, key: tuple[Process, str, int], said: Remembered) -> None:
        hide, model = self.hiding, said.fingerprint
        plain = Chain(root_hash(model, said.salt), said.tokens)
        hidden = Chain(root_hash(model, hide.salt(said.salt)), hide.tokens(said.tokens))
        self._rows[key] = Rows(0, True, plain, hidden)

    def _claim(self, key: tuple[Process, str, int], claim: Claim) -> None:
        rows = self._rows.get(key)
        known = None if rows is None else rows.before(claim.length)
        if rows is not None and known is not None and known[0] == claim.digest:
            self._name(claim.digest, known[1], rows.sure)

    def _root(self, segment: Segment) -> bytes:
        for fingerprint in self.fingerprints:
            if root_hash(fingerprint, segment.salt) == segment.parent_hash:
                return root_hash(fingerprint, self.hiding.salt(segment.salt))
        return self.hiding.hash(segment.parent_hash)

    def _name(self, plain: bytes, hidden: bytes, sure: bool) -> None:
        if sure:
            self._sure[plain] = hidden
        else:
            self._guessed.setdefault(plain, hidden)

    def tokens(self, turn: int, tokens: Iterable[int]) -> tuple[int, ...]:
        """A turn's tokens in the redacted log."""
        return tuple(tokens) if turn == PROBE_TURN else self.hiding.tokens(tokens)


@dataclass(frozen=True, slots=True)
class Redactor:
    """Frame in, frame without its text out."""

    hiding: Hiding
    hashes: Hashes

    def frame(self, frame: Frame, payload_bytes: int) -> Frame:
        """payload_bytes: of the frame's tensor. Its bytes are zeros after it, and not written."""
        hide = self.hiding
        match frame:
            case Run():
                segments = tuple(self._segment(each) for each in frame.segments)
                payload = _zeros(frame.payload, payload_bytes)
                return replace(frame, segments=segments, payload=payload)
            case Verdict():
                return replace(frame, results=self._results(frame.results))
            case Forwarded():
                payload, results = _zeros(frame.payload, payload_bytes), frame.results
                return replace(frame, payload=payload, results=self._results(results))
            case Copy():
                return replace(frame, parent_hash=self.hashes.of(frame.parent_hash))
            case Submit():
                return replace(
                    frame,
                    prompt=hide.tokens(frame.prompt),
                    stops=hide.tokens(frame.stops),
                    sampling=self._sampling(frame.sampling),
                    salt=hide.salt(frame.salt),
                    hint=hide.name(frame.hint),
                )
            case Remembered():
                return replace(
                    frame,
                    salt=hide.salt(frame.salt),
                    tokens=hide.tokens(frame.tokens),
                    hint=hide.name(frame.hint),
                )
            case RollCall():
                of = self.hashes.of
                claims = tuple(replace(each, digest=of(each.digest)) for each in frame.claims)
                return replace(frame, claims=claims)
            case Drafted():
                return replace(frame, tokens=hide.tokens(frame.tokens))
            case Heartbeat() | StageLost() | Reject():
                return replace(frame, detail=hide.text(frame.detail))
            case _:
                return frame

    def _segment(self, segment: Segment) -> Segment:
        return replace(
            segment,
            tokens=self.hashes.tokens(segment.turn, segment.tokens),
            parent_hash=self.hashes.of(segment.parent_hash),
            sampling=self._sampling(segment.sampling),
            salt=self.hiding.salt(segment.salt),
        )

    def _results(self, results: tuple[Result, ...]) -> tuple[Result, ...]:
        """Log probabilities are dropped: with the model they would tell the text."""
        return tuple(
            each
            if each.turn == PROBE_TURN
            else replace(each, tokens=self.hiding.tokens(each.tokens), logprobs=(), top=())
            for each in results
        )

    def _sampling(self, sampling: Sampling) -> Sampling:
        shaping = sampling.shaping
        if shaping is None:
            return sampling
        bias = tuple((self.hiding.token(token), value) for token, value in shaping.bias)
        ends = self.hiding.tokens(shaping.ends)
        return replace(sampling, shaping=replace(shaping, bias=bias, ends=ends))


def run_redact(
    *, paths: Sequence[Path], out: Path, key_file: Path | None, vocabulary: int | None
) -> int:
    """Write the copies; the exit code: 1 when something could not be read."""
    key = _key(key_file)
    stream = Stream(paths)
    entries = list(_roll_calls(stream.processes))
    sizes = dict.fromkeys(each.vocabulary for each in entries)
    if vocabulary is None:
        if not sizes:
            text = "no roll call in these logs: say --vocabulary N, the model's number of token ids"
            raise ToolError(text, code=USAGE)
        if len(sizes) > 1:
            found = ", ".join(map(str, sizes))
            raise ToolError(f"logs of vocabularies {found}: redact each model's apart", code=USAGE)
        vocabulary = next(iter(sizes))
    hiding = Hiding(key, vocabulary)
    hashes = Hashes(hiding, tuple(dict.fromkeys(each.fingerprint for each in entries)))
    for entry in stream:
        hashes.take(entry)
    redactor = Redactor(hiding, hashes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for process in stream.processes:
            _write(stream, process, redactor, out)
    except OSError as error:
        raise ToolError(f"-o {error.filename or out}: {error.strerror or error}") from None
    for text in stream.notes + stream.damages:
        print(f"kvring: {text}", file=sys.stderr)
    return RUNTIME if stream.damages else 0


def _write(stream: Stream, process: Process, redactor: Redactor, out: Path) -> None:
    hide = redactor.hiding
    file: IO[bytes] | None = None
    writer: FrameLogWriter | None = None
    path: Path | None = None
    try:
        for entry in stream.of([process]):
            record = entry.record
            if path != entry.path or writer is None:
                path = entry.path
                if file is not None:
                    file.close()
                file = (out / path.name).open("xb")
                print(out / path.name)
                header = _header(path)
                header = replace(header, config=hide.config(header.config))
                writer = FrameLogWriter(file, header, Payloads.NONE)
            local = record.direction in (Direction.LOCAL, Direction.UNSENT)
            writer.record(
                record.mono_ns,
                record.wall_ns,
                record.direction,
                hide.link(record.link),
                redactor.frame(entry.frame, record.payload_bytes),
                envelope=None if local else entry.envelope,
            )
    finally:
        if file is not None:
            file.close()


def _header(path: Path) -> LogHeader:
    with path.open("rb") as file:
        return FrameLogReader(file).header


def _zeros(payload: Tensor | None, size: int) -> Tensor | None:
    return None if payload is None else replace(payload, data=bytes(size))


def _roll_calls(processes: Sequence[Process]) -> Iterator[StageEntry]:
    """What the stages said of themselves; other frames are not decoded."""
    for process in processes:
        for path in process.paths:
            with path.open("rb") as file:
                try:
                    for record in FrameLogReader(file):
                        if b"RollCall" in record.header[:400]:
                            frame = record.decode()[0]
                            if isinstance(frame, RollCall):
                                yield from frame.entries
                except FrameError:  # the pass that decodes everything says where
                    break


def _key(path: Path | None) -> bytes:
    if path is None:
        return secrets.token_bytes(32)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ToolError(f"--key-file {path}: {error.strerror or error}", code=USAGE) from None
    if len(key) < MIN_KEY_BYTES:
        text = f"{len(key)} bytes; at least {MIN_KEY_BYTES} random ones are needed"
        raise ToolError(f"--key-file {path}: {text}", code=USAGE)
    return key
