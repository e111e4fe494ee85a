"""A program in a pseudo-terminal: what it shows there, and keys pressed for it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0  # of a machine that is busy with other things
# The terminal must be the program's own for the key Ctrl-C to reach it as a signal.
OWN = (
    "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
# As a shell's `&` does: another process group than the terminal's own.
BACKGROUND = (
    "import fcntl, signal, subprocess, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGTERM, signal.default_int_handler); "  # call ends the other, too
    "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], process_group=0))"
)
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"


def pasted(text: str) -> str:
    """As a terminal sends it once bracketed paste is on."""
    return f"\x1b[200~{text}\x1b[201~"


class Screen:
    """What came so far; `wait_for` consumes it in order."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._raw = ""
        self._read = 0  # of the text without escapes
        self._changed = threading.Condition()
        threading.Thread(target=self._follow, daemon=True).start()

    @property
    def raw(self) -> str:
        """Everything, with the sequences that steer the terminal."""
        return self._raw

    @property
    def text(self) -> str:
        """Everything, without them."""
        return ESCAPES.sub("", self._raw)

    def wait_for(self, pattern: str, limit_s: float = PATIENCE_S) -> re.Match[str]:
        """The next match of a regular expression; what is before it is read, too."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            match = re.compile(pattern).search(self.text, self._read)
            found.extend([match] if match else [])
            return match is not None

        with self._changed:
            seen = self._changed.wait_for(look, limit_s)
        assert seen, f"never saw {pattern!r} in {self.text[self._read :]!r}"
        self._read = found[0].end()
        return found[0]

    def press(self, keys: str) -> None:
        """Type something."""
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE_S)

    def _follow(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with suppress(OSError):  # the last one who had the terminal open is gone
            while data := os.read(self._master, 65536):
                with self._changed:
                    self._raw += decoder.decode(data)
                    self._changed.notify_all()


@contextmanager
def terminal(
    *arguments: str, state: Path, columns: int = 80, stdin: int | None = None, start: str = OWN
) -> Iterator[Screen]:
    """Run `kvring ARGUMENTS` in a terminal of that width; state: where its history is kept.

    stdin: something else to read from. start: OWN or BACKGROUND.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", start, "-m", "tools.cli", *arguments],
        stdin=slave if stdin is None else stdin,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state)},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Screen(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        process.kill()
        process.wait()
        os.close(master)
