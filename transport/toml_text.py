"""Owns how a dataclass is written as the keys of a TOML table; what equals the default is left out.

Tables of tables (a ring's `stages`) are the caller's.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any


def pairs(part: Any) -> list[str]:
    """One `key = value` line for each field that is neither None nor its default."""
    lines = []
    for each in fields(part):
        value = getattr(part, each.name)
        if value is None or each.name == "stages" or value == each.default:
            continue
        lines.append(f"{each.name} = {_toml(value)}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    if isinstance(value, float):
        assert math.isfinite(value), value
        return repr(value)
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(_escaped(each) for each in value) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if ord(character) < 32 or ord(character) == 127:
        return f"\\u{ord(character):04x}"
    return character
