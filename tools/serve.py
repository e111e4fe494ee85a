"""Owns the two daemons' processes: configuration in, signals, exit codes. `kvring stage|coord`.

`kvring up` starts these same programs; nothing here knows whether a person or `up` did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn

from tools import events
from tools.errors import USAGE, ToolError
from tools.moved import as_seen_by, on_moved
from tools.security import check_http, check_link, trust_of_coordinator, trust_of_stage
from tools.stop import Stop, first
from transport.config import OFF, Config, ConfigError, Limits, Ring, Stage, dumps, load
from transport.framelog import LogHeader, Payloads
from transport.link import LinkError
from transport.recorder import Recorder
from transport.trust import CoordinatorTrust, StageTrust

if TYPE_CHECKING:
    from fastapi import FastAPI

    from coord.coordinator import Coordinator
    from coord.drafting import DraftRunner
    from coord.gateway import Settings
    from coord.history import History
    from coord.http.keys import Key
    from coord.http.limits import Door
    from coord.store import Store
    from coord.tokenizer import Tokenizer

# So often a thread of GNU OpenMP looks for the others before it sleeps: some 10 us, as long as they
# take within a layer. Its own 300,000 keep cores from other stages between two frames.
SPINS = "10000"


def set_threads(count: int) -> None:
    """So many for torch in this process, before it is imported: that is when OpenMP looks."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def run_stage(
    *,
    ring: Path,
    name: str,
    device: str | None,
    record: Path | None,
    record_payloads: str,
    insecure: bool = False,
    with_parent: bool = False,
) -> int:
    """Run one stage until SIGINT or SIGTERM; 0 when it ended by one of them.

    It finishes the frame at hand first.
    """
    config = load_config(ring)
    try:
        which, spec = config.find(name)
    except KeyError as error:
        raise ToolError(str(error.args[0]), code=USAGE) from None
    events.configure()
    trust = trust_of_stage(config, which, spec)
    check_link(f"stage {name}", spec.listen, keys=trust is not None, insecure=insecure)
    set_threads(spec.threads)
    incarnation = secrets.randbits(63)
    with _recorder("stage", name, incarnation, config, record, record_payloads) as recorder:
        return asyncio.run(
            _stage(ring, config, which, spec, device, incarnation, recorder, with_parent, trust)
        )


async def _stage(
    file: Path,
    config: Config,
    ring: Ring,
    spec: Stage,
    device: str | None,
    incarnation: int,
    recorder: Recorder | None,
    with_parent: bool,
    trust: StageTrust | None,
) -> int:
    from pipeline.daemon import Worker, run_stage
    from pipeline.load import load_model
    from pipeline.model import ModelError

    stop = Stop(with_parent=with_parent)
    worker = Worker(
        ring,
        spec,
        config.limits,
        lambda progress: load_model(config, ring, spec, device or spec.device, progress),
        incarnation,
        recorder,
        config.emulate,
        trust,
        device,
    )
    on_moved(file, config, lambda found: worker.move(as_seen_by(spec.name, ring, found)))
    try:
        await run_stage(worker, incarnation, stop.asked)
    except (LinkError, ModelError) as error:
        raise ToolError(f"stage {spec.name}: {error}") from None
    structlog.get_logger().info("stopped", stage=spec.name)
    return 0


def run_coord(
    *,
    ring: Path,
    http: str | None,
    api_key: str | None,
    api_key_file: Path | None = None,
    state: str | None = None,
    record: Path | None,
    record_payloads: str,
    insecure: bool = False,
    with_parent: bool = False,
) -> int:
    """Run the coordinator until SIGINT or SIGTERM; 0 when it ended by one of them.

    Turns that run may end first, within limits.drain_s; a second signal ends it at once.
    """
    config = load_config(ring)
    events.configure()
    if config.coordinator.drafter == "model":
        set_threads(config.rings[0].head.threads)
    incarnation = secrets.randbits(63)
    keys = api_keys(api_key, api_key_file)
    trust = trust_of_coordinator(config)
    for each in config.rings:
        who = f"the coordinator of ring {each.name}"
        check_link(who, each.listen, keys=trust is not None, insecure=insecure)
    check_http(http or config.coordinator.http, keys=bool(keys), insecure=insecure)
    listener = listen(http or config.coordinator.http)
    with listener, contextlib.ExitStack() as stack:

        def open_log(first_epoch: int, vocabulary: int) -> Recorder | None:
            recording = _recorder(
                "coordinator",
                "coord",
                incarnation,
                config,
                record,
                record_payloads,
                first_epoch=first_epoch,
                vocabulary=vocabulary,
            )
            return stack.enter_context(recording)

        folder = record or Path("logs")
        file = _state_file(state or config.coordinator.state, ring)
        return asyncio.run(
            _coord(
                ring,
                config,
                listener,
                keys,
                incarnation,
                open_log,
                folder,
                with_parent,
                trust,
                file,
            )
        )


def _state_file(said: str | None, ring: Path) -> Path | None:
    """Where the coordinator's memory is kept; beside ring.toml unless something else is said."""
    if said is None:
        return ring.parent / ".kvring" / f"{ring.stem}.sqlite"
    try:
        return None if said == OFF else Path(said).expanduser()
    except RuntimeError as error:
        raise ToolError(f"--state {said}: {error}", code=USAGE) from None


async def _coord(
    file: Path,
    config: Config,
    listener: socket.socket,
    api_keys: tuple[Key, ...],
    incarnation: int,
    open_log: Callable[[int, int], Recorder | None],
    folder: Path,
    with_parent: bool,
    trust: CoordinatorTrust | None,
    state: Path | None,
) -> int:
    from coord.coordinator import Coordinator, new_epoch
    from coord.gateway import build_app
    from coord.http.limits import Door
    from coord.tokenizer import load_tokenizer
    from pipeline.load import text_path

    stop = Stop(with_parent=with_parent)
    limits = config.limits
    try:
        where = await asyncio.to_thread(text_path, config.model.path)
        tokenizer = await asyncio.to_thread(load_tokenizer, where)
    except (ValueError, OSError) as error:
        raise ToolError(f"tokenizer: {error}") from None
    drafts = await _drafts(config, tokenizer.vocabulary)
    store = None if state is None else _store(state)
    history = _history(store, tokenizer)
    epoch = new_epoch()
    coordinator = Coordinator(
        config,
        incarnation,
        tokenizer.vocabulary,
        open_log(epoch, tokenizer.vocabulary),
        folder,
        drafts,
        trust=trust,
        store=store,
        first_epoch=epoch,
    )
    try:
        await coordinator.open()
    except LinkError as error:
        raise ToolError(f"coordinator: {error}") from None
    on_moved(file, config, lambda found: coordinator.move(found.rings))
    door = Door(coordinator.counters, per_key_turns=limits.per_key_turns)
    app = build_app(coordinator, tokenizer, _settings(config, api_keys), door, history)
    server = _http_server(app, limits)
    host, port = listener.getsockname()[:2]
    structlog.get_logger().info("listening", http=f"http://{host}:{port}")

    async def watch() -> None:
        try:
            await first(stop.asked.wait(), coordinator.wait())
            if stop.asked.is_set():
                await _drain(coordinator, door, stop, limits.drain_s)
        finally:
            if drafts is not None:
                drafts.close()
            await coordinator.close()  # open streams end with an error event
            server.should_exit = True

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        if drafts is not None:
            group.create_task(drafts.run(coordinator.drafted))
        group.create_task(server.serve(sockets=[listener]))
    structlog.get_logger().info("stopped", stage="coordinator")
    return 0


async def _drain(coordinator: Coordinator, door: Door, stop: Stop, limit_s: float) -> None:
    """Let the turns end that run, within limit_s, unless a second signal comes."""
    log = structlog.get_logger()
    if door.running and not stop.now.is_set():
        log.info("draining", turns=door.running, limit_s=limit_s)
    await first(door.drain(limit_s), stop.now.wait(), coordinator.wait())
    if door.running:
        log.warning("turns_cut_off", turns=door.running)


def _settings(config: Config, api_keys: tuple[Key, ...]) -> Settings:
    from coord.gateway import Settings

    limits = config.limits
    return Settings(
        api_keys=api_keys, deadline_s=limits.deadline_s, per_key_turns=limits.per_key_turns
    )


async def _drafts(config: Config, vocabulary: int) -> DraftRunner | None:
    """The draft model, loaded, where ring.toml asks for one."""
    if config.coordinator.drafter != "model":
        return None
    from coord.drafting import DraftRunner
    from pipeline.model import ModelError
    from tools.drafting import load_draft_model

    try:
        model, tokens = await asyncio.to_thread(load_draft_model, config, vocabulary)
    except ModelError as error:
        raise ToolError(str(error)) from None
    structlog.get_logger().info("draft_model", path=config.coordinator.draft_model)
    return DraftRunner(model, tokens)


def _store(file: Path) -> Store | None:
    """The state file; without one (it says why) a restart is cold, and nothing else is amiss."""
    from coord.store import Store, StoreError

    log = structlog.get_logger()
    try:
        store = Store(file)
    except StoreError as error:
        log.warning("state_not_kept", reason=str(error))
        return None
    if store.moved is not None:
        log.warning("state_damaged", file=str(file), moved_to=str(store.moved))
    return store


def _history(store: Store | None, tokenizer: Tokenizer) -> History:
    """What the model said, to be found again after a restart."""
    from coord.history import History

    if store is None:
        return History()
    history = History(write=store.say, decode=tokenizer.decode)
    for key, body in store.spoken():
        history.restore(key, body)
    return history


def _http_server(app: FastAPI, limits: Limits) -> _Server:
    from coord.http.connection import Patience, protocol

    patience = Patience(write_s=limits.write_timeout_s, connections=limits.connections)
    return _Server(
        uvicorn.Config(
            app,
            http=protocol(patience),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=3,
        )
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def api_keys(key: str | None, file: Path | None) -> tuple[Key, ...]:
    """Of the command line the operator's own key, of the file everybody's."""
    from coord.http.keys import hold, holds_plain_keys, parse_keys

    try:
        keys = () if key is None else (hold("default", key, admin=True),)
    except ValueError as error:
        raise ToolError(f"--api-key: {error}", code=USAGE) from None
    if file is None:
        return keys
    try:
        text = file.read_text(encoding="utf-8")
        found = parse_keys(text)
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ToolError(f"--api-key-file {file}: {error}", code=USAGE) from None
    if not found:
        raise ToolError(f"--api-key-file {file}: no key in it", code=USAGE)
    if mode & 0o077 and holds_plain_keys(text):
        raise ToolError(
            f"--api-key-file {file}: others can read it (mode {stat.S_IMODE(mode):04o}) and it "
            f"holds keys in plain text: chmod 600 {file}, or keep hashes (kvring apikey NAME)",
            code=USAGE,
        )
    return (*keys, *found)


def listen(address: str) -> socket.socket:
    """A listening TCP socket. ToolError names the address when it can't be had."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        advice = "stop what listens there, or choose another --http HOST:PORT"
        raise ToolError(f"HTTP address {address}: {reason}; {advice}") from None
    return listener


def load_config(path: Path) -> Config:
    """A ring.toml. ToolError names the key and the line."""
    try:
        return load(path)
    except (ConfigError, OSError) as error:
        raise ToolError(str(error), code=USAGE) from None


@contextlib.contextmanager
def _recorder(
    role: str,
    name: str,
    incarnation: int,
    config: Config,
    directory: Path | None,
    payloads: str,
    *,
    first_epoch: int = 0,
    vocabulary: int = 0,
) -> Iterator[Recorder | None]:
    if directory is None:
        yield None
        return
    header = LogHeader(
        role,
        name,
        incarnation,
        _version(),
        time.time_ns(),
        config=dumps(config),
        first_epoch=first_epoch,
        vocabulary=vocabulary,
    )
    try:
        recorder = Recorder(directory, header, Payloads[payloads.upper()])
    except OSError as error:
        raise ToolError(f"--record {directory}: {error.strerror or error}") from None
    try:
        yield recorder
    finally:
        recorder.close()


def _version() -> str:
    try:
        return version("kvring")
    except PackageNotFoundError:
        return "source"
