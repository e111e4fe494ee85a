"""Scheduler.handle for turns on a ready ring: these frames in, exactly these actions out.

The test plays the ring (tests/desk.py). Where a turn is placed is the ledger's policy: the slot is
read from Admitted. Frames count from 3, because the self-check took 1 and 2.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from coord.actions import Admitted, Failed, Finished, Send, Tokens
from tests.desk import LIMITS, Desk, prefill, runs, slot_of, verify
from transport.frame import Run, Sampling, Submit

PROMPT = tuple(range(1, 11))  # three chunks: 4, 4 and 2 tokens


def one_frame() -> Desk:
    """A ring with room for one frame at a time."""
    return Desk(limits=replace(LIMITS, window_frames=1)).form()


# ---- prefill ------------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_in_chunks_all_in_flight() -> None:
    """CASES 37: chunk k + 1 is sent before chunk k is acknowledged. Only the last wants a token."""
    desk = Desk().form()
    actions = desk.submit(1, PROMPT)
    slot = slot_of(actions)
    assert actions == [
        Admitted(1, "r", slot, prompt=10, matched=0),
        desk.run(3, prefill(1, slot, (), PROMPT[:4])),
        desk.run(4, prefill(1, slot, PROMPT[:4], PROMPT[4:8])),
        desk.run(5, prefill(1, slot, PROMPT[:8], PROMPT[8:], want=1)),
    ]
    assert desk.core.deadline() == desk.now + LIMITS.lost_after_s


def test_the_window_bounds_the_chunks_in_flight() -> None:
    desk = Desk().form()
    prompt = tuple(range(1, 21))
    actions = desk.submit(1, prompt)
    slot, sent = slot_of(actions), runs(actions)
    assert [run.segments[0].start for run in sent] == [0, 4, 8]
    assert desk.verdict(sent[0]) == [desk.run(6, prefill(1, slot, prompt[:12], prompt[12:16]))]
    assert desk.verdict(sent[1]) == [
        desk.run(7, prefill(1, slot, prompt[:16], prompt[16:], want=1))
    ]
    assert desk.verdict(sent[2]) == []


def test_the_ledger_follows_the_acknowledgements() -> None:
    """DESIGN 4: extend on ack."""
    desk = Desk().form()
    actions = desk.submit(1, PROMPT)
    slot = slot_of(actions)
    held = []
    for run, tokens in zip(runs(actions), ((), (), (21,)), strict=True):
        held.append(desk.resident(slot))
        desk.verdict(run, *tokens)
    assert [*held, desk.resident(slot)] == [(), PROMPT[:4], PROMPT[:8], PROMPT]


# ---- decode -------------------------------------------------------------------------------------


def test_a_verdict_makes_the_next_decode_segment() -> None:
    desk = Desk().form()
    actions = desk.submit(1, (1, 2, 3), budget=3)
    slot = slot_of(actions)
    assert desk.verdict(runs(actions)[0], 21) == [
        Tokens(1, (21,)),
        desk.run(4, verify(1, slot, (1, 2, 3), 21)),
    ]
    assert desk.verdict(Run("r", 1, 4, (verify(1, slot, (1, 2, 3), 21),)), 22) == [
        Tokens(1, (22,)),
        desk.run(5, verify(1, slot, (1, 2, 3, 21), 22)),
    ]
    assert desk.verdict(Run("r", 1, 5, (verify(1, slot, (1, 2, 3, 21), 22),)), 23) == [
        Tokens(1, (23,)),
        Finished(1, "length"),
    ]
    assert desk.resident(slot) == (1, 2, 3, 21, 22), "prompt + committed - 1 rows"
    assert (desk.core.turns, desk.ring.ledger.slots[slot].turn) == ({}, None)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stop_token_ends_the_turn(at: int) -> None:
    """CASES 34, 35: at the earliest of several; nothing more is sent; a stop is committed."""
    desk = Desk().form()
    actions = desk.submit(1, (1, 2, 3), budget=10, stops=(40, 50))
    slot = slot_of(actions)
    for token in (21, 22)[:at]:
        actions = desk.verdict(runs(actions)[0], token)
    assert desk.verdict(runs(actions)[0], 50) == [Tokens(1, (50,)), Finished(1, "stop")]
    assert desk.resident(slot) == (1, 2, 3, 21, 22)[: 3 + at]


@pytest.mark.parametrize(("prompt", "tokens"), [(28, 4), (31, 1)])
def test_the_context_limit_ends_the_turn(prompt: int, tokens: int) -> None:
    """CASES 33: prompt and reply together are at most max_model_len; no row >= limit is written."""
    desk = Desk().form()
    actions = desk.submit(1, tuple(range(prompt)), budget=100)
    ends: list[int] = []
    replied: list[int] = []
    finished: list[Finished] = []
    queue = runs(actions)
    while queue:
        run = queue.pop(0)
        ends.append(run.segments[0].end)
        actions = desk.verdict(run, *([60] if run.segments[0].want else []))
        queue += runs(actions)
        replied += [token for a in actions if isinstance(a, Tokens) for token in a.tokens]
        finished += [a for a in actions if isinstance(a, Finished)]
    assert (len(replied), finished) == (tokens, [Finished(1, "length")])
    assert max(ends) == LIMITS.max_model_len - 1


def test_log_probabilities_and_sampling_travel_through() -> None:
    """CASES 30: sampling is in each segment, so that a resume has it too."""
    desk = Desk().form()
    wanted = Sampling(temperature=0.5, seed=3, logprobs=1)
    (run,) = runs(desk.submit(1, (1, 2), sampling=wanted))
    assert run.segments[0].sampling == wanted


# ---- sharing a ring -----------------------------------------------------------------------------


def test_two_turns_decode_in_one_frame() -> None:
    desk = one_frame()
    first = desk.submit(1, (1, 2))
    a = slot_of(first)
    second = desk.submit(2, (7, 8))
    b = slot_of(second)
    assert second == [Admitted(2, "r", b, prompt=2, matched=0)]
    actions = desk.verdict(runs(first)[0], 21)
    assert actions == [
        Tokens(1, (21,)),
        desk.run(4, verify(1, a, (1, 2), 21), prefill(2, b, (), (7, 8), want=1)),
    ]
    assert desk.verdict(runs(actions)[0], 22, 31) == [
        Tokens(1, (22,)),
        Tokens(2, (31,)),
        desk.run(5, verify(1, a, (1, 2, 21), 22), verify(2, b, (7, 8), 31)),
    ]


def test_a_long_prompt_does_not_stall_a_decode() -> None:
    """Every frame takes the decode segment first, then at most shared_chunk_tokens of prefill."""
    desk = one_frame()
    actions = desk.submit(1, (1, 2), budget=8)
    desk.submit(2, PROMPT)
    for chunk in (PROMPT[:4], PROMPT[4:8], PROMPT[8:]):
        actions = desk.verdict(runs(actions)[0], 21)
        (run,) = runs(actions)
        assert [(s.turn, s.kind, s.want) for s in run.segments] == [
            (1, "verify", 1),
            (2, "prefill", int(chunk == PROMPT[8:])),
        ]
        assert run.segments[1].tokens == chunk


def test_the_token_budget_is_shared_by_prompts() -> None:
    """Two short prompts in one frame; the second is cut where the budget ends."""
    desk = one_frame()
    first = desk.submit(1, (1, 2, 3), budget=1)
    desk.submit(2, (7, 8, 9))
    (run,) = runs(desk.verdict(runs(first)[0], 21))
    assert [s.turn for s in run.segments] == [2]
    desk.submit(3, (4, 5, 6))
    desk.cancel(2)
    actions = desk.verdict(run, 5)
    assert [(s.turn, s.tokens) for s in runs(actions)[0].segments] == [(3, (4, 5, 6))]


def test_waiting_turns_start_in_order_of_arrival() -> None:
    desk = Desk().form()
    first = desk.submit(1, (1,), budget=1)
    desk.submit(2, (2,), budget=1)
    assert desk.submit(3, (3,)) == []
    assert desk.submit(4, (4,)) == []
    actions = desk.verdict(runs(first)[0], 21)
    assert actions[:2] == [Tokens(1, (21,)), Finished(1, "length")]
    assert [a.turn for a in actions if isinstance(a, Admitted)] == [3]


def test_the_match_is_made_when_a_turn_is_scheduled() -> None:
    """CASES 3, 14: what is resident then counts, not what was on arrival."""
    desk = Desk(slots=1).form()
    first = desk.submit(1, (1, 2, 3), budget=1)
    assert desk.submit(2, (1, 2, 3, 21, 4)) == [], "nothing of it is resident yet"
    actions = desk.verdict(runs(first)[0], 21)
    assert actions[2] == Admitted(2, "r", 0, prompt=5, matched=3)
    assert runs(actions)[0].segments == (prefill(2, 0, (1, 2, 3), (21, 4), want=1),)


# ---- reuse --------------------------------------------------------------------------------------


def test_a_second_turn_sends_only_its_suffix() -> None:
    desk = Desk().form()
    first = desk.submit(1, (1, 2, 3), budget=2)
    slot = slot_of(first)
    actions = desk.verdict(runs(first)[0], 21)
    desk.verdict(runs(actions)[0], 22)
    assert desk.submit(2, (1, 2, 3, 21, 22, 6)) == [
        Admitted(2, "r", slot, prompt=6, matched=4),
        desk.run(5, prefill(2, slot, (1, 2, 3, 21), (22, 6), want=1)),
    ]
    totals = desk.core.totals
    assert (totals.prefix_cache_hits, totals.prefilled_tokens) == (0, 5), "a hit once it is proven"


def test_the_whole_prompt_resident_still_sends_its_last_token() -> None:
    """CASES 4: matched is clamped to prompt - 1, because that row's logits are wanted."""
    desk = Desk().form()
    first = desk.submit(1, (1, 2, 3), budget=1)
    slot = slot_of(first)
    desk.verdict(runs(first)[0], 21)
    again = desk.submit(2, (1, 2, 3), budget=1)
    assert again == [
        Admitted(2, "r", slot, prompt=3, matched=2),
        desk.run(4, prefill(2, slot, (1, 2), (3,), want=1)),
    ]
    assert desk.resident(slot) == (1, 2), "row 2 is being written again"
    desk.verdict(runs(again)[0], 21)
    assert (desk.core.totals.prompt_tokens, desk.core.totals.prefix_cache_hits) == (6, 2)


@pytest.mark.parametrize(
    "submit",
    [Submit(2, (1, 2, 3, 4), 3, reuse=False), Submit(2, (1, 2, 3, 4), 3, salt=b"tenant")],
    ids=["off", "salt"],
)
def test_no_reuse_without_leave(submit: Submit) -> None:
    """CASES 19: another salt never hits."""
    desk = Desk().form()
    first = desk.submit(1, (1, 2, 3), budget=1)
    desk.verdict(runs(first)[0], 21)
    admitted, sent = desk.tell(submit)
    assert isinstance(admitted, Admitted)
    assert admitted.matched == 0
    assert isinstance(sent, Send)
    assert isinstance(sent.frame, Run)
    assert sent.frame.segments[0].tokens == (1, 2, 3, 4)


# ---- refused before it starts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("submit", "status", "code"),
    [
        (Submit(1, (), 1), 400, "empty_prompt"),
        (Submit(1, (1,), 0), 400, "invalid_value"),
        (Submit(1, (1,) * 32, 1), 400, "context_length_exceeded"),
        (Submit(1, (1,) * 1000, 1), 400, "context_length_exceeded"),
    ],
)
def test_impossible_turns_fail_at_once(submit: Submit, status: int, code: str) -> None:
    """CASES 26: and touch nothing that is resident."""
    desk = Desk().form()
    first = desk.submit(9, (1, 2, 3), budget=1)
    desk.verdict(runs(first)[0], 21)
    (failed,) = desk.tell(submit)
    assert isinstance(failed, Failed)
    assert (failed.turn, failed.status, failed.code) == (1, status, code)
    if code == "context_length_exceeded":
        assert f"{len(submit.prompt)} tokens" in failed.message
        assert "32" in failed.message
    assert desk.resident(slot_of(first)) == (1, 2, 3)


def test_a_full_queue_is_429() -> None:
    desk = Desk().form()
    for turn in (1, 2, 3, 4):
        desk.submit(turn, (turn,))
    assert desk.submit(5, (5,)) == [Failed(5, 429, "queue_full", "2 turns are waiting already")]
    desk.cancel(3)
    assert desk.submit(6, (6,)) == [], "a place in the queue is free again"
    assert (desk.core.waiting(), desk.core.running()) == (2, 2)


# ---- cancel -------------------------------------------------------------------------------------


def test_a_cancelled_waiting_turn_never_runs() -> None:
    desk = Desk().form()
    first = desk.submit(1, (1,), budget=1)
    desk.submit(2, (2,))
    desk.submit(3, (3,))
    assert desk.cancel(3) == [Finished(3, "cancelled")]
    assert desk.verdict(runs(first)[0], 21) == [Tokens(1, (21,)), Finished(1, "length")]
    assert desk.cancel(3) == [], "it is over"


def test_a_cancelled_prefill_keeps_its_slot_until_its_frames_are_back() -> None:
    """CASES 25: and leaves exactly what was acknowledged."""
    desk = Desk().form()
    first = desk.submit(1, PROMPT)
    slot, sent = slot_of(first), runs(first)
    desk.verdict(sent[0])
    assert desk.cancel(1) == [Finished(1, "cancelled")]
    assert desk.cancel(1) == []
    assert desk.ring.ledger.slots[slot].turn == 1
    assert desk.resident(slot) == PROMPT[:4]
    assert desk.verdict(sent[1]) == []
    assert desk.ring.ledger.slots[slot].turn == 1
    assert desk.verdict(sent[2], 21) == [], "no token for a client that is gone"
    assert desk.ring.ledger.slots[slot].turn is None
    assert desk.resident(slot) == PROMPT


def test_chunks_not_yet_sent_are_not_sent_after_a_cancel() -> None:
    desk = one_frame()
    first = desk.submit(1, PROMPT)
    desk.cancel(1)
    assert desk.verdict(runs(first)[0]) == []
    assert desk.resident(slot_of(first)) == PROMPT[:4]


def test_a_cancelled_decode_keeps_what_it_committed() -> None:
    desk = Desk().form()
    first = desk.submit(1, (1, 2, 3), budget=9)
    slot = slot_of(first)
    actions = desk.verdict(runs(first)[0], 21)
    assert desk.cancel(1) == [Finished(1, "cancelled")]
    assert desk.resident(slot) == (1, 2, 3)
    assert desk.verdict(runs(actions)[0], 22) == []
    assert desk.resident(slot) == (1, 2, 3, 21)
    assert desk.core.totals.generation_tokens == 1


def test_the_next_turn_waits_for_a_draining_slot() -> None:
    """CASES 25: a late answer can't reach the new owner of the slot."""
    desk = Desk(slots=1).form()
    first = desk.submit(1, (1, 2, 3))
    desk.cancel(1)
    assert desk.submit(2, (7, 8)) == []
    assert desk.verdict(runs(first)[0], 21) == [
        Admitted(2, "r", 0, prompt=2, matched=0),
        desk.run(4, prefill(2, 0, (), (7, 8), want=1)),
    ]
    assert desk.ring.ledger.evictions == {"evicted": 1}
