"""Owns one request's state: what is known, what was sent, what is in flight. Knows no ring's state.

Known tokens are prompt + committed. Row p is the input of token p; the last committed token has no
row until it is sent to be extended. Behind the known tokens the chain may hold drafts: what was
sent ahead on the guess that it will be picked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from coord.draft import Acceptance, Drafter
from transport.chain import Chain, pack_tokens
from transport.frame import Kind, Sampling, Segment, Submit


class Phase(StrEnum):
    """Life of a turn. A draining turn is over for its client, but frames of it are in flight."""

    WAITING = "waiting"
    RUNNING = "running"
    RECOVERING = "recovering"  # a stage refused its rows: start over once nothing is in flight
    DRAINING = "draining"


# A member is looked up on its class in five times what a global takes (Python 3.11), and every
# event asks for the phase of every turn.
WAITING, RUNNING, RECOVERING, DRAINING = Phase


@dataclass(slots=True)
class Turn:
    """One turn; the scheduler drives it."""

    submit: Submit
    budget: int  # tokens it may still commit in total, clamped to the context limit
    drafter: Drafter | None = None
    phase: Phase = WAITING
    ring: str | None = None
    slot: int | None = None
    chain: Chain | None = None  # known tokens, then drafts; made when the turn is first admitted
    known: int = 0  # prompt and committed tokens
    sent: int = 0  # rows [0, sent) were sent (or are resident)
    prefilling: int = 0  # rows below this are prefill; later ones verify
    in_flight: int = 0  # segments and copies without an answer
    guess: int = 0  # counts wrong drafts: segments sent before the latest one are void
    ahead: int = 0  # verify segments of the present guess in flight
    acceptance: Acceptance = field(default_factory=Acceptance)
    refusals: int = 0
    waiting_since: float = 0.0
    round: int = 0  # the queue's order, see coord.admission.round_of
    admitted_before: bool = False
    behind: tuple[int, int] | None = None  # wait until turn [0] has [1] rows acknowledged
    started: bool = False  # a segment of it has settled: what it reused is proven
    sampling: Sampling = field(init=False)  # the same for every segment, and after a resume

    def __post_init__(self) -> None:
        self.known = len(self.submit.prompt)
        self.sampling = self.submit.sampling
        shaping = self.sampling.shaping
        if shaping is not None:
            ends = self.submit.stops if shaping.min_tokens else ()
            shaping = replace(shaping, prompt=self.known, ends=ends)
            self.sampling = replace(self.sampling, shaping=shaping)

    @property
    def id(self) -> int:
        """The turn's identity, never used twice."""
        return self.submit.turn

    @property
    def committed(self) -> int:
        """Tokens that were delivered."""
        return self.known - len(self.submit.prompt)

    @property
    def decoding(self) -> bool:
        """True when the prompt is resident or on its way."""
        return self.sent >= self.prefilling

    @property
    def ready(self) -> bool:
        """True when a known token waits to be sent."""
        return self.phase is RUNNING and self.sent < self.known

    @property
    def pending(self) -> int:
        """Drafts behind the known tokens: sent, and not yet judged."""
        return 0 if self.chain is None else len(self.chain) - self.known

    @property
    def hopeful(self) -> bool:
        """True when the drafter knows what may follow all that is known or guessed."""
        if self.drafter is None or self.chain is None:
            return False
        return bool(self.drafter.propose(self.chain.tokens(self.known), 1))

    def packed(self) -> bytes:
        """All known token ids, packed."""
        if self.chain is None:
            return pack_tokens(self.submit.prompt)
        return self.chain.packed(self.known)

    def admit(self, ring: str, slot: int, root: bytes, donor: Chain | None, matched: int) -> None:
        """The turn goes on in a slot whose first `matched` rows need no prefill.

        donor: the resident chain of those rows; its hashes are taken over, not computed again.
        """
        self.ring, self.slot = ring, slot
        self.phase = RUNNING
        if self.drafter is not None and not self.admitted_before:
            self.drafter.extend(self.submit.prompt)
        self.admitted_before = True
        if self.chain is None or self.chain.root != root:
            tokens = self.submit.prompt if self.chain is None else self.chain.tokens(0, self.known)
            self.chain = Chain(root)
            if donor is not None and matched:
                self.chain.extend_from(donor, matched)
            self.chain.extend(tokens[len(self.chain) :])
        self.sent = matched
        self.prefilling = self.known
        self.void()

    def next_segment(self, limit: int) -> Segment | None:
        """The next rows to send, at most `limit` of them, or None when there are none.

        A prefill chunk stops at the last known token; a verify segment takes the drafts along.
        """
        if self.phase is not RUNNING or limit <= 0:
            return None
        assert self.chain is not None
        verify = self.decoding
        end = min(len(self.chain) if verify else self.known, self.sent + limit)
        if end <= self.sent:
            return None
        return self._cut(end, verify)

    def _cut(self, end: int, verify: bool) -> Segment:
        assert self.chain is not None
        assert self.slot is not None
        segment = Segment(
            self.id,
            self.slot,
            self.sent,
            self.chain.tokens(self.sent, end),
            Kind.VERIFY if verify else Kind.PREFILL,
            self.chain.hash_before(self.sent),
            end - self.sent if verify else int(end == self.known),
            self.sampling,
            self.submit.salt,
        )
        self.sent = end
        self.in_flight += 1
        self.ahead += int(segment.want > 0)
        return segment

    def speculate(self, count: int) -> int:
        """Append up to `count` drafts behind what is known or sent; returns how many.

        Cut where the turn would end anyway: at its budget, and behind a stop token.
        """
        if self.drafter is None or self.phase is not RUNNING or self.chain is None:
            return 0
        end = len(self.submit.prompt) + self.budget  # a row at `end - 1` can pick nothing of use
        room = min(count, end - 1 - len(self.chain))
        if room <= 0 or self.sent < len(self.chain) - 1:
            return 0
        branch = self.chain.tokens(self.known)
        if any(token in self.submit.stops for token in branch):
            return 0
        drafts = list(self.drafter.propose(branch, room))
        for index, token in enumerate(drafts):
            if token in self.submit.stops:
                del drafts[index + 1 :]
                break
        self.chain.extend(drafts)
        return len(drafts)

    def learn_from(self, token: int) -> None:
        """What a draft of one token would have been worth, where none was sent.

        So that a turn in a crowd, whose frames have no row to spare, is known to quote when it
        does, and one that chats needs no wrong guesses to show it.
        """
        if self.drafter is not None:
            proposed = self.drafter.propose((), 1)
            self.acceptance.learn(len(proposed), int(proposed == (token,)))

    def commit(self, token: int) -> str | None:
        """Take the next token; the finish reason when it ends the turn.

        Where a draft stands there and is another token, what was sent from there on is void.
        """
        assert self.chain is not None
        if len(self.chain) == self.known or self.chain.tokens(self.known, self.known + 1) != (
            token,
        ):
            wrong = len(self.chain) > self.known
            self.chain.truncate(self.known)
            self.chain.extend((token,))
            if wrong:
                self.void()
        self.known += 1
        if self.drafter is not None:
            self.drafter.extend((token,))
        if token in self.submit.stops:
            return "stop"
        if self.committed >= self.budget:
            return "length"
        return None

    def void(self) -> None:
        """Drafts in flight are wrong: send again from the last known token, or what was sent."""
        assert self.chain is not None
        self.sent = min(self.sent, self.known)
        self.guess += 1
        self.ahead = 0

    def suspend(self) -> None:
        """The turn lost its slot: it waits to go on behind its known tokens."""
        if self.chain is not None:
            self.chain.truncate(self.known)
        self.in_flight = self.ahead = 0
        self.ring = self.slot = None
        self.phase = WAITING

    def check(self) -> None:
        """Assert the invariants."""
        assert self.in_flight >= 0, self
        assert 0 <= self.ahead <= self.in_flight or self.phase is not RUNNING, self
        assert self.committed <= self.budget, self
        if self.phase is WAITING:
            assert self.slot is None, self
            assert self.in_flight == 0, self
        else:
            assert self.slot is not None, self
            assert self.chain is not None, self
            assert self.known <= len(self.chain), self
            assert self.sent <= len(self.chain), self
            assert len(self.chain) <= len(self.submit.prompt) + self.budget, self
