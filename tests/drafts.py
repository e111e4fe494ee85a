"""A MemoryRing beside a draft model: requests are answered after each event, in this thread."""

from __future__ import annotations

from coord.actions import Draft
from coord.drafting import DraftRunner
from tests.memoryring import MemoryRing
from transport.config import Config, Coordinator, Limits, Model, Ring, Stage
from transport.frame import Drafted


def answer(runner: DraftRunner, request: Draft) -> Drafted:
    """What the runner's thread would deliver, with nothing else in its queue."""
    runner.ask(request)
    del runner._waiting[request.turn]
    known = tuple(runner._known[request.turn])
    return Drafted(request.turn, len(known), runner._answer(request.turn, known, request.count))


def pump(ring: MemoryRing, runner: DraftRunner) -> None:
    """Let everything that can happen happen."""
    while ring.drafts or ring.choices():
        if ring.drafts:
            ring.tell(answer(runner, ring.drafts.pop(0)))
        else:
            ring.happen(ring.choices()[0])


def config(model: str, draft: str) -> Config:
    """A ring that drafts with a model; nobody listens at its addresses."""
    ring = Ring("r", "tcp://c:1", (Stage("s0", "tcp://s:1", (0, 6)),))
    coordinator = Coordinator("h:1", "model", draft_model=draft)
    return Config(Model(model, "m"), (ring,), coordinator, Limits(slots=2, max_model_len=512))
