"""Owns JSON that is one line to every reader of lines."""

from __future__ import annotations

import json
from collections.abc import Mapping

# JSON lets these stand in a string, and an event stream ends no line at them; httpx's iter_lines,
# Python's splitlines and those who use them do, and find half an object.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


def dump_line(value: Mapping[str, object]) -> str:
    """`value` as JSON; ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_LINE_ENDS)
