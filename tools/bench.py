"""Owns `kvring bench`: the options of each measurement, and the order of its steps."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from tools.errors import USAGE, ToolError

if TYPE_CHECKING:  # at run time only when a measurement runs: --help must stay quick
    from tools.client import Json
    from tools.decode import Plan as DecodePlan
    from tools.multiturn import Measurement, Plan

app = typer.Typer(
    help="Measure a server: tables, JSON and plots.", rich_markup_mode=None, no_args_is_help=False
)
FLOOR = Path(__file__).resolve().parent.parent / "bench" / "floor.py"


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def multiturn(
    *,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server [default: starts its own].")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Bearer token.")] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR|FILE.gguf", help="Model of the own server.")
    ] = "smollm2-135m",
    stages: Annotated[int, typer.Option(min=1, help="Stages of the own server.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 6,
    first_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the first message.")] = 1500,
    suffix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each follow-up.")] = 80,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Conversations; medians over them.")] = 3,
    floor: Annotated[
        bool, typer.Option("--floor", help="Also time the suffix alone in one process.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For JSON, plot and log.")] = Path(
        "bench/out"
    ),
) -> int:
    """Time to first token, turn by turn, cold against cached. Exit code 1 if a text differs."""
    from tools.multiturn import Plan
    from tools.server import own_server

    plan = Plan(turns, first_tokens, suffix_tokens, max_tokens, rounds)
    with contextlib.ExitStack() as stack:
        if url is None:
            options = ["--model", model, "--stages", str(stages)]
            url = stack.enter_context(own_server(options, out / "server.log"))
        server, results = _measure(url, api_key, plan)
    floor_result = _floor(model, results) if floor else {}
    return _report(out, plan, server, results, floor_result)


Delays = Annotated[str, typer.Option(metavar="MS,MS", help="Delays of every link, one way.")]
Concurrency = Annotated[str, typer.Option(metavar="N,N", help="Turns at once.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="For JSON, plot and log.")]


@app.command()
def decode(
    *,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR|FILE.gguf", help="What is served.")
    ] = "smollm2-135m",
    stages: Annotated[int, typer.Option(min=1, help="Stages of each ring.")] = 3,
    delay_ms: Delays = "0,20",
    drafter: Annotated[str, typer.Option(metavar="NAME,NAME", help="Drafters.")] = "off,lookup",
    draft_model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR|FILE.gguf", help="Of the drafter `model`.")
    ] = None,
    draft_depth: Annotated[
        str, typer.Option(metavar="N,N", help="Bounds of frames in flight per turn; - for none.")
    ] = "-",
    draft_tokens: Annotated[
        str, typer.Option(metavar="N,N", help="Bounds of drafts per frame; - for none.")
    ] = "-",
    classes: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Classes of bench/prompts.toml.")
    ] = "quote,edit,list,chat,fact",
    concurrency: Concurrency = "1,8",
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest reply.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Medians over them.")] = 1,
    out: Out = Path("bench/out"),
) -> int:
    """Tokens per second against delay, drafter, depth, concurrency. Exit code 1 if a text differs.

    Each combination is an arm with a ring of its own (some 2 GB with the default model); arms take
    turns within one run. The first arm has no delay and no drafts; all texts must be its texts.
    """
    from tools.decode import Plan

    plan = Plan(
        model=model,
        stages=stages,
        delays_ms=tuple(map(float, _parts("--delay-ms", delay_ms, "0123456789."))),
        drafters=tuple(_parts("--drafter", drafter)),
        draft_model=draft_model,
        depths=_bounds("--draft-depth", draft_depth),
        draft_tokens=_bounds("--draft-tokens", draft_tokens),
        classes=tuple(_parts("--classes", classes)),
        concurrency=tuple(map(int, _parts("--concurrency", concurrency, "0123456789"))),
        max_tokens=max_tokens,
        rounds=rounds,
    )
    return _decode(plan, out)


def _decode(plan: DecodePlan, out: Path) -> int:
    from tools.decode import as_json, measure, mismatches, rows
    from tools.decode_report import plot_rows, print_rows, write_json
    from tools.terminal import ProgressLine

    line = ProgressLine(sys.stderr)
    try:
        cells = measure(plan, out, line.show)
    finally:
        line.close()
    table = rows(cells)
    print_rows(table, sys.stdout)
    different = mismatches(cells)
    body = {
        "plan": as_json(plan),
        "rows": [as_json(row) for row in table],
        "mismatches": different,
        "cells": [as_json(cell) for cell in cells],
    }
    write_json(out / "decode.json", body)
    plot_rows(out / "decode.png", f"{plan.model}: {plan.stages} stages", table)
    if different:
        raise ToolError(
            f"{len(different)} of {len(cells)} cells have other texts than the reference, first in "
            f"{different[0]}; see {out / 'decode.json'}"
        )
    return 0


@app.command()
def serve(
    *,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server [default: starts its own].")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Bearer token.")] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR|FILE.gguf", help="Model of the own server.")
    ] = "smollm2-135m",
    stages: Annotated[int, typer.Option(min=1, help="Stages of the own server.")] = 3,
    delay_ms: Annotated[float, typer.Option(min=0, help="Of its links, one way.")] = 0.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients of the closed loop.")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Arrivals per second: an open loop instead.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest reply.")] = 64,
    long_tokens: Annotated[
        int, typer.Option(min=64, help="Of the prompt that prefills beside a reply.")
    ] = 4000,
    out: Out = Path("bench/out"),
) -> int:
    """A mixed load, and a reply's longest gap while a long prompt prefills beside it."""
    from dataclasses import asdict

    from tools import decode_report
    from tools.client import Client
    from tools.mixed import Plan, mixed, neighbour
    from tools.terminal import ProgressLine

    plan = Plan(clients, requests, rate, max_tokens, long_tokens)
    line = ProgressLine(sys.stderr)
    with contextlib.ExitStack() as stack:
        stack.callback(line.close)
        if url is None:
            from tools.server import own_server

            options = ["--model", model, "--stages", str(stages), "--slots", str(clients)]
            options += ["--delay-ms", f"{delay_ms:g}"]
            url = stack.enter_context(own_server(options, out / "server.log"))
        client = stack.enter_context(Client(url, api_key))
        load = mixed(client, plan, line.show)
        beside = neighbour(client, plan, line.show)
    pairs = {name: f"{value:,.1f}" for name, value in asdict(load).items() if _is_number(value)}
    pairs |= {
        "gap before the long prompt, ms": f"{median(beside.before) * 1e3:,.1f}",
        "usual gap beside it, ms": f"{beside.usual_ms:,.1f}",
        "longest gap beside it, ms": f"{beside.longest_ms:,.1f}",
        "longest against usual": f"{beside.ratio:.2f}",
        "its prefill, s": f"{beside.prefill_s:,.2f}",
    }
    decode_report.print_pairs("mixed load, and a long prompt beside a reply", pairs, sys.stdout)
    body = {"plan": asdict(plan), "mixed": asdict(load), "neighbour": asdict(beside)}
    decode_report.write_json(out / "serve.json", body)
    gaps = {"before": beside.before, "while the long prompt prefills": beside.during}
    decode_report.plot_gaps(out / "serve.png", "gaps of one reply", gaps)
    return 0


@app.command()
def soak(
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long the load lasts.")] = 10.0,
    model: Annotated[
        str, typer.Option(metavar="NAME|DIR|FILE.gguf", help='What is served; "toy" is quickest.')
    ] = "toy",
    stages: Annotated[int, typer.Option(min=1, help="Stages of each ring.")] = 3,
    rings: Annotated[int, typer.Option(min=1, max=64, help="Rings.")] = 1,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Clients at once.")] = 4,
    kill_every: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds between faults; 0 for none.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the load and of the faults.")] = 1,
    out: Out = Path("bench/out/soak"),
) -> int:
    """A mixed load while stages and coordinator are killed, stopped and restarted.

    Exit code 1 where a text differs from serial decoding, an answer has no end, something leaks,
    or a request fails without a fault.
    """
    from tools.decode_report import print_pairs, write_json
    from tools.soak.report import as_json, pairs, plot
    from tools.soak.run import Plan
    from tools.soak.run import soak as run
    from tools.terminal import ProgressLine

    plan = Plan(minutes, model, stages, rings, clients, kill_every, seed)
    line = ProgressLine(sys.stderr)
    try:
        result = run(plan, out, line.show)
    finally:
        line.close()
    title = f"soak of {model}: {rings} x {stages} stages, {clients} clients, seed {seed}"
    print_pairs(title, pairs(result), sys.stdout)
    write_json(out / "soak.json", as_json(result))
    plot(out / "soak.png", title, result)
    if result.total:
        kind, found = next(iter(result.findings.items()))
        raise ToolError(
            f"{result.total} findings, first of {kind}: {found[0][:300]}; see {out / 'soak.json'}"
        )
    return 0


def _parts(option: str, text: str, characters: str = "") -> list[str]:
    """The values of a comma-separated option. Raises ToolError with its name."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or any(characters and set(part) - set(characters) for part in found):
        raise ToolError(f"{option} {text}: must be values separated by commas", code=USAGE)
    return found


def _bounds(option: str, text: str) -> tuple[int | None, ...]:
    """Bounds of drafts; "-" is none."""
    parts = _parts(option, text, "0123456789-")
    if any("-" in part and part != "-" for part in parts):
        raise ToolError(f"{option} {text}: must be numbers, or - for none", code=USAGE)
    return tuple(None if part == "-" else int(part) for part in parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _measure(url: str, api_key: str | None, plan: Plan) -> tuple[Json, list[Measurement]]:
    from tools.chat import wait_ready
    from tools.client import Client, ServerError
    from tools.multiturn import measure
    from tools.terminal import ProgressLine

    line = ProgressLine(sys.stderr)
    with Client(url, api_key) as client:
        wait_ready(client)
        try:
            server = client.get("/ring")
        except ServerError:
            server = {}
        try:
            return server, measure(client, plan, line.show)
        finally:
            line.close()


def _floor(model: str, results: list[Measurement]) -> Json:
    """Time the median follow-up's suffix in one process, with bench/floor.py."""
    from tools.multiturn import CACHED

    turns = [r for r in results if r.arm == CACHED and r.turn > 1 and r.prefilled_tokens]
    if not turns:
        raise ToolError(
            "--floor needs at least two turns and a server that counts prefilled tokens"
        )
    suffix = int(median(turn.prefilled_tokens or 0 for turn in turns))
    resident = int(median(turn.cached_tokens or 0 for turn in turns))
    command = [sys.executable, str(FLOOR), "--model", model]
    command += ["--resident", str(resident), "--suffix", str(suffix)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise ToolError(f"{FLOOR} ended with exit code {done.returncode}; its message is above")
    result: Json = json.loads(done.stdout)
    return result


def _report(out: Path, plan: Plan, server: Json, results: list[Measurement], floor: Json) -> int:
    from tools import report
    from tools.client import number
    from tools.multiturn import mismatches, rows

    table = rows(results)
    floor_ms = number(floor.get("forward_ms"))
    report.print_table(table, sys.stdout)
    print("\n".join(report.summary(table, floor_ms)), flush=True)
    report.write_json(
        out / "multiturn.json", plan=plan, server=server, results=results, floor=floor
    )
    title = f"{server.get('model', 'model')}: cold against cached, {plan.rounds} rounds"
    report.write_plot(out / "multiturn.png", title, table, floor_ms)
    different = mismatches(results)
    if different:
        first = "round {} turn {}".format(*different[0])
        raise ToolError(
            f"cold and cached differ in {len(different)} of {plan.rounds * plan.turns} turns, "
            f"first in {first}; see {out / 'multiturn.json'}"
        )
    return 0
