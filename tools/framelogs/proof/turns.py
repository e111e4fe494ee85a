"""Owns what one turn's text must be: its prompt and the tokens that answers have committed.

Knows no slot. The coordinator's log does not say what was committed; it follows from the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.framelogs.proof.rows import Violation
from transport.frame import Kind, Result, Segment, Submit


@dataclass(slots=True)
class Sent:
    """A segment without its answer. low: rows from here on were written again since."""

    segment: Segment
    low: int
    void: bool = False  # a token that it goes on from was not the one picked


@dataclass(slots=True)
class Turn:
    """One turn. text: prompt and committed tokens.

    least: after a loss, how much of the text is sure to be committed: answers that came between the
    loss and the roll call may not have been taken. The next last chunk of a prefill tells.
    """

    submit: Submit
    budget: int
    text: list[int] = field(default_factory=list)
    least: int | None = None
    over: bool = False  # by its budget or a stop token
    cancelled: bool = False
    refused: bool = False  # it starts over with its next segment
    at: tuple[str, int] | None = None  # ring and slot where it was sent last

    def __post_init__(self) -> None:
        self.text = list(self.submit.prompt)

    @property
    def ended(self) -> bool:
        """Nothing of it may be sent any more."""
        return self.cancelled or (self.over and self.least is None)

    def on(self, ring: str) -> bool:
        """Whether it runs in a ring."""
        return self.at is not None and self.at[0] == ring

    def sends(self, segment: Segment, ahead: int) -> None:
        """Check a segment against the text. ahead: positions below it have been asked for."""
        who, start, end = f"turn {segment.turn}", segment.start, segment.end
        if self.ended:
            raise Violation("R4", f"{who} is over")
        known, prompt = len(self.text), len(self.submit.prompt)
        if segment.kind is Kind.PREFILL and segment.want:
            self._resumes(segment)
            known = len(self.text)
        elif self.least is not None and segment.kind is Kind.VERIFY:
            self._resumes(segment)
        first = end - segment.want
        if segment.kind is Kind.PREFILL and end > known:
            raise Violation("R4", f"{who} prefills {end} rows, but {known} tokens are known")
        if list(segment.tokens[: max(0, known - start)]) != self.text[start:end]:
            raise Violation("R4", f"{who}: rows [{start}, {end}) are not its prompt and reply")
        if segment.want and not known - 1 <= first <= max(known - 1, ahead):
            text = f"{who} asks for position {first + 1} on; the next unknown one is {known}"
            raise Violation("R4", text)
        if end > max(prompt, prompt + self.budget - 1):
            text = f"{who} writes up to row {end}, past its end at {prompt + self.budget} tokens"
            raise Violation("R4", text)
        behind = segment.tokens[max(0, prompt - start) : -1]
        if any(token in self.submit.stops for token in behind):
            raise Violation("R4", f"{who} goes on behind a stop token")
        self.refused = False

    def _resumes(self, segment: Segment) -> None:
        """Where the prefill of a resumed turn ends is where the coordinator's text ends."""
        least = len(self.text) if self.least is None else self.least
        if not least <= segment.end:
            text = f"turn {segment.turn} goes on at {segment.end}, but {least} tokens are known"
            raise Violation("R4", text)
        if self.least is not None:
            del self.text[segment.end :]
            self.least, self.over = None, False

    def answered(self, sent: Sent, result: Result, behind: list[Sent]) -> None:
        """Commit an answer's tokens as far as they hold. behind: what was sent after it."""
        segment = sent.segment
        if not segment.want or sent.void or self.over or self.cancelled or self.refused:
            return
        first = segment.end - segment.want
        if first != len(self.text) - 1:
            text = f"turn {segment.turn}: an answer from {first + 1} on; {len(self.text)} is next"
            raise Violation("R4", text)
        for token in result.tokens:
            at = len(self.text)
            self.text.append(token)
            generated = at + 1 - len(self.submit.prompt)
            self.over = token in self.submit.stops or generated >= self.budget
            wrong = _differs(segment, at, token)
            if wrong or any(_differs(each.segment, at, token) for each in behind):
                for each in behind if wrong else _from(behind, at, token):
                    each.void = True
            if wrong or self.over:
                return

    def holds(self, sent: Sent) -> int:
        """Rows of the segment, counted from 0, that hold the turn's text and nothing newer."""
        segment = sent.segment
        end = min(segment.end, len(self.text), sent.low)
        for at in range(segment.start, end):
            if segment.tokens[at - segment.start] != self.text[at]:
                return at
        return end


def _differs(segment: Segment, at: int, token: int) -> bool:
    inside = segment.start <= at < segment.end
    return inside and segment.tokens[at - segment.start] != token


def _from(behind: list[Sent], at: int, token: int) -> list[Sent]:
    """What was sent on the guess that another token stands there: that segment, and all later."""
    for index, each in enumerate(behind):
        if _differs(each.segment, at, token):
            return behind[index:]
    return []
