"""Owns compute replay: a stage's recorded inputs through the real block, outputs compared.

The core says what to run, as it did then; the block holds the KV rows and makes the outputs. The
core goes on with the recorded outputs, so that every frame is judged on its own inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from pipeline.forward import perform_forward
from pipeline.model import ModelInfo, StageModel
from pipeline.stage import CopyRows, DropRows, Forward, Stage
from tools.errors import USAGE, ToolError
from tools.framelogs.read import Entry, Process, entries
from tools.replay import words
from tools.replay.core import DifferenceError, Replayer
from tools.replay.fresh import config_of, own_entry
from tools.replay.where import Where
from transport.config import Config
from transport.frame import Forwarded, Result, Run, Segment, Tensor
from transport.framelog import DIGEST_BYTES, Payloads

TOP = 20  # alternatives listed by a tail where a token may differ within the tolerance
Load = Callable[[Config], StageModel]


@dataclass(slots=True)
class Computed:
    """What was compared. largest: difference to a recorded activation or log probability."""

    exact: bool
    device: str
    frames: int = 0
    rows: int = 0
    tokens: int = 0
    ties: int = 0  # other tokens than recorded, as likely within the tolerance
    largest: float = 0.0


class Judge:
    """Compares a forward's answer with the recorded one."""

    def __init__(self, done: Computed, tolerance: float, recorded_tail: bool) -> None:
        self.done = done
        self._tolerance = tolerance
        self._tail = recorded_tail

    def fault(self, recorded: Entry, run: Run, mine: Forwarded) -> str | None:
        """What is wrong with the block's forward of `run`, in words; None when as recorded."""
        theirs = recorded.frame
        assert isinstance(theirs, Forwarded), theirs
        self.done.frames += 1
        if self._tail:
            return self._results(theirs.results, mine.results)
        assert theirs.payload is not None, recorded
        assert mine.payload is not None, recorded
        self.done.rows += theirs.payload.shape[0]
        return self._activations(recorded, run, theirs.payload, mine.payload)

    def _activations(self, recorded: Entry, run: Run, theirs: Tensor, mine: Tensor) -> str | None:
        if (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape):
            return f"{mine.dtype} {list(mine.shape)}, not {theirs.dtype} {list(theirs.shape)}"
        if recorded.record.payloads is Payloads.DIGEST:
            digest = blake2b(mine.data, digest_size=DIGEST_BYTES).digest()
            same = digest == recorded.record.data
            return None if same else "the activations' digest is another one"
        if bytes(theirs.data) == bytes(mine.data):
            return None
        one, other = values(theirs), values(mine)
        apart = np.abs(one - other)
        worst, scale = float(np.max(apart)), float(np.max(np.abs(one)))
        self.done.largest = max(self.done.largest, worst)
        limit = 0.0 if self.done.exact else self._tolerance * max(1.0, scale)
        over = np.argwhere(~(apart <= limit))  # a NaN is over, too
        if not len(over):
            return "other bits of equal values" if self.done.exact else None
        said = f"max abs difference {worst:.6g}, values up to {scale:.4g}"
        said += "" if self.done.exact else f", tolerance {self._tolerance:g} of them"
        return f"{said}; first in {_row(run, int(over[0][0]))}"

    def _results(self, theirs: Iterable[Result], mine: Iterable[Result]) -> str | None:
        for old, new in zip(theirs, mine, strict=True):
            if self.done.exact and old != new:
                return words.difference(old, new)
            for at, (was, token) in enumerate(zip(old.tokens, new.tokens, strict=True)):
                self.done.tokens += 1
                wrong = self._token(old, new, at) if not self.done.exact else None
                if wrong is not None:
                    return f"turn {old.turn} position {old.start + 1 + at}: {wrong} ({was} {token})"
        return None

    def _token(self, old: Result, new: Result, at: int) -> str | None:
        """A token of an inexact block: the recorded one, or as likely within the tolerance."""
        was, token = old.tokens[at], new.tokens[at]
        likely = dict(new.top[at]) if new.top else {}
        if was != token:
            if was not in likely:
                return "the recorded token is not among the likely ones"
            apart = new.logprobs[at] - likely[was]
            self.done.ties += 1
            self.done.largest = max(self.done.largest, apart)
            if not 0 <= apart <= self._tolerance:
                return f"the recorded token is less likely by {apart:.6g}"
        elif old.logprobs:
            apart = abs(old.logprobs[at] - new.logprobs[at])
            self.done.largest = max(self.done.largest, apart)
            if apart > self._tolerance:
                return f"log probabilities differ by {apart:.6g}"
        return None


def _row(run: Run, row: int) -> str:
    """Whose row of a frame it is."""
    for segment in run.segments:
        if row < len(segment.tokens):
            return f"turn {segment.turn}, position {segment.start + row} of slot {segment.slot}"
        row -= len(segment.tokens)
    raise AssertionError((run, row))


def values(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """A tensor's numbers as float64."""
    if tensor.dtype == "bfloat16":  # numpy has none: the upper half of a float32
        wide = np.frombuffer(tensor.data, dtype="<u2").astype("<u4") << 16
        return wide.view("<f4").astype(np.float64).reshape(tensor.shape)
    names = {"float32": "<f4", "float16": "<f2", "uint8": "u1", "int64": "<i8"}
    return np.frombuffer(tensor.data, names[tensor.dtype]).astype(np.float64).reshape(tensor.shape)


def compute(
    process: Process,
    model: StageModel,
    *,
    device: str,
    tolerance: float,
    until: Where | None = None,
) -> Computed:
    """Replay a stage's log through `model`. Raises DifferenceError at the first frame too far off.

    tolerance: of an activation, as a share of the frame's largest; of a token, in log probability.
    Raises ToolError where the block or the log is not the one that is needed.
    """
    if own_entry(process) is None:
        raise ToolError(f"{process.paths[0]}: no stage's log, or one that no roll call reached")
    replayer = Replayer(process)
    core = replayer.core
    assert isinstance(core, Stage), core
    exact = _check(process, core.info, model.info)
    done = Computed(exact, device)
    judge = Judge(done, tolerance, core.info.tail)
    asked: tuple[Entry, Run, Forwarded] | None = None
    for step in replayer:
        answer = step.input
        if isinstance(answer.frame, Forwarded) and asked is not None:
            wrong = judge.fault(answer, *asked[1:])
            if wrong is not None:
                story = [f"  {words.of_entry(asked[0])}", f"> {words.of_entry(answer)}"]
                raise DifferenceError(answer, f"the block computes otherwise: {wrong}", story)
            asked = None
        for action in step.actions:
            match action:
                case CopyRows():
                    model.copy(action.source, action.target, action.length)
                case DropRows():
                    model.drop(action.parked)
                case Forward():
                    _check_payload(step.input, action.run, core.info)
                    mine = perform_forward(model, action if exact else _telling(action))
                    asked = step.input, action.run, mine
        if until is not None and any(map(until.names, (step.input, *step.sent))):
            break
    return done


def choose_process(found: list[Process], stage: str) -> Process:
    """The stage's log that is to be computed: of its only life, or ToolError."""
    mine = [each for each in found if each.header.role == "stage" and each.name == stage]
    if len(mine) == 1:
        return mine[0]
    if mine:
        files = ", ".join(each.paths[0].name for each in mine)
        raise ToolError(f"stage {stage} lived {len(mine)} times ({files}): name one's files")
    names = ", ".join(dict.fromkeys(each.name for each in found if each.header.role == "stage"))
    raise ToolError(f"no log of a stage {stage!r}; there are {names or 'none'}", code=USAGE)


def load_block(process: Process, device: str, model: str | None) -> StageModel:
    """The block that the stage held, from its ring.toml's model or from another path."""
    from pipeline.load import load_model
    from pipeline.model import ModelError

    config = config_of(process)
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    ring, spec = config.find(process.name)
    try:
        return load_model(config, ring, spec, device, lambda _share, _what: None)
    except ModelError as error:
        raise ToolError(f"stage {spec.name}: {error}") from None


def _check(process: Process, then: ModelInfo, now: ModelInfo) -> bool:
    """Whether outputs must be equal to the bit. Raises ToolError where the block is another one."""
    for what in ("layers", "layers_total", "vocabulary"):
        was, found = getattr(then, what), getattr(now, what)
        if was != found:
            raise ToolError(f"the model has {what} {found}, {process.name} recorded {was}")
    if now.capacity < then.capacity or now.slots < then.slots:
        raise ToolError(
            f"the block has {now.slots} slots of {now.capacity} rows, {process.name} had "
            f"{then.slots} of {then.capacity}"
        )
    kept = _kept(process)
    if not then.tail and kept is Payloads.NONE:
        raise ToolError(
            f"{process.paths[0]}: no outputs to compare with: record with --record-payloads full"
        )
    exact = (then.fingerprint, then.kernel) == (now.fingerprint, now.kernel) and not (
        now.kernel.startswith("exact off")
    )
    if kept is Payloads.DIGEST and not then.tail and not exact:
        raise ToolError(
            f"{process.paths[0]}: only digests of the outputs, and this block is not exact as the "
            f"recorded one was ({then.kernel}; here {now.kernel}): record with --record-payloads "
            "full"
        )
    return exact


def _kept(process: Process) -> Payloads:
    """What the log keeps of activations, by the first record that has any."""
    for entry in entries(process):
        if entry.record.payload_bytes:
            return Payloads(entry.record.payloads)
    return Payloads.NONE


def _check_payload(entry: Entry, run: Run, info: ModelInfo) -> None:
    if not info.head and entry.record.payloads is not Payloads.FULL:
        raise ToolError(
            f"{entry.place}: the input of {words.of_frame(run)} was not recorded: only the head "
            "can be computed from tokens alone; record with --record-payloads full"
        )


def _telling(action: Forward) -> Forward:
    """The same, with the alternatives' log probabilities: they tell how near another token was."""
    run = action.run
    return replace(action, run=replace(run, segments=tuple(map(_with_logprobs, run.segments))))


def _with_logprobs(segment: Segment) -> Segment:
    return replace(segment, sampling=replace(segment.sampling, logprobs=TOP))
