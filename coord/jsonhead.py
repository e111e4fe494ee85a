"""Owns reading a call's JSON object while it comes: its name, and where its arguments are.

Checks the outer object's grammar and balances brackets inside values; what is between the braces of
the arguments is the model's own business.
"""

from __future__ import annotations

import json

_SPACE = " \n\r\t"
_ARGUMENTS = ("arguments", "parameters")


class Head:
    """Feed it characters from the opening brace on.

    name: once it is read. inside: the last character belongs to the arguments. closed: the outer
    brace has come.
    """

    def __init__(self) -> None:
        self._expect = "{"  # { key first-key : value , or ""
        self._key = ""
        self._token: list[str] = []  # of the key or string that is being read
        self._arguments: list[str] = []
        self._kind = ""  # of it: key string scalar nested
        self._depth = 0
        self._quoted = self._escaped = False
        self.name: str | None = None
        self.inside = False
        self.closed = False

    @property
    def arguments(self) -> str:
        """All that has come of them."""
        return "".join(self._arguments)

    @property
    def within(self) -> bool:
        """True while the arguments are not complete."""
        return self._kind == "nested" and self._key in _ARGUMENTS

    def feed(self, character: str) -> bool:
        """False where it can't be a call's object; nothing may follow then."""
        self.inside = False
        if self._kind == "nested":
            self._take(character)
            self._nest(character)
            return True
        if self._kind == "scalar" and (character in _SPACE or character in ",}"):
            self._kind, self._expect = "", ","
        if self._kind:
            return self._read(character)
        if character in _SPACE:
            return True
        return self._between(character)

    def _between(self, character: str) -> bool:
        expect = self._expect
        if expect == "{":
            self._expect = "first-key"
            return character == "{"
        if expect == "value":
            return self._begin_value(character)
        if character == "}" and expect in ("first-key", ","):
            self.closed = True
            return True
        if character == '"' and expect in ("first-key", "key"):
            self._kind, self._token = "key", [character]
            return True
        self._expect = {":": "value", ",": "key"}.get(expect, "")
        return character == expect

    def _begin_value(self, character: str) -> bool:
        self._token, self._depth = [character], 0
        if self._key == "name":
            self._kind = "string"
            return character == '"'
        if self._key in _ARGUMENTS and (character != "{" or self._arguments):
            return False
        if character == '"':
            self._kind = "string"
        elif character in "{[":
            self._kind, self._depth = "nested", 1
            self._take(character)
        else:
            self._kind = "scalar"
            return character not in ",}]:"
        return True

    def _take(self, character: str) -> None:
        if self._key in _ARGUMENTS:
            self.inside = True
            self._arguments.append(character)

    def _read(self, character: str) -> bool:
        if self._kind == "scalar":
            return True
        self._token.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            return self._end_string()
        return True

    def _nest(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._kind, self._expect = "", ","

    def _end_string(self) -> bool:
        try:
            text = json.loads("".join(self._token), strict=False)
        except ValueError:
            return False
        if self._kind == "key":
            self._key, self._expect = text, ":"
        else:
            self._expect = ","
            if self._key == "name":
                self.name = text
        self._kind = ""
        return True
