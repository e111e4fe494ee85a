"""Owns what `kvring up` asks of its stages, wherever they run: as processes, and as places."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from transport.config import Config


class Process(Protocol):
    """A subprocess.Popen, or a stage that runs on another machine."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its end hurries the process; None where it has none."""

    @property
    def returncode(self) -> int | None:
        """As poll() said last."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> int:
        """Wait until it has ended."""


class Elsewhere(Protocol):
    """Runs the stages on other machines, and knows all that depends on where they are."""

    def place(self, config: Config, folder: Path) -> Config:
        """The ring as it can run there: addresses and keys. Raises ToolError."""

    def start(
        self, file: Path, extra: list[str], coordinator: subprocess.Popen[bytes]
    ) -> Mapping[str, Process]:
        """Start the stages; by name. Their output is copied to NAME.log beside the file."""
