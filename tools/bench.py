"""Owns `kvring bench`: the options of each measurement, and the order of its steps."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.errors import ToolError

if TYPE_CHECKING:  # at run time only when a measurement runs: --help must stay quick
    from tools.client import Json
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
    from statistics import median

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
