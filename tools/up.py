"""Owns `kvring up`: a launcher of the same programs that people start by hand, on one machine.

Writes a ring.toml, starts one coordinator and N stages as processes, shows their progress, and ends
all of them together.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tools.client import Client
from tools.elsewhere import Elsewhere, Process
from tools.errors import USAGE, ToolError
from tools.glance import glancing
from tools.loading import loading, opening
from tools.options import DEFAULT_URL
from tools.pull import resolve_model
from tools.security import check_http
from tools.serve import api_keys, listen
from transport.config import (
    HUB,
    OFF,
    TOY,
    Config,
    ConfigError,
    Coordinator,
    Limits,
    Model,
    Ring,
    Stage,
    dumps,
    loads,
)
from transport.emulate import Emulate

STOP_S = 10.0  # for a process to end once it has nothing left to do; then it is killed
QUIET_S = 2.0  # an ending that takes longer says why; with nothing left to do it takes 0.3 s
POLL_S = 0.1
OWN_KEY = "kvring-up"  # name of the key that it looks at its ring with, beside a file of keys
DEFAULT_CONTEXT = 8192  # tokens per slot where neither the model nor the user says less
CONTEXT_STEP = 512  # exact mode's KV views end on it; a capacity that is no multiple is padded


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says, unchecked beyond its types."""

    model: str
    stages: int
    slots: int
    max_model_len: int | None
    dtype: str
    threads: int | None
    drafter: str
    rings: int
    park_mb: int
    idle_ttl_s: float
    verify_share: float
    http: str
    served_model_name: str | None
    api_key: str | None
    api_key_file: Path | None
    record: Path | None
    record_payloads: str
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float = 0.0
    draft_depth: int | None = None
    draft_tokens: int | None = None
    draft_model: str | None = None
    insecure: bool = False
    weights: str = "dtype"
    activations: str = "dtype"
    kernels: str = "auto"
    kv: str = "dtype"


@dataclass(frozen=True, slots=True)
class Child:
    """One process of the ring and where its output goes."""

    name: str
    process: Process
    log: Path

    def last_words(self) -> str:
        """Why it ended: the last line that it printed as an error, or the signal that killed it.

        Events of its log are no reason.
        """
        code = self.process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if line and not line.startswith("{")]
        return said[-1].removeprefix("kvring: ") if said else "it said nothing"


class _InterruptedError(BaseException):
    """SIGINT or SIGTERM came. No Exception: libraries catch those while they are imported."""


class _Interrupts:
    """SIGINT and SIGTERM raise _InterruptedError; while held, they wait for the end of the block.

    A process is started within `hold`: an exception between its fork and its note in the list of
    children would leave it running.
    """

    def __init__(self) -> None:
        self._held = self._came = False
        self._previous = {
            number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if not self._held:
            raise _InterruptedError

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Put signals off."""
        self._held = True
        yield
        self._held = False
        if self._came:
            raise _InterruptedError

    def ignore(self) -> None:
        """From now on a Ctrl-C raises nothing; `again` tells of it."""
        self._held, self._came = True, False

    @property
    def again(self) -> bool:
        """True when one came since `ignore`."""
        return self._came

    def restore(self) -> None:
        """As it was before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run_up(*, elsewhere: Elsewhere | None = None, **options: object) -> int:
    """Run a whole ring until Ctrl-C; 0 when that ended it. Raises ToolError."""
    wanted = Options(**options)  # type: ignore[arg-type]
    own, keys = _keys(wanted)
    folder = Path(tempfile.mkdtemp(prefix="kvring-"))
    children: list[Child] = []
    interrupts = _Interrupts()
    failed = True
    try:
        with opening(wanted.model, sys.stderr):  # the libraries alone take seconds
            config = _plan(wanted, folder)
        if elsewhere is not None:
            config = elsewhere.place(config, folder)
        file = folder / "ring.toml"
        file.write_text(_checked(dumps(config), folder))
        _start(wanted, config, file, keys, children, interrupts, elsewhere)
        _wait_ready(config, children)
        _greet(config, keyed=bool(keys))
        _watch(own, config, children)
    except _InterruptedError:
        failed = False
        return 0
    finally:
        interrupts.ignore()
        _stop(children, interrupts, drain_s=0.0 if failed else Limits().drain_s)
        interrupts.restore()
        if failed and children:
            print(f"the processes' output is kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1


def _plan(wanted: Options, folder: Path) -> Config:
    """Rings on this machine: layers split evenly, cores shared, links in the run's folder."""
    if not wanted.insecure:
        keyed = wanted.api_key is not None or wanted.api_key_file is not None
        check_http(wanted.http, keys=keyed, insecure=False)
    http = _free_address(wanted.http)
    path, total, longest = _model(wanted.model)
    if wanted.stages > total:
        raise ToolError(f"--stages {wanted.stages}: the model has only {total} layers", code=USAGE)
    length = wanted.max_model_len or min(longest, DEFAULT_CONTEXT)
    if length > longest:
        raise ToolError(
            f"--max-model-len {length}: the model's context ends at {longest}", code=USAGE
        )
    draft = _draft_model(wanted)
    computing = wanted.stages * wanted.rings + (draft is not None)
    cores = os.cpu_count() or 1
    # two where one is a stage's share: while one conversation runs only one stage computes
    threads = wanted.threads or max(min(2, cores), cores // computing)
    name = wanted.served_model_name or (wanted.model if path == TOY else _name(wanted.model))
    return Config(
        Model(
            path,
            name,
            wanted.dtype,
            weights=wanted.weights,
            activations=wanted.activations,
            kv=wanted.kv,
        ),
        tuple(_ring(wanted, index, total, threads, folder) for index in range(wanted.rings)),
        Coordinator(
            http,
            wanted.drafter,
            wanted.draft_depth,
            wanted.draft_tokens,
            wanted.verify_share,
            draft,
            state=OFF,  # its stages end with it: nothing could be warm when it starts again
        ),
        Limits(
            slots=wanted.slots,
            max_model_len=length,
            idle_ttl_s=wanted.idle_ttl_s,
            park_bytes=wanted.park_mb * 1_000_000,
        ),
        Emulate(wanted.delay_ms, wanted.jitter_ms, wanted.mbit),
    )


def _checked(text: str, folder: Path) -> str:
    """The text of a ring.toml, once it is known that the children will take it."""
    try:
        loads(text, folder=folder, file="these options make a ring.toml that is wrong")
    except ConfigError as error:
        raise ToolError(str(error), code=USAGE) from None
    return text


def _ring(wanted: Options, index: int, total: int, threads: int, folder: Path) -> Ring:
    """Stages s0, s1, ... of the first ring, r1s0, r1s1, ... of the second, and so on."""
    cuts = [total * i // wanted.stages for i in range(wanted.stages + 1)]
    names = [f"r{index}s{i}" if index else f"s{i}" for i in range(wanted.stages)]
    stages = tuple(
        Stage(
            name,
            f"ipc://{folder}/{name}.sock",
            (cuts[i], cuts[i + 1]),
            threads=threads,
            kernels=wanted.kernels,
        )
        for i, name in enumerate(names)
    )
    verdicts = f"r{index}verdicts" if index else "verdicts"
    return Ring(f"ring{index}", f"ipc://{folder}/{verdicts}.sock", stages)


def _free_address(wanted: str) -> str:
    """The address with a port of its own for port 0. Raises ToolError where it can't be had.

    Asked before anything is started: what listens there might be another ring, and that it is
    ready would be taken for this one's word.
    """
    with listen(wanted) as listener:
        return f"{wanted.rpartition(':')[0]}:{listener.getsockname()[1]}"


def _model(name: str) -> tuple[str, int, int]:
    """Path, number of layers and longest context of a model."""
    from pipeline.load import describe_model, pinned
    from pipeline.model import ModelError

    try:
        if name.startswith(HUB):
            path = pinned(name)
        else:
            path = TOY if name == TOY else str(resolve_model(name, Path("models")).resolve())
        layers, context = describe_model(path)
    except ModelError as error:
        raise ToolError(str(error), code=USAGE) from None
    return path, layers, context


def _draft_model(wanted: Options) -> str | None:
    """The draft model's path; None where the drafter is another."""
    if (wanted.drafter == "model") != (wanted.draft_model is not None):
        raise ToolError("--drafter model and --draft-model go together", code=USAGE)
    return None if wanted.draft_model is None else _model(wanted.draft_model)[0]


def _name(model: str) -> str:
    return Path(model).stem if model.endswith(".gguf") else Path(model).name


def _start(
    wanted: Options,
    config: Config,
    file: Path,
    keys: str,
    children: list[Child],
    interrupts: _Interrupts,
    elsewhere: Elsewhere | None,
) -> None:
    extra: list[str] = []
    if wanted.record is not None:
        extra = [
            "--record",
            str(wanted.record.absolute()),
            "--record-payloads",
            wanted.record_payloads,
        ]
    commands = {"coordinator": ["coord", "--ring", str(file)]}
    if wanted.insecure:
        commands["coordinator"].append("--insecure")
    if keys:
        held = file.parent / "api-keys"  # not on a command line: ps shows those
        held.touch(mode=0o600)
        held.write_text(keys)
        commands["coordinator"] += ["--api-key-file", str(held)]
    here = config.rings if elsewhere is None else ()
    for stage in [stage for ring in here for stage in ring.stages]:
        commands[stage.name] = ["stage", "--ring", str(file), "--name", stage.name]
    for name, arguments in commands.items():
        log = file.parent / f"{name}.log"
        with interrupts.hold(), log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.cli", *arguments, "--with-parent", *extra],
                stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            )
            children.append(Child(name, process, log))
    if elsewhere is not None:
        with interrupts.hold():
            started = elsewhere.start(file, extra, process)
            children += [Child(*each, file.parent / f"{each[0]}.log") for each in started.items()]


def _keys(wanted: Options) -> tuple[str | None, str]:
    """The key that this process asks with, and the lines of the coordinator's file of keys.

    Of a file of keys none may be known here, or an admin's: so one is drawn, for this run alone.
    """
    from coord.http.keys import new_key

    found = api_keys(wanted.api_key, wanted.api_key_file)
    own = wanted.api_key
    if found and own is None:
        own, drawn = new_key(OWN_KEY, admin=True)
        found = (*found, drawn)
    return own, "".join(f"{key.line()}\n" for key in found)


def _fail_if_one_ended(children: list[Child]) -> None:
    for child in children:
        code = child.process.poll()
        if code is not None:
            raise ToolError(f"{child.name} ended with exit code {code}: {child.last_words()}")


def _wait_ready(config: Config, children: list[Child]) -> None:
    """Show each stage's progress until a token has been round the ring."""
    with (
        Client(f"http://{config.coordinator.http}") as client,
        loading(config.rings, sys.stderr) as show,
    ):
        while True:
            _fail_if_one_ended(children)
            try:
                state = client.ready()
            except ToolError:
                show(None)
            else:
                show(state)
                if state.ready:
                    return
            time.sleep(POLL_S)


def _greet(config: Config, *, keyed: bool) -> None:
    url = f"http://{config.coordinator.http}"
    layers = "; ".join(
        ", ".join(f"{s.name} [{s.layers[0]}, {s.layers[1]})" for s in ring.stages)
        for ring in config.rings
    )
    body = {
        "model": config.model.name,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 32,
    }
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    model = config.model
    precision = [model.dtype]
    precision += [f"{model.weights} weights"] if model.weights != "dtype" else []
    precision += [f"{model.activations} activations"] if model.activations != "dtype" else []
    precision += [f"{model.kv} KV"] if model.kv != "dtype" else []
    print(f"{model.name} ({', '.join(precision)}) is ready at {url}")
    print(
        f"  stages: {layers}; {config.limits.slots} slots of {config.limits.max_model_len} tokens"
    )
    if config.emulate.on:
        link = config.emulate
        print(
            f"  every link is made slower: {link.delay_ms:g} ms one way, "
            f"up to {link.jitter_ms:g} ms more, {f'{link.mbit:g}' if link.mbit else 'any'} Mbit/s"
        )
    print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
    where = "" if url == DEFAULT_URL else f" --url {url}"
    where += " --api-key KEY" if keyed else ""
    print(f"  kvring chat{where}, kvring status{where}; Ctrl-C ends it", flush=True)


def _watch(own_key: str | None, config: Config, children: list[Child]) -> None:
    url = f"http://{config.coordinator.http}"
    with Client(url, own_key) as client, glancing(client, sys.stderr) as look:
        while True:
            _fail_if_one_ended(children)
            look()
            time.sleep(0.5)


def _stop(children: list[Child], interrupts: _Interrupts, drain_s: float) -> None:
    """End every child, the coordinator first: it lets running turns end. No process outlives this.

    drain_s: what that may take; 0 where turns can't end, since a stage is gone.
    """
    coordinator, stages = children[:1], children[1:]
    if drain_s:
        _end(coordinator, interrupts, drain_s)
    for child in children:
        _at_once(child)
    _end([*coordinator, *stages], interrupts, 0.0)


def _end(children: list[Child], interrupts: _Interrupts, drain_s: float) -> None:
    """Ask all, wait, kill what is left; a second signal ends a drain."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    began = time.monotonic()
    deadline = began + drain_s + STOP_S
    told = hurried = not drain_s
    while any(child.process.poll() is None for child in children):
        now = time.monotonic()
        if now > deadline:
            break
        if interrupts.again and not hurried:
            hurried, deadline = True, now + STOP_S
            for child in children:
                _at_once(child)
        elif not told and now > began + QUIET_S:
            told = True
            text = f"replies that run get {drain_s:g} s to end; Ctrl-C again ends all at once"
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.02)
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()


def _at_once(child: Child) -> None:
    """The end of its standard input tells a child to wait for nothing."""
    if child.process.stdin is not None:
        child.process.stdin.close()
