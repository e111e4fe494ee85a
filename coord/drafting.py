"""Owns the draft model's run: its slots, its queue, and the one thread that computes.

The scheduler asks (coord.actions.Draft), the answer is a Drafted. Decides nothing about a turn, and
knows neither the ring nor what kind of model it drives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from coord.actions import Draft
from transport.frame import Drafted

CHUNK = 256  # tokens of one step of a prefill: a newer request waits for no more than that


class DraftModel(Protocol):
    """A whole small model with `slots` KV buffers of `capacity` rows each."""

    @property
    def slots(self) -> int:
        """How many sequences it holds."""

    @property
    def capacity(self) -> int:
        """Rows of each."""

    def pick(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        """Write `tokens` to rows [start, ...) of a slot; the likeliest token after them."""


@dataclass(slots=True)
class _Slot:
    """What one slot holds. Tokens from `guessed` on are the model's own, `then` follows them."""

    turn: int | None = None
    salt: bytes | None = None
    tokens: list[int] = field(default_factory=list)  # as many as rows are written
    guessed: int = 0
    then: int | None = None


class DraftRunner:
    """Answers requests one after another, in the order in which turns began to wait.

    vocabulary: of the model that is served; a token id from there on ends an answer before it. All
    but the model and its slots is touched in the event loop alone.
    """

    def __init__(self, model: DraftModel, vocabulary: int) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._known: dict[int, list[int]] = {}  # by turn: bounded by the scheduler's turns
        self._salts: dict[int, bytes] = {}
        self._waiting: dict[int, int] = {}  # turn -> count; at most one request of each turn
        self._slots = {index: _Slot() for index in range(model.slots)}  # least recently used first
        self._more = asyncio.Event()
        self._closed = False

    def ask(self, draft: Draft) -> None:
        """Take a request; it replaces an earlier one of the turn."""
        known = self._known.setdefault(draft.turn, [])
        assert len(known) == draft.start, (draft, len(known))
        known += draft.tokens
        self._salts[draft.turn] = draft.salt
        self._waiting[draft.turn] = draft.count
        self._more.set()

    def forget(self, turn: int) -> None:
        """The turn is over; its rows stay for the next one of its salt that begins alike."""
        self._known.pop(turn, None)
        self._salts.pop(turn, None)
        self._waiting.pop(turn, None)

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self._more.set()

    async def run(self, deliver: Callable[[Drafted], object]) -> None:
        """Answer until `close`; `deliver` is called in the event loop."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "draft") as pool:
            try:
                while not self._closed:
                    if not self._waiting:
                        self._more.clear()
                        await self._more.wait()
                        continue
                    turn = next(iter(self._waiting))
                    count = self._waiting.pop(turn)
                    known = tuple(self._known[turn])
                    tokens = await loop.run_in_executor(pool, self._answer, turn, known, count)
                    if turn in self._known and not self._closed:
                        deliver(Drafted(turn, len(known), tokens))
            finally:
                self._closed = True  # the thread ends after its present step

    # ---- in the thread ----

    def _answer(self, turn: int, known: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Up to `count` tokens after `known`; fewer at the context's end, or if it was replaced."""
        if len(known) > self._model.capacity:
            return ()
        index = self._place(turn, known)
        slot = self._slots[index]
        shared = _common(slot.tokens, known)
        if slot.then is None or not slot.guessed <= len(known) == shared:
            self._read(index, known, min(shared, len(known) - 1), turn)
        while slot.then is not None and not self._replaced(turn):
            row = len(slot.tokens)
            if row + 1 - len(known) >= count or row >= self._model.capacity:
                break
            token = slot.then
            slot.tokens.append(token)
            slot.then = self._within(self._model.pick(index, row, (token,)))
        guessed = slot.tokens[len(known) :]
        return tuple([*guessed, slot.then] if slot.then is not None else guessed)[:count]

    def _read(self, index: int, known: tuple[int, ...], at: int, turn: int) -> None:
        """Write the rows of known[at:]; the first at rows are there."""
        slot = self._slots[index]
        del slot.tokens[at:]
        slot.then, slot.guessed = None, len(known)
        while at < len(known) and not self._replaced(turn):
            chunk = known[at : at + CHUNK]
            picked = self._model.pick(index, at, chunk)
            slot.tokens += chunk
            at += len(chunk)
            if at == len(known):
                slot.then = self._within(picked)

    def _within(self, token: int) -> int | None:
        return token if token < self._vocabulary else None

    def _replaced(self, turn: int) -> bool:
        """Whether nobody waits for this answer any more."""
        return self._closed or turn in self._waiting or turn not in self._known

    def _place(self, turn: int, known: tuple[int, ...]) -> int:
        """The turn's slot; else of those without a live turn the one that shares most with it.

        Rows of another salt are not shared: how soon drafts come would say what others asked.
        """
        slots, salt = self._slots, self._salts.get(turn)
        found = next((index for index, slot in slots.items() if slot.turn == turn), None)
        if found is None:
            free = [index for index, slot in slots.items() if slot.turn not in self._known]
            if free:
                mine = {i: slots[i].tokens if slots[i].salt == salt else () for i in free}
                found = max(free, key=lambda index: _common(mine[index], known))
            else:
                found = next(iter(slots))
        slot = slots[found] = slots.pop(found)
        if slot.salt != salt:
            slot.tokens, slot.guessed, slot.then = [], 0, None
        slot.turn, slot.salt = turn, salt
        return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))
