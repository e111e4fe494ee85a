"""Owns one request's state: what is known, what was sent, what is in flight. Knows no ring's state.

Known tokens are prompt + committed. Row p is the input of token p; the last committed token has no
row until it is sent to be extended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transport.chain import Chain, pack_tokens
from transport.frame import Kind, Segment, Submit


class Phase(StrEnum):
    """Life of a turn. A draining turn is over for its client, but frames of it are in flight."""

    WAITING = "waiting"
    RUNNING = "running"
    RECOVERING = "recovering"  # a stage refused its rows: start over once nothing is in flight
    DRAINING = "draining"


@dataclass(slots=True)
class Turn:
    """One turn; the scheduler drives it."""

    submit: Submit
    budget: int  # tokens it may still commit in total, clamped to the context limit
    phase: Phase = Phase.WAITING
    ring: str | None = None
    slot: int | None = None
    chain: Chain | None = None  # known tokens; made when the turn is first admitted
    sent: int = 0  # rows [0, sent) were sent (or are resident)
    prefilling: int = 0  # rows below this are prefill; later ones verify
    in_flight: int = 0  # segments and copies without an answer
    refusals: int = 0
    waiting_since: float = 0.0
    admitted_before: bool = False
    behind: tuple[int, int] | None = None  # wait until turn [0] has [1] rows acknowledged
    started: bool = False  # a segment of it has settled: what it reused is proven

    @property
    def id(self) -> int:
        """The turn's identity, never used twice."""
        return self.submit.turn

    @property
    def known(self) -> int:
        """Prompt and committed tokens."""
        return len(self.submit.prompt) if self.chain is None else len(self.chain)

    @property
    def committed(self) -> int:
        """Tokens that were delivered."""
        return self.known - len(self.submit.prompt)

    def packed(self) -> bytes:
        """All known token ids, packed."""
        return pack_tokens(self.submit.prompt) if self.chain is None else self.chain.packed()

    def admit(self, ring: str, slot: int, root: bytes, donor: Chain | None, matched: int) -> None:
        """The turn goes on in a slot whose first `matched` rows need no prefill.

        donor: the resident chain of those rows; its hashes are taken over, not computed again.
        """
        self.ring, self.slot = ring, slot
        self.phase = Phase.RUNNING
        self.admitted_before = True
        if self.chain is None or self.chain.root != root:
            tokens = self.submit.prompt if self.chain is None else self.chain.tokens()
            self.chain = Chain(root)
            if donor is not None and matched:
                self.chain.extend_from(donor, matched)
            self.chain.extend(tokens[len(self.chain) :])
        self.sent = matched
        self.prefilling = self.known

    def next_segment(self, limit: int) -> Segment | None:
        """The next rows to send, at most `limit` of them, or None when all known ones are sent."""
        known = self.known
        if self.phase is not Phase.RUNNING or self.sent >= known or limit <= 0:
            return None
        assert self.chain is not None
        assert self.slot is not None
        end = min(known, self.sent + limit)
        segment = Segment(
            self.id,
            self.slot,
            self.sent,
            self.chain.tokens(self.sent, end),
            Kind.PREFILL if self.sent < self.prefilling else Kind.VERIFY,
            self.chain.hash_before(self.sent),
            1 if end == known else 0,
            self.submit.sampling,
            self.submit.salt,
        )
        self.sent = end
        self.in_flight += 1
        return segment

    @property
    def decoding(self) -> bool:
        """True when the prompt is resident or on its way."""
        return self.sent >= self.prefilling

    def commit(self, token: int) -> str | None:
        """Append a token; the finish reason when it ends the turn."""
        assert self.chain is not None
        self.chain.extend((token,))
        if token in self.submit.stops:
            return "stop"
        if self.committed >= self.budget:
            return "length"
        return None

    def check(self) -> None:
        """Assert the invariants."""
        assert self.in_flight >= 0, self
        assert self.sent <= self.known, self
        assert self.committed <= self.budget, self
        if self.phase is Phase.WAITING:
            assert self.slot is None, self
            assert self.in_flight == 0, self
        else:
            assert self.slot is not None, self
            assert self.chain is not None, self
