"""Owns the way from a chat request to its prompt: history recalled, tools, and a forced call.

Knows no turn and no ring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coord.actions import TurnError
from coord.history import History, Spoken
from coord.http.schema import ChatRequest, Message
from coord.http.toolschema import NamedChoice, Tools
from coord.splice import splice
from coord.tokenizer import Tokenizer
from coord.toolcalls import Calling, Style, sent_back


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: what the model reads. forced: further ids, the first of its answer.

    calling: the tool calls to look for in it, None for none.
    """

    ids: Sequence[int]
    forced: tuple[int, ...] = ()
    calling: Calling | None = None

    @property
    def whole(self) -> Sequence[int]:
        """All that is computed before the first token is picked."""
        return [*self.ids, *self.forced] if self.forced else self.ids


async def prompt_of(
    tokenizer: Tokenizer, history: History, salt: bytes, wanted: ChatRequest
) -> Prompt:
    """A chat's prompt. TurnError 400 where the template takes no tools, or refuses the messages."""
    style = check_tools(tokenizer, wanted.messages, wanted.tools)
    said, replies = _recall(history, salt, wanted.messages)
    messages = [message.plain() for message in wanted.messages]
    tools = [tool.plain() for tool in wanted.tools]
    # A long prompt takes 1-3 us per byte to encode: off the loop, streams must not stall.
    ids = await asyncio.to_thread(splice, tokenizer, messages, said, tools, replies)
    if style is None or not tools or wanted.tool_choice == "none":
        return Prompt(ids)
    choice = wanted.tool_choice
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    forced: list[int] = []
    if choice != "auto":
        forced = tokenizer.encode(style.beginning(named), special=False)
    single = named is not None or not wanted.parallel_tool_calls
    return Prompt(ids, tuple(forced), Calling(style, frozenset(wanted.functions), single))


def check_tools(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools) -> Style | None:
    """How the model spells calls. TurnError 400 where there are some and it can't."""
    used = any(message.role == "tool" or message.tool_calls for message in messages)
    if tokenizer.style is None and (tools or used):
        text = "the model's chat template takes no tools, or spells calls in a way not known here"
        raise TurnError(400, "tools_not_supported", text, "tools" if tools else "messages")
    return tokenizer.style


def _recall(
    history: History, salt: bytes, messages: Sequence[Message]
) -> tuple[dict[int, tuple[Spoken, ...]], dict[int, str]]:
    """By message: the spellings of what was said, and the text of those with calls."""
    said: dict[int, tuple[Spoken, ...]] = {}
    replies: dict[int, str] = {}
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        text: str | None = message.text
        if message.tool_calls:
            calls = [(one.function.name, one.function.arguments) for one in message.tool_calls]
            text = history.meaning(salt, sent_back(message.text, calls))
        if text is not None and (spoken := history.recall(salt, text)):
            said[index] = spoken
            if message.tool_calls:
                replies[index] = text
    return said, replies
