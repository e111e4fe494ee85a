"""Speculation: what is proposed, what is learned from it, and how much of it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coord.batch
from bench.controller import GOAL, curve, rate, scripts
from bench.crowd import steady
from bench.virtual import Costs, Script, VirtualRing
from coord.batch import chunk_rows
from coord.draft import (
    MAX_DRAFT,
    NGRAM,
    ROW_STEP,
    Acceptance,
    Bounds,
    LookupDrafter,
    Pace,
    Usual,
    accepted,
    worthwhile,
)
from coord.ring import Ring
from coord.turn import Turn
from transport.config import Limits
from transport.config import Ring as RingSpec
from transport.config import Stage as StageSpec
from transport.frame import Submit

TOKENS = st.integers(0, 3)  # few, so that n-grams repeat
TEXTS = st.lists(TOKENS, max_size=40)


def rescan(tokens: Sequence[int], branch: Sequence[int], count: int) -> tuple[int, ...]:
    """Prompt lookup without an index: look for the last 3, 2 or 1 tokens from the end."""
    known = list(tokens)
    tail = [*known[-NGRAM:], *branch][-NGRAM:]
    for n in range(min(NGRAM, len(tail)), 0, -1):
        wanted = tail[len(tail) - n :]
        for at in range(len(known) - n - 1, -1, -1):  # it must have a successor
            if known[at : at + n] == wanted:
                found = known[at + n :]
                if len(found) < count:
                    found += branch
                while len(found) < count:
                    found += found
                return tuple(found[:count])
    return ()


# ---- the drafter ---------------------------------------------------------------------------------


@given(TEXTS, st.lists(TOKENS, max_size=5), st.integers(1, 40), st.data())
def test_the_index_finds_what_a_rescan_finds(
    tokens: list[int], branch: list[int], count: int, data: st.DataObject
) -> None:
    drafter = LookupDrafter()
    at = 0
    while at < len(tokens):
        step = data.draw(st.integers(1, len(tokens) - at))
        drafter.extend(tokens[at : at + step])
        at += step
        assert drafter.propose(branch, count) == rescan(tokens[:at], branch, count)


@given(TEXTS, TEXTS, st.lists(TOKENS, max_size=5))
def test_a_warm_turn_proposes_what_the_cold_one_would(
    prompt: list[int], reply: list[int], branch: list[int]
) -> None:
    cold, warm = LookupDrafter(), LookupDrafter()
    cold.extend(prompt)
    for token in reply:
        cold.extend((token,))
    warm.extend(prompt + reply)  # a later turn: all of it is its prompt
    assert cold.propose(branch, 8) == warm.propose(branch, 8)


def test_the_latest_and_longest_match_wins_and_a_period_goes_on() -> None:
    drafter = LookupDrafter()
    drafter.extend((1, 2, 3, 9, 5, 3, 7, 1, 2, 3))
    assert drafter.propose((), 3) == (9, 5, 3)  # after 1 2 3, not the later 3
    assert drafter.propose((8,), 3) == ()
    period = LookupDrafter()
    period.extend((1, 2, 1, 2))
    assert period.propose((), 5) == (1, 2, 1, 2, 1)


@given(TEXTS, TEXTS)
def test_accepted_counts_the_common_beginning(drafts: list[int], picked: list[int]) -> None:
    count = accepted(drafts, picked)
    assert drafts[:count] == picked[:count]
    assert drafts[count : count + 1] != picked[count : count + 1] or not drafts[count:]


# ---- what is learned -----------------------------------------------------------------------------

JUDGED = st.integers(0, MAX_DRAFT).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(st.lists(JUDGED, max_size=30), st.integers(0, 60))
def test_chances_are_chances_and_fall_with_the_distance(
    verdicts: list[tuple[int, int]], low: int
) -> None:
    acceptance = Acceptance()
    for proposed, right in verdicts:
        acceptance.learn(proposed, right)
        assert 0 < acceptance.start < 1
        assert 0 < acceptance.onward < 1
    assert acceptance.chance(low) > acceptance.chance(low + 1) > 0
    singly = sum(acceptance.chance(index + 1) for index in range(low, low + 7))
    assert acceptance.expected(low, low + 7) == pytest.approx(singly)
    assert acceptance.expected(low, low) == 0.0


def test_a_run_is_told_from_its_beginning() -> None:
    acceptance = Acceptance()
    for _ in range(20):  # every third run begins, and then goes on for long
        for proposed, right in ((7, 0), (7, 0), (7, 7), (7, 7), (7, 3)):
            acceptance.learn(proposed, right)
    assert acceptance.start < 0.5
    assert acceptance.onward > 0.85
    assert not acceptance.running
    assert acceptance.chance(1) == acceptance.start
    acceptance.learn(7, 7)
    assert acceptance.running
    assert acceptance.chance(1) == acceptance.onward
    acceptance.learn(0, 0)  # nothing was proposed: whatever comes begins anew
    assert not acceptance.running


def test_it_changes_its_mind_within_a_few_verdicts() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.learn(7, 7)
    assert acceptance.chance(40) > 0.5
    for _ in range(6):
        acceptance.learn(7, 0)
    assert acceptance.chance(1) < 0.2
    for _ in range(8):
        acceptance.learn(7, 7)
    assert acceptance.chance(8) > 0.5


# ---- how much is sent ----------------------------------------------------------------------------

PACES = st.builds(
    Pace,
    frame_s=st.sampled_from((0.0, 0.001, 0.01)),
    row_s=st.sampled_from((0.0, 1e-5, 4e-4, 0.01)),
    link_s=st.sampled_from((0.0, 0.08)),
    stages=st.integers(1, 4),
)


def learned(verdicts: list[tuple[int, int]]) -> Acceptance:
    acceptance = Acceptance()
    for proposed, right in verdicts:
        acceptance.learn(proposed, right)
    return acceptance


ACCEPTANCES = st.lists(JUDGED, max_size=6).map(learned)


@given(
    st.lists(st.tuples(ACCEPTANCES, st.integers(0, 60)), max_size=6),
    st.integers(0, 70),
    PACES,
    st.booleans(),
)
def test_drafts_fill_the_padding_and_whole_steps(
    turns: list[tuple[Acceptance, int]], rows: int, pace: Pace, alone: bool
) -> None:
    alone = alone and len(turns) == 1
    counts = worthwhile(turns, rows, pace, alone=alone)
    assert len(counts) == len(turns)
    assert all(0 <= count <= MAX_DRAFT for count in counts)
    if turns and max(counts) < MAX_DRAFT:
        total = rows + sum(counts)
        assert total % ROW_STEP == 0
        assert sum(counts) >= (-rows % ROW_STEP if rows else ROW_STEP)


def test_rows_that_cost_go_to_the_likeliest_drafts() -> None:
    sure, doubtful = learned([(7, 7)] * 9), learned([(7, 0)] * 9)
    pace = Pace(0.01, 4e-4, 0.0, 3)
    counts = worthwhile([(sure, 0), (doubtful, 0)], 2, pace, alone=False)
    assert counts[0] > 6
    assert counts[1] == 0
    assert worthwhile([(doubtful, 0)], 8, pace, alone=False) == [0]  # a new step is not free
    assert worthwhile([(sure, 0)], 8, pace, alone=False)[0] >= 8
    dear = Pace(0.01, 0.01, 0.0, 3)
    assert worthwhile([(sure, 0)], 8, dear, alone=False) == [0]


def test_alone_a_long_run_takes_long_frames_and_a_short_one_short_frames() -> None:
    pace = Pace(0.01, 4e-4, 0.0, 3)
    (long,) = worthwhile([(learned([(31, 31)] * 20), 0)], 1, pace, alone=True)
    (short,) = worthwhile([(learned([(7, 5)] * 20), 0)], 1, pace, alone=True)
    assert long > 20
    assert short == ROW_STEP - 1


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 9), st.integers(1, 9))
def test_bounds_bind(wanted: int, most: int, least: int, depth: int) -> None:
    bounds = Bounds(max(most, least), depth)
    assert bounds.tokens(wanted) == min(wanted, max(most, least))
    assert bounds.depth(wanted) == max(1, min(wanted, depth))
    exactly = Bounds(most, depth, most, depth)
    assert (exactly.tokens(wanted), exactly.depth(wanted)) == (most, depth)


# ---- the ring's window, in virtual time ----------------------------------------------------------


def novel(count: int, tokens: int) -> list[Script]:
    """Turns in which nothing ever repeats."""
    numbers = iter(Random(1).sample(range(1 << 19), count * (tokens + 20)))
    return [
        Script(tuple(next(numbers) for _ in range(20)), tuple(next(numbers) for _ in range(tokens)))
        for _ in range(count)
    ]


@pytest.mark.parametrize(("delay_s", "window"), [(0.0, 4), (0.005, 6), (0.02, 12), (0.041, 20)])
def test_the_window_fills_the_links_before_the_first_ping(delay_s: float, window: int) -> None:
    ring = VirtualRing(Costs(delay_s=delay_s, send_s=0.0), None)
    assert ring.ring.stats.hop_s is None
    assert ring.ring.window == window


def test_queueing_does_not_widen_the_window() -> None:
    """Measured under load, a round trip holds the queue that the window itself made."""
    ring = VirtualRing(Costs(send_s=0.0), None, slots=16)
    ring.run(novel(16, 60))
    assert ring.ring.window == 4


def test_a_long_prompts_chunks_fill_the_links_with_fewer_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coord.batch, "chunk_rows", lambda ring, rows, limits: limits.chunk_tokens)
    ring = VirtualRing(Costs(delay_s=0.02), None)
    ring.run([Script(tuple(range(1, 4097)), (5, 6))])
    # chunks of 256 rows take 0.1 s each: more than one of 4 links' worth would only queue
    assert 4 <= ring.most_in_flight <= 5


def test_chunks_are_cut_so_that_the_stages_overlap() -> None:
    def rows(stages: int, frame_s: float, row_s: float, waiting: int) -> int:
        names = [StageSpec(f"s{i}", f"tcp://s{i}:1", (i, i + 1)) for i in range(stages)]
        ring = Ring(RingSpec("r", "tcp://c:1", tuple(names)), Limits(chunk_tokens=256), 0, 0)
        ring.frame_s, ring.row_s = frame_s, row_s
        return chunk_rows(ring, waiting, ring.limits)

    assert rows(3, 0.0, 0.0, 1500) == 256, "nothing was measured"
    assert rows(1, 0.01, 0.0004, 1500) == 256, "one stage overlaps with none"
    assert rows(3, 0.01, 0.0004, 96) == 64  # sqrt(96 x 0.01 / (0.0004 x 2)) = 35
    assert rows(3, 0.01, 0.0004, 1500) == 160  # 137
    assert rows(3, 0.01, 0.0004, 100_000) == 256
    assert rows(3, 1e-6, 0.0004, 10) == 32


def test_sixteen_turns_keep_their_pace_over_long_links() -> None:
    """DESIGN 4: the rate is bound by the stages or by the round trip, whichever is slower."""

    def together(delay_s: float) -> float:
        ring = VirtualRing(Costs(delay_s=delay_s), None, slots=16)
        turns = novel(16, 100)
        ring.run(turns)
        start, end = min(t.times[0] for t in turns), max(t.times[-1] for t in turns)
        return 16 * 99 / (end - start)

    near = together(0.0)
    round_s = 4 * 0.0202 + 3 * Costs().frame_s
    assert together(0.02) >= 0.85 * min(near, 16 / round_s)
    alone = VirtualRing(Costs(), None)
    (turn,) = novel(1, 100)
    alone.run([turn])
    assert near >= 3 * 99 / (turn.times[-1] - turn.times[0])


# ---- the controller against the curve ------------------------------------------------------------


def test_text_that_lookup_never_hits_is_not_slower() -> None:
    for delay_s in (0.0, 0.02):
        off, on = (
            VirtualRing(Costs(delay_s=delay_s), None),
            VirtualRing(Costs(delay_s=delay_s), LookupDrafter),
        )
        assert on.run(novel(1, 80)) <= off.run(novel(1, 80)) / 0.97


@pytest.mark.parametrize("text_class", ["quote", "edit"])
def test_text_that_lookup_hits_is_four_times_as_fast_over_long_links(text_class: str) -> None:
    costs = Costs(delay_s=0.02)
    plain, _ = rate(scripts(text_class), costs, Bounds(0, 1))
    fast, _ = rate(scripts(text_class), costs, Bounds())
    assert fast >= 4 * plain


@pytest.mark.parametrize(
    ("text_class", "lengths", "depths"),
    [
        ("quote", (7, 15), (3, 8)),  # around each curve's best point; bench.controller has all
        ("edit", (7, 15), (4, 8)),
        ("list", (7,), (8,)),
        ("chat", (7,), (1, 3)),
    ],
)
def test_the_controller_is_near_the_best_point_of_the_curve(
    text_class: str, lengths: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    found = curve(text_class, 20.0, lengths, depths, most=1)
    assert found.share >= GOAL, found


def test_a_chat_wastes_few_frames() -> None:
    """Guesses behind guesses that are never right would take the stages from other turns."""
    costs = Costs(delay_s=0.02)
    _, adaptive = rate(scripts("chat")[:1], costs, Bounds())
    _, plain = rate(scripts("chat")[:1], costs, Bounds(7, 1))
    assert adaptive <= 1.1 * plain


@pytest.mark.parametrize(("text_class", "turns", "least"), [("chat", 16, 0.97), ("quote", 8, 2.0)])
def test_lookup_never_slows_a_crowd_down(text_class: str, turns: int, least: float) -> None:
    costs = Costs(delay_s=0.02, processors=2)
    off, on = (steady(costs, text_class, turns, lookup=lookup) for lookup in (False, True))
    assert on >= least * off


def test_turns_that_came_one_by_one_come_to_share_a_frame() -> None:
    ring = VirtualRing(Costs(send_s=0.0), None, slots=8)
    turns = [
        Script(each.prompt + (9,) * (64 * index), each.reply)
        for index, each in enumerate(novel(8, 120))
    ]
    ring.run(turns)
    assert ring.sizes.count(8) > 60, ring.sizes


def test_what_lookup_would_have_hit_is_learned_without_sending_it() -> None:
    """A turn in a crowd has no free rows: its acceptance must not stay what chats made of it."""
    usual = Usual()
    for _ in range(60):
        Acceptance(usual).learn(3, 0)
    assert Acceptance(usual).chance(1) < 0.1
    submit = Submit(1, (1, 2, 3, 4, 1, 2), 50)
    turn = Turn(submit, 50, LookupDrafter(), acceptance=Acceptance(usual))
    turn.admit("r", 0, b"r" * 16, None, 0)
    for token in (3, 4, 1, 2, 3, 4, 1, 2):
        turn.learn_from(token)
        turn.commit(token)
    assert turn.acceptance.chance(1) > 0.6


def test_turns_in_step_go_in_frames_of_eight_while_there_are_places() -> None:
    """Two frames of 8 rows, one behind the other, are back sooner than one of 16."""
    script = novel(1, 60)[0]
    ring = VirtualRing(Costs(), None, slots=16)
    turns = [Script(script.prompt, script.reply) for _ in range(16)]
    took_s = ring.run(turns)
    assert ring.most_in_flight >= 2
    one_frame_s = 3 * Costs().forward_s(16)
    assert took_s < 60 * one_frame_s
