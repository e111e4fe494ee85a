"""Owns the map from a key of a TOML text to its line, which tomllib does not give.

A scanner over text that tomllib has already accepted, so it only has to find where keys and values
begin and end, never to judge them. (tomlkit keeps no positions either.) That it finds exactly the
keys that tomllib finds is property-tested.
"""

from __future__ import annotations

import re
import tomllib
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(
    r"""[ \t]*(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
    r"""(?:[ \t]*\.[ \t]*(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+))*[ \t]*"""
)
_PART = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+""")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""("{0,2})'
    r"|'''(?:[^']|'(?!''))*'''('{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_ATOM = re.compile(r"[^,\]}\n#]+")


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) of every table and key, by its path; items of arrays are numbered from 0.

    `text` must be valid TOML. Tables that are only implied ("a" in [a.b]) get their first line.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0
        self._items: dict[Path, int] = {}  # array of tables -> index of its last table

    def document(self) -> None:
        table: Path = ()
        while self._skip(_BLANK) and self._at < len(self._text):
            if self._text.startswith("[[", self._at):
                self._at += 2
                parts = self._key()
                array = self._resolve(parts[:-1]) + parts[-1:]
                self._note(array)
                index = self._items.get(array, -1) + 1
                self._items[array] = index
                table = (*array, index)
                self._note(table)
                self._at += 2
            elif self._text.startswith("[", self._at):
                self._at += 1
                table = self._resolve(self._key())
                self._note(table)
                self._at += 1
            else:
                self._pair(table)

    def _pair(self, table: Path) -> None:
        path = table + self._key()
        for end in range(len(table) + 1, len(path) + 1):
            self._note(path[:end])
        self._at += 1  # the equals sign
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip(_BLANK)
        start = self._text[self._at]
        if start == "{":
            self._at += 1
            while self._skip(_BLANK) and self._text[self._at] != "}":
                self._pair(path)
                self._skip(_BLANK)
                self._at += self._text[self._at] == ","
            self._at += 1
        elif start == "[":
            self._at += 1
            index = 0
            while self._skip(_BLANK) and self._text[self._at] != "]":
                self._note((*path, index))
                self._value((*path, index))
                index += 1
                self._skip(_BLANK)
                self._at += self._text[self._at] == ","
            self._at += 1
        else:
            self._skip(_STRING if start in "\"'" else _ATOM)

    def _key(self) -> tuple[str, ...]:
        start = self._at
        self._skip(_KEY)
        parts = _PART.findall(self._text[start : self._at])
        return tuple(_unquote(part) for part in parts)

    def _resolve(self, parts: tuple[str, ...]) -> Path:
        """A header's path: a name that is an array of tables means its last table."""
        path: Path = ()
        for part in parts:
            path = (*path, part)
            self._note(path)
            if path in self._items:
                path = (*path, self._items[path])
        return path

    def _note(self, path: Path) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self.lines.setdefault(path, self._line)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self._at)
        assert found is not None, self._at
        assert found.end() > self._at or pattern is _BLANK, self._at
        self._at = found.end()
        return True


def _unquote(part: str) -> str:
    if part[0] == '"':
        return str(tomllib.loads(f"key = {part}")["key"])
    return part[1:-1] if part[0] == "'" else part
