"""Owns the command line `kvring`: names, options and help; each command lives in its own module.

A command's module is imported only when the command runs, so that --help costs no torch. Expected
failures end as one line on stderr: exit code 2 for a wrong option, name or configuration, 1 for
what could not be done.
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tools import bench, options, prepare
from tools.errors import USAGE, ToolError
from tools.framelogs import commands as framelogs

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

app = typer.Typer(
    name="kvring",
    help="Serve a language model across a ring of machines; never prefill a conversation twice.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(framelogs.app, name="log")


def main() -> None:
    """The console script: run the command, print an expected failure, exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = app(args=arguments, prog_name="kvring", standalone_mode=False)
        sys.stdout.flush()
    except ToolError as error:
        return _fail(error.told, error.code)
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} (see: kvring --help)", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`kvring status | head -1`)
        sys.stdout = None
        return 1
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"kvring: {' '.join(message.split())}", file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("kvring")
    except PackageNotFoundError:
        number = "(source tree, not installed)"
    print(f"kvring {number}")
    raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _command(name: str) -> Any:
    """The function `module.function`, imported only now."""
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(f"tools.{module}"), function)


@app.command()
def up(
    context: typer.Context,
    *,
    model: options.Model = "smollm2-135m",
    stages: options.Stages = 3,
    slots: options.Slots = 4,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Precision = options.Dtype.BFLOAT16,
    weights: options.Weights = options.WeightKind.DTYPE,
    activations: options.Activations = options.ActivationKind.DTYPE,
    kernels: options.Kernels = options.KernelKind.AUTO,
    kv: options.Kv = options.KvKind.DTYPE,
    threads: options.Threads = None,
    drafter: options.Drafter = options.DrafterKind.LOOKUP,
    draft_model: options.DraftModel = None,
    rings: options.Rings = 1,
    park_mb: options.ParkMb = 0,
    idle_ttl_s: options.IdleTtl = 0.0,
    verify_share: options.VerifyShare = 0.0,
    http: options.Http = "127.0.0.1:8000",
    served_model_name: options.ServedModelName = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    record: options.Record = None,
    record_payloads: options.RecordPayloads = options.Payloads.NONE,
    delay_ms: options.Delay = 0.0,
    jitter_ms: options.Jitter = 0.0,
    mbit: options.Mbit = 0.0,
    draft_depth: options.DraftDepth = None,
    draft_tokens: options.DraftTokens = None,
    insecure: options.Insecure = False,
    on: options.RunOn = options.On.HERE,
    ray_address: options.RayAddress = None,
    ray_place: options.RayPlace = None,
    ray_gpus: options.RayGpus = None,
    ray_cpus: options.RayCpus = None,
    ray_wait_s: options.RayWait = None,
) -> int:
    """Run a whole ring on this machine, with its HTTP API. Ctrl-C ends all of it."""
    _check_address(http)
    _check_record(record, record_payloads)
    wanted = {name: getattr(value, "value", value) for name, value in context.params.items()}
    for name, value in wanted.items():
        _check_finite(name, value)
    if wanted.pop("on") == options.On.RAY:
        return _code(_command("on_ray.command.run_up_on_ray")(**wanted))
    for name in [name for name in wanted if name.startswith("ray_")]:
        if wanted.pop(name) is not None:
            raise ToolError(f"--{name.replace('_', '-')} goes with --on ray", code=USAGE)
    return _code(_command("up.run_up")(**wanted))


@app.command()
def stage(
    *,
    ring: options.RingFile,
    name: Annotated[str, typer.Option(metavar="NAME", help="Which [[stage]] of the file to run.")],
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda:0, … [default: ring.toml's].")
    ] = None,
    record: options.Record = None,
    record_payloads: options.RecordPayloads = options.Payloads.NONE,
    insecure: options.Insecure = False,
    with_parent: options.WithParent = False,
) -> int:
    """Run one stage of a ring on this machine."""
    options.check_ring(ring)
    _check_record(record, record_payloads)
    return _code(
        _command("serve.run_stage")(
            ring=ring,
            name=name,
            device=device,
            record=record,
            record_payloads=record_payloads.value,
            insecure=insecure,
            with_parent=with_parent,
        )
    )


@app.command()
def coord(
    *,
    ring: options.RingFile,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="HTTP address [default: ring.toml's].")
    ] = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    state: options.State = None,
    record: options.Record = None,
    record_payloads: options.RecordPayloads = options.Payloads.NONE,
    insecure: options.Insecure = False,
    with_parent: options.WithParent = False,
) -> int:
    """Run the coordinator of a ring, with the HTTP API."""
    options.check_ring(ring)
    _check_record(record, record_payloads)
    if http is not None:
        _check_address(http)
    return _code(
        _command("serve.run_coord")(
            ring=ring,
            http=http,
            api_key=api_key,
            api_key_file=api_key_file,
            state=state,
            record=record,
            record_payloads=record_payloads.value,
            insecure=insecure,
            with_parent=with_parent,
        )
    )


@app.command()
def chat(
    *,
    url: options.Url = options.DEFAULT_URL,
    api_key: options.ApiKey = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="[default: the server's first model]")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest reply [default: the server's].")
    ] = None,
) -> int:
    """Talk to the model in the terminal. Shows what each turn had to prefill."""
    return _code(
        _command("chat.run_chat")(
            url=url,
            api_key=api_key,
            model=model,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
        )
    )


@app.command()
def status(
    *,
    url: options.Url = options.DEFAULT_URL,
    api_key: options.ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="The server's JSON as it is.")] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show the first words of what is resident.")
    ] = False,
    evict: Annotated[
        int | None, typer.Option(metavar="SLOT", min=0, help="Give a slot up now.")
    ] = None,
    keep: Annotated[
        tuple[int, float] | None,
        typer.Option(metavar="SLOT SECONDS", help="Don't give a slot up; 0 s: as any other."),
    ] = None,
    ring: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose slot [default: the only ring's].")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Again and again, until Ctrl-C.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Argument(metavar="[SECONDS]", help="Of --watch [default: 1].")
    ] = None,
) -> int:
    """Show rings, stages and slots. Exit code 0: ready, 3: not ready, 1: unreachable."""
    if keep is not None:
        _check_finite("keep", keep[1])
    if seconds is not None and not watch:
        raise ToolError(f"{seconds:g}: seconds are for --watch", code=USAGE)
    if seconds is not None and not 0.1 <= seconds <= 3600:
        raise ToolError(f"--watch {seconds:g}: 0.1 to 3600 seconds", code=USAGE)
    return _code(
        _command("status.run_status")(
            url=url,
            api_key=api_key,
            as_json=json,
            preview=preview,
            evict=evict,
            keep=keep,
            ring=ring,
            watch_s=(1.0 if seconds is None else seconds) if watch else None,
        )
    )


app.command()(prepare.doctor)
app.command()(prepare.plan)


@app.command()
def replay(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Frame logs, or folders of them.")
    ],
    *,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute this stage's frames with the real block."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Of the block [default: as recorded].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|FILE.gguf", help="Of the block [default: as recorded]."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Of a frame's largest value, if not exact.")
    ] = 0.02,
    ring: Annotated[
        str | None,
        typer.Option(metavar="RING.TOML", help="Ask its running stages again; same tokens?"),
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="FACTOR", help="Of --ring; 0 for without pauses.")
    ] = 1.0,
    until: Annotated[
        str | None,
        typer.Option(metavar="N|EPOCH,SEQ|FILE:BYTE", help="Stop there; show the core's state."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Replay frame logs into fresh cores: every frame sent must be equal. Exit code 1: it differs.

    With --stage through a real block instead, with --ring on a live ring.
    """
    if stage is not None and ring is not None:
        raise ToolError("--stage and --ring: one at a time", code=USAGE)
    for name, value in (("tolerance", tolerance), ("speed", speed)):
        _check_finite(name, value)
        if value < 0:
            raise ToolError(f"--{name} {value:g}: must not be negative", code=USAGE)
    return _code(
        _command("replay.command.run_replay")(
            paths=paths,
            stage=stage,
            device=device,
            model=model,
            tolerance=tolerance,
            ring=ring,
            speed=speed,
            until=until,
            as_json=json,
        )
    )


@app.command()
def apikey(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The tenant; two keys of one name share.")
    ],
    *,
    admin: Annotated[
        bool, typer.Option("--admin", help="It sees and may evict everybody's slots.")
    ] = False,
    turns: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=999_999, help="Turns at once [default: ring.toml's limit]."
        ),
    ] = None,
) -> int:
    """Draw an API key: prints the key (once) and the line for --api-key-file."""
    return _code(_command("apikey.run_apikey")(name=name, admin=admin, turns=turns))


@app.command()
def keygen(
    *,
    ring: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A ring.toml: keys for all its processes.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='A stage, or "coordinator"; may be given again.'),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where [default: keys beside ring.toml]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace keys that are there.")] = False,
) -> int:
    """Draw CURVE keys for a ring's links: writes files, prints the lines for ring.toml."""
    if ring is not None:
        options.check_ring(ring)
    return _code(
        _command("keygen.run_keygen")(ring=ring, names=name or [], folder=folder, force=force)
    )


@app.command()
def sim(
    *,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many [default: 100; 1 with --seed].")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The first one [default: 0].")] = None,
    faults: Annotated[
        str, typer.Option(metavar="LIST", help="Comma-separated kinds, all or none.")
    ] = "all",
    stages: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Of a ring.")] = "1-6",
    rings: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Of a world.")] = "1-3",
    clients: Annotated[str, typer.Option(metavar="N|LOW-HIGH", help="Of a world.")] = "1-16",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes that play.")] = 1,
    log: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where frame logs go [logs/sim].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> int:
    """Play whole rings with faults in virtual time, each drawn from a seed. 1: one has failed."""
    named = {"stages": stages, "rings": rings, "clients": clients, "faults": faults}
    return _code(
        _command("sim.hunt.run_sim")(
            seeds=seeds, seed=seed, jobs=jobs, log=log, as_json=json, **named
        )
    )


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="smollm2-135m, or a hub id org/name.")
    ],
    models: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where models are kept.")
    ] = Path("models"),
) -> int:
    """Fetch a model; prints where it lies."""
    print(_command("pull.pull")(name, models))
    return 0


def _code(result: object) -> int:
    """A command may return its exit code, or nothing for success."""
    return result if isinstance(result, int) else 0


def _check_record(record: Path | None, payloads: options.Payloads) -> None:
    if record is None and payloads is not options.Payloads.NONE:
        text = f"--record-payloads {payloads}: needs --record DIR, else nothing is written"
        raise ToolError(text, code=USAGE)


def _check_finite(option: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        name = option.replace("_", "-")
        raise ToolError(f"--{name} {value:g}: must be a finite number", code=USAGE)


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ToolError(f"--http {address}: must be HOST:PORT, port 0 to 65535", code=USAGE)


if __name__ == "__main__":
    main()
