"""Owns the command line `kvring log`: options and help; each command lives in its own module."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Look at what a ring recorded (--record): frames, a turn's story, proofs and plots.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Log files, or directories of them.")
]
Tokens = Annotated[bool, typer.Option("--tokens", help="Say token ids, too.")]


@app.callback()
def _root() -> None:
    """Without it a group of one command would lose its name."""


def _command(name: str) -> Any:
    """The function `module.function`, imported only now."""
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"tools.framelogs.{module}"), function)


@app.command()
def show(
    paths: Paths,
    *,
    turn: Annotated[int | None, typer.Option(min=0, help="Only this turn.")] = None,
    slot: Annotated[int | None, typer.Option(min=0, help="Only this slot.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only run, verdict, … or prefill, verify; repeat it.")
    ] = None,
    process: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what this process recorded.")
    ] = None,
    ring: Annotated[str | None, typer.Option(metavar="NAME", help="Only this ring.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Seconds from the start, or clock time.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before that time.")] = None,
    direction: Annotated[
        str | None, typer.Option(help="Only in, out, local, or unsent: no link took it.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per record.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as it grows.")] = False,
    tokens: Tokens = False,
) -> int:
    """List recorded frames in order of time, one a line."""
    kinds = tuple(each.lower() for each in kind or ())
    wanted = _command("show.Filter")(turn, slot, kinds, process, ring, direction)
    result = _command("show.run_show")(
        paths=paths,
        wanted=wanted,
        since=since,
        until=until,
        as_objects=json,
        follow=follow,
        tokens=tokens,
    )
    return int(result)


@app.command()
def story(
    turn: Annotated[int, typer.Argument(metavar="TURN", min=0, help="Which turn.")],
    paths: Paths,
    *,
    tokens: Tokens = False,
) -> int:
    """Tell one turn's life in words; with the stages' logs also what each of them did when."""
    return int(_command("story.run_story")(turn=turn, paths=paths, tokens=tokens))


@app.command()
def trace(
    paths: Paths,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The trace, JSON.")],
) -> int:
    """Write a Chrome/Perfetto trace: stages, links and turns on a time line, bubbles as gaps."""
    return int(_command("trace.run_trace")(paths=paths, out=out))


@app.command()
def plot(
    paths: Paths,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.png", help="The picture.")],
) -> int:
    """Plot frames in flight, the stages' busy share and the slots' resident rows over time."""
    return int(_command("plot.run_plot")(paths=paths, out=out))


@app.command()
def redact(
    paths: Paths,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where copies go.")],
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key; the same one hides alike [default: drawn]."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Token ids of the model, if no roll call is in them.")
    ] = None,
) -> int:
    """Copy logs without their text: token ids, salts and names replaced, hashes computed anew."""
    result = _command("redact.run_redact")(
        paths=paths, out=out, key_file=key_file, vocabulary=vocabulary
    )
    return int(result)


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
