"""Owns what a turn knows of the draft model's proposals: those that hold, and what was asked for.

Knows no model: the driver answers a Draft by a Drafted, whenever it likes or never. A turn does not
wait for it; what comes late still counts as far as it agrees with what was committed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coord.actions import Draft
from coord.draft import MAX_DRAFT, NGRAM, ROW_STEP, LookupDrafter
from coord.turn import DRAINING, Turn

MOST_AHEAD = 2 * MAX_DRAFT  # tokens asked for at once: more would be late where they are needed


class ModelDrafter:
    """A small model's greedy continuation; or what lookup says, where it knows the last 3 tokens.

    Such a match costs nothing and is there at once. See Drafter.
    """

    def __init__(self) -> None:
        self._lookup = LookupDrafter(NGRAM)
        self._known: list[int] = []
        self._told = 0  # known tokens that a request has told
        self._ahead: list[int] = []  # proposals for the positions from len(known) on
        self._wanted = 0  # proposals that were missed since the last request
        self._asked = (0, 0)  # the latest request: known tokens then, and count
        self._open = False  # it has no answer yet

    def extend(self, tokens: Sequence[int]) -> None:
        """See Drafter. Proposals that these agree with still hold; after any other none does."""
        if not self._known:  # the model can read the prompt while the ring does
            self._wanted = ROW_STEP
        self._lookup.extend(tokens)
        self._known += tokens
        agreed = self._ahead[: len(tokens)] == list(tokens[: len(self._ahead)])
        self._ahead = self._ahead[len(tokens) :] if agreed else []

    def propose(self, branch: Sequence[int], count: int) -> tuple[int, ...]:
        """See Drafter. What is missing is asked for; nothing where `branch` is another guess."""
        found = self._lookup.propose(branch, count)
        if found:
            return found
        end = len(branch) + count
        if end > len(self._ahead):
            wanted = min(MOST_AHEAD, end + -end % ROW_STEP)
            self._wanted = max(self._wanted, wanted)
        if self._ahead[: len(branch)] != list(branch):
            return ()
        return tuple(self._ahead[len(branch) : end])

    def drafted(self, start: int, tokens: Sequence[int]) -> None:
        """Proposals from position `start` on have come; only the latest request's count."""
        if start != self._asked[0]:
            return
        self._open = False
        since = self._known[start:]
        if list(tokens[: len(since)]) != since:
            self._wanted = max(self._wanted, self._asked[1])  # too late: ask from here
        elif len(tokens) - len(since) > len(self._ahead):
            self._ahead = list(tokens[len(since) :])

    def ask(self, turn: int, salt: bytes = b"") -> Draft | None:
        """The request to make now, if any.

        One at a time, unless its answer can be of no use any more. From one position only ever for
        more, so that a model that has nothing to say is not asked again and again.
        """
        wanted, self._wanted = self._wanted, 0
        known, (start, count) = len(self._known), self._asked
        if not wanted or (start == known and wanted <= count):
            return None
        if self._open and start < known < start + count:
            return None
        self._asked, self._open = (known, wanted), True
        told, self._told = self._told, known
        return Draft(turn, told, tuple(self._known[told:]), wanted, salt)


def asked(turns: Iterable[Turn]) -> list[Draft]:
    """The requests of all turns that still run for a client."""
    found = []
    for turn in turns:
        if isinstance(turn.drafter, ModelDrafter) and turn.phase is not DRAINING:
            draft = turn.drafter.ask(turn.id, turn.submit.salt)
            if draft is not None:
                found.append(draft)
    return found
