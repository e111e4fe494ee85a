"""ring.toml: what loads, and that every mistake is named with its key and its line."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.config import (
    ACTIVATIONS,
    KV,
    WEIGHTS,
    Config,
    ConfigError,
    Coordinator,
    Limits,
    Model,
    Ring,
    Stage,
    dumps,
    load,
    loads,
)
from transport.emulate import Emulate
from transport.toml_lines import key_lines

TEXT = """\
# two stages
[model]
path = "models/x.gguf"
name = "smollm2-135m"
dtype = "float32"
exact = false

[coordinator]
http = "127.0.0.1:8000"

[limits]
slots = 8
window_frames = 5
heartbeat_s = 2

[[ring]]
name = "ring0"
verdicts = "tcp://10.0.0.1:7100"
bind = "tcp://*:7100"

[[ring.stage]]
name = "s0"
address = "tcp://10.0.0.2:7101"
bind = "tcp://0.0.0.0:7101"
layers = [0, 10]
device = "cuda:0"
threads = 2

[[ring.stage]]
name = "s1"
address = "ipc://run/s1.sock"
layers = [10, 30]
"""


def test_everything_is_read() -> None:
    config = loads(TEXT, folder="/srv/kvring")
    s0 = Stage("s0", "tcp://10.0.0.2:7101", (0, 10), "cuda:0", 2, "tcp://0.0.0.0:7101")
    s1 = Stage("s1", "ipc:///srv/kvring/run/s1.sock", (10, 30))
    ring = Ring("ring0", "tcp://10.0.0.1:7100", (s0, s1), "tcp://*:7100")
    assert config == Config(
        model=Model("/srv/kvring/models/x.gguf", "smollm2-135m", "float32", False),
        coordinator=Coordinator("127.0.0.1:8000"),
        limits=Limits(slots=8, window_frames=5, heartbeat_s=2.0),
        rings=(ring,),
    )
    assert ring.head is s0
    assert ring.layers_total == 30
    assert (ring.listen, s0.listen, s1.listen) == ("tcp://*:7100", s0.bind, s1.address)
    assert ring.next_address(s0) == s1.address
    assert ring.next_address(s1) == ring.verdicts
    assert config.find("s1") == (ring, s1)
    with pytest.raises(KeyError, match=r"no stage 's2'.*; there are s0, s1"):
        config.find("s2")


def test_defaults() -> None:
    text = TEXT.replace('name = "smollm2-135m"\ndtype = "float32"\nexact = false\n', "")
    text = text[: text.index("[coord")] + text[text.index("[[ring]]") :]
    config = loads(text)
    assert config.model == Model(str(Path("models/x.gguf").absolute()), "x", "bfloat16", True)
    assert config.coordinator == Coordinator()
    assert config.limits == Limits()


def test_load_resolves_against_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "ring.toml"
    file.write_text(TEXT)
    assert load(file).model.path == str(tmp_path / "models" / "x.gguf")
    file.write_text(TEXT.replace("models/x.gguf", "toy"))
    assert load(str(file)).model.path == "toy"
    file.write_bytes(b"[model]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"ring.toml:2: not UTF-8"):
        load(file)
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match=r"ring.toml:1: more than"):
        load(file)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.toml")


# ---- mistakes ------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str, int, str | None, str]] = [
    # replaced, by, line, key, message
    ("slots = 8", "slot = 8", 12, "limits.slot", "unknown key; did you mean 'slots'?"),
    ("slots = 8", "zebra = 8", 12, "limits.zebra", "unknown key; known: slots, max_model_len"),
    ("slots = 8", "slots = '8'", 12, "limits.slots", "must be an integer, not '8'"),
    ("slots = 8", "slots = 8.0", 12, "limits.slots", "must be an integer, not 8.0"),
    ("slots = 8", "slots = true", 12, "limits.slots", "must be an integer, not True"),
    ("slots = 8", "slots = 0", 12, "limits.slots", "must be from 1 to 1024, not 0"),
    ("slots = 8", "slots = 1025", 12, "limits.slots", "must be from 1 to 1024, not 1025"),
    ("slots = 8", "chunk_tokens = 0", 12, "limits.chunk_tokens", "must be from 8"),
    ("slots = 8", "max_frame_bytes = 10", 12, "limits.max_frame_bytes", "must be from 1048576"),
    ("[limits]", "[emulate]\ndelay_ms = -1\n[limits]", 12, "emulate.delay_ms", "from 0 to 60000"),
    ("[limits]", "[emulate]\nseed = 1.5\n[limits]", 12, "emulate.seed", "must be an integer"),
    ("_frames = 5", "_frames = 0", 13, "limits.window_frames", "must be from 1 to 512"),
    ("_s = 2", "_s = nan", 14, "limits.heartbeat_s", "must be from 0.01 to 3600 seconds, not nan"),
    ("_s = 2", "_s = true", 14, "limits.heartbeat_s", "must be a number, not True"),
    ("_s = 2", "_s = 3", 14, "limits.heartbeat_s", "must be at least two heartbeats (2 x 3 s)"),
    ("slots = 8", "lost_after_s = 3", 12, "limits.lost_after_s", "at least two heartbeats"),
    ("slots = 8", "park_bytes = -1", 12, "limits.park_bytes", "must be from 0 to"),
    ("slots = 8", "idle_ttl_s = -1", 12, "limits.idle_ttl_s", "must be from 0 to"),
    ('http = "127.0.0.1:8000"', 'drafter = "n"', 9, "coordinator.drafter", "of off, lookup, model"),
    ("[limits]", 'drafter = "model"\n[limits]', 11, "coordinator.drafter", "needs the key"),
    ("[limits]", 'draft_model = ""\n[limits]', 11, "coordinator.draft_model", 'folder or "toy"'),
    ("[limits]", 'state = ""\n[limits]', 11, "coordinator.state", 'must be a file'),
    ('name = "ring0"', 'name = "ring0"\nspare = true', 18, "ring[0].spare", "every ring is a"),
    ("[limits]", "[limit]", 11, "limit", "unknown key; did you mean 'limits'?"),
    ("[limits]", "[[limits]]", 11, "limits", "must be a table, not"),
    ("[coordinator]", "[model.x]", 8, "model.x", "unknown key"),
    ('path = "models/x.gguf"', "", 2, "model", "missing key 'path'"),
    ('"models/x.gguf"', '""', 3, "model.path", 'must be a file, a folder or "toy"'),
    ('"models/x.gguf"', "3", 3, "model.path", "must be a string, not 3"),
    ('"float32"', '"float8"', 5, "model.dtype", "must be one of bfloat16, float32, float16, not"),
    ("exact = false", 'weights = "int3"', 6, "model.weights", "one of dtype, int8, int4, not"),
    ('"models/x.gguf"', '"toy"\nweights = "int8"', 4, "model.weights", "the toy has no weights"),
    ("exact = false", 'activations = "fp4"', 6, "model.activations", "must be one of dtype, fp8"),
    ("exact = false", 'kv = "fp4"', 6, "model.kv", "must be one of dtype, int8, fp8, not"),
    ('"models/x.gguf"', '"toy"\nkv = "int8"', 4, "model.kv", "the toy has no rows that could be"),
    ('"models/x.gguf"', '"hf://org"', 3, "model.path", "must be hf://org/name or"),
    ('"models/x.gguf"', '"hf://../x"', 3, "model.path", "must be hf://org/name or"),
    ("exact = false", "exact = 0", 6, "model.exact", "must be true or false, not 0"),
    ('"smollm2-135m"', '"a\\nb"', 4, "model.name", "must be 1 to 128 printable"),
    ("127.0.0.1:8000", "127.0.0.1", 9, "coordinator.http", "must be host:port"),
    ("127.0.0.1:8000", "127.0.0.1:65536", 9, "coordinator.http", "must be host:port"),
    ('name = "ring0"', "", 16, "ring[0]", "missing key 'name'"),
    ('"ring0"', '"ring 0"', 17, "ring[0].name", "must be 1 to 64 of A-Z"),
    ('"ring0"', '"s0"', 22, "ring[0].stage[0].name", "'s0' is already taken by ring 's0'"),
    ('"s1"', '"s0"', 30, "ring[0].stage[1].name", "already taken by stage 's0' of ring 'ring0'"),
    ("ipc://run/s1.sock", "tcp://10.0.0.2:7101", 31, "ring[0].stage[1].address", "already taken"),
    ("ipc://run/s1.sock", "tcp://10.0.0.1:7100", 31, "ring[0].stage[1].address", "by ring 'ring0'"),
    ("ipc://run/s1.sock", "10.0.0.2:7101", 31, "ring[0].stage[1].address", "is no address: write"),
    ("ipc://run/s1.sock", "ipc://", 31, "ring[0].stage[1].address", "is no address: write"),
    ("ipc://run/s1.sock", "tcp://host", 31, "ring[0].stage[1].address", "is no address: write"),
    ("ipc://run/s1.sock", "tcp://h:0", 31, "ring[0].stage[1].address", "is no address: write"),
    ("ipc://run/s1.sock", "tcp://h:65536", 31, "ring[0].stage[1].address", "is no address: write"),
    ("ipc://run/s1.sock", "tcp://*:7102", 31, "ring[0].stage[1].address", "can't be sent to"),
    ("ipc://run/s1.sock", "tcp://0.0.0.0:1", 31, "ring[0].stage[1].address", "can't be sent to"),
    ("ipc://run/s1.sock", "ipc://" + "x" * 108, 31, "ring[0].stage[1].address", "over 107 bytes"),
    ("tcp://0.0.0.0:7101", "tcp://7101", 24, "ring[0].stage[0].bind", "is no address"),
    ('"cuda:0"', '"gpu 0"', 26, "ring[0].stage[0].device", "must be like cpu or cuda:0"),
    ("threads = 2", "threads = 0", 27, "ring[0].stage[0].threads", "must be from 1 to 1024"),
    ("layers = [10, 30]", "", 29, "ring[0].stage[1]", "missing key 'layers'"),
    ("[10, 30]", "[10]", 32, "ring[0].stage[1].layers", "must be [first, last), two integers"),
    ("[10, 30]", "[10.0, 30]", 32, "ring[0].stage[1].layers", "must be [first, last), two"),
    ("[10, 30]", "[10, 10]", 32, "ring[0].stage[1].layers", "must be [first, last) with 0 <="),
    ("[10, 30]", "[-1, 10]", 32, "ring[0].stage[1].layers", "must be [first, last) with 0 <="),
    (
        "[10, 30]", "[9, 30]", 32, "ring[0].stage[1].layers",
        "stage 's1' starts at layer 9, but stage 's0' ends at 10: layers [9, 10) are held twice",
    ),
    (
        "[10, 30]", "[12, 30]", 32, "ring[0].stage[1].layers",
        "stage 's1' starts at layer 12, but stage 's0' ends at 10: nobody holds layers [10, 12)",
    ),
    (
        "[0, 10]", "[1, 10]", 25, "ring[0].stage[0].layers",
        "stage 's0' starts at layer 1, but the first stage must start at 0",
    ),
    ("[limits]", "[limits", 11, None, "not TOML: "),
    ("exact = false", "exact = false\nexact = true", 7, None, "not TOML: "),
    ("# two stages", "x = " + "[" * 5000, 1, None, "not TOML: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "message"),
    MISTAKES,
    ids=[f"{m[3]} {m[1][:20]}" for m in MISTAKES],
)
def test_a_mistake_is_named(old: str, new: str, line: int, key: str | None, message: str) -> None:
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    with pytest.raises(ConfigError) as caught:
        loads(text, file="some/ring.toml")
    error = caught.value
    assert message in str(error)
    assert (error.line, error.key) == (line, key)
    assert str(error).startswith(f"some/ring.toml:{line}: " + (f"{key}: " if key else ""))


def test_missing_parts() -> None:
    model = TEXT[: TEXT.index("[coord")]
    for text, message in [
        ("", "missing key 'model'"),
        (model, "missing key 'ring'"),
        (model + "[[ring]]\nname = 'r'\nverdicts = 'tcp://h:1'\n", "missing key 'stage'"),
        ("ring = []\n" + model, "must be 1 to 64 tables, not 0"),
        ("ring = [1]\n" + model, "must be a table"),
        ("ring = 1\n" + model, "must be an array"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loads(text)


def test_every_key_has_its_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "ring-toml.md").read_text()
    for cls in (Model, Coordinator, Limits, Emulate, Ring, Stage):
        for each in fields(cls):
            assert each.name == "stages" or f"`{each.name}`" in page, (cls, each.name)


# ---- any configuration survives writing and reading ----------------------------------------------

_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
_seconds = st.floats(0.1, 1000.0)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    ports = iter(range(1, 60000))

    def stages(names: list[str]) -> tuple[Stage, ...]:
        found = []
        first = 0
        for name in names:
            last = first + draw(st.integers(1, 20))
            address = draw(st.sampled_from(["tcp://h:{}", "tcp://[::1]:{}", "ipc:///tmp/{}.s"]))
            found.append(
                Stage(
                    name,
                    address.format(next(ports)),
                    (first, last),
                    draw(st.sampled_from(["cpu", "cuda:0", "mps"])),
                    draw(st.integers(1, 64)),
                    draw(st.none() | st.just("tcp://*:7")),
                )
            )
            first = last
        return tuple(found)

    count = draw(st.integers(1, 3))
    names = draw(st.lists(_names, min_size=2 * count, max_size=9, unique=True))
    rings = tuple(
        Ring(
            names[i],
            f"tcp://10.0.0.1:{next(ports)}",
            stages(names[count:][i::count]),
            draw(st.none() | st.just("tcp://0.0.0.0:9")),
            spare=i > 0 and draw(st.booleans()),
        )
        for i in range(count)
    )
    heartbeat_s = draw(_seconds)
    limits = Limits(
        slots=draw(st.integers(1, 1024)),
        max_model_len=draw(st.integers(16, 1 << 20)),
        window_frames=draw(st.none() | st.integers(1, 512)),
        heartbeat_s=heartbeat_s,
        lost_after_s=heartbeat_s * 2 + draw(_seconds),
        frame_timeout_s=draw(_seconds),
        resume_s=draw(_seconds),
        idle_ttl_s=draw(st.just(0.0) | _seconds),
        park_bytes=draw(st.integers(0, 1 << 50)),
        max_frame_bytes=draw(st.integers(1 << 20, 1 << 30)),
    )
    path = draw(st.just("toy") | _texts.map(lambda text: str(Path("/") / text)))
    name = draw(_texts.filter(str.isprintable))
    model = Model(path, name, draw(st.sampled_from(["bfloat16", "float32"])), draw(st.booleans()))
    if path != "toy":
        weights, activations, kv = (draw(st.sampled_from(x)) for x in (WEIGHTS, ACTIVATIONS, KV))
        model = replace(model, weights=weights, activations=activations, kv=kv)
    coordinator = Coordinator(
        f"h:{draw(st.integers(0, 65535))}",
        draw(st.sampled_from(["off", "lookup", "model"])),
        draw(st.none() | st.integers(1, 64)),
        draw(st.none() | st.integers(0, 64)),
        draft_model=path,
        state=draw(st.sampled_from([None, "off", "/folder/file"])),
    )
    emulate = Emulate(
        draw(st.floats(0, 60_000)),
        draw(st.floats(0, 60_000)),
        draw(st.floats(0, 1e6)),
        draw(st.integers(0, 1 << 62)),
    )
    return Config(model, rings, coordinator, limits, emulate)


@given(configs())
@settings(max_examples=100, deadline=None)
def test_round_trip(config: Config) -> None:
    assert loads(dumps(config)) == config


def test_dumps_leaves_defaults_out() -> None:
    ring = Ring("r", "tcp://h:1", (Stage("s", "tcp://h:2", (0, 1)),))
    assert dumps(Config(Model("toy", "toy"), (ring,))) == (
        '[model]\npath = "toy"\nname = "toy"\n\n'
        '[[ring]]\nname = "r"\nverdicts = "tcp://h:1"\n\n'
        '[[ring.stage]]\nname = "s"\naddress = "tcp://h:2"\nlayers = [0, 1]\n'
    )


# ---- lines ---------------------------------------------------------------------------------------

TRICKY = """\
# [not.a.table]
a = "x # [no] = 1"   # comment
b = '''
c = 1
''''' # two more quotes belong to it
"d.e" = [ # nested
  1, { f = "}]", g.h = 2 },
  \"\"\"
  i = 3 \\
  \\\"\"\" \"\"\",
]
j . 'k' = 1979-05-27 07:32:00

[[l]]
[l.m]
n = 1
[[l.o]]
p = 1
[[l.o]]
[[l]]
q = { }
[l.m]
r = [ [ ], [ [ 1 ] ], ]
[s.t]
[s]
"""


def paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    found = {path} if path else set()
    if isinstance(value, dict):
        for key, item in value.items():
            found |= paths(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            found |= paths(item, (*path, index))
    return found


def test_lines_of_a_tricky_file() -> None:
    lines = key_lines(TRICKY)
    assert set(lines) == paths(tomllib.loads(TRICKY))
    at = {
        ("a",): 2, ("b",): 3, ("d.e",): 6, ("d.e", 1, "f"): 7, ("d.e", 1, "g", "h"): 7,
        ("d.e", 2): 8, ("j", "k"): 12, ("l",): 14, ("l", 0): 14, ("l", 0, "m", "n"): 16,
        ("l", 0, "o", 1): 19, ("l", 1): 20, ("l", 1, "q"): 21, ("l", 1, "m", "r", 1, 0, 0): 23,
        ("s",): 24, ("s", "t"): 24,
    }  # fmt: skip
    assert {path: lines[path] for path in at} == at
    assert key_lines(TRICKY.replace("\n", "\r\n")) == lines


def _quoted(text: str) -> str:
    escaped = (
        f"\\U{ord(each):08x}" if each in '"\\' or ord(each) < 32 or ord(each) == 127 else each
        for each in text
    )
    return '"' + "".join(escaped) + '"'


_keys = st.text(max_size=4).map(_quoted) | st.from_regex(r"[A-Za-z0-9_-]{1,4}", fullmatch=True)
_blanks = st.sampled_from(["", " ", "\t", "  "])
_scalars = st.one_of(
    st.sampled_from(
        ["1", "0x1F", "-1.5e3", "inf", "true", "07:32:00", "1979-05-27 07:32:00", "''", '""']
    ),
    st.sampled_from(
        [
            "'a]#'",
            '"b}\\"[c"',
            "'''\n[x]\ny=1\n'''",
            '"""\n"z" \\"""\n#"""',
            "''''q'''''",
            '"""a"""""',
        ]
    ),
    st.text(max_size=5).map(_quoted),
)


_newlines = st.sampled_from(["", "\n", " # , ] = }\n ", "\n\n"])
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(
            lambda items, gap, comma: (
                "["
                + gap
                + ("," + gap).join(items)
                + (gap + "," if comma and items else "")
                + gap
                + "]"
            ),
            st.lists(inner, max_size=3),
            _newlines,
            st.booleans(),
        ),
        st.builds(
            lambda pairs, gap: "{" + gap + ", ".join(f"{k} = {v}" for k, v in pairs) + gap + "}",
            st.lists(st.tuples(_keys, inner), max_size=3),
            _blanks,
        ),
    ),
    max_leaves=6,
)
_statements = st.one_of(
    st.builds(
        lambda keys, gap, value: f"{gap}{(gap + '.' + gap).join(keys)}{gap}={gap}{value}{gap}\n",
        st.lists(_keys, min_size=1, max_size=3),
        _blanks,
        _values,
    ),
    st.builds(
        lambda keys, gap: f"[{gap}{'.'.join(keys)}{gap}] # x\n",
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
        _blanks,
    ),
    st.builds(
        lambda keys: f"[[{' . '.join(keys)}]]\n",
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
    ),
    st.sampled_from(["\n", "# = [\n", "  \t\n"]),
)


@given(st.lists(_statements, max_size=12))
@settings(max_examples=400, deadline=None)
def test_lines_has_exactly_the_keys_that_tomllib_finds(statements: list[str]) -> None:
    text = ""
    for statement in statements:  # keep what makes valid TOML, so that most examples count
        try:
            data = tomllib.loads(text + statement)
        except tomllib.TOMLDecodeError:
            continue
        text += statement
        assert set(key_lines(text)) == paths(data)
