"""Owns the command line `kvring log`: options and help; each command lives in its own module."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Look at what a ring recorded (--record): frames, a turn's story, proofs and plots.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.callback()
def _root() -> None:
    """Without it a group of one command would lose its name."""
