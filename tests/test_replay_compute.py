"""Compute replay over the toy: equal to the bit, within a tolerance, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.model import ModelInfo, Output, ToyModel
from tests.memoryring import VOCABULARY, limits, toy
from tests.recorded import RecordedRing, play
from tools.errors import ToolError
from tools.framelogs.read import Process, entries, processes
from tools.replay import DifferenceError
from tools.replay.compute import Computed, choose_process, compute, values
from tools.replay.fresh import own_entry
from transport.frame import Forwarded, Result, Segment, Tensor
from transport.framelog import Payloads

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def quiet(folder: Path, payloads: Payloads, stages: int = 3) -> None:
    ring = RecordedRing(folder, stages, payloads=payloads).form()
    first = ring.ask(PROMPT, 6)
    ring.ask([*PROMPT, *first.tokens, 11, 12], 5)
    ring.ask([9, 8, 7], 4)
    ring.close()


def block(process: Process) -> ToyModel:
    """The toy that a stage held."""
    said = own_entry(process)
    assert said is not None
    return toy(said.layers, said.slots, said.capacity, said.layers_total)


def again(folder: Path, stage: str, model: ToyModel | None = None, **options: float) -> Computed:
    process = choose_process(processes([folder]), stage)
    given = {"tolerance": 0.0, **options}
    return compute(process, model or block(process), device="cpu", **given)  # type: ignore[arg-type]


class Other(ToyModel):
    """The toy on another device, as it were: not exact, and off by `error` in one forward."""

    def __init__(self, like: ToyModel, error: int = 0, token: int = 0, apart: float = 0.0) -> None:
        info = like.info
        super().__init__(
            info.layers,
            info.layers_total,
            slots=info.slots,
            capacity=info.capacity,
            vocabulary=info.vocabulary,
        )
        self.error, self.token, self.apart = error, token, apart
        self.forwards = 0
        self.due = 5  # the forward that is off

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, kernel="another kernel")

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        made = super().forward(segments, payload, histories)
        self.forwards += 1
        if self.forwards != self.due:
            return made
        if made.payload is not None and self.error:
            data = bytearray(made.payload.data)
            data[3] = (data[3] + self.error) % 256
            return Output(replace(made.payload, data=bytes(data)))
        return Output(made.payload, tuple(map(self._other, made.results)))

    def _other(self, result: Result) -> Result:
        if not self.token or not result.tokens:
            return result
        first = (result.tokens[0] + self.token) % VOCABULARY
        top = (((first, -0.5), (result.tokens[0], -0.5 - self.apart)), *result.top[1:])
        logprobs = (-0.5, *result.logprobs[1:])
        return replace(result, tokens=(first, *result.tokens[1:]), logprobs=logprobs, top=top)


# ---- equal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_every_stage_of_a_ring_with_faults(seed: int, tmp_path: Path) -> None:
    """Copies, parked rows, refused segments and all: the block's rows are what they were."""
    bounds = limits(slots=2, park_bytes=4096)
    ring = RecordedRing(tmp_path, 3, bounds=bounds, payloads=Payloads.FULL)
    play(ring, seed)
    ring.close()
    computed = 0
    for process in processes([tmp_path])[1:]:
        if not any(isinstance(each.frame, Forwarded) for each in entries(process)):
            continue  # it was killed before it had to compute
        done = compute(process, block(process), device="cpu", tolerance=0.0)
        assert done.exact
        assert done.largest == 0.0
        computed += done.frames
    assert computed > 50


def test_of_a_head_tokens_and_digests_are_enough(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.DIGEST)
    assert again(tmp_path, "s0").rows > 20
    with pytest.raises(ToolError, match=r"s1.*input of Run .* was not recorded.*payloads full"):
        again(tmp_path, "s1")
    with pytest.raises(ToolError, match=r"input of Run .* was not recorded"):
        again(tmp_path, "s2")


def test_a_ring_of_one_stage_needs_no_payloads(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.NONE, stages=1)
    assert again(tmp_path, "s0").tokens > 10


def test_without_payloads_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.NONE)
    for stage in ("s0", "s1"):
        with pytest.raises(ToolError, match=r"record with --record-payloads full"):
            again(tmp_path, stage)


# ---- different -----------------------------------------------------------------------------------


class Wrong(Other):
    """The same block by its fingerprint, and yet off."""

    @property
    def info(self) -> ModelInfo:
        return ToyModel.info.fget(self)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("payloads", [Payloads.FULL, Payloads.DIGEST])
def test_one_wrong_value_of_an_exact_block(payloads: Payloads, tmp_path: Path) -> None:
    quiet(tmp_path, payloads)
    head = block(choose_process(processes([tmp_path]), "s0"))
    with pytest.raises(DifferenceError) as caught:
        again(tmp_path, "s0", Wrong(head, error=1), tolerance=9.0)
    said = "max abs difference 1, values up to "
    assert "; first in turn 1, position " in caught.value.message or payloads is Payloads.DIGEST
    assert (said if payloads is Payloads.FULL else "digest") in caught.value.message
    assert "Forwarded" in type(caught.value.at.frame).__name__


def test_one_wrong_token_of_an_exact_tail(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.FULL)
    tail = block(choose_process(processes([tmp_path]), "s2"))
    with pytest.raises(DifferenceError, match=r"tokens\[0\]: recorded \d+, replayed \d+"):
        again(tmp_path, "s2", Wrong(tail, token=1), tolerance=9.0)


def test_within_a_tolerance(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.FULL)
    middle = block(choose_process(processes([tmp_path]), "s1"))
    done = again(tmp_path, "s1", Other(middle, error=1), tolerance=0.02)
    assert not done.exact
    assert done.largest in (1.0, 255.0)  # it may wrap
    with pytest.raises(DifferenceError, match=r"max abs difference 1, .* tolerance 0.001 of them"):
        again(tmp_path, "s1", Other(middle, error=1), tolerance=0.001)


def test_a_tail_within_a_tolerance(tmp_path: Path) -> None:
    """Another token is a tie when the recorded one is nearly as likely."""
    quiet(tmp_path, Payloads.FULL)
    tail = block(choose_process(processes([tmp_path]), "s2"))
    done = again(tmp_path, "s2", Other(tail, token=1, apart=0.01), tolerance=0.02)
    assert (done.exact, done.ties) == (False, 1)
    assert math.isclose(done.largest, 0.01, abs_tol=1e-9)
    with pytest.raises(DifferenceError, match=r"recorded token is less likely by 0.5"):
        again(tmp_path, "s2", Other(tail, token=1, apart=0.5), tolerance=0.02)


def test_digests_know_no_tolerance(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.DIGEST)
    head = block(choose_process(processes([tmp_path]), "s0"))
    with pytest.raises(ToolError, match=r"only digests .* not exact as the recorded one was"):
        again(tmp_path, "s0", Other(head), tolerance=0.5)


# ---- refused -------------------------------------------------------------------------------------


def test_another_block_is_refused(tmp_path: Path) -> None:
    quiet(tmp_path, Payloads.FULL)
    for model, words in (
        (toy((0, 3)), "layers .0, 3., s0 recorded .0, 2."),
        (toy((0, 2), total=8), "layers_total 8, s0 recorded 6"),
        (ToyModel((0, 2), 6, slots=3, capacity=256, vocabulary=65), "vocabulary 65, s0 recorded"),
        (toy((0, 2), slots=2), "2 slots of 256 rows, s0 had 3 of 256"),
        (toy((0, 2), capacity=64), "3 slots of 64 rows, s0 had 3 of 256"),
    ):
        with pytest.raises(ToolError, match=words):
            again(tmp_path, "s0", model)
    coord = processes([tmp_path])[0]
    with pytest.raises(ToolError, match=r"no stage's log"):
        compute(coord, toy((0, 2)), device="cpu", tolerance=0.0)


def test_a_stage_of_two_lives_must_be_named_by_its_files(tmp_path: Path) -> None:
    ring = RecordedRing(tmp_path, payloads=Payloads.FULL).form()
    ring.restart(1)
    ring.close()
    with pytest.raises(ToolError, match=r"lived 2 times"):
        choose_process(processes([tmp_path]), "s1")
    second = processes([tmp_path])[-1]
    with pytest.raises(ToolError, match=r"no roll call reached"):
        compute(second, toy((2, 4)), device="cpu", tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8", "int64"])
def test_values_of_every_dtype(dtype: str) -> None:
    numbers = [0.0, 1.0, 2.5, 96.0] if "float" in dtype else [0.0, 1.0, 2.0, 96.0]
    if dtype == "bfloat16":
        data = (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        names = {"float32": "<f4", "float16": "<f2", "uint8": "u1", "int64": "<i8"}
        data = np.array(numbers).astype(names[dtype]).tobytes()
    assert values(Tensor(dtype, (2, 2), data)).ravel().tolist() == numbers
