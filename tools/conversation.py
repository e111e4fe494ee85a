"""Owns a conversation: its turns, where it may be continued, and what to ask the server.

Knows neither a terminal nor a server.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.client import Json, Reply


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its reply. again: it was asked in an earlier reply's place."""

    said: str
    reply: Reply
    again: bool = False


@dataclass(slots=True)
class Conversation:
    """What was said so far. `unanswered`: a message whose reply never came."""

    system: str | None
    turns: list[Turn] = field(default_factory=list)
    unanswered: str | None = None
    # The ring finds a prefix by its tokens; the name tells which branch may be written over.
    session: str = field(default_factory=lambda: secrets.token_hex(12))

    def request(self, said: str) -> Json:
        """The part of a request's body that asks for the reply to one more message."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.said})
            messages.append({"role": "assistant", "content": turn.reply.text})
        messages.append({"role": "user", "content": said})
        return {"messages": messages, "prompt_cache_key": self.session}

    def take(self, said: str, reply: Reply, *, again: bool = False) -> bool:
        """One more turn. A reply that was stopped before it began is none: False."""
        began = bool(reply.text) or not reply.stopped
        if began:
            self.turns.append(Turn(said, reply, again))
        self.unanswered = None if began else said
        return began

    def fork(self, turns: int) -> Conversation:
        """Another conversation with the first `turns` of this one."""
        return Conversation(self.system, self.turns[:turns])


def turn_number(text: str, turns: Sequence[Turn]) -> int | None:
    """The number of a turn as it was typed, 0 for before the first; None where there is none."""
    if not text.isascii() or not text.isdecimal():
        return None
    number = int(text[:9])
    return number if number <= len(turns) else None
