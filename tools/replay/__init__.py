"""Replay of frame logs: into a fresh core, through a real block, or on a live ring.

For a debugger or a notebook (docs/debugging.md):

    from tools.replay import open_log
    replayer = open_log("logs", "coord")
    replayer.run_until(parse_where("1764503650001,17"))
    replayer.core.turns
"""

from __future__ import annotations

from pathlib import Path

from tools.errors import ToolError
from tools.framelogs.read import processes
from tools.replay.core import DifferenceError, Replayer, Step
from tools.replay.where import Where, parse_where

__all__ = ["DifferenceError", "Replayer", "Step", "Where", "open_log", "parse_where"]


def open_log(path: str | Path, name: str | None = None) -> Replayer:
    """The replayer of one process's log: of the process `name`, or of the only one there is.

    A name that lived several times means its first life; open the files of another one. Raises
    ToolError where it is not there, or where several are and none was named.
    """
    found = processes([Path(path)])
    names = dict.fromkeys(each.name for each in found)
    if name is None and len(names) == 1:
        name = next(iter(names))
    wanted = [each for each in found if each.name == name]
    if not wanted:
        raise ToolError(f"{path}: name one of {', '.join(names)}")
    return Replayer(wanted[0])
