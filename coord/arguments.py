"""Owns a tool call's arguments on their way into a chat template: the client's bytes, kept.

Templates either print arguments as they are, or write a mapping as JSON (`arguments | tojson`), or
walk through its items. All three work on an `Arguments`, and what the first two print is the text
that the client sent: written anew, its spaces, escapes and numbers would often differ from what the
model generated, and the resident prefix would end there.
"""

from __future__ import annotations

import json
from typing import Any


class Arguments(dict[str, Any]):
    """A JSON object with the text it was parsed from."""

    def __init__(self, raw: str, parsed: dict[str, Any]) -> None:
        super().__init__(parsed)
        self.raw = raw

    def __str__(self) -> str:
        return self.raw


class BrokenArguments(str):
    """Arguments that are no JSON object (a model's answer may be cut): text in every template."""

    __slots__ = ()


def read_arguments(raw: str) -> Arguments | BrokenArguments:
    """What a template gets for a call's arguments; none at all ("") is an empty object."""
    try:
        parsed = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        return BrokenArguments(raw)
    return Arguments(raw or "{}", parsed) if isinstance(parsed, dict) else BrokenArguments(raw)


def dump(value: object, indent: int | None = None) -> str:
    """JSON as transformers' `tojson` writes it, arguments inside of it as they came."""
    if isinstance(value, Arguments):
        return value.raw
    if isinstance(value, BrokenArguments):
        return str(value)
    if isinstance(value, dict) and any(map(_holds, value.values())):
        items = (f"{json.dumps(str(key), ensure_ascii=False)}: {dump(value[key])}" for key in value)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple) and any(map(_holds, value)):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _holds(value: object) -> bool:
    if isinstance(value, Arguments | BrokenArguments):
        return True
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds, value))
