"""Owns one table of ring.toml: hands out its keys, each checked, and refuses what is left.

Every error is a ConfigError that names the key and the line. Knows types, ranges, names and
addresses, not what a key is for; transport.config does.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn

from transport.keys import KeyFileError, is_key, read_public

TOY = "toy"
HUB = "hf://"
_HUB_NAME = re.compile(HUB + r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]{1,128})?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TCP = re.compile(r"tcp://(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.%a-z0-9]+\]):(?P<port>[0-9]{1,5})")
_ANYWHERE = ("*", "0.0.0.0", "[::]")
_FLOAT_LIMIT = 1 << 1023
_MAX_SHOWN = 200  # characters of a key in an error
_ADVICE = "write tcp://host:port or ipc://path"


class ConfigError(ValueError):
    """ring.toml can't be used. key: dotted, None where the text is no TOML; line: from 1."""

    def __init__(self, file: str, line: int, key: str | None, message: str) -> None:
        super().__init__(f"{file}:{line}: {key + ': ' if key else ''}{message}")
        self.key = key
        self.line = line


class Table:
    """One table of the file: hands out its keys, each checked, and then refuses what is left."""

    def __init__(
        self,
        data: dict[str, Any],
        path: tuple[str | int, ...],
        lines: dict[tuple[str | int, ...], int],
        file: str,
        folder: Path,
    ) -> None:
        self.data = data
        self.folder = folder
        self._path = path
        self._lines = lines
        self._file = file
        self._known: list[str] = []

    def fail(self, message: str, *key: str | int) -> NoReturn:
        """Raise ConfigError at a key of this table, or at the table itself."""
        path = self._path + key
        at = path
        while at and at not in self._lines:
            at = at[:-1]
        dotted = ""
        for part in path:
            dotted += f"[{part}]" if isinstance(part, int) else f".{part}" if dotted else part
        if len(dotted) > _MAX_SHOWN or not dotted.isprintable():
            dotted = repr(dotted[:_MAX_SHOWN])
        raise ConfigError(self._file, self._lines.get(at, 1), dotted or None, message)

    def take(self, key: str, kind: type, default: Any = MISSING) -> Any:
        """The value of a key, of exactly that type (an integer passes for a float)."""
        self._known.append(key)
        if key not in self.data:
            if default is MISSING:
                self.fail(f"missing key {key!r}")
            return default
        value = self.data[key]
        if kind is float and type(value) is int and abs(value) < _FLOAT_LIMIT:
            value = float(value)
        if type(value) is not kind:
            self.fail(f"must be {_WORDS[kind]}, not {shown(value)}", key)
        return value

    def choice(self, key: str, names: tuple[str, ...], default: str) -> str:
        """One of some names."""
        value: str = self.take(key, str, default)
        if value not in names:
            self.fail(f"must be one of {', '.join(names)}, not {shown(value)}", key)
        return value

    def integer(self, key: str, low: int, high: int, default: Any = MISSING) -> Any:
        """An integer in [low, high]; the default is not checked."""
        value = self.take(key, int, default)
        if key in self.data and not low <= value <= high:
            self.fail(f"must be from {low} to {high}, not {shown(value)}", key)
        return value

    def seconds(
        self, key: str, low: float, high: float, default: float, unit: str = " seconds"
    ) -> float:
        """Seconds (or what `unit` says) in [low, high]."""
        value: float = self.take(key, float, default)
        if not low <= value <= high:
            self.fail(f"must be from {low:g} to {high:g}{unit}, not {value:g}", key)
        return value

    def name(self, key: str) -> str:
        """A name that is safe in file names, logs and metrics."""
        value: str = self.take(key, str)
        if not NAME.fullmatch(value):
            self.fail(f"must be 1 to 64 of A-Z a-z 0-9 _ . -, not {shown(value)}", key)
        return value

    def address(self, key: str, *, listen: bool = False) -> str:
        """A link address; relative ipc paths are resolved. Wildcard hosts only to listen on."""
        value: str = self.take(key, str)
        if value.startswith("ipc://") and len(value) > 6:
            value = f"ipc://{self.folder / value[6:]}"
            if len(value.encode()) > 107 + 6:
                self.fail(f"{shown(value)}: the path is over 107 bytes", key)
            return value
        found = _TCP.fullmatch(value)
        if found is None or not 1 <= int(found["port"]) <= 65535:
            self.fail(f"{shown(value)} is no address: {_ADVICE}", key)
        if found["host"] in _ANYWHERE and not listen:
            self.fail(
                f"{value} can't be sent to: give the machine's address, and this as `bind`", key
            )
        return value

    def model(self, key: str) -> str:
        """A model's absolute path, its name on a hub (hf://org/name), or "toy"."""
        path: str = self.take(key, str)
        if not path or "\0" in path:
            self.fail('must be a file, a folder or "toy"', key)
        if path.startswith(HUB):
            if not _HUB_NAME.fullmatch(path):
                self.fail(f"must be {HUB}org/name or {HUB}org/name@revision", key)
            return path
        return path if path == TOY else str(self._absolute(key, path))

    def file(self, key: str) -> Path:
        """A file's absolute path."""
        path: str = self.take(key, str)
        if not path or "\0" in path:
            self.fail("must be a file", key)
        return self._absolute(key, path)

    def _absolute(self, key: str, path: str) -> Path:
        try:
            return self.folder / Path(path).expanduser()
        except RuntimeError:
            self.fail(f"there is no home directory for {shown(path)}", key)

    def keys(self) -> tuple[str | None, str | None]:
        """A process's public key and the path of its secret one; (None, None) without keys.

        The public key stands in the table or in a file of its own. What is in the file of the
        secret one is its process's business: the others don't have it.
        """
        public: str | None = self.take("public_key", str, None)
        if public is not None and not is_key(public):
            self.fail("must be a CURVE key of 40 characters: kvring keygen makes one", "public_key")
        if "public_key_file" in self.data:
            if public is not None:
                self.fail("there is a 'public_key' already: keep one of them", "public_key_file")
            try:
                public = read_public(self.file("public_key_file"))
            except KeyFileError as error:
                self.fail(str(error), "public_key_file")
        secret = str(self.file("secret_key_file")) if "secret_key_file" in self.data else None
        self._known += ["public_key_file", "secret_key_file"]
        if (public is None) != (secret is None):
            missing = "secret_key_file" if secret is None else "public_key"
            self.fail(f"missing key {missing!r}: a process has both or neither")
        return public, secret

    def table(self, key: str, *, required: bool = True) -> Table:
        """A table within this one; an empty one where it is not required and not there."""
        data = self.take(key, dict, MISSING if required else {})
        return Table(data, (*self._path, key), self._lines, self._file, self.folder)

    def tables(self, key: str, most: int) -> list[Table]:
        """An array of 1 to `most` tables."""
        items = self.take(key, list)
        path = (*self._path, key)
        for index, item in enumerate(items):
            if type(item) is not dict:
                self.fail(f"must be a table, [[{key}]], not {shown(item)}", key, index)
        if not 1 <= len(items) <= most:
            self.fail(f"must be 1 to {most} tables, not {len(items)}", key)
        return [
            Table(item, (*path, index), self._lines, self._file, self.folder)
            for index, item in enumerate(items)
        ]

    def finish(self) -> None:
        """Refuse the first key that nobody asked for."""
        for key in self.data:
            if key not in self._known:
                close = difflib.get_close_matches(key, self._known, 1)
                hint = (
                    f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self._known)}"
                )
                self.fail(f"unknown key; {hint}", key)


_WORDS = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false",
    list: "an array", dict: "a table",
}  # fmt: skip


def shown(value: Any) -> str:
    """A value as an error quotes it: short."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than 4,300 digits
        return f"a number of {value.bit_length()} bits"
    except RecursionError:
        return "an array of arrays of arrays"
    return text if len(text) <= 60 else text[:57] + "..."
