"""Owns the one exception that a command ends with: a message for a person and an exit code."""

from __future__ import annotations

from coord.help import pointed

RUNTIME = 1  # it could not be done
USAGE = 2  # it was asked for wrongly: an option, a name, a configuration file


class ToolError(Exception):
    """An expected failure of a command: printed as one line on stderr, never as a traceback.

    kind: the HTTP API's code where a server said it.
    """

    def __init__(self, message: str, *, code: int = RUNTIME, kind: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind = kind

    @property
    def told(self) -> str:
        """The message, and where to read on if docs/troubleshooting.md knows it."""
        return pointed(self.message, self.kind)
