"""Owns the hypothesis strategies for frames: every class, each field over its legal range."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, get_args

from hypothesis import strategies as st

from transport import codec
from transport.frame import (
    GREEDY,
    Claim,
    Copy,
    Envelope,
    Forwarded,
    Frame,
    Heartbeat,
    Kind,
    Local,
    Look,
    Machine,
    Measure,
    Measured,
    Refusal,
    Reject,
    Remembered,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    Shaping,
    StageEntry,
    StageState,
    Submit,
    Tensor,
    Timing,
    Verdict,
    Wire,
)

FRAMES: tuple[type, ...] = get_args(Wire) + get_args(Local)

names = st.text(max_size=codec.MAX_NAME)
texts = st.text(max_size=60)
counts = st.integers(0, codec.U31)
serials = st.integers(0, codec.U63)
digests = st.binary(min_size=16, max_size=16)
salts = st.binary(max_size=64)
token_ids = st.integers(0, 2**32 - 1)
logprobs = st.floats(max_value=0.0, allow_nan=False)
units = st.floats(0.0, 1.0)


def some(items: st.SearchStrategy[Any], low: int = 0, high: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(items, min_size=low, max_size=high).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(codec.ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=codec.MAX_DIMENSIONS)))
    size = math.prod(shape) * codec.ITEM_BYTES[dtype]
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


# Fields by name, where one rule serves every class that has the field ...
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "ring": names,
    "stage": names,
    "name": names,
    "link": names,
    "sender": names,
    "number": serials,
    "detail": texts,
    "reason": texts,
    "kernel": texts,
    "tokens": some(token_ids),
    "prompt": some(token_ids),
    "stops": some(token_ids),
    "parent_hash": digests,
    "salt": salts,
    "fingerprint": st.binary(min_size=1, max_size=64),
    "turn": serials,
    "epoch": st.integers(0, codec.MAX_EPOCH),
    "seq": serials,
    "incarnation": serials,
    "expected": serials,
    "got": serials,
    "pid": serials,
    "rss_bytes": serials,
    "progress": units,
    "reuse": st.booleans(),
    "done": some(names),
    "digest": digests,
    "proven": st.booleans(),
    "idle_s": st.floats(0.0, 1e9),
    "row_bytes": serials,
    "park_bytes": serials,
    "hint": names,
    "keep_s": st.floats(0.0, 1e9),
    "payload": st.none() | tensors(),
}
# ... and where a class differs.
BY_CLASS: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (Segment, "tokens"): some(token_ids, 1),
    (Copy, "length"): st.integers(1, codec.U31),
    (Claim, "number"): counts,
    (Remembered, "number"): counts,
    (Claim, "length"): st.integers(1, codec.U31),
    (Remembered, "tokens"): some(token_ids, 1),
    (Reject, "turn"): st.none() | serials,
    (Reject, "slot"): st.none() | counts,
    (Reject, "code"): st.sampled_from(Refusal),
    (Segment, "kind"): st.sampled_from(Kind),
    (Heartbeat, "state"): st.sampled_from(StageState),
    (StageEntry, "layers"): st.tuples(counts, counts),
    (Timing, "wait_us"): serials,
    (Timing, "forward_us"): serials,
    (Sampling, "temperature"): st.floats(0.0, 1e6),
    (Sampling, "top_p"): units,
    (Sampling, "min_p"): units,
    (Sampling, "seed"): serials,
    (Sampling, "logprobs"): st.none() | st.integers(0, codec.MAX_TOP),
    (Result, "logprobs"): some(logprobs),
    (Result, "top"): some(some(st.tuples(counts, logprobs))),
}


def records(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(
        cls,
        **{
            each.name: BY_CLASS.get((cls, each.name), BY_NAME.get(each.name, counts))
            for each in fields(cls)
        },
    )


penalties = st.floats(-1e3, 1e3)
BY_CLASS |= {
    (Shaping, "repetition"): st.floats(1e-3, 1e3),
    (Shaping, "presence"): penalties,
    (Shaping, "frequency"): penalties,
    (Shaping, "bias"): some(st.tuples(counts, penalties)),
    (Shaping, "prompt"): counts,
    (Shaping, "ends"): some(token_ids),
}
BY_CLASS[Sampling, "shaping"] = st.none() | records(Shaping)
_samplings = st.just(GREEDY) | records(Sampling)
BY_CLASS[Segment, "sampling"] = BY_CLASS[Submit, "sampling"] = _samplings
BY_CLASS[Run, "segments"] = some(records(Segment), 0, 3)
BY_CLASS[Run, "timings"] = BY_CLASS[Verdict, "timings"] = some(records(Timing))
BY_CLASS[Verdict, "results"] = BY_CLASS[Forwarded, "results"] = some(records(Result), 0, 3)
BY_CLASS |= {
    (Machine, "machine"): names,
    (Machine, "device"): names,
    (Machine, "software"): texts,
    (Machine, "layers"): st.tuples(counts, counts),
    (Machine, "slots"): serials,
    (Machine, "trips"): some(st.tuples(names, serials)),
    (Measure, "look"): st.sampled_from(Look),
    (Measure, "wide"): st.booleans(),
    (Measured, "wide"): st.booleans(),
    (Measure, "gaps_ns"): some(serials),
}
BY_CLASS[Measure, "machines"] = BY_CLASS[Measured, "machines"] = some(records(Machine), 0, 3)
BY_CLASS[RollCall, "claims"] = some(records(Claim))
BY_CLASS[RollCall, "entries"] = some(records(StageEntry), 0, 3)

envelopes = records(Envelope)
frames: st.SearchStrategy[Frame] = st.one_of([records(cls) for cls in FRAMES])
