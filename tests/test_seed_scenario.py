"""The seed scenario: two turns on one ring; the second prefills only what the first did not leave.

CASES 1, 4, 5, 8, 10, 11, 15, 19. The resident length is wrong in three ways: the ledger claims too
many rows, too few, or a stage lacks some. Only the first and the last are refused, and no token may
ever change.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random

import pytest

from coord.ledger import Holding
from pipeline.model import Output, StageModel
from tests.memoryring import LAYERS, VOCABULARY, MemoryRing, limits, serial, toy
from transport.chain import Chain
from transport.frame import Copy, Kind, Refusal, Result, Segment, Tensor

CHUNKS = [1, 4, 16, 256]  # 256 tokens: the whole suffix at once
REPLY = 6


def novel(count: int, seed: int = 1) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


TEXTS = {
    "novel": (novel(40), novel(23, 2)),
    "repetitive": ([7] * 40, [7] * 23),
    "cyclic": ([1, 2, 3, 4] * 10, [1, 2, 3, 4] * 6),
}


def ring_of(chunk: int, stages: int = 3) -> MemoryRing:
    return MemoryRing(stages, bounds=limits(chunk_tokens=chunk)).form()


def warm(ring: MemoryRing, prompt: Sequence[int], budget: int = REPLY) -> tuple[int, Holding]:
    """Turn 1; where it lies."""
    reply = ring.ask(prompt, budget)
    assert tuple(reply.tokens) == serial(prompt, budget)
    slot = reply.admitted[0].slot
    holding = ring.scheduler.rings["r"].ledger.holding(slot)
    assert holding.resident == len(prompt) + len(reply.tokens) - 1
    return slot, holding


def starts(ring: MemoryRing, turn: int) -> list[int]:
    return [segment.start for segment in ring.segments(turn) if segment.kind is Kind.PREFILL]


# ---- the scenario --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("text", TEXTS)
def test_turn_2_begins_at_the_boundary_and_equals_cold(text: str, chunk: int) -> None:
    """P prompt tokens, N of them resident: exactly P - N prefill tokens are on the wire."""
    first, more = TEXTS[text]
    ring = ring_of(chunk)
    _, holding = warm(ring, first)
    resident = holding.resident
    prompt = [*first, *serial(first, REPLY), *more]
    reply = ring.ask(prompt, REPLY)
    assert reply.admitted[0].matched == resident == len(first) + REPLY - 1
    assert starts(ring, 2) == list(range(resident, len(prompt), chunk))
    assert ring.prefilled(2) == len(prompt) - resident
    cold = ring_of(chunk)
    assert cold.ask(prompt, REPLY).tokens == reply.tokens == list(serial(prompt, REPLY))
    assert cold.prefilled(1) == len(prompt)
    assert ring.rejects == []


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_any_number_of_stages(stages: int) -> None:
    first, more = TEXTS["novel"]
    ring = ring_of(16, stages)
    warm(ring, first)
    prompt = [*first, *serial(first, REPLY), *more]
    assert tuple(ring.ask(prompt, REPLY).tokens) == serial(prompt, REPLY)
    assert ring.prefilled(2) == len(more) + 1


def test_the_same_request_again_prefills_one_token() -> None:
    """CASES 4: and the third as well."""
    first = TEXTS["novel"][0]
    ring = ring_of(16)
    warm(ring, first)
    for turn in (2, 3):
        assert tuple(ring.ask(first, REPLY).tokens) == serial(first, REPLY)
        assert ring.prefilled(turn) == 1


def test_an_edit_reuses_what_is_before_it() -> None:
    """CASES 10: what was behind the edit is never read again."""
    first = TEXTS["novel"][0]
    ring = ring_of(16)
    warm(ring, first)
    edited = [*first[:25], (first[25] + 1) % VOCABULARY, *first[26:]]
    reply = ring.ask(edited, REPLY)
    assert tuple(reply.tokens) == serial(edited, REPLY)
    assert ring.prefilled(2) == len(edited) - 25


def test_another_salt_starts_cold() -> None:
    """CASES 19: the same salt hits."""
    first = TEXTS["novel"][0]
    ring = ring_of(16)
    warm(ring, first)
    for turn, prefilled in ((2, len(first)), (3, 1)):
        reply = ring.ask(first, REPLY, salt=b"tenant")
        assert tuple(reply.tokens) == serial(first, REPLY)
        assert ring.prefilled(turn) == prefilled


# ---- a ledger that is off by one -----------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("claimed", [1, 2, 5])
def test_claiming_too_many_rows_is_refused_and_costs_a_prefill(
    text: str, chunk: int, claimed: int
) -> None:
    """CASES 8, 11: on novel and on repetitive text; the tokens are those of serial decoding."""
    first, more = TEXTS[text]
    ring = ring_of(chunk)
    slot, holding = warm(ring, first, budget=1)  # rows [0, 40) of the text itself
    prompt = [*first, *more]
    lie = holding.resident + claimed
    ring.scheduler.rings["r"].ledger.extend(slot, Chain(ring.root(), prompt), lie)
    reply = ring.ask(prompt, REPLY)
    assert [admitted.matched for admitted in reply.admitted] == [lie, 0]
    assert starts(ring, 2)[0] == lie
    assert ring.rejects[0].code is Refusal.GAP
    assert {reject.turn for reject in ring.rejects} == {2}
    assert tuple(reply.tokens) == serial(prompt, REPLY)


@pytest.mark.parametrize("text", TEXTS)
def test_claiming_another_text_is_refused(text: str) -> None:
    """CASES 5: as many rows as there are, but one token of them is another."""
    first, more = TEXTS[text]
    ring = ring_of(16)
    slot, holding = warm(ring, first, budget=1)
    prompt = [*first, *more]
    prompt[20] = (prompt[20] + 1) % VOCABULARY
    ledger, rows = ring.scheduler.rings["r"].ledger, holding.resident
    ledger.forget(slot)
    ledger.extend(slot, Chain(ring.root(), prompt), rows)
    reply = ring.ask(prompt, REPLY)
    assert ring.rejects[0].code is Refusal.CONTENT
    assert tuple(reply.tokens) == serial(prompt, REPLY)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("text", TEXTS)
def test_claiming_too_few_rows_only_costs_their_prefill(text: str, chunk: int) -> None:
    first, more = TEXTS[text]
    ring = ring_of(chunk)
    slot, holding = warm(ring, first)
    ring.scheduler.rings["r"].ledger.truncate(slot, holding.resident - 1)
    prompt = [*first, *serial(first, REPLY), *more]
    reply = ring.ask(prompt, REPLY)
    assert ring.rejects == []
    assert ring.prefilled(2) == len(more) + 2
    assert tuple(reply.tokens) == serial(prompt, REPLY)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("text", TEXTS)
def test_one_stage_that_lacks_the_rows_is_enough(text: str, index: int) -> None:
    """CASES 8: the head, the middle or the tail; the others' rows are written again."""
    first, more = TEXTS[text]
    ring = ring_of(16)
    slot, _ = warm(ring, first)
    ring.stages[index].slots.free(slot)
    prompt = [*first, *serial(first, REPLY), *more]
    reply = ring.ask(prompt, REPLY)
    assert {(reject.stage, reject.code) for reject in ring.rejects} >= {(f"s{index}", Refusal.GAP)}
    assert tuple(reply.tokens) == serial(prompt, REPLY)


# ---- why the toy's answer is a hash of every row -------------------------------------------------


class PositionToy:
    """Answers by position and token alone, as toys often do: no row that it holds matters."""

    def forward(self, segments: Sequence[Segment], payload: Tensor | None) -> Output:
        (segment,) = segments
        answers = tuple(
            blake2b(bytes((position, token))).digest()[0] % VOCABULARY
            for position, token in enumerate(segment.tokens, segment.start)
        )
        wanted = answers[len(answers) - segment.want :]
        return Output(None, (Result(segment.turn, segment.slot, segment.end - 1, wanted),))


def decode_with_a_hole(model: StageModel | PositionToy, prompt: list[int], hole: int | None) -> int:
    """The token after the prompt; row `hole` is skipped, as when one row too many is claimed."""
    for start, end in ((0, hole or 0), (0 if hole is None else hole + 1, len(prompt))):
        if start < end:
            tokens = tuple(prompt[start:end])
            run = Segment(1, 0, start, tokens, Kind.PREFILL, b"\0" * 16, 1)
            token = model.forward([run], None).results[0].tokens[0]
    return token


@pytest.mark.parametrize("text", TEXTS)
def test_a_toy_that_answers_by_position_cannot_see_a_missing_row(text: str) -> None:
    """Measured on 24 texts each: the chained toy shows nearly every hole, the other none."""
    seen = {"chained": 0, "position": 0}
    for hole in range(10, 34):
        prompt = [*TEXTS[text][0], hole]
        for name in seen:
            whole, holed = (
                decode_with_a_hole(
                    toy((0, LAYERS), slots=1) if name == "chained" else PositionToy(), prompt, skip
                )
                for skip in (None, hole)
            )
            seen[name] += whole != holed
    assert seen["position"] == 0
    assert seen["chained"] >= 20


def test_a_follow_up_waits_for_the_last_frames_of_what_it_continues() -> None:
    """CASES 12: cut by a stop string; its rows are still coming back when the client goes on."""
    ring = MemoryRing(drafter=None).form()
    turn = ring.submit(list(range(20)), 30)
    while len(ring.replies[turn].tokens) < 9:
        ring.happen(ring.choices()[0])
    ring.cancel(turn)
    said = ring.replies[turn].tokens
    after = ring.ask([*range(20), *said, 1, 2, 3], 3)
    assert after.admitted[0].matched == 20 + len(said)
    assert after.admitted[0].slot == ring.replies[turn].admitted[0].slot
    assert not any(isinstance(frame, Copy) for frame in ring.sent)
