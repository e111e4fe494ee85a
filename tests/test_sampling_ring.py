"""Sampling on a whole ring: nothing but the settings and the sequence changes a token (DESIGN 5).

CASES 9, 11, 30: cold or warm, drafted or not, alone or among neighbours, resumed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import coord.draft
from coord.draft import Drafter, LookupDrafter
from coord.turn import Turn
from pipeline.model import ToyModel, toy_logits
from pipeline.rule import Tally, shaped
from pipeline.slots import SlotTable
from tests.memoryring import LAYERS, VOCABULARY, MemoryRing, limits, serial
from tests.test_rule import chances
from tests.world import Oracle, Plan, visit
from tools.sim.samplings import draw_sampling
from transport.frame import GREEDY, Kind, Sampling, Segment, Shaping

NEIGHBOURS = 15


@dataclass(frozen=True)
class Case:
    """One turn, and all that must not matter to it."""

    seed: int
    drafter: str = "off"
    depth: int = 1
    neighbours: int = 0
    warm: int = 0  # rows of the prompt that an earlier turn left, at most
    chunk: int = 16
    restart: bool = False


class Always(Oracle):
    """Always right, so that the depth is reached."""

    def __init__(self, truths: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        super().__init__(truths, Random(0))
        self._random.random = lambda: 1.0  # type: ignore[method-assign]


def drafter_of(
    name: str, truths: dict[tuple[int, ...], tuple[int, ...]]
) -> Callable[[], Drafter] | None:
    makers: dict[str, Callable[[], Drafter] | None] = {
        "off": None,
        "lookup": LookupDrafter,
        "oracle": lambda: Always(truths),
        "guess": lambda: Oracle(truths, Random(1)),
    }
    return makers[name]


def play(case: Case) -> None:
    """Ask on a ring of three stages; the tokens are those of plain serial decoding."""
    draw = Random(case.seed)
    sampling = draw_sampling(draw, VOCABULARY)
    prompt = tuple(draw.choices(range(VOCABULARY), k=draw.randrange(2, 40))) * 2
    stops = tuple(draw.choices(range(VOCABULARY), k=draw.choice((0, 0, 4))))
    budget = draw.randrange(1, 40)
    truths = {prompt: serial(prompt, budget + 4, stops, sampling, beyond=True)}
    bounds = limits(slots=16, chunk_tokens=case.chunk, window_frames=case.depth + 2)
    drafter = drafter_of(case.drafter, truths)
    ring = MemoryRing(3, bounds=bounds, slots=16, drafter=drafter).form()
    if case.warm:
        ring.ask(prompt[: case.warm], 2, sampling=draw_sampling(draw, VOCABULARY))
    for _ in range(case.neighbours):
        other = draw.choices(range(VOCABULARY), k=draw.randrange(1, 12))
        ring.submit(other, draw.randrange(1, 12), sampling=draw_sampling(draw, VOCABULARY))
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(coord.draft, "MAX_DEPTH", case.depth)
        turn = ring.submit(prompt, budget, stops, sampling=sampling)
        for _ in range(draw.randrange(60)):
            if ring.choices():
                ring.happen(draw.choice(ring.choices()))
        if case.restart:
            ring.restart(draw.randrange(3))
            for _ in range(3):
                ring.pump(draw.choice)
                ring.wait(1.1)
        ring.pump(draw.choice)
    reply = ring.replies[turn]
    assert tuple(reply.tokens) == serial(prompt, budget, stops, sampling), (case, sampling)
    assert reply.over


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Case,
        seed=st.integers(0, 2**32),
        drafter=st.sampled_from(("off", "lookup", "oracle", "guess")),
        depth=st.integers(1, 8),
        neighbours=st.sampled_from((0, 0, NEIGHBOURS)),
        warm=st.sampled_from((0, 1, 10, 100)),
        chunk=st.sampled_from((1, 3, 16, 64)),
        restart=st.booleans(),
    )
)
@example(Case(1, "oracle", 8, NEIGHBOURS, 10, 3, True))
@example(Case(2, "lookup", 8, NEIGHBOURS, 0, 64, False))
def test_nothing_but_the_settings_changes_a_token(case: Case) -> None:
    play(case)


@pytest.mark.parametrize("seed", range(6))
def test_every_way_of_one_turn(seed: int) -> None:
    """One turn with all drafters, depths, company, and caches cold and warm."""
    for drafter, depth in (("off", 1), ("lookup", 4), ("oracle", 1), ("oracle", 8), ("guess", 3)):
        for neighbours, warm, chunk in ((0, 0, 64), (NEIGHBOURS, 0, 8), (0, 100, 8), (3, 9, 1)):
            play(Case(seed, drafter, depth, neighbours, warm, chunk))


def test_min_tokens_holds_over_a_resume() -> None:
    """CASES 30, 32, 34: what may stop a turn is counted from its prompt, not from the resume."""
    every = tuple(range(VOCABULARY - 1))  # all but one token would end it
    sampling = Sampling(1.0, seed=5, shaping=Shaping(min_tokens=6))
    prompt = (1, 2, 3)
    ring = MemoryRing(3).form()
    turn = ring.submit(prompt, 20, every, sampling=sampling)
    while len(ring.replies[turn].tokens) < 3:
        ring.happen(ring.choices()[0])
    ring.restart(1)
    for _ in range(3):
        ring.pump()
        ring.wait(1.1)
    tokens = ring.replies[turn].tokens
    assert tokens[:6] == [VOCABULARY - 1] * 6
    assert len(tokens) == 7 or tokens[6] == VOCABULARY - 1
    assert tuple(tokens) == serial(prompt, 20, every, sampling)
    assert ring.replies[turn].finished == "stop"


# ---- the distribution, with and without speculation ----------------------------------------------


def uniforms(prompt: tuple[int, ...], said: list[int], sampling: Sampling) -> list[float]:
    """For each token its place in the toy's distribution there: uniform on [0, 1) if fair."""
    tokens = (*prompt, *said)
    inner = ToyModel((0, LAYERS), LAYERS + 1, slots=1, vocabulary=VOCABULARY)
    whole = Segment(1, 0, 0, tokens, Kind.PREFILL, bytes(16), 1, sampling)
    payload = inner.forward([whole], None).payload
    assert payload is not None
    rows = [bytes(payload.data[at : at + 8]) for at in range(0, len(payload.data), 8)]
    shaping = sampling.shaping and replace(sampling.shaping, prompt=len(prompt))
    whole = replace(whole, sampling=replace(sampling, shaping=shaping))
    tally = Tally(whole, ()) if shaping else None
    draw, found = Random(len(prompt)), []
    for position in range(len(prompt), len(tokens)):
        logits = toy_logits(rows[position - 1], VOCABULARY)
        if shaping and tally:
            logits = shaped(logits, shaping, position, tally.before(position))
        left = chances(logits, sampling)
        ids = sorted(left)
        below = dict(zip(ids, accumulate((left[t] for t in ids), initial=0.0), strict=False))
        token = tokens[position]
        found.append(below[token] + draw.random() * left[token])
    return found


@pytest.mark.parametrize("drafter", ["off", "guess"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(1.5, 30, 0.95, 0.02, shaping=Shaping(1.3, 0.4, 0.3, ((3, 2.0),))),
    ],
)
def test_chi_square_on_the_ring(drafter: str, sampling: Sampling) -> None:
    """Rejected drafts, batches and prefills leave the distribution the model's own."""
    draw, places = Random(11), []
    prompts = [tuple(draw.choices(range(VOCABULARY), k=6)) for _ in range(64)]
    wanted = {prompt: replace(sampling, seed=index) for index, prompt in enumerate(prompts)}
    truths = {prompt: serial(prompt, 90, (), wanted[prompt]) for prompt in prompts}
    ring = MemoryRing(1, slots=16, drafter=drafter_of(drafter, truths)).form()
    turns = {ring.submit(p, 80, sampling=wanted[p], reuse=False): p for p in prompts}
    ring.pump()
    for turn, prompt in turns.items():
        places += uniforms(prompt, ring.replies[turn].tokens, wanted[prompt])
    if drafter == "guess":
        assert ring.scheduler.totals.drafts_accepted > 1000
    bins = [0] * 16
    for place in places:
        bins[int(place * 16)] += 1
    assert len(places) == 64 * 80
    mean = len(places) / 16
    assert sum((count - mean) ** 2 / mean for count in bins) < 37.7  # 15 degrees: p = 0.001


# ---- injected bugs ------------------------------------------------------------------------------


def no_drafts(patcher: pytest.MonkeyPatch) -> None:
    """A tally that leaves out a segment's tokens behind the first."""
    made = Tally.__init__

    def wrong(self: Tally, segment: Segment, history: tuple[int, ...]) -> None:
        made(self, replace(segment, tokens=segment.tokens[:1]), history)

    patcher.setattr(Tally, "__init__", wrong)


def short_history(patcher: pytest.MonkeyPatch) -> None:
    history = SlotTable.history
    patcher.setattr(SlotTable, "history", lambda self, segment: history(self, segment)[1:])


def prompt_moves(patcher: pytest.MonkeyPatch) -> None:
    """After a resume what was generated is taken for prompt."""
    admit = Turn.admit

    def wrong(self: Turn, *rest: object) -> None:
        admit(self, *rest)  # type: ignore[arg-type]
        if self.sampling.shaping is not None:
            shaping = replace(self.sampling.shaping, prompt=self.known)
            self.sampling = replace(self.sampling, shaping=shaping)

    patcher.setattr(Turn, "admit", wrong)


def greedy_segments(patcher: pytest.MonkeyPatch) -> None:
    """A resumed turn has lost its settings."""
    admit = Turn.admit

    def wrong(self: Turn, *rest: object) -> None:
        self.sampling = GREEDY if self.admitted_before else self.sampling
        admit(self, *rest)  # type: ignore[arg-type]

    patcher.setattr(Turn, "admit", wrong)


@pytest.mark.parametrize(
    ("bug", "trouble"),
    [
        (no_drafts, "none"),
        (short_history, "none"),
        (prompt_moves, "restarts"),
        (greedy_segments, "restarts"),
    ],
)
def test_a_world_notices(bug: Callable[[pytest.MonkeyPatch], None], trouble: str) -> None:
    with pytest.MonkeyPatch.context() as patcher:
        bug(patcher)
        for seed in range(12):
            try:
                visit(Plan(seed, slots=3, trouble=trouble, sampled=True))
            except Exception:  # any failure at all is a bug noticed
                return
    raise AssertionError(f"{bug.__name__} survives")
