"""Which bugs of the cores the recorded frames alone show: those of tests/bugs.py."""

from __future__ import annotations

import itertools

import pytest

import tests.world
from pipeline.slots import SlotTable
from pipeline.stage import Forward, Send, Stage
from tests.bugs import MUTATIONS, Mutation
from tests.memoryring import toy
from tests.mutations import WORLDS
from tests.recording import RecordedRing, Taken, prove, record
from tests.world import Plan, visit
from tools.framelogs.residency import Violation, Who
from transport.chain import Chain, root_hash
from transport.frame import Copy, Envelope, Forwarded, Kind, Result, RollCall, Run, Segment, Verdict
from transport.framelog import Direction

# What the frames alone show. The others end in the same frames as a correct ring's would, or in
# none at all: a turn that hangs, a token that only serial decoding proves wrong, a lost prefix that
# costs a prefill, an assertion of the core before the frame is sent. The worlds' own checks and
# the cores' invariants are for those.
COORDINATOR_BUGS = (
    "the ledger claims a row too many",
    "no truncation in the ledger",
    "rows are resident when they are sent",
    "a fork starts a row too late",
    "a dropped parked prefix is still offered",
    "a restarted stage's rows are still claimed",
    "a resume forgets what was committed",
    "a resume repeats the last token",
    "a resume gets a new budget",
    "one verdict too many is wanted",
    "no verdict is wanted of a last chunk",
    "the parent hash is one position behind",
    "a stop token goes unnoticed",
    "every draft is accepted",
    "what was sent behind a wrong draft is believed",
    "rejected drafts stay resident",
    "drafts run past the end of the turn",
    "a cancelled turn frees its slot at once",
    "an answer settles another frame",
    "lost verdicts go unnoticed",
    "a restarted stage works without a roll call",
    "a stage does not tell of lost frames",
)
# Shown by the stages' logs alone, where the coordinator's claims are false.
STAGE_BUGS = (
    "a stage refuses nothing",
    "a stage takes foreign content",
    "a copy is not checked",
    "no refusal is told",
)


def shown(mutant: Mutation | None, plan: Plan) -> Violation | None:
    """What a world's frames show of a bug, whatever else notices it.

    In a world of lies the stages' logs alone count, and none loses rows on its own.
    """
    log: list[Taken] = []
    lies = plan.trouble == "lies"
    with pytest.MonkeyPatch.context() as patcher:
        if mutant is not None:
            mutant.patch(patcher)
        if lies:
            patcher.setattr(tests.world.World, "disturb", lambda self: None)
        patcher.setattr(tests.world, "MemoryRing", RecordedRing)
        patcher.setattr(RecordedRing, "sink", staticmethod(log.append), raising=False)
        try:
            visit(plan)
        except Exception:  # its own checks have noticed; what was recorded so far counts
            assert mutant is not None
    try:
        prove([taken for taken in log if not lies or taken.who.role == "stage"])
    except Violation as found:
        return found
    return None


def mutation(name: str) -> Mutation:
    return next(each for each in MUTATIONS if each.name == name)


@pytest.mark.parametrize("name", COORDINATOR_BUGS, ids=lambda name: name.replace(" ", "-"))
def test_the_frames_alone_show_a_bug(name: str) -> None:
    mutant = mutation(name)
    plans = [plan for plan in WORLDS if plan.trouble != "lies"]
    plans.sort(key=lambda plan: plan.trouble != mutant.trouble)
    assert any(shown(mutant, plan) for plan in plans), "no world's frames show it"


@pytest.mark.parametrize("verdict", [True, False])
def test_a_stage_that_judges_claims_wrongly_is_named(verdict: bool) -> None:
    """It confirms everything, or nothing; whoever is misled by it later."""
    bug = Mutation(
        "every claim is judged alike",
        lambda patcher: patcher.setattr(SlotTable, "confirms", lambda *_: verdict),
        "successors",
    )
    plans = [plan for plan in WORLDS if plan.trouble == "successors"]
    found = [shown(bug, plan) for plan in plans]
    rules = [each.rule for each in found if each is not None]
    assert rules
    assert set(rules) == {"R8"}


@pytest.mark.parametrize("name", STAGE_BUGS, ids=lambda name: name.replace(" ", "-"))
def test_the_stages_frames_alone_show_a_bug(name: str) -> None:
    plans = [plan for plan in WORLDS if plan.trouble == "lies"]
    assert any(shown(mutation(name), plan) for plan in plans), "no world's frames show it"


def test_a_coordinator_that_lies_is_named_and_its_stages_are_not() -> None:
    plans = [plan for plan in WORLDS if plan.trouble == "lies"]
    for plan in plans:
        assert shown(None, plan) is None
    log = record(plans[0], steps=120)
    with pytest.raises(Violation) as found:
        prove(log)
    assert found.value.rule == "R3"


def test_rows_that_were_not_copied_are_named() -> None:
    """A stage that claims all of a copy's source, and a frame that reads what is not there."""
    info, log = toy((0, 6)).info, list[Taken]()
    me, link = Who("stage", "s0", 1), itertools.count()
    chain = Chain(root_hash(info.fingerprint, b""), range(12))

    def segment(turn: int, slot: int, start: int, end: int) -> Segment:
        tokens, before = chain.tokens(start, end), chain.hash_before(start)
        return Segment(turn, slot, start, tokens, Kind.PREFILL, before, 0)

    def answers(run: Run) -> tuple[Result, ...]:
        return tuple(Result(each.turn, each.slot, each.end, ()) for each in run.segments)

    with pytest.MonkeyPatch.context() as patcher:
        mutation("a copy claims all of its source's rows").patch(patcher)
        stage, sent = Stage("r", "s0", 1, info), itertools.count()
        for frame in (
            RollCall("r", 1),
            Run("r", 1, 1, (segment(1, 0, 0, 8),)),
            Copy("r", 1, 2, 2, 0, 1, 4, chain.hash_before(4)),
            Run("r", 1, 3, (segment(2, 1, 8, 12),)),
        ):
            log.append(Taken(me, Direction.IN, frame, Envelope("r/coordinator", 1, next(link))))
            actions = stage.handle(frame, 0.0)
            for action in actions:  # grows while it is walked
                if isinstance(action, Forward):
                    run = action.run
                    done = Forwarded(run.epoch, run.seq, None, answers(run))
                    log.append(Taken(me, Direction.LOCAL, done, None))
                    actions += stage.handle(done, 0.0)
                elif isinstance(action, Send):
                    envelope = Envelope("r/s0", 1, next(sent))
                    log.append(Taken(me, Direction.OUT, action.frame, envelope))
    assert isinstance(log[-1].frame, Verdict)
    with pytest.raises(Violation, match=r"rows \[0, 8\) of slot 1, where 4 are written") as found:
        prove(log)
    assert (found.value.rule, int(found.value.place)) == ("R1", len(log) - 1)
