"""Owns ring.toml: its text -> frozen dataclasses, each value checked once, and back.

Every error is a ConfigError that names the key and the line. Opens no socket and loads no model:
whether the last stage reaches the model's last layer is only known at the roll call.
See docs/ring-toml.md for every key.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from transport.codec import MAX_PAYLOAD_BYTES, MAX_SLOTS, MAX_STAGES
from transport.emulate import Emulate
from transport.toml_lines import key_lines
from transport.toml_table import HUB as HUB
from transport.toml_table import TOY as TOY
from transport.toml_table import ConfigError as ConfigError
from transport.toml_table import Table, shown
from transport.toml_text import pairs

OFF = "off"
DTYPES = ("bfloat16", "float32", "float16")
KERNELS = ("auto", "torch", "native")
WEIGHTS = ("dtype", "int8", "int4")
ACTIVATIONS = ("dtype", "fp8")
KV = ("dtype", "int8", "fp8")
DRAFTERS = ("off", "lookup", "model")
MAX_CONFIG_BYTES = 1 << 20
MAX_RINGS = 64
MAX_DOTS = 256
_HTTP = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. path: absolute file or folder, "hf://org/name" or "toy".

    name: what clients call it. weights: of the layers' linears; activations: between stages; kv:
    rows in slots; all as dtype says, or as WEIGHTS, ACTIVATIONS and KV name.
    """

    path: str
    name: str
    dtype: str = "bfloat16"
    exact: bool = True
    weights: str = "dtype"
    activations: str = "dtype"
    kv: str = "dtype"


@dataclass(frozen=True, slots=True)
class Coordinator:
    """http: host:port of the HTTP API. drafter: how next tokens are guessed, see DRAFTERS.

    draft_model: as Model.path, for the drafter "model".
    draft_depth: most verify frames of a turn in flight; draft_tokens: most drafts of one frame;
    None for as many as pay. verify_share: of the warm turns, run again cold in idle time and
    compared; 0 for none. public_key and secret_key_file: of CURVE, both or neither; where the
    coordinator has them every stage has. state: the path of the state file, "off" for none, or
    None for the default, which is beside ring.toml.
    """

    http: str = "127.0.0.1:8000"
    drafter: str = "lookup"
    draft_depth: int | None = None
    draft_tokens: int | None = None
    verify_share: float = 0.0
    draft_model: str | None = None
    public_key: str | None = None
    secret_key_file: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of everything that could grow; see docs/ring-toml.md.

    max_model_len: tokens of prompt and reply. chunk_tokens: prefill tokens of one frame;
    shared_chunk_tokens: the same while another turn decodes. window_frames: Runs in flight per
    ring, None for as many as keep the stages busy. frame_timeout_s: a frame without a verdict for
    this long counts as lost. idle_ttl_s: rows that nobody has used for so long are freed, 0 for
    never. park_bytes: host memory per stage for rows of conversations that lost their slot.
    resume_s: a turn whose ring was lost, or that came since, fails when no ring is ready so
    long after the loss. From deadline_s on: of the HTTP API.
    """

    slots: int = 4
    max_model_len: int = 4096
    chunk_tokens: int = 256
    shared_chunk_tokens: int = 64
    window_frames: int | None = None
    queue_turns: int = 256
    heartbeat_s: float = 1.0
    lost_after_s: float = 5.0
    frame_timeout_s: float = 30.0
    resume_s: float = 60.0
    idle_ttl_s: float = 0.0
    park_bytes: int = 0
    send_timeout_s: float = 10.0
    max_frame_bytes: int = MAX_PAYLOAD_BYTES
    deadline_s: float = 3600.0
    per_key_turns: int = 0
    write_timeout_s: float = 30.0
    connections: int = 512
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One daemon. address: where others send its frames; bind: where it listens, if different.

    layers: [first, last). kernels: on a CPU, see KERNELS; "auto" takes native ones where they
    serve. public_key (Z85) and secret_key_file (absolute): of CURVE. layer_ms: for benches, what
    each layer takes at least.
    """

    name: str
    address: str
    layers: tuple[int, int]
    device: str = "cpu"
    threads: int = 1
    bind: str | None = None
    public_key: str | None = None
    secret_key_file: str | None = None
    layer_ms: float = 0.0
    kernels: str = "auto"

    @property
    def listen(self) -> str:
        """Where the stage's PULL socket binds."""
        return self.bind or self.address


@dataclass(frozen=True, slots=True)
class Ring:
    """Stages in order of their layers. verdicts: the coordinator's PULL socket for this ring."""

    name: str
    verdicts: str
    stages: tuple[Stage, ...]
    bind: str | None = None
    spare: bool = False  # takes turns only while another ring is lost

    @property
    def listen(self) -> str:
        """Where the coordinator's PULL socket for this ring binds."""
        return self.bind or self.verdicts

    @property
    def head(self) -> Stage:
        """The first stage: the coordinator sends to it."""
        return self.stages[0]

    @property
    def layers_total(self) -> int:
        """Layers that the stages hold together."""
        return self.stages[-1].layers[1]

    def next_address(self, stage: Stage) -> str:
        """Where `stage` sends its frames: the stage after it, or the coordinator for the tail."""
        after = self.stages.index(stage) + 1
        return self.verdicts if after == len(self.stages) else self.stages[after].address


@dataclass(frozen=True, slots=True)
class Config:
    """All of ring.toml. Stage and ring names are unique in the whole file."""

    model: Model
    rings: tuple[Ring, ...]
    coordinator: Coordinator = Coordinator()
    limits: Limits = field(default_factory=Limits)
    emulate: Emulate = field(default_factory=Emulate)

    def find(self, stage: str) -> tuple[Ring, Stage]:
        """The stage of that name and its ring. Raises KeyError whose text lists the names."""
        for ring in self.rings:
            for each in ring.stages:
                if each.name == stage:
                    return ring, each
        known = ", ".join(each.name for ring in self.rings for each in ring.stages)
        raise KeyError(f"no stage {stage!r} in ring.toml; there are {known}")


def load(path: str | os.PathLike[str]) -> Config:
    """Read a ring.toml. Raises ConfigError; OSError where the file can't be read."""
    file = Path(path)
    with file.open("rb") as stream:
        data = stream.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(str(file), 1, None, f"more than {MAX_CONFIG_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(str(file), line, None, "not UTF-8 text") from None
    return loads(text, folder=file.parent, file=str(file))


def loads(text: str, *, folder: str | os.PathLike[str] = ".", file: str = "ring.toml") -> Config:
    """Check a ring.toml's text; relative paths mean relative to `folder`. Raises ConfigError."""
    for number, line_text in enumerate(text.splitlines(), 1):
        if line_text.count(".") > MAX_DOTS:  # tomllib takes hours for a key of 100,000 parts
            raise ConfigError(file, number, None, f"more than {MAX_DOTS} dots in a line")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at[1]) if at else text.count("\n") + 1
        raise ConfigError(file, line, None, f"not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(file, 1, None, "not TOML: nested too deeply") from None
    except ValueError:  # what Python makes of a number with more than 4,300 digits
        raise ConfigError(file, _longest_line(text), None, "not TOML: a number too long") from None
    top = Table(data, (), key_lines(text), file, Path(folder).absolute())
    config = Config(
        model=_model(top.table("model")),
        coordinator=_coordinator(top.table("coordinator", required=False)),
        limits=_limits(top.table("limits", required=False)),
        emulate=_emulate(top.table("emulate", required=False)),
        rings=tuple([_ring(table) for table in top.tables("ring", MAX_RINGS)]),
    )
    top.finish()
    _unique(config, top)
    _keyed(config, top)
    return config


def _longest_line(text: str) -> int:
    lines = text.splitlines()
    return max(range(len(lines)), key=lambda index: len(lines[index]), default=0) + 1


def dumps(config: Config) -> str:
    """The text of a ring.toml that loads as `config`; what equals the default is left out."""
    lines = ["[model]", *pairs(config.model)]
    for name in ("coordinator", "limits", "emulate"):
        found = pairs(getattr(config, name))
        lines += ["", f"[{name}]", *found] if found else []
    for ring in config.rings:
        lines += ["", "[[ring]]", *pairs(ring)]
        for stage in ring.stages:
            lines += ["", "[[ring.stage]]", *pairs(stage)]
    return "\n".join(lines) + "\n"


def _model(table: Table) -> Model:
    path = table.model("path")
    name = table.take("name", str, Path(path).name.removesuffix(".gguf") or TOY)
    if not 1 <= len(name) <= 128 or not name.isprintable():
        table.fail("must be 1 to 128 printable characters", "name")
    dtype = table.choice("dtype", DTYPES, "bfloat16")
    exact = table.take("exact", bool, True)
    weights = table.choice("weights", WEIGHTS, "dtype")
    activations = table.choice("activations", ACTIVATIONS, "dtype")
    kv = table.choice("kv", KV, "dtype")
    for key, value in (("weights", weights), ("activations", activations), ("kv", kv)):
        if path == TOY and value != "dtype":
            what = "rows" if key == "kv" else "weights"
            table.fail(f"the toy has no {what} that could be {value}", key)
    table.finish()
    return Model(path, name, dtype, exact, weights, activations, kv)


def _coordinator(table: Table) -> Coordinator:
    http = table.take("http", str, Coordinator().http)
    found = _HTTP.fullmatch(http)
    if found is None or int(found["port"]) > 65535:
        table.fail(f"must be host:port, not {shown(http)}", "http")
    drafter = table.choice("drafter", DRAFTERS, Coordinator().drafter)
    model = table.model("draft_model") if "draft_model" in table.data else None
    if drafter == "model" and model is None:
        table.fail("'model' needs the key 'draft_model': a small model's path", "drafter")
    depth = table.integer("draft_depth", 1, 64, None)
    tokens = table.integer("draft_tokens", 0, 64, None)
    share = table.take("verify_share", float, 0.0)
    if not 0.0 <= share <= 1.0:
        table.fail(f"must be from 0 to 1, not {share:g}", "verify_share")
    public, secret = table.keys()
    state: str | None = table.take("state", str, None)
    if state not in (None, OFF):
        state = str(table.file("state"))
    table.finish()
    return Coordinator(http, drafter, depth, tokens, share, model, public, secret, state)


def _emulate(table: Table) -> Emulate:
    emulate = Emulate(
        delay_ms=table.seconds("delay_ms", 0, 60_000, 0.0, ""),
        jitter_ms=table.seconds("jitter_ms", 0, 60_000, 0.0, ""),
        mbit=table.seconds("mbit", 0, 1e6, 0.0, ""),
        seed=table.integer("seed", 0, 1 << 62, 0),
    )
    table.finish()
    return emulate


def _limits(table: Table) -> Limits:
    base = Limits()
    limits = Limits(
        slots=table.integer("slots", 1, MAX_SLOTS, base.slots),
        max_model_len=table.integer("max_model_len", 16, 1 << 20, base.max_model_len),
        chunk_tokens=table.integer("chunk_tokens", 8, 1 << 16, base.chunk_tokens),
        shared_chunk_tokens=table.integer(
            "shared_chunk_tokens", 8, 1 << 16, base.shared_chunk_tokens
        ),
        window_frames=table.integer("window_frames", 1, 512, base.window_frames),
        queue_turns=table.integer("queue_turns", 1, 1 << 20, base.queue_turns),
        heartbeat_s=table.seconds("heartbeat_s", 0.01, 3600, base.heartbeat_s),
        lost_after_s=table.seconds("lost_after_s", 0.02, 86400, base.lost_after_s),
        frame_timeout_s=table.seconds("frame_timeout_s", 0.1, 86400, base.frame_timeout_s),
        resume_s=table.seconds("resume_s", 0.1, 86400, base.resume_s),
        idle_ttl_s=table.seconds("idle_ttl_s", 0.0, 1e9, base.idle_ttl_s),
        park_bytes=table.integer("park_bytes", 0, 1 << 50, base.park_bytes),
        send_timeout_s=table.seconds("send_timeout_s", 0.1, 86400, base.send_timeout_s),
        max_frame_bytes=table.integer(
            "max_frame_bytes", 1 << 20, MAX_PAYLOAD_BYTES, base.max_frame_bytes
        ),
        deadline_s=table.seconds("deadline_s", 0.1, 86400, base.deadline_s),
        per_key_turns=table.integer("per_key_turns", 0, 1 << 20, base.per_key_turns),
        write_timeout_s=table.seconds("write_timeout_s", 0.1, 86400, base.write_timeout_s),
        connections=table.integer("connections", 1, 1 << 16, base.connections),
        drain_s=table.seconds("drain_s", 0.0, 86400, base.drain_s),
    )
    table.finish()
    if limits.lost_after_s < 2 * limits.heartbeat_s:
        table.fail(
            f"must be at least two heartbeats (2 x {limits.heartbeat_s:g} s), "
            f"not {limits.lost_after_s:g}",
            "lost_after_s" if "lost_after_s" in table.data else "heartbeat_s",
        )
    return limits


def _ring(table: Table) -> Ring:
    name = table.name("name")
    verdicts = table.address("verdicts")
    bind = table.address("bind", listen=True) if "bind" in table.data else None
    tables = table.tables("stage", MAX_STAGES)
    stages = [_stage(each) for each in tables]
    table.take("bind", str, None)
    spare = table.take("spare", bool, False)
    table.finish()
    before: Stage | None = None
    for each, stage in zip(tables, stages, strict=True):
        first, last = stage.layers
        expected = before.layers[1] if before else 0
        whom = f"stage {before.name!r} ends at" if before else "the first stage must start at"
        if first != expected:
            if before is None:
                flaw = f"{whom} 0"
            elif first < expected:
                flaw = f"{whom} {expected}: layers [{first}, {min(last, expected)}) are held twice"
            else:
                flaw = f"{whom} {expected}: nobody holds layers [{expected}, {first})"
            each.fail(f"stage {stage.name!r} starts at layer {first}, but {flaw}", "layers")
        before = stage
    return Ring(name, verdicts, tuple(stages), bind, spare)


def _stage(table: Table) -> Stage:
    name = table.name("name")
    address = table.address("address")
    layers = table.take("layers", list)
    if len(layers) != 2 or any(type(each) is not int for each in layers):
        table.fail(f"must be [first, last), two integers, not {shown(layers)}", "layers")
    first, last = layers
    if not 0 <= first < last <= 1 << 16:
        table.fail(f"must be [first, last) with 0 <= first < last, not {shown(layers)}", "layers")
    device = table.take("device", str, "cpu")
    if not re.fullmatch(r"cpu|[a-z]+(:[0-9]{1,3})?", device):
        table.fail(f"must be like cpu or cuda:0, not {shown(device)}", "device")
    threads = table.integer("threads", 1, 1024, 1)
    kernels = table.choice("kernels", KERNELS, "auto")
    bind = table.address("bind", listen=True) if "bind" in table.data else None
    table.take("bind", str, None)
    public, secret = table.keys()
    layer_ms = table.seconds("layer_ms", 0, 60_000, 0.0, "")
    table.finish()
    block = (first, last)
    return Stage(name, address, block, device, threads, bind, public, secret, layer_ms, kernels)


def _unique(config: Config, top: Table) -> None:
    names: dict[str, str] = {}
    addresses: dict[str, str] = {}

    def claim(seen: dict[str, str], value: str, owner: str, *key: str | int) -> None:
        if value in seen:
            top.fail(f"{value!r} is already taken by {seen[value]}", *key)
        seen[value] = owner

    if all(ring.spare for ring in config.rings):
        top.fail("every ring is a spare", "ring", 0, "spare")
    for i, ring in enumerate(config.rings):
        claim(names, ring.name, f"ring {ring.name!r}", "ring", i, "name")
        claim(addresses, ring.verdicts, f"ring {ring.name!r}", "ring", i, "verdicts")
        for j, stage in enumerate(ring.stages):
            owner = f"stage {stage.name!r} of ring {ring.name!r}"
            claim(names, stage.name, owner, "ring", i, "stage", j, "name")
            claim(addresses, stage.address, owner, "ring", i, "stage", j, "address")


def _keyed(config: Config, top: Table) -> None:
    """Keys for all or for nobody, and none for two: a link must know whom it lets in."""
    owners: dict[str | None, str] = {config.coordinator.public_key: "the coordinator"}
    keyed = [config.coordinator.public_key is not None]
    keyed += [stage.public_key is not None for ring in config.rings for stage in ring.stages]
    if not any(keyed):
        return
    advice = "others in this file have one, so every process needs one: kvring keygen"
    if not keyed[0]:
        where = ["coordinator"] if "coordinator" in top.data else []
        top.fail(f"the coordinator has no 'public_key'; {advice}", *where)
    for i, ring in enumerate(config.rings):
        for j, stage in enumerate(ring.stages):
            at: tuple[str | int, ...] = ("ring", i, "stage", j)
            if stage.public_key is None:
                top.fail(f"stage {stage.name!r} has no 'public_key'; {advice}", *at)
            if stage.public_key in owners:
                owner = owners[stage.public_key]
                key = "public_key" if "public_key" in _raw(top, at) else "public_key_file"
                top.fail(f"stage {stage.name!r} has the key of {owner}", *at, key)
            owners[stage.public_key] = f"stage {stage.name!r}"


def _raw(top: Table, path: tuple[str | int, ...]) -> dict[str, object]:
    found: object = top.data
    for part in path:
        found = found[part]  # type: ignore[index]
    assert isinstance(found, dict), path
    return found
