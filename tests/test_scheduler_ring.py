"""Scheduler.handle while rings form, are checked, are pinged, and are lost; exact actions.

CASES 7, 25, 27, 28, 31: readiness is a token round the ring; a loss ends within a stated bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coord.actions import Failed, Send
from coord.ring import PING_S, RETRY_S, Phase
from tests.desk import LIMITS, PRINT, Desk, entry, runs, spec
from transport.chain import Chain, root_hash
from transport.frame import (
    Frame,
    Free,
    FreeSlot,
    Heartbeat,
    Kind,
    LinkGap,
    Ping,
    Refusal,
    Reject,
    Result,
    RollCall,
    Run,
    Sampling,
    Segment,
    StageEntry,
    StageLost,
    StageState,
    Tick,
    Verdict,
)


def probe(seq: int, slot: int, start: int) -> Send:
    tokens = (1, 2, 3, 0)
    parent = Chain(root_hash(PRINT, b""), tokens).hash_before(start)
    asked = Sampling(logprobs=0)
    return Send(
        Run("r", 1, seq, (Segment(0, slot, start, tokens[start:], Kind.PREFILL, parent, 1, asked),))
    )


def answered(seq: int, token: int, logprob: float) -> Verdict:
    return Verdict("r", 1, seq, (Result(0, 0, 3, (token,), (logprob,)),), ())


# ---- forming -----------------------------------------------------------------------------------


def test_no_roll_call_before_every_stage_is_ready() -> None:
    desk = Desk()
    assert desk.tick() == []
    assert desk.ring.detail == (
        "stage s0 (tcp://s0:1) has not been heard of; stage s1 (tcp://s1:1) has not been heard of"
    )
    assert desk.beat(0) == []
    assert desk.beat(1, StageState.LOADING, detail="half way") == []
    assert desk.ring.detail == "stage s1 is loading: half way"
    assert desk.beat(1) == [Send(RollCall("r", 1))]
    assert desk.ring.phase is Phase.FORMING


def test_epochs_go_on_from_the_first() -> None:
    desk = Desk()
    desk.core.rings["r"].epoch = 40
    assert desk.beats() == [Send(RollCall("r", 41))]


def test_a_stage_that_fell_silent_keeps_the_ring_waiting() -> None:
    desk = Desk()
    desk.beat(0)
    desk.now += LIMITS.lost_after_s + 0.5
    assert desk.beat(1) == []
    assert desk.ring.detail == "stage s0 was last heard of over 5 s ago"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a, b: (a,), "the roll call met ['s0'], not ['s0', 's1']"),
        (lambda a, b: (b, a), "the roll call met ['s1', 's0']"),
        (lambda a, b: (a, b, b), "the roll call met ['s0', 's1', 's1']"),
        (lambda a, b: (a, replace(b, layers=(1, 4))), "s1 runs layers (1, 4), not (2, 4)"),
        (lambda a, b: (replace(a, layers=(0, 1)), b), "s0 runs layers (0, 1), not (0, 2)"),
        (lambda a, b: (a, replace(b, fingerprint=b"x")), "different weights or precision"),
        (lambda a, b: (a, replace(b, layers_total=6)), "different weights or precision"),
        (lambda a, b: (replace(a, layers_total=6), replace(b, layers_total=6)), "ends at layer 4"),
        (lambda a, b: (a, replace(b, slots=3)), "s0 has 2 slots of 32 rows, s1 has 3 of 32"),
        (lambda a, b: (a, replace(b, capacity=64)), "s0 has 2 slots of 32 rows, s1 has 2 of 64"),
        (
            lambda a, b: (replace(a, capacity=31), replace(b, capacity=31)),
            "slots of 31 rows, max_model_len 32",
        ),
        (
            lambda a, b: (replace(a, vocabulary=49), replace(b, vocabulary=49)),
            "a model of 49 tokens, the tokenizer has 50",
        ),
    ],
)
def test_a_roll_call_that_does_not_add_up(
    change: Callable[[StageEntry, StageEntry], tuple[StageEntry, ...]], text: str
) -> None:
    """CASES 6, 28: nothing is computed on a ring whose stages do not fit together."""
    desk = Desk(vocabulary=50)
    desk.beats()
    assert desk.answer(change(entry(0), entry(1))) == []
    assert desk.ring.phase is Phase.WAITING
    assert text in desk.ring.detail
    (failed,) = desk.submit(1, (1, 2))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (503, "not_ready")
    assert text in failed.message
    assert desk.tick(RETRY_S) == [Send(RollCall("r", 2))], "asked again, in another epoch"
    assert text in desk.ring.detail


@pytest.mark.parametrize("second", [(1, 4), (3, 4)], ids=["overlap", "hole"])
def test_layers_must_join_up_even_when_configured_otherwise(second: tuple[int, int]) -> None:
    desk = Desk()
    stages = spec().stages
    desk.ring.spec = replace(spec(), stages=(stages[0], replace(stages[1], layers=second)))
    desk.beats()
    assert desk.answer((entry(0), replace(entry(1), layers=second))) == []
    assert desk.ring.detail == f"stage s1 begins at layer {second[0]}, not 2"


def test_an_unanswered_roll_call_is_sent_again_in_a_new_epoch() -> None:
    """CASES 31: the late answer of the first is not taken for the second's."""
    desk = Desk()
    desk.beats()
    assert desk.tick(RETRY_S / 2) == []
    assert desk.tick(RETRY_S / 2) == [Send(RollCall("r", 2))]
    assert desk.tell(RollCall("r", 1, (), desk.entries())) == []
    assert (desk.ring.phase, desk.ring.stats.stale) == (Phase.FORMING, 1)
    assert len(desk.answer()) == 1


def test_a_stage_that_restarts_while_the_ring_forms() -> None:
    """CASES 28: the entries are of the old process; its next heartbeat shows it."""
    desk = Desk()
    desk.beats()
    assert desk.beat(1, incarnation=99) == [], "the roll call may still meet the new process"
    assert len(desk.answer()) == 1
    assert desk.beat(1, incarnation=99) == []
    assert desk.ring.detail == "stage s1 was restarted"
    assert desk.tick(RETRY_S) == [Send(RollCall("r", 2))]
    assert len(desk.answer((entry(0), replace(entry(1), incarnation=99)))) == 1


def test_a_stage_that_fails_while_the_ring_forms() -> None:
    desk = Desk()
    desk.beats()
    assert desk.beat(0, StageState.FAILED, detail="out of memory") == []
    assert desk.ring.detail == "stage s0 is failed: out of memory"
    assert desk.answer() == [], "the roll call was given up"


# ---- self-check --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "logprob", "reuse", "exact"),
    [(7, -0.5, True, True), (7, -0.25, True, False), (8, -0.5, False, False)],
)
def test_the_self_check_writes_and_then_reuses_a_prefix(
    token: int, logprob: float, reuse: bool, exact: bool
) -> None:
    """CASES 7: what is said of reuse was measured on this ring."""
    desk = Desk()
    desk.beats()
    assert desk.answer() == [probe(1, 0, 0)]
    assert desk.ring.phase == "probing"
    (failed,) = desk.submit(1, (1, 2))
    assert isinstance(failed, Failed), "CASES 27: alive is not ready"
    assert desk.tell(answered(1, 7, -0.5)) == [probe(2, 0, 2)]
    assert desk.tell(answered(2, token, logprob)) == []
    assert desk.ring.phase == "ready"
    assert (desk.ring.reuse, desk.ring.exact) == (reuse, exact)


def test_a_ring_that_cannot_reuse_prefills_everything() -> None:
    """CASES 7: and says matched = 0."""
    desk = Desk()
    desk.beats()
    desk.answer()
    desk.tell(answered(1, 7, -0.5))
    desk.tell(answered(2, 8, -0.5))
    for turn in (1, 2):
        (run,) = runs(desk.submit(turn, (1, 2, 3), budget=1))
        assert [(s.start, s.tokens) for s in run.segments] == [(0, (1, 2, 3))]
        desk.verdict(run, 9)


def test_a_refused_self_check_calls_the_roll_again() -> None:
    desk = Desk()
    desk.beats()
    desk.answer()
    assert desk.tell(Verdict("r", 1, 1, (), ())) == []
    assert (desk.ring.phase, desk.ring.detail) == (Phase.WAITING, "the self-check was refused")
    assert desk.tick(RETRY_S) == [Send(RollCall("r", 2))]


# ---- losing a ring -----------------------------------------------------------------------------

LOSSES: dict[str, tuple[Frame, str]] = {
    "gap": (LinkGap("r/s1", 4, 6), "verdicts 4 to 6 were lost"),
    "stage": (StageLost("r", "s0", "killed"), "stage s0: killed"),
    "failed": (
        Heartbeat("r", "s0", 10, StageState.FAILED, 1.0, "cuda", 1, 1),
        "stage s0 is failed: cuda",
    ),
    "restarted": (
        Heartbeat("r", "s0", 11, StageState.READY, 1.0, "", 1, 1),
        "stage s0 was restarted",
    ),
    "epoch": (Reject("r", 1, 3, "s1", Refusal.EPOCH, "new here"), "stage s1: new here"),
    "link": (Reject("r", 1, 0, "s1", Refusal.LINK, "frame 4, not 3"), "stage s1: frame 4, not 3"),
    "link, no epoch": (Reject("r", 0, 0, "s1", Refusal.LINK, "lost"), "stage s1: lost"),
    "ahead": (Reject("r", 8, 0, "s1", Refusal.EPOCH, "in epoch 8"), "stage s1: in epoch 8"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_voids_the_frames_and_calls_the_roll(loss: str) -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2, 3), budget=1)
    desk.wait(1.0)
    frame, detail = LOSSES[loss]
    actions = desk.tell(frame)
    epoch = 9 if loss == "ahead" else 2
    if loss == "failed":
        assert actions == []
        assert desk.ring.detail == detail
        actions = desk.beat(0)
    assert actions == [Send(RollCall("r", epoch))]
    assert desk.ring.phase is Phase.FORMING
    assert (desk.ring.in_flight, desk.ring.stats.lost) == ({}, 1)


@pytest.mark.parametrize(
    "frame",
    [
        LinkGap("r/s0", 4, 6),
        LinkGap("r/s1/control", 4, 6),
        StageLost("q", "s0", "killed"),
        Reject("r", 1, 77, "s1", Refusal.EPOCH, "of a frame nobody waits for"),
        Reject("r", 0, 3, "s1", Refusal.EPOCH, "of an older epoch"),
        Reject("q", 1, 3, "s1", Refusal.EPOCH, "of another ring"),
        Heartbeat("r", "s9", 5, StageState.READY, 1.0, "", 1, 1),
        RollCall("r", 1),
        Tick(),
    ],
    ids=lambda frame: f"{type(frame).__name__}",
)
def test_what_is_no_loss(frame: Frame) -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2, 3), budget=1)
    assert desk.tell(frame) == []
    assert (desk.ring.phase, list(desk.ring.in_flight)) == (Phase.READY, [3])


def test_a_refusal_while_the_roll_is_called_changes_nothing() -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2, 3), budget=1)
    desk.tick(RETRY_S)
    assert desk.tell(LinkGap("r/s1", 4, 6)) == [Send(RollCall("r", 2))]
    for code in (Refusal.LINK, Refusal.EPOCH):
        assert desk.tell(Reject("r", 1, 3, "s1", code, "late")) == []
    assert desk.ring.phase is Phase.FORMING


def test_the_first_that_a_new_coordinator_hears_of_a_living_tail_is_no_loss() -> None:
    """The tail counts on from its earlier frames: a gap, right before the roll call's answer."""
    desk = Desk()
    desk.beats()
    assert desk.tell(LinkGap("r/s1", 0, 38)) == []
    desk.probe(desk.answer())
    assert (desk.ring.phase, desk.ring.epoch) == (Phase.READY, 1)


def test_a_frame_without_an_answer_is_a_loss() -> None:
    """CASES 28: a stopped stage; its heartbeats may go on."""
    desk = Desk().form()
    desk.submit(1, (1, 2, 3), budget=1)
    assert desk.wait(LIMITS.frame_timeout_s - 0.5) == []
    assert desk.tick(0.5) == [Send(RollCall("r", 2))]


def test_a_silent_stage_is_a_loss() -> None:
    desk = Desk().form()
    desk.now += 4.0
    desk.beat(0)
    desk.now += 1.5
    assert desk.beat(0) == []
    assert (desk.ring.phase, desk.ring.stats.lost) == (Phase.WAITING, 1)
    assert desk.ring.detail == "stage s1 was last heard of over 5 s ago"
    assert desk.beat(1) == [Send(RollCall("r", 2))]


@pytest.mark.parametrize("same", [True, False])
def test_residency_outlives_a_loss_of_frames_but_not_of_a_stage(same: bool) -> None:
    desk = Desk().form()
    (run,) = runs(desk.submit(1, (1, 2, 3), budget=1))
    desk.verdict(run, 9)
    desk.tick(RETRY_S)
    desk.tell(LinkGap("r/s1", 1, 2))
    other = (entry(0), entry(1) if same else replace(entry(1), incarnation=99))
    desk.probe(desk.answer(other))
    held = [desk.resident(slot) for slot in range(2)]
    assert ((1, 2, 3) in held) is same


# ---- an idle ring ------------------------------------------------------------------------------


def test_an_idle_ring_is_pinged() -> None:
    desk = Desk().form()
    assert desk.wait(PING_S - 1.0) == []
    assert desk.wait(1.0) == [Send(Ping("r", 1, 3))]
    assert desk.tell(Ping("r", 1, 3), 0.25) == []
    assert desk.ring.stats.hop_s == 0.25
    assert desk.tell(Ping("r", 1, 3)) == []
    assert desk.ring.stats.stale == 1


def test_a_busy_ring_is_not_pinged() -> None:
    desk = Desk().form()
    desk.submit(1, (1, 2, 3), budget=1)
    assert desk.wait(PING_S + 1.0) == []


def test_a_slot_is_freed_on_request() -> None:
    desk = Desk().form()
    actions = desk.submit(1, (1, 2, 3), budget=1)
    (run,) = runs(actions)
    slot = run.segments[0].slot
    assert desk.tell(FreeSlot("r", slot)) == [], "not while a turn writes there"
    desk.verdict(run, 9)
    assert desk.resident(slot) == (1, 2, 3)
    assert desk.tell(FreeSlot("r", slot)) == [Send(Free("r", 1, 4, slot))]
    assert desk.resident(slot) == ()
    assert desk.tell(Free("r", 1, 4, slot)) == []
    assert desk.ring.in_flight == {}
    for nowhere in (FreeSlot("q", 0), FreeSlot("r", 2)):
        assert desk.tell(nowhere) == []


def test_impatient_operators_do_not_fill_the_window() -> None:
    desk = Desk().form()
    for _ in range(20):
        for slot in range(2):
            desk.tell(FreeSlot("r", slot))
    assert len(desk.ring.in_flight) <= 2


# ---- time --------------------------------------------------------------------------------------


def mute(desk: Desk) -> None:
    desk.submit(1, (1, 2, 3), budget=1)


@pytest.mark.parametrize("before", [None, mute], ids=["idle", "busy"])
@pytest.mark.parametrize("alive", [True, False])
def test_a_tick_at_the_deadline_always_moves_it(
    before: Callable[[Desk], None] | None, alive: bool
) -> None:
    """Whoever sleeps until exactly deadline() never spins, and nothing waits for ever."""
    desk = Desk().form()
    if before is not None:
        before(desk)
    epoch = desk.ring.epoch
    for _ in range(200):
        deadline = desk.core.deadline()
        assert deadline is not None
        assert deadline > desk.now
        desk.tick(deadline - desk.now)
        if alive:
            desk.beats()
    assert (desk.ring.epoch > epoch) or not alive
    assert not desk.core.turns


def test_a_late_tick_finds_what_is_due() -> None:
    """The sum of doubles at a deadline may round to either side."""
    desk = Desk().form()
    desk.now = 1e6 + 1 / 3
    desk.beats()
    mute(desk)
    for _ in range(40):
        desk.now = (desk.core.deadline() or 0.0) + 0.001
        desk.core.handle(Tick(), desk.now)
        desk.beats()
    assert desk.ring.epoch > 1
