"""Owns how a message is typed: lines, pasted text, and the history kept across runs.

Editing is the readline library's. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

KEPT = 1000  # messages in the history; the file may grow to twice as many before it is cut
PASTE = "set enable-bracketed-paste on"  # pasted text is one piece, line ends and all
BINDINGS = (
    "set enable-active-region off",  # which would show it in reverse
    r'"\e\C-m": "\C-v\C-j"',  # Alt-Enter puts in a line end
    "tab: complete",
)


def is_command(text: str) -> bool:
    """Whether it is one, and no message. With a space in front it is a message."""
    return text.startswith("/") and "\n" not in text


def history_file() -> Path | None:
    """Where the history is: below XDG_STATE_HOME, by its standard ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        state = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    except RuntimeError:
        return None  # a user without a home
    return state / "kvring" / "chat-history"


class History:
    """What was typed, oldest first, one JSON string a line: readable by the owner alone.

    trouble: why nothing is kept, or None. Several chats may write at once.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file or Path()
        self.trouble = None if file else "there is no home directory"
        self.entries: list[str] = []
        if file is None:
            return
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file.exists() and not file.is_file():  # a link to /dev/null, say
                self.trouble = f"{file}: no regular file"
                return
            self._open().close()
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            self.entries = _entries(lines)[-KEPT:]
            if len(lines) > 2 * KEPT:
                self._cut()
        except OSError as error:
            self.trouble = f"{file}: {error.strerror or error}"

    def add(self, text: str) -> None:
        """Keep one more, unless it is the last one again."""
        if self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        if self.trouble is None:
            try:
                with self._open() as file:
                    file.write(json.dumps(text) + "\n")
            except OSError as error:
                self.trouble = f"{self._file}: {error.strerror or error}"

    def _open(self) -> TextIO:
        """To append to. Made for the owner alone, and so if others could read it."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        file = os.fdopen(os.open(self._file, flags, 0o600), "a", encoding="utf-8")
        if os.fstat(file.fileno()).st_mode & 0o077:
            os.fchmod(file.fileno(), 0o600)
        return file

    def _cut(self) -> None:
        """Leave only the newest entries in the file."""
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self.entries)
        new.replace(self._file)


def _entries(lines: Sequence[str]) -> list[str]:
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # half a line of a chat that was killed
        if isinstance(entry, str) and "\0" not in entry:
            found.append(entry)
    return found


class Typist:
    """A person at a terminal: a prompt, editing, history, commands completed with Tab.

    emptied: the Ctrl-C that ended `read` took something away that had been typed.
    """

    def __init__(self, history: History, commands: Sequence[str]) -> None:
        self._history = history
        self._commands = commands
        self.emptied = False
        self._readline = _readline()
        if self._readline is not None:
            self._set_up(self._readline)

    def read(self) -> str | None:
        """The next message, over several lines if they end in a backslash; None at the end.

        KeyboardInterrupt: Ctrl-C was pressed, and what was typed is gone.
        """
        lines: list[str] = []
        self.emptied = False
        while True:
            try:
                line = input(self._prompt("… " if lines else "> "))
            except EOFError:
                if not lines:
                    return None
                line = ""
            except KeyboardInterrupt:
                typed = self._readline.get_line_buffer() if self._readline is not None else ""
                self.emptied = bool(lines or typed)
                raise
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        text = "\n".join(lines)
        if text.strip():
            if not is_command(text):  # those are of no use to another run
                self._history.add(text)
            if self._readline is not None:
                self._readline.add_history(text)
        return text

    def _prompt(self, text: str) -> str:
        """Bold; what readline should not count as columns is between 1 and 2."""
        if self._readline is None or os.environ.get("TERM") == "dumb":
            return text
        return f"\001\033[1m\002{text}\001\033[0m\002"

    def _set_up(self, readline: ModuleType) -> None:
        readline.set_auto_history(False)
        readline.clear_history()
        for entry in self._history.entries:
            readline.add_history(entry)
        if "libedit" in (readline.__doc__ or ""):  # macOS; it pastes line by line
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            dumb = os.environ.get("TERM") == "dumb"
            for line in BINDINGS if dumb else (PASTE, *BINDINGS):
                readline.parse_and_bind(line)
        readline.set_completer_delims("\n")
        readline.set_completer(self._complete)

    def _complete(self, typed: str, index: int) -> str | None:
        fitting = [each for each in self._commands if typed and each.startswith(typed)]
        return fitting[index] if index < len(fitting) else None


class Pipe:
    """Standard input that is no terminal: a message a line."""

    def read(self) -> str | None:
        """The next message; a backslash at a line's end continues it. None at the end."""
        lines: list[str] = []
        while raw := sys.stdin.readline():
            line = raw.rstrip("\r\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)
        return "\n".join(lines) if lines else None


def _readline() -> ModuleType | None:
    try:
        return importlib.import_module("readline")  # not part of every Python
    except ImportError:
        return None
