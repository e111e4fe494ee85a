"""Owns tool calls in a model's text: how each family spells them, and finding them as text comes.

Knows no token, no template engine and no HTTP. The parser takes one character after another, so
that the cuts of a stream cannot matter: whatever pieces a text comes in, the same calls come out.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeAlias

from coord.jsonhead import Head


class Style(StrEnum):
    """How a model spells calls.

    hermes (Qwen 2.5 and 3, Hermes): <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    llama3: the whole answer is {"name": ..., "parameters": {...}}, <|python_tag|> may precede it
    mistral (up to Nemo): [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    """

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that belong to the text of a call, though some vocabularies call them control."""
        return (self.opening, _CLOSING) if self is Style.HERMES else (self.opening,)

    @property
    def opening(self) -> str:
        """What begins a call wherever it stands; a token of its own in these vocabularies."""
        return {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}[
            self
        ]

    def beginning(self, name: str | None) -> str:
        """An answer's first words that make it a call; of this function where a name is given.

        They end where the next token begins with a space, as it does in running text.
        """
        start = {"hermes": "<tool_call>\n", "llama3": "", "mistral": "[TOOL_CALLS] ["}[self]
        if name is None:
            return start + '{"name":'
        key = "parameters" if self is Style.LLAMA3 else "arguments"
        return f'{start}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}":'


def style_of(template: str) -> Style | None:
    """The style by a chat template's own marks; None where it is none of the known ones."""
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else Style.MISTRAL
    if "<tool_call>" in template:
        other = "<function=" in template or "<arg_key>" in template  # Qwen3-Coder, GLM: XML
        return None if other else Style.HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return Style.LLAMA3
    return None


def spell_calls(calls: Sequence[tuple[str, str]]) -> str:
    """Calls as (name, arguments) in the hermes style, for a model without a template."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, '
        f'"arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def sent_back(content: str, calls: Sequence[tuple[str, str]]) -> str:
    """What tells a message with calls from all others: content, names, arguments; not their ids."""
    return json.dumps([content, calls])


@dataclass(frozen=True, slots=True)
class Begin:
    """A call's name is known. index: of the call in the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class More:
    """The next piece of a call's arguments, as generated."""

    index: int
    text: str


Part: TypeAlias = str | Begin | More  # a str is plain content


@dataclass(frozen=True, slots=True)
class Calling:
    """What to look for. names: of the request's functions. single: end with the first call."""

    style: Style
    names: Collection[str]
    single: bool = False


class _State(Enum):
    TEXT = "text"  # content; a call may begin
    MARK = "mark"  # in what may be the opening
    OPEN = "open"  # between the opening and the call's object
    CALL = "call"  # in the object
    DONE = "done"  # behind it: another one, the end of the calls, or content
    END = "end"  # of a single call: nothing is looked at any more


_ID = string.ascii_letters + string.digits
_SPACE = " \n\r\t"
_MAX_SPACE = 256  # characters that are withheld because a call might follow
_CLOSING = "</tool_call>"


class CallParser:
    """Text in, content and calls out. Give it all text, then flush() once.

    What cannot be a call is content, to the character; only the spelling of a call itself (its
    marks, braces and keys, and white space around it) is in no part. Arguments go out as they
    come, once the name is known: a call that breaks off behind that stays a call, `unfinished`.
    """

    def __init__(self, calling: Calling, new_id: Callable[[], str]) -> None:
        self._style = calling.style
        self._opening = calling.style.opening
        self._names = calling.names
        self._single = calling.single
        self._new_id = new_id
        self._state = _State.TEXT
        self._held = ""  # not decided: content, if it turns out to be no call
        self._object: list[str] = []  # not decided either: of the call's object
        self._head = Head()
        self._begun = False  # the present object's call has gone out
        self._marked = False  # the present object stands behind an opening
        self._fresh = True  # nothing but white space so far
        self._listed = False  # mistral: in the list of calls
        self._runs: list[Begin | tuple[int | None, list[str]]] = []  # of a call's text, or content
        self._torn = False
        self.calls = 0

    @property
    def done(self) -> bool:
        """True when a single call is complete; what comes later is not looked at."""
        return self._state is _State.END

    @property
    def unfinished(self) -> bool:
        """True while the last call's arguments are not complete."""
        return self._state is _State.CALL and self._begun and self._head.within

    @property
    def torn(self) -> bool:
        """True where a single call's end has cut the spelling of the calls."""
        return self._torn

    def feed(self, text: str) -> list[Part]:
        """What these characters make certain."""
        for character in text:
            while not self._step(character):
                pass
        return self._taken()

    def flush(self) -> list[Part]:
        """The end of the text."""
        held = self._held + "".join(self._object)
        syntax = self._state is _State.DONE or (self.calls and not held.strip(_SPACE + ","))
        if not syntax:
            self._say(held)
        self._held, self._object = "", []
        return self._taken()

    def _taken(self) -> list[Part]:
        """Parts since the last time; neighbours of one kind are one."""
        taken: list[Part] = []
        for run in self._runs:
            if isinstance(run, Begin):
                taken.append(run)
            else:
                text = "".join(run[1])
                taken.append(text if run[0] is None else More(run[0], text))
        self._runs = []
        return taken

    def _say(self, text: str, call: int | None = None) -> None:
        last = self._runs[-1] if self._runs else None
        if isinstance(last, tuple) and last[0] == call:
            last[1].append(text)
        elif text:
            self._runs.append((call, [text]))

    def _step(self, character: str) -> bool:
        """One character; False where it is to be looked at again, in the state it led to."""
        state = self._state
        if state is _State.TEXT:
            return self._in_text(character)
        if state is _State.CALL:
            return self._in_call(character)
        if state is _State.MARK:
            return self._in_mark(character)
        if state is _State.OPEN:
            return self._in_open(character)
        return state is _State.END or self._behind_call(character)

    def _in_text(self, character: str) -> bool:
        """What is held: white space."""
        if character == self._opening[0] or (
            self._style is Style.LLAMA3 and self._fresh and character == "{"
        ):
            self._state = _State.CALL if character == "{" else _State.MARK
            self._marked = False
            return self._state is _State.CALL and self._begin_object(character)
        self._held += character
        if character not in _SPACE or len(self._held) > _MAX_SPACE:
            self._fresh = self._fresh and character in _SPACE
            self._say(self._held)
            self._held = ""
        return True

    def _in_mark(self, character: str) -> bool:
        """What is held: white space, and a beginning of the opening."""
        opening = self._opening
        so_far = self._held.lstrip(_SPACE) + character
        if not opening.startswith(so_far):
            return self._give_up()
        self._held += character
        if so_far == opening:
            self._state, self._marked, self._listed = _State.OPEN, True, False
        return True

    def _in_open(self, character: str) -> bool:
        """What is held: all since the opening began."""
        if character in _SPACE:
            self._held += character
            return True
        if self._style is Style.MISTRAL and not self._listed:
            if character != "[":
                return self._give_up()
            self._listed = True
            self._held += character
            return True
        if character != "{":
            return self._give_up()
        return self._begin_object(character)

    def _begin_object(self, character: str) -> bool:
        self._state, self._begun = _State.CALL, False
        self._head, self._object = Head(), []
        return self._in_call(character)

    def _in_call(self, character: str) -> bool:
        head = self._head
        if not head.feed(character):
            if self._begun:  # what follows is no JSON any more; the call itself was complete
                self._state, self._held = _State.DONE, ""
                return False
            return self._give_up()
        if self._begun:
            if head.inside:
                self._say(character, self.calls - 1)
        else:
            self._object.append(character)
            if head.inside and head.name is not None and self._is_call(head.name):
                self._begin_call(head.name, head.arguments)
        return True if not head.closed else self._close_object()

    def _close_object(self) -> bool:
        head = self._head
        if not self._begun:
            if head.name is None or not self._is_call(head.name):
                self._say(self._held + "".join(self._object))
                self._state, self._held, self._object = _State.TEXT, "", []
                self._fresh = False
                return True
            self._begin_call(head.name, head.arguments or "{}")
        self._state = _State.DONE
        if self._single and self._style is Style.LLAMA3:
            self._state = _State.END
        return True

    def _is_call(self, name: str) -> bool:
        """Without an opening it may be any JSON: then the name has to be a known one."""
        return bool(name) and (self._marked or name in self._names)

    def _begin_call(self, name: str, arguments: str) -> None:
        self._runs.append(Begin(self.calls, self._new_id(), name))
        self._say(arguments, self.calls)
        self.calls += 1
        self._begun, self._held, self._object = True, "", []

    def _behind_call(self, character: str) -> bool:
        """What is held: white space, and with hermes a beginning of the closing."""
        if self._style is Style.HERMES:
            so_far = self._held.lstrip(_SPACE) + character
            if _CLOSING.startswith(so_far) or (character in _SPACE and so_far.isspace()):
                self._held += character
                if so_far == _CLOSING:
                    self._leave()
                return True
            if so_far == "<t" and not self._single:  # the next call, though this one was not closed
                self._state, self._marked = _State.MARK, False
                return False
        elif character in _SPACE:
            self._held += character
            return True
        elif self._style is Style.MISTRAL and self._listed and character in ",]":
            self._torn = self._single and character == ","
            self._leave()
            if character == "," and not self._single:
                self._state = _State.OPEN
                self._held = character
            return True
        elif self._style is Style.LLAMA3 and character == ";":
            self._held += character
            return True
        elif self._style is Style.LLAMA3 and character == "{":
            return self._begin_object(character)
        if self._single:
            self._torn = True
            self._leave()
            return True
        return self._give_up()

    def _leave(self) -> None:
        """The calls are over."""
        self._held = ""
        self._state = _State.END if self._single else _State.TEXT

    def _give_up(self) -> bool:
        """What is held is content; white space may belong to a next call."""
        held = self._held + "".join(self._object)
        kept = held.rstrip(_SPACE)
        self._fresh = self._fresh and not kept
        self._say(kept)
        self._state, self._held, self._object = _State.TEXT, held[len(kept) :], []
        return False


def contents(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """All parts put together: the content; name and arguments of each call."""
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [(part.name, list[str]()) for part in parts if isinstance(part, Begin)]
    for part in parts:
        if isinstance(part, More):
            calls[part.index][1].append(part.text)
    return content, [(name, "".join(pieces)) for name, pieces in calls]


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id."""
    return "".join(secrets.choice(_ID) for _ in range(9))
