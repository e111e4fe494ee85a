"""Owns `kvring apikey`: draws an API key, shows it once, and says what to store of it."""

from __future__ import annotations

import sys

from coord.http.keys import new_key
from tools.errors import USAGE, ToolError


def run_apikey(*, name: str, admin: bool, turns: int | None = None) -> int:
    """Print the key on the first line and its line for --api-key-file on the second."""
    try:
        text, key = new_key(name, admin=admin, turns=turns)
    except ValueError as error:
        raise ToolError(str(error), code=USAGE) from None
    print(text)
    print(key.line())
    if sys.stdout.isatty():
        print(
            "the first line is the key, shown only now; the second goes into --api-key-file",
            file=sys.stderr,
        )
    return 0
