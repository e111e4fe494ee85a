"""The draft model: what is asked of it, which of its answers hold, and how it is run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coord.actions import Draft, Finished, Tokens
from coord.draft_model import MOST_AHEAD, ModelDrafter
from coord.drafting import CHUNK, DraftRunner
from tests import drafts, processes
from tests.desk import LIMITS, Desk, prefill, runs, segment, slot_of, verify
from tests.memoryring import LAYERS, VOCABULARY, MemoryRing, serial, toy
from tests.modelfile import default_model
from tests.processes import get
from tests.toyclient import complete, truth
from tools.drafting import WholeModel, load_draft_model
from transport.frame import Drafted, Kind, Result, Run, Verdict

PROMPT = (1, 2, 3)


def judge(desk: Desk, run: Run, tokens: Sequence[int]) -> list[object]:
    """A verdict with several tokens for one segment."""
    (each,) = run.segments
    result = Result(each.turn, each.slot, each.end - each.want, tuple(tokens))
    return list(desk.tell(Verdict("r", run.epoch, run.seq, (result,), ())))


# ---- the drafter ---------------------------------------------------------------------------------


def test_the_prompt_is_told_at_once_and_answers_hold_while_they_agree() -> None:
    drafter = ModelDrafter()
    drafter.extend(PROMPT)
    assert drafter.ask(7) == Draft(7, 0, PROMPT, 8)
    assert drafter.ask(7) is None
    drafter.drafted(3, (4, 5, 6, 7, 8, 9, 10, 11))
    drafter.extend((4,))
    assert drafter.propose((), 3) == (5, 6, 7)
    assert drafter.propose((5, 6), 3) == (7, 8, 9)
    assert drafter.propose((5, 9), 3) == (), "behind another guess"
    assert drafter.ask(7) is None, "there is enough"
    assert drafter.propose((5, 6), 7) == (7, 8, 9, 10, 11)
    assert drafter.ask(7) == Draft(7, 3, (4,), 16)


def test_what_diverges_is_dropped_and_asked_for_again() -> None:
    drafter = ModelDrafter()
    drafter.extend(PROMPT)
    assert drafter.ask(7) == Draft(7, 0, PROMPT, 8)
    drafter.drafted(3, (4, 5, 6))
    drafter.extend((9,))
    assert drafter.propose((), 7) == ()
    assert drafter.ask(7) == Draft(7, 3, (9,), 8)
    drafter.drafted(3, (9, 5, 6))
    assert drafter.propose((), 1) == (), "an answer to an older request"
    drafter.extend((10,))
    drafter.drafted(4, (11, 12))  # came too late: it did not foresee 10
    assert drafter.propose((), 1) == ()
    assert drafter.ask(7) == Draft(7, 4, (10,), 8)


def test_a_late_answer_counts_as_far_as_it_agrees_and_a_lost_one_is_asked_again() -> None:
    drafter = ModelDrafter()
    drafter.extend(PROMPT)
    assert drafter.ask(7) is not None
    for token in (4, 5):
        drafter.extend((token,))
        assert drafter.propose((), 2) == ()
        assert drafter.ask(7) is None, "one is on its way"
    drafter.drafted(3, (4, 5, 6, 7))
    assert drafter.propose((), 2) == (6, 7)
    drafter.drafted(3, (4, 5, 6))
    assert drafter.propose((), 2) == (6, 7), "a duplicate that is shorter"
    for token in range(20, 29):  # no answer comes any more
        drafter.extend((token,))
    drafter.propose((), 2)
    assert drafter.ask(7) == Draft(7, 3, (4, 5, *range(20, 29)), 8)


def test_a_model_with_nothing_to_say_is_not_asked_again_and_again() -> None:
    drafter = ModelDrafter()
    drafter.extend(PROMPT)
    asked = 0
    for count in [*range(1, 40)] * 3:
        drafter.propose((), count)
        request = drafter.ask(7)
        if request is not None:
            asked += 1
            assert request.count <= MOST_AHEAD
            drafter.drafted(request.start + len(request.tokens), ())
    assert asked == 5  # for 8, 16, 24, 32 and 40


def test_lookup_goes_first_where_three_tokens_match() -> None:
    drafter = ModelDrafter()
    drafter.extend((1, 2, 3, 4, 9, 1, 2, 3))
    assert drafter.propose((), 2) == (4, 9)
    drafter = ModelDrafter()
    drafter.extend((1, 2, 3, 4, 9, 2, 3))
    assert drafter.propose((), 2) == (), "two tokens match: the model is asked"


# ---- the scheduler -------------------------------------------------------------------------------


def test_requests_answers_and_divergence_are_exactly_these_actions() -> None:
    desk = Desk(limits=replace(LIMITS, window_frames=1), drafter=ModelDrafter).form()
    actions = desk.submit(1, PROMPT, budget=12)
    slot = slot_of(actions)
    assert actions[1:] == [
        desk.run(3, prefill(1, slot, (), PROMPT, want=1)),
        Draft(1, 0, PROMPT, 8),
    ]
    assert desk.tell(Drafted(1, 3, (21, 22, 23))) == []
    (first,) = runs(actions)
    assert judge(desk, first, (21,)) == [
        Tokens(1, (21,)),
        desk.run(4, segment(1, slot, PROMPT, (21, 22, 23), Kind.VERIFY, 3)),
        Draft(1, 3, (21,), 8),
    ]
    # 23 was wrong: what is left of the proposals is void, and so is the answer that assumed it
    sent = Run("r", 1, 4, (segment(1, slot, PROMPT, (21, 22, 23), Kind.VERIFY, 3),))
    assert judge(desk, sent, (22, 40, 41)) == [
        Tokens(1, (22, 40)),
        desk.run(5, verify(1, slot, (*PROMPT, 21, 22), 40)),
    ]
    assert desk.tell(Drafted(1, 4, (22, 23, 24))) == [Draft(1, 4, (22, 40), 8)]
    assert desk.tell(Drafted(1, 4, (22, 40, 50))) == [], "stale"
    assert desk.tell(Drafted(2, 4, (22,))) == [], "nobody's"
    assert desk.cancel(1) == [Finished(1, "cancelled")]
    assert desk.tell(Drafted(1, 6, (50, 51))) == []
    assert Draft(2, 0, PROMPT, 8, b"t") in desk.submit(2, PROMPT, salt=b"t")


def test_another_drafter_takes_no_answer() -> None:
    desk = Desk().form()
    desk.submit(1, PROMPT)
    assert desk.tell(Drafted(1, 3, (21, 22))) == []


def test_a_ring_whose_draft_model_is_its_own_accepts_nearly_all() -> None:
    """Answers come while the prompt is in flight, and then after each event."""
    ring = MemoryRing(3, drafter=ModelDrafter).form()
    turn = ring.submit(range(20), 100)
    drafts.pump(ring, DraftRunner(WholeModel(toy((0, LAYERS))), VOCABULARY))
    assert tuple(ring.replies[turn].tokens) == serial(range(20), 100)
    totals = ring.scheduler.totals
    assert totals.drafts_rejected == 0
    assert totals.drafts_accepted > 70


# ---- the runner ----------------------------------------------------------------------------------


class Counted(WholeModel):
    """Counts the tokens that were read."""

    read = 0

    def pick(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        self.read += len(tokens)
        return super().pick(slot, start, tokens)


def counted(slots: int = 2, capacity: int = 1024) -> Counted:
    return Counted(toy((0, 1), slots=slots, capacity=capacity, total=1))


def alone(known: Sequence[int], count: int) -> tuple[int, ...]:
    """The greedy continuation, made in one go by a fresh model."""
    model, tokens = counted(1), list(known)
    at = 0
    for _ in range(count):
        token = model.pick(0, at, tokens[at:])
        at = len(tokens)
        tokens.append(token)
    return tuple(tokens[len(known) :])


def answers(model: Counted, *asked: Draft, over: Sequence[int] = ()) -> list[Drafted]:
    """What a runner delivers when these are asked one after another; `over`: turns forgotten."""

    async def main() -> list[Drafted]:
        runner, found = DraftRunner(model, VOCABULARY), asyncio.Queue[Drafted]()
        got = []
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(found.put_nowait))
            for request in asked:
                runner.ask(request)
                got.append(await found.get())
                if request.turn in over:
                    runner.forget(request.turn)
            runner.close()
        return got

    return asyncio.run(main())


def test_a_runner_goes_on_from_what_its_slots_hold() -> None:
    prompt = tuple(range(40)) * 15
    reply = alone(prompt, 12)
    model = counted()
    got = answers(
        model,
        Draft(1, 0, prompt, 8),
        Draft(1, len(prompt), reply[:3], 8),  # agrees: 3 further tokens
        Draft(1, len(prompt) + 3, (reply[3] ^ 1,), 2),
    )
    other = (*prompt, *reply[:3], reply[3] ^ 1)
    assert len(prompt) > 2 * CHUNK
    assert got == [
        Drafted(1, len(prompt), reply[:8]),
        Drafted(1, len(prompt) + 3, reply[3:11]),
        Drafted(1, len(other), alone(other, 2)),
    ]
    assert model.read == len(prompt) + 10 + 2


def test_a_next_turn_shares_the_rows_of_one_that_is_over() -> None:
    prompt = tuple(range(40))
    reply = alone(prompt, 4)
    longer = (*prompt, *reply, 1, 2, 3)
    first, second = Draft(1, 0, prompt, 4), Draft(2, 0, longer, 1)
    model = counted()
    assert answers(model, first, second, over=[1])[1] == Drafted(2, 47, alone(longer, 1))
    assert model.read == 40 + 3 + 4  # the reply's last token was never read
    model = counted()  # while it lives, its slot is its own; with one slot there is no choice
    assert answers(model, first, second)[1].tokens == alone(longer, 1)
    assert model.read == 40 + 3 + 47
    assert answers(counted(1), first, second)[1].tokens == alone(longer, 1)


def test_rows_are_not_shared_under_another_salt() -> None:
    prompt = tuple(range(40))
    reply = alone(prompt, 4)
    first, again = Draft(1, 0, prompt, 4, b"a"), Draft(2, 0, prompt, 4, b"a")
    other = Draft(3, 0, prompt, 4, b"b")
    for slots in (1, 2):
        model = counted(slots)
        got = answers(model, first, again, other, over=[1, 2])
        assert [each.tokens for each in got] == [reply] * 3
        assert model.read == 43 + 43, "the second found all of it, the third nothing"


def test_a_runner_ends_at_the_context_and_before_a_foreign_token() -> None:
    prompt = tuple(range(10))
    reply = alone(prompt, 8)
    (got,) = answers(counted(capacity=13), Draft(1, 0, prompt, 8))
    assert got.tokens == reply[:4]
    beyond = answers(counted(capacity=9), Draft(1, 0, prompt, 8), Draft(1, 10, (1,), 8))
    assert [each.tokens for each in beyond] == [(), ()]
    foreign = max(reply)
    runner = DraftRunner(counted(), foreign)  # the served model's ids end before it
    for start, tokens in ((0, prompt), (len(prompt), ())):
        request = Draft(1, start, tokens, 8)
        assert drafts.answer(runner, request).tokens == reply[: reply.index(foreign)]


def test_a_newer_request_replaces_an_older_one() -> None:
    runner = DraftRunner(counted(), VOCABULARY)
    runner.ask(Draft(1, 0, PROMPT, 8))
    runner.ask(Draft(2, 0, PROMPT, 8))
    runner.ask(Draft(1, 3, (4, 5), 16))
    assert runner._waiting == {1: 16, 2: 8}
    assert runner._known[1] == [*PROMPT, 4, 5]
    assert len(runner._answer(1, PROMPT, 8)) <= 1, "not gone on with: a newer one waits"
    runner.forget(1)
    assert (list(runner._known), list(runner._waiting)) == ([2], [2])


# ---- whole rings ---------------------------------------------------------------------------------


def accepted(url: str) -> dict[str, float]:
    """Drafts accepted and rejected, from GET /metrics."""
    lines = [line.split() for line in get(f"{url}/metrics").text.splitlines()]
    return {
        what: sum(float(line[1]) for line in lines if line[0].startswith(f"kvring:drafts_{what}"))
        for what in ("accepted", "rejected")
    }


def test_a_toy_ring_with_the_toy_as_its_draft_model(tmp_path: Path) -> None:
    with processes.fleet(tmp_path / "processes") as fleet:
        options = ("--model", "toy", "--drafter", "model", "--draft-model", "toy")
        _, url = fleet.up(*options, "--stages", "2", "--delay-ms", "10")
        fleet.ready(url)
        prompt = list(range(50))
        cold = complete(url, prompt, 120)
        assert cold.tokens == complete(url, prompt, 120).tokens == truth(prompt, 120)
        counts = accepted(url)
        assert counts["accepted"] > 100
        assert counts["accepted"] > 9 * counts["rejected"]


def test_up_refuses_half_of_the_options(tmp_path: Path) -> None:
    with processes.fleet(tmp_path / "processes") as fleet:
        for options in (("--drafter", "model"), ("--draft-model", "toy")):
            process, _ = fleet.up("--model", "toy", *options)
            processes.assert_clear(process, 2, "--drafter model and --draft-model go together")


def test_the_toy_is_loaded_whole() -> None:
    model, vocabulary = load_draft_model(drafts.config("toy", "toy"), 256)
    assert (model.slots, model.capacity, vocabulary) == (2, 512, 256)


@pytest.mark.model
def test_a_model_of_another_vocabulary_is_refused() -> None:
    path = str(default_model())
    for model, draft, tokens in ((path, "toy", 49152), ("toy", path, 256)):
        with pytest.raises(ValueError, match="tokens and the served model's"):
            load_draft_model(drafts.config(model, draft), tokens)
