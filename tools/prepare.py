"""Owns the command lines of `kvring doctor` and `kvring plan`: options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tools import options
from tools.errors import USAGE, ToolError

CoordinatorUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="The coordinator [default: ring.toml's].")
]


def doctor(
    *,
    ring: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ring.toml [default: what up needs].")
    ] = None,
    url: CoordinatorUrl = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where frame logs would go.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="The ring is meant to run without keys.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Look for what keeps a ring from working, and say what to change. Exit code 1: something."""
    from tools.doctor.command import run_doctor

    if ring is None and url is not None:
        raise ToolError("--url: needs --ring FILE, to compare with", code=USAGE)
    if ring is not None:
        options.check_ring(ring)
    return run_doctor(
        ring=ring,
        url=url,
        api_key=api_key,
        api_key_file=api_key_file,
        record=record,
        insecure=insecure,
        json_wanted=json,
    )


def plan(
    *,
    ring: options.RingFile,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which ring [default: the only one].")
    ] = None,
    url: CoordinatorUrl = None,
    api_key: options.ApiKey = None,
    turns: Annotated[
        int | None, typer.Option(min=1, max=4096, help="That decode at once [default: the slots].")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="For one turn at a time, not for many.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the new ring.toml goes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Measure the running stages of a ring, and split its layers by their speed and memory."""
    options.check_ring(ring)
    from tools.plan.command import run_plan

    return run_plan(
        ring=ring,
        name=name,
        url=url,
        api_key=api_key,
        turns=turns,
        alone=alone,
        write=write,
        as_json=json,
    )
