"""What stays resident and what is given up, case by case, on toy rings in memory."""

from __future__ import annotations

import pytest

from coord.actions import Admitted
from coord.ledger import FORK_ROWS
from coord.ring import Phase
from tests.memoryring import VOCABULARY, limits
from tests.memoryworld import MemoryWorld
from tools.sim.oracle import Oracle
from transport.frame import Copy, Free, FreeSlot, KeepSlot, Run, Tick, Verdict

ORACLE = Oracle(2, VOCABULARY)
SYSTEM = list(range(1, 41))  # a long system prompt
PARK = 300 * 16  # bytes of 300 rows of one stage with both layers


def world(slots: int = 2, rings: int = 1, stages: int = 1, **changes: float) -> MemoryWorld:
    bounds = limits(slots=slots, max_model_len=256, lost_after_s=1e5, **changes)
    made = MemoryWorld(ORACLE, bounds, stages=[stages] * rings, slots=slots, codec=True)
    return made.form()


def chat(made: MemoryWorld, known: list[int], new: list[int], **options: object) -> Admitted:
    """One turn of a conversation: `known` grows by the message and the reply."""
    known += new
    reply = made.ask(known, 4, **options)
    assert reply.finished == "length"
    known += reply.tokens
    made.audit()
    return reply.admitted[-1]


# ---- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [0.0, 30.0])
def test_cases_2_4_the_same_again_gives_the_same_and_hits(drift: float) -> None:
    made = world()
    first = made.ask(SYSTEM, 6)
    made.wait(drift)
    for _ in range(3):
        again = made.ask(SYSTEM, 6)
        assert again.tokens == first.tokens
        assert again.admitted[0].matched == len(SYSTEM) - 1


def test_case_3_the_match_is_made_when_the_turn_is_scheduled() -> None:
    """What was resident when the second turn arrived is gone when it gets the slot, and reverse."""
    made = world(slots=1)
    known: list[int] = []
    chat(made, known, SYSTEM)
    running = made.submit([9] * 30, 4)  # takes the only slot: the conversation is given up
    waiting = made.submit([*known, 5], 4)
    after = made.submit([9] * 30 + made.truth[running] + [7], 4)
    made.pump()
    assert made.replies[waiting].admitted[0].matched == 0
    assert made.replies[after].admitted[0].matched == 0, "given up for the one before"
    miss = made.replies[waiting].admitted[0].miss
    assert miss is not None
    assert miss.reason == "evicted"


def test_case_5_two_conversations_share_a_system_prompt_and_never_a_row() -> None:
    made = world(slots=2)
    one, two = list(SYSTEM), list(SYSTEM)
    chat(made, one, [50])
    assert chat(made, two, [51]).matched == len(SYSTEM), "forked, not overwritten"
    for turn in range(4):  # alternation keeps hitting (CASE 13)
        for known in (one, two):
            expected = len(known) - 1
            assert chat(made, known, [52 + turn]).matched == expected
    assert made.scheduler.rings["r0"].ledger.evictions.get("evicted", 0) == 0


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_case_13_as_many_residents_as_slots(slots: int) -> None:
    made = world(slots=slots)
    chats = [list(SYSTEM) for _ in range(slots)]
    for index, known in enumerate(chats):
        chat(made, known, [index, index])
    for turn in range(3):
        for known in chats:
            expected = len(known) - 1
            assert chat(made, known, [turn]).matched == expected


def test_case_14_a_hint_is_no_pin() -> None:
    """The session's hint names an emptied slot; its prefix is warm in another one."""
    made = world(slots=2)
    one, two = [1] * 20, [2] * 20
    chat(made, one, [], hint="one")
    slot = chat(made, two, [], hint="two").slot
    made.tell(FreeSlot("r0", 1 - slot))
    made.pump()
    admitted = chat(made, [*two, 5], [], hint="one")
    assert (admitted.slot, admitted.matched) == (slot, len(two) - 1)


@pytest.mark.parametrize("length", [2, 3, 7, 9, 17])
def test_case_15_any_length_hits(length: int) -> None:
    made = world()
    prompt = list(range(length))
    made.ask(prompt, 1)
    assert made.ask(prompt, 1).admitted[0].matched == length - 1


def test_case_16_rebuild_cost_decides() -> None:
    """Three leaves of a long root and a short stranger: the stranger goes, then a leaf."""
    made = world(slots=4)
    leaves = [[*SYSTEM, *SYSTEM, 50 + i] for i in range(3)]
    for leaf in leaves:
        chat(made, leaf, [])
    stranger = [7] * 9
    chat(made, stranger, [])
    chat(made, [8] * 20, [])  # somebody has to go
    for leaf in leaves:
        assert chat(made, leaf, [3]).matched >= len(SYSTEM) * 2, "the root is still there"


def test_case_17_an_edit_is_explained_by_its_position() -> None:
    made = world()
    known = list(SYSTEM)
    chat(made, known, [])
    edited = [*known[:20], 63, *known[21:]]
    admitted = chat(made, edited, [])
    assert admitted.miss is not None
    assert (admitted.matched, admitted.miss.position, admitted.miss.reason) == (20, 20, "edited")
    assert admitted.miss.resident == tuple(known[20:28])


@pytest.mark.parametrize("rings", [1, 2])
def test_case_18_identical_cold_prompts_prefill_once(rings: int) -> None:
    made = world(slots=4, rings=rings, chunk_tokens=8)
    prompt = [*SYSTEM, *SYSTEM]
    turns = [made.submit(prompt, 3) for _ in range(4)]
    made.pump()
    assert len({tuple(made.replies[turn].tokens) for turn in turns}) == 1
    assert made.scheduler.totals.prefilled_tokens <= len(prompt) + 4 * FORK_ROWS


def test_another_tenant_neither_matches_nor_learns_why() -> None:
    made = world(slots=3)
    known = list(SYSTEM)
    chat(made, known, [], salt=b"one")
    admitted = chat(made, list(known), [3], salt=b"two")
    assert (admitted.matched, admitted.miss and admitted.miss.reason) == (0, "new")
    expected = len(known) - 1
    assert chat(made, known, [3], salt=b"one").matched == expected


# ---- refusals, cancels and stale answers ---------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_case_8_a_stage_that_cannot_honour_a_match_costs_a_prefill(stage: int) -> None:
    made = world(stages=2)
    known = list(SYSTEM)
    slot = chat(made, known, []).slot
    made.damage(made.rings[0], stage, slot, 10)
    reply = made.ask([*known, 5], 4)
    assert [each.matched for each in reply.admitted] == [len(known) - 1, 0]
    made.audit()
    known += [5, *reply.tokens]
    expected = len(known) - 1
    assert chat(made, known, [6]).matched == expected, "and is warm again"


def test_case_22_a_resumed_turn_counts_no_work_of_its_own_as_a_hit() -> None:
    made = world(stages=2, chunk_tokens=8)
    turn = made.submit([*SYSTEM, *SYSTEM], 4)
    while made.scheduler.turns[turn].committed < 2:
        made.happen(*made.choices()[0])
    made.gap(made.rings[0])
    made.wait(1.1)
    made.pump()
    assert made.replies[turn].finished == "length"
    admitted = made.replies[turn].admitted
    assert (admitted[0].matched, admitted[-1].resumed) == (0, True)
    assert admitted[-1].matched > 0, "it goes on from what it had"
    assert made.scheduler.totals.prefix_cache_hits == 0


def test_case_25_a_late_answer_moves_nothing() -> None:
    made = world(slots=1)
    old = made.submit(SYSTEM, 4)
    made.cancel(old)
    new = made.submit([9] * 20, 4)
    made.pump()
    assert made.replies[new].finished == "length"
    run = next(frame for frame in made.rings[0].sent if isinstance(frame, Run))
    made.tell(Verdict("r0", run.epoch, run.seq, (), ()))
    made.tell(Free("r0", run.epoch, run.seq, 0))
    assert made.scheduler.rings["r0"].stats.stale == 2
    made.audit()
    assert made.ask([9] * 20 + made.replies[new].tokens + [1], 2).admitted[0].matched == 23


def test_case_26_an_over_long_turn_leaves_the_session_warm() -> None:
    made = world()
    known = list(SYSTEM)
    chat(made, known, [])
    refused = made.ask(known + [1] * 300, 4)
    assert refused.failed is not None
    assert refused.failed.code == "context_length_exceeded"
    expected = len(known) - 1
    assert chat(made, known, [5]).matched == expected


def test_case_31_a_leftover_reply_acknowledges_nothing() -> None:
    """A copy's acknowledgement of an earlier epoch does not settle the next one."""
    made = world(slots=2)
    known = list(SYSTEM)
    chat(made, known, [])
    turn = made.submit([*SYSTEM, 60], 4)
    copy = next(frame for frame in made.rings[0].sent if isinstance(frame, Copy))
    made.gap(made.rings[0])
    made.tell(copy)
    assert made.scheduler.rings["r0"].stats.stale == 1
    made.wait(1.1)
    made.pump()
    assert made.replies[turn].finished == "length"
    made.audit()


def test_sixty_cancels_at_random_points_leave_full_capacity() -> None:
    made = world(slots=3, stages=2, chunk_tokens=8)
    for index in range(60):
        turn = made.submit([index % 7, *SYSTEM, *range(index)], 6)
        for _ in range(index):
            options = made.choices()
            if options:
                made.happen(*options[index % len(options)])
        made.cancel(turn)
    turns = [made.submit([i] * 30, 4) for i in range(3)]
    made.pump()
    assert all(made.replies[turn].finished == "length" for turn in turns)
    made.audit()


def test_an_aborted_prefill_is_reused_as_far_as_it_settled() -> None:
    made = world(stages=2, chunk_tokens=10)
    prompt = [i % 60 for i in range(100)]
    turn = made.submit(prompt, 4)
    ledger = made.scheduler.rings["r0"].ledger
    while ledger.slots[0].resident < 60:
        made.happen(*made.choices()[0])
    made.cancel(turn)
    made.pump()
    settled = max(slot.resident for slot in ledger.slots)
    assert settled >= 60
    again = made.ask(prompt, 4)
    assert again.admitted[0].matched == min(settled, len(prompt) - 1)


# ---- eviction ------------------------------------------------------------------------------------


def test_a_side_request_takes_the_colder_slot() -> None:
    """Titles and the like: one turn, soon forgotten. The conversations stay."""
    made = world(slots=3)
    one, two = [1] * 30, [2] * 30
    for known in (one, two, one, two):
        chat(made, known, [5])
    for title in range(6):
        made.ask([3, title, *range(12)], 2)
        made.wait(2.0)
    for known in (one, two):
        expected = len(known) - 1
        assert chat(made, known, [6]).matched == expected


def test_what_is_kept_is_not_given_up_while_it_is_kept() -> None:
    made = world(slots=2)
    known = [1] * 20
    slot = chat(made, known, []).slot
    made.tell(KeepSlot("r0", slot, 60.0))
    for index in range(5):
        made.ask([2, index] * 30, 2)
    expected = len(known) - 1
    assert chat(made, known, [5]).matched == expected


def test_rows_that_nobody_uses_expire_with_the_next_tick() -> None:
    made = world(idle_ttl_s=30.0)
    known = [1] * 20
    chat(made, known, [])
    made.wait(29.0)
    made.pump()
    assert made.scheduler.rings["r0"].ledger.slots[0].resident
    made.wait(2.0)
    made.pump()
    assert not made.scheduler.rings["r0"].ledger.slots[0].resident
    miss = chat(made, [*known], []).miss
    assert miss is not None
    assert miss.reason == "ttl"


def test_a_lost_ring_asks_for_no_tick_to_expire_what_it_holds() -> None:
    """It frees nothing before it is ready: the shell would spin."""
    made = world(idle_ttl_s=30.0)
    chat(made, [1] * 20, [])
    made.gap(made.rings[0])
    made.rings[0].links[0].clear()  # the roll call is not answered
    made.now += 100.0
    made.tell(Tick())
    due = made.scheduler.deadline()
    assert due is not None
    assert due >= made.now + 0.5


# ---- parking -------------------------------------------------------------------------------------


def talk(made: MemoryWorld, count: int, tokens: int = 90) -> list[list[int]]:
    chats = [[index + 1] * tokens for index in range(count)]
    for known in chats:
        chat(made, known, [])
    return chats


def test_more_conversations_than_slots_come_back_from_the_park() -> None:
    made = world(slots=1, park_bytes=PARK)
    one, two = talk(made, 2)
    for known in (one, two, one):
        expected = len(known) - 1
        assert chat(made, known, [50]).matched == expected
    ledger = made.scheduler.rings["r0"].ledger
    assert ledger.restored == 3
    assert list(ledger.evictions) == ["parked"]


def test_nothing_is_parked_without_room_for_it() -> None:
    made = world(slots=1)
    one, _ = talk(made, 2)
    admitted = chat(made, one, [50])
    assert admitted.matched == 0
    assert made.scheduler.rings["r0"].ledger.evictions == {"evicted": 2}


def test_a_park_that_is_full_drops_what_is_worth_least() -> None:
    made = world(slots=1, park_bytes=PARK)
    chats = talk(made, 6)
    ledger = made.scheduler.rings["r0"].ledger
    assert sum(each.resident for each in ledger.parked.values()) <= 300
    assert ledger.evictions["parked too long"] == 2
    expected = len(chats[4]) - 1
    assert chat(made, chats[4], [50]).matched == expected


@pytest.mark.parametrize(("park_row_s", "pays"), [(1e-5, True), (1e-3, False)])
def test_a_parked_prefix_is_restored_only_when_that_beats_prefilling(
    park_row_s: float, pays: bool
) -> None:
    made = world(slots=1, park_bytes=PARK)
    one, _ = talk(made, 2)
    ring = made.scheduler.rings["r0"]
    ring.row_s, ring.park_row_s = 1e-4, park_row_s
    admitted = chat(made, one, [50])
    assert (admitted.matched > 0) is pays
    if not pays:
        assert admitted.miss is not None
        assert admitted.miss.reason == "parked"
        made.wait(61.0)
        assert ring.restore_pays(made.now), "rates change: it is tried again"


def test_a_copy_that_met_nothing_else_is_timed_without_the_hops() -> None:
    made = world(slots=1, park_bytes=PARK)
    made.wait(6.0)  # an idle ring is pinged
    made.pump()
    ring = made.scheduler.rings["r0"]
    assert ring.stats.hop_s is not None
    talk(made, 2)
    assert 0 < ring.park_row_s < 1e-4


def test_a_restarted_stage_leaves_nothing_parked_on_the_others() -> None:
    """The ledger starts anew, so the roll is called again: whoever lives drops what it parked."""
    made = world(slots=1, stages=2, park_bytes=PARK)
    talk(made, 3)
    made.restart(made.rings[0], 1)
    made.wait(1.1)
    made.pump()
    assert made.scheduler.rings["r0"].phase is Phase.READY
    made.audit()
    assert all(not stage.slots._parked for stage in made.rings[0].stages)


# ---- several rings -------------------------------------------------------------------------------


def test_case_39_two_rings_share_the_load() -> None:
    made = world(slots=2, rings=2, chunk_tokens=8)
    turns = [made.submit([index] * 40, 8) for index in range(4)]
    made.pump()
    used = [made.replies[turn].admitted[0].ring for turn in turns]
    assert sorted(used) == ["r0", "r0", "r1", "r1"]
    follow = [made.submit([*[i] * 40, *made.replies[t].tokens, 1], 4) for i, t in enumerate(turns)]
    made.pump()
    assert [made.replies[turn].admitted[0].ring for turn in follow] == used, "affinity"


def test_nothing_is_given_up_on_one_ring_while_another_has_room() -> None:
    made = world(slots=1, rings=2)
    chats = [[index + 1] * 30 for index in range(2)]
    assert [chat(made, known, []).ring for known in chats] == ["r0", "r1"]


def test_case_39_load_overrides_affinity() -> None:
    """The warm ring has much more to compute first than the cold one in all."""
    made = world(slots=2, rings=2, chunk_tokens=8)
    known = list(SYSTEM)
    warm = chat(made, known, []).ring
    busy = made.submit([*known, *[9] * 150], 4)
    second = made.submit([*SYSTEM, 5], 4)
    admitted = made.replies[second].admitted[0]
    made.pump()
    assert made.replies[busy].admitted[0].ring == warm, "affinity: one suffix is there to compute"
    assert admitted.ring != warm
    assert admitted.miss is not None
    assert (admitted.matched, admitted.miss.reason) == (0, "busy ring")


def test_a_lost_ring_voids_its_own_residency_alone() -> None:
    made = world(slots=2, rings=2, stages=2)
    one, two = [1] * 40, [2] * 40
    turns = [made.submit(known, 4) for known in (one, two)]
    made.pump()
    where = [made.replies[turn].admitted[0].ring for turn in turns]
    assert sorted(where) == ["r0", "r1"]
    one += made.replies[turns[0]].tokens
    two += made.replies[turns[1]].tokens
    lost, other = (one, two) if where[0] == "r0" else (two, one)
    made.restart(made.by_name["r0"], 1)
    going = made.submit([*other, 7], 4)  # the other ring goes on while this one forms
    made.wait(1.1)
    made.pump()
    assert made.replies[going].admitted[0].matched == len(other) - 1
    admitted = made.ask([*lost, 7], 4).admitted[0]
    assert admitted.miss is not None
    assert (admitted.matched, admitted.miss.reason) == (0, "ring lost")


def test_case_38_the_ledger_stays_small_over_many_sessions() -> None:
    made = world(slots=2, park_bytes=PARK)
    sizes = []
    for session in range(150):
        made.ask([session % 64, session // 64, *range(70)], 1)
        if session % 50 == 49:
            ledger = made.scheduler.rings["r0"].ledger
            sizes.append((len(ledger.parked), len(ledger.gone.prefixes) <= 128))
            assert not made.scheduler.turns
    assert sizes[1] == sizes[2]
