"""Owns the command line `kvring log`: options and help; each command lives in its own module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Look at what a ring recorded (--record): frames, a turn's story, proofs and plots.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.callback()
def _root() -> None:
    """Without it a group of one command would lose its name."""


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Frame logs, or directories of them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Prove from the frames alone that no row was read that was not there; see docs/log-check.md.

    Ends with exit code 1 and the first offending frame where that is not so.
    """
    from tools.framelogs.check import check as run

    return run(paths, as_json=as_json)
