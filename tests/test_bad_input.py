"""What people get wrong: each ends as one clear line that names the thing, and nothing is left.

What fails before a process is started runs in this one, through the command line's own entry; the
rest are real processes. Ring faults are told by GET /ready, and end when the fault does.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coord.help import anchor
from coord.tokenizer import load_tokenizer
from pipeline.load import describe_model, load_model
from pipeline.model import ModelError
from tests import processes, randommodel
from tests.modelfile import default_model
from tests.processes import (
    QUICK,
    Fleet,
    RingFile,
    assert_clear,
    get,
    post,
    write_ring,
)
from tests.toyclient import complete, truth
from tools.cli import run
from transport.config import dumps


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def refused(
    capfd: pytest.CaptureFixture[str], code: int, arguments: list[str], *words: str
) -> None:
    """This command line ends with this code and one line on stderr that says all the words."""
    capfd.readouterr()
    assert run(arguments) == code
    out, err = capfd.readouterr()
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("kvring: ")
    assert "Traceback" not in out + err
    for word in words:
        assert word in lines[0], (word, lines[0])


def up(model: object, *options: str) -> list[str]:
    return ["up", "--http", "127.0.0.1:0", "--model", str(model), *options]


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (up("no-such-model"), ["no-such-model", "smollm2-135m"]),
        (up("toy", "--stages", "7"), ["--stages 7", "6 layers"]),
        (up("toy", "--max-model-len", "5000"), ["--max-model-len 5000", "4096"]),
        (up("toy", "--max-model-len", "5"), ["max_model_len", "from 16", "not 5"]),
        (up("toy", "--slots", "2000"), ["slots", "to 1024", "not 2000"]),
        (up("toy", "--dtype", "float8"), ["--dtype", "float8", "bfloat16"]),
        (up("toy", "--served-model-name", "a\nb"), ["name", "printable"]),
        (["up", "--model", "toy", "--http", "nonsense"], ["--http nonsense", "HOST:PORT"]),
        (["up", "--model", "toy", "--http", "127.0.0.1:70000"], ["70000", "65535"]),
        (["stage", "--ring", "no/ring.toml", "--name", "s0"], ["no/ring.toml", "no such file"]),
        (["coord", "--ring", "no/ring.toml"], ["no/ring.toml", "no such file"]),
    ],
)
def test_a_wrong_option(
    options: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    refused(capfd, 2, options, *words)


def test_an_http_address_in_use(capfd: pytest.CaptureFixture[str], fleet: Fleet) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(capfd, 1, ["up", "--model", "toy", "--http", address], address, "in use")
        with processes.fleet(fleet.scratch / "f") as other:
            ring = write_ring(fleet.scratch / "ring.toml", stages=1)
            started = other.coord(ring, "--http", address)
            assert_clear(started, 1, address, "in use", "another --http")


def test_a_second_up_is_not_fooled_by_the_first(
    capfd: pytest.CaptureFixture[str], toy: str
) -> None:
    """The first ring is ready; that must not be taken for the second's word."""
    address = toy.removeprefix("http://")
    refused(capfd, 1, ["up", "--model", "toy", "--http", address], address, "in use")


def test_a_record_folder_that_is_a_file(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process, _ = fleet.up("--model", "toy", "--stages", "1", "--record", tmp_path / "file")
    assert_clear(process, 1, "--record", "file")
    assert fleet.alive() == []


# ---- ring.toml -----------------------------------------------------------------------------------

_HEADER = '[model]\npath = "toy"\n\n[[ring]]\nname = "r"\nverdicts = "tcp://127.0.0.1:7000"\n'
_STAGE = '\n[[ring.stage]]\nname = "s{0}"\naddress = "tcp://127.0.0.1:{1}"\nlayers = {2}\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[model]\npath = "toy"\n[limits]\nslotz = 4\n', 4, ["limits.slotz", "'slots'"]),
        ('[model]\npath = "toy"\ndtype = "float8"\n', 3, ["model.dtype", "float8"]),
        ('[model]\npath = "toy"\nname = "x\n', 3, ["not TOML"]),
        (
            _HEADER + _STAGE.format(0, 7001, "[0, 4]") + _STAGE.format(1, 7002, "[3, 6]"),
            16,
            ["stage[1].layers", "'s1'", "[3, 4) are held twice"],
        ),
        (
            _HEADER + _STAGE.format(0, 7001, "[0, 2]") + _STAGE.format(1, 7002, "[3, 6]"),
            16,
            ["stage[1].layers", "'s1'", "nobody holds layers [2, 3)"],
        ),
        (
            _HEADER + _STAGE.format(0, 7001, "[0, 2]") + _STAGE.format(1, 7001, "[2, 6]"),
            15,
            ["stage[1].address", "already taken", "'s0'"],
        ),
    ],
)
@pytest.mark.parametrize("command", ["coord", "stage"])
def test_a_wrong_ring_file(
    command: str,
    text: str,
    line: int,
    words: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "ring.toml"
    file.write_text(text)
    options = [command, "--ring", str(file)] + (["--name", "s0"] if command == "stage" else [])
    refused(capfd, 2, options, f"{file}:{line}: ", *words)


def test_an_unknown_stage_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    refused(capfd, 2, ["stage", "--ring", str(ring.path), "--name", "s9"], "'s9'", "s0, s1")


# ---- addresses -----------------------------------------------------------------------------------


def test_link_addresses_in_use(fleet: Fleet, tmp_path: Path) -> None:
    """A stage and a coordinator that are started twice; the ring that runs does not notice."""
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    running = fleet.whole(ring)
    epoch = get(f"{ring.url}/ring").json()["rings"][0]["epoch"]
    again = fleet.stage(ring, "s0")
    other = fleet.coord(ring, "--http", f"127.0.0.1:{processes.free_ports(1)[0]}")
    stage, verdicts = ring.config.rings[0].stages[0].address, ring.config.rings[0].verdicts
    assert_clear(again, 1, "s0", stage, "already in use", "another process listens there")
    assert_clear(other, 1, "coordinator", verdicts, "already in use")
    assert processes.readiness(ring.url)["status"] == 200
    assert get(f"{ring.url}/ring").json()["rings"][0]["epoch"] == epoch
    assert "restarted" not in running["coord"].errors


# ---- model files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randommodel.write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randommodel.write_folder(tmp_path_factory.mktemp("folder") / "small")


def test_the_small_models_themselves_are_whole(small_gguf: Path, small_folder: Path) -> None:
    for path in (small_gguf, small_folder):
        assert describe_model(str(path)) == (randommodel.LAYERS, randommodel.CONTEXT)
        assert load_tokenizer(path).encode("a€") == [97, 0xE2, 0x82, 0xAC]


@pytest.mark.parametrize("size", [0, 3, 4, 12, 24, 100, 700, 3000, 0.5, -1])
def test_a_truncated_gguf(
    size: float, small_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = small_gguf.read_bytes()
    cut = int(len(whole) * size) if isinstance(size, float) else int(size)
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:cut])
    refused(capfd, 2, up(file), "cut.gguf")


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"GGUF" + b"\xff" * 5000, b"#!/bin/sh\n" * 99])
def test_a_garbage_gguf(garbage: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "garbage.gguf"
    file.write_bytes(garbage)
    refused(capfd, 2, up(file), "garbage.gguf", "GGUF")


def test_a_gguf_without_a_tensor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = randommodel.write_gguf(tmp_path / "gap.gguf", missing=["blk.2.ffn_up.weight"])
    refused(capfd, 2, up(file), "gap.gguf", "model.layers.2.mlp.up_proj.weight", "missing")


def test_a_folder_with_something_missing(
    small_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gap = ["model.layers.1.self_attn.k_proj.weight"]
    folder = randommodel.write_folder(tmp_path / "gap", missing=gap)
    refused(capfd, 2, up(folder), "gap", gap[0], "missing")
    (folder / "model.safetensors").unlink()
    refused(capfd, 2, up(folder), "gap", "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    refused(capfd, 2, up(folder), "gap", "'mamba'", "llama")
    (folder / "config.json").write_text("{")
    refused(capfd, 2, up(folder), "config.json", "not JSON")
    (folder / "config.json").unlink()
    refused(capfd, 2, up(folder), "gap", "no config.json and no .gguf")
    weights = (small_folder / "model.safetensors").read_bytes()
    folder = randommodel.write_folder(tmp_path / "cut")
    for cut in (0, 5, 300, len(weights) // 2, len(weights) - 1):
        (folder / "model.safetensors").write_bytes(weights[:cut])
        refused(capfd, 2, up(folder), "model.safetensors")


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_a_damaged_file_is_refused_or_read(
    seed: int, small_gguf: Path, small_folder: Path, tmp_path: Path
) -> None:
    """Any change of the bytes that describe a file: a ModelError (or ValueError), nothing else."""
    kinds = {
        tmp_path / "x.gguf": small_gguf,
        randommodel.write_folder(tmp_path / "a") / "config.json": small_folder / "config.json",
        randommodel.write_folder(tmp_path / "b") / "model.safetensors": small_folder
        / "model.safetensors",
        randommodel.write_folder(tmp_path / "c") / "tokenizer.json": small_folder
        / "tokenizer.json",
    }
    for target, source in kinds.items():
        model = target if target.suffix == ".gguf" else target.parent
        data = source.read_bytes()
        for number in range(seed, seed + 100):
            target.write_bytes(randommodel.mutate(data, number))
            for read, expected in ((describe_model, ModelError), (load_tokenizer, ValueError)):
                said = _refusal(read, model, expected)
                assert said is None or str(tmp_path) in said, (target.name, number, said)


def _refusal(read: Callable[[str], object], model: Path, expected: type[Exception]) -> str | None:
    """What it says against the file; None when it takes it."""
    try:
        read(str(model))
    except expected as error:
        return str(error)
    return None


def test_a_broken_tokenizer_is_named(fleet: Fleet, tmp_path: Path) -> None:
    """It is the coordinator's alone, so `up` ends with the coordinator's last words."""
    folder = randommodel.write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "tokenizer_config.json").write_text("{}")
    process, _ = fleet.up("--model", folder, "--stages", "1")
    assert_clear(process, 1, "coordinator", "tokenizer", str(folder))
    assert fleet.alive() == []


@pytest.mark.model
def test_a_truncated_real_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = default_model()
    for size in (1 << 10, 1 << 20, 50 << 20, whole.stat().st_size - 1):
        file = tmp_path / f"cut-{size}.gguf"
        with whole.open("rb") as source:
            file.write_bytes(source.read(size))
        refused(capfd, 2, up(file), file.name, "truncated")


# ---- rings that do not fit together --------------------------------------------------------------

Half = tuple[Fleet, RingFile]


@pytest.fixture(scope="module")
def half(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Half]:
    """A coordinator and s0 of two stages with a real (tiny) model; each test brings its own s1."""
    folder = tmp_path_factory.mktemp("half")
    with processes.fleet(folder / "processes") as made:
        ring = write_ring(
            folder / "ring.toml",
            model=str(small_folder),
            layers=randommodel.LAYERS,
            stages=2,
            limits=replace(QUICK, max_model_len=256, slots=2),
        )
        made.coord(ring)
        made.stage(ring, "s0")
        yield made, ring


def _variant(ring: RingFile, path: Path, what: str) -> RingFile:
    """The same ring as another machine's ring.toml might say by mistake."""
    config = ring.config
    if what == "weights":
        other = randommodel.write_folder(path / "other", seed=1)
        config = replace(config, model=replace(config.model, path=str(other)))
    elif what == "dtype":
        config = replace(config, model=replace(config.model, dtype="bfloat16"))
    elif what == "kv":
        config = replace(config, model=replace(config.model, kv="int8"))
    elif what in ("past the end", "short of the end"):
        first, second = config.rings[0].stages
        end = randommodel.LAYERS + (1 if what == "past the end" else -1)
        stages = (first, replace(second, layers=(second.layers[0], end)))
        config = replace(config, rings=(replace(config.rings[0], stages=stages),))
    file = path / "other.toml"
    file.write_text(dumps(config))
    return RingFile(file, config)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("weights", ["s0", "s1", "different weights"]),
        ("dtype", ["s0", "s1", "different weights or precision", "bfloat16"]),
        ("kv", ["s0", "s1", "different weights or precision", "int8 KV"]),
        ("short of the end", ["s1", "layers"]),
    ],
)
def test_a_stage_that_does_not_fit(what: str, words: list[str], half: Half, tmp_path: Path) -> None:
    """Case 6: 503 that names both stages, for as long as it is so."""
    fleet, ring = half
    process = fleet.stage(_variant(ring, tmp_path, what), "s1")
    try:
        fleet.not_ready(ring.url, *words)
        answer = post(f"{ring.url}/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "not_ready"
    finally:
        process.kill()


def test_a_stage_with_other_slots(fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    other = replace(ring.config, limits=replace(QUICK, slots=3))
    (tmp_path / "other.toml").write_text(dumps(other))
    fleet.coord(ring)
    fleet.stage(ring, "s0")
    fleet.stage(RingFile(tmp_path / "other.toml", other), "s1")
    fleet.not_ready(ring.url, "stage s0 has 4 slots", "s1 has 3")


def test_layers_past_the_models_end(half: Half, tmp_path: Path) -> None:
    fleet, ring = half
    process = fleet.stage(_variant(ring, tmp_path, "past the end"), "s1")
    assert_clear(process, 1, "s1", "no layers [2, 5) in a model of 4")
    fleet.not_ready(ring.url, "s1", "failed", "no layers [2, 5)")


def test_the_stage_that_fits_makes_it_ready(half: Half) -> None:
    fleet, ring = half
    fleet.stage(ring, "s1")
    fleet.ready(ring.url)
    first, second = (complete(ring.url, list(range(60)), 20) for _ in range(2))
    assert first.tokens == second.tokens
    assert (first.cached, second.cached) == (0, 59)


# ---- requests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes.fleet(tmp_path_factory.mktemp("toy")) as made:
        process, base = made.up("--model", "toy", "--stages", "2", "--max-model-len", "600")
        made.ready(base)
        yield base
        assert process.popen.poll() is None, process


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"prompt": [1] * 600}, "context_length_exceeded", ["600", "601"]),
        ({"prompt": [1] * 2000}, "context_length_exceeded", ["600", "2000"]),
        ({"prompt": [1] * 500, "max_tokens": 101}, "context_length_exceeded", ["600", "601"]),
        ({"prompt": []}, "empty_prompt", []),
        ({"prompt": [256]}, "invalid_value", ["256"]),
        ({"prompt": "x", "max_tokens": 0}, "invalid_value", ["max_tokens"]),
        ({"prompt": "x", "surprise": 1}, "unknown_parameter", ["surprise"]),
        ({"prompt": "x", "best_of": 2}, "unsupported_parameter", ["best_of"]),
        ({}, "missing_parameter", ["prompt"]),
    ],
)
def test_a_wrong_request(body: dict[str, object], code: str, words: list[str], toy: str) -> None:
    answer = post(f"{toy}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1", b'{"prompt": ' + b"[" * 9999])
def test_a_body_that_is_not_json(content: bytes, toy: str) -> None:
    answer = post(f"{toy}/v1/chat/completions", content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_connection_reset_in_mid_stream(toy: str) -> None:
    """Not a polite close: RST, as from a process that was killed."""
    host, port = toy.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 590, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(head.encode() + body)
        assert b"200 OK" in link.recv(4096)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    processes.idle(toy)
    assert complete(toy, [1, 2, 3], 20).tokens == truth([1, 2, 3], 20)


def test_clients_that_send_half_a_request(toy: str) -> None:
    host, port = toy.removeprefix("http://").split(":")
    for half_of_it in (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
        b"\x16\x03\x01\x02\x00",
    ):
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(half_of_it)
    processes.idle(toy)
    assert complete(toy, [4, 5, 6], 20).tokens == truth([4, 5, 6], 20)


# ---- devices and memory --------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(
    ("device", "slots", "words"),
    [
        ("cuda:99", 1, ["device cuda:99", "installation of torch", "GPUs"]),
        ("cuda:x", 1, ["device cuda:x", "none of that name"]),
        ("cpu", 1024, ["not enough memory on cpu", "[0, 1)", "1024 slots of 1048576 rows"]),
        ("cpu", 1 << 40, ["not enough memory on cpu", "1099511627776 slots of 1048576 rows"]),
    ],
)
def test_a_block_that_has_no_place(
    device: str, slots: int, words: list[str], tmp_path: Path
) -> None:
    limits = replace(QUICK, slots=slots, max_model_len=1 << 20)
    model = str(default_model())
    ring = write_ring(tmp_path / "ring.toml", model=model, layers=1, stages=1, limits=limits)
    (one,) = ring.config.rings
    with pytest.raises(ModelError) as caught:
        load_model(ring.config, one, one.head, device, lambda _share, _what: None)
    for word in words:
        assert word in str(caught.value)
    kind = {"cuda:99": "torch", "cpu": "not-enough-memory"}.get(device)
    assert anchor(str(caught.value)) == kind
