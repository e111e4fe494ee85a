"""Owns a model's chat template: messages and tools to the text that the model was trained on.

Runs other people's Jinja in a sandbox with bounds. Knows no token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from coord.actions import TurnError
from coord.arguments import dump
from coord.toolcalls import Style, style_of

Message: TypeAlias = Mapping[str, Any]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

MAX_RENDERED_CHARS = 64 << 20  # a request has at most 4 MB of text
MAX_RENDER_S = 10.0
MAX_INDENT = 16
# What a template's own code can raise on messages it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class Template:
    """One template, compiled. style: how it spells tool calls, None where it takes no tools."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        named = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.style: Style | None = style_of(source) if "tools" in named else None

    def render(
        self, messages: Sequence[Message], tools: Tools | None, names: Mapping[str, str]
    ) -> str:
        """The text of a conversation, ready for the assistant's answer.

        names: bos_token, eos_token, ... TurnError 400 where the template refuses the messages.
        """
        try:
            return _render(
                self._template,
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **names,
            )
        except _TEMPLATE_ERRORS as error:
            raise TurnError(
                400,
                "template_error",
                f"the chat template refuses these messages: {error}",
                "messages",
            ) from error


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the library's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """No attribute that reaches the interpreter, and no one operation that takes gigabytes."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            counted = [each for each in (left, right) if isinstance(each, int)]
            sized = [each for each in (left, right) if isinstance(each, str | list | tuple)]
            if counted and sized and len(sized[0]) * counted[0] > MAX_RENDERED_CHARS:
                raise jinja2.TemplateError(f"over {MAX_RENDERED_CHARS} characters")
        elif operator == "**" or isinstance(left, str):
            raise jinja2.TemplateError(f"the operator {operator} is not for a chat template")
        return super().call_binop(context, operator, left, right)


def _render(template: jinja2.Template, **values: object) -> str:
    """Like render, but ends at MAX_RENDERED_CHARS and, as long as it writes, MAX_RENDER_S."""
    pieces: list[str] = []
    size, deadline = 0, time.monotonic() + MAX_RENDER_S
    for piece in template.generate(**values):
        size += len(piece)
        if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
            limit = f"{MAX_RENDERED_CHARS} characters, {MAX_RENDER_S:g} s"
            raise jinja2.TemplateError(f"it does not come to an end ({limit})")
        pieces.append(piece)
    return "".join(pieces)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    indent = None if indent is None else max(0, min(indent, MAX_INDENT))
    return dump(value, indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
