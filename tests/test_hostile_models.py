"""Model files that lie: GGUF and safetensors headers, configs, tokenizers and chat templates.

Each ends in a ModelError (of the weights) or a ValueError (of the tokenizer) that names the file,
within seconds and without taking memory for what the file only claims to have.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from coord.actions import TurnError
from coord.tokenizer import load_tokenizer
from pipeline.load import describe_model
from pipeline.model import ModelError
from tests import randommodel

SEEDS = 60
MOST_BYTES = 64 << 20  # a tiny model's own classes and headers take 10
MOST_S = 20.0
U32S = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
U64S = (0, 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def bounded(read: Callable[[str], object], model: Path, expected: type[Exception]) -> str | None:
    """What it says against the file; None when it takes it."""
    began = time.thread_time()
    tracemalloc.start()
    try:
        read(str(model))
    except expected as error:
        said = str(error)
        assert str(model) in said, said
        return said
    else:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES, f"{peak:,} bytes"
        assert time.thread_time() - began < MOST_S


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The libraries' own classes are no finding."""
    folder = tmp_path_factory.mktemp("whole")
    for model in (
        randommodel.write_folder(folder / "m"),
        randommodel.write_gguf(folder / "m.gguf"),
    ):
        describe_model(str(model))
        load_tokenizer(model)


def both(model: Path) -> tuple[str | None, str | None]:
    return bounded(describe_model, model, ModelError), bounded(load_tokenizer, model, ValueError)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = randommodel.write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return path.read_bytes()


# ---- GGUF ----------------------------------------------------------------------------------------


def lengths(data: bytes) -> Iterator[int]:
    """Where a 64-bit count, length or offset of the header may stand."""
    end = min(len(data), 12_000)
    yield 8
    yield 16
    for at in range(24, end - 8):
        if data[at + 3 : at + 8] == bytes(5) and data[at : at + 3] != bytes(3):
            yield at


@pytest.mark.parametrize("seed", range(3))
def test_a_gguf_whose_numbers_lie(seed: int, gguf: bytes, tmp_path: Path) -> None:
    random = Random(seed)
    places = list(lengths(gguf))
    path = tmp_path / "lie.gguf"
    refused = 0
    for _ in range(SEEDS):
        data = bytearray(gguf)
        for _lie in range(random.randrange(1, 4)):
            at = random.choice(places)
            if random.random() < 0.7:
                data[at : at + 8] = struct.pack("<Q", random.choice(U64S))
            else:
                data[at : at + 4] = struct.pack("<I", random.choice(U32S))
        path.write_bytes(data)
        refused += any(said is not None for said in both(path))
    assert refused > SEEDS // 4


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


HEAD = b"GGUF" + struct.pack("<I", 3)
HOSTILE_GGUF: dict[str, bytes] = {
    "all tensors there are": HEAD + struct.pack("<QQ", 2**64 - 1, 0),
    "all values there are": HEAD + struct.pack("<QQ", 0, 2**64 - 1),
    "a key of 2^63 bytes": HEAD + struct.pack("<QQQ", 0, 1, 2**63) + b"k",
    "a text of 2^64 - 1 bytes": HEAD
    + struct.pack("<QQ", 0, 1)
    + text("k")
    + struct.pack("<IQ", 8, 2**64 - 1),
    "an array of 2^60 texts": HEAD
    + struct.pack("<QQ", 0, 1)
    + text("k")
    + struct.pack("<I", 9)
    + array(8, 2**60, b""),
    "an array of 2^62 numbers": HEAD
    + struct.pack("<QQ", 0, 1)
    + text("k")
    + struct.pack("<I", 9)
    + array(10, 2**62, bytes(64)),
    "arrays in arrays": HEAD
    + struct.pack("<QQ", 0, 1)
    + text("k")
    + struct.pack("<I", 9)
    + array(9, 1, b"") * 5000,
    "a tensor of 2^32 - 1 dimensions": HEAD
    + struct.pack("<QQ", 1, 0)
    + text("t")
    + struct.pack("<I", 2**32 - 1),
    "a tensor of 2^252 numbers": HEAD
    + struct.pack("<QQ", 1, 0)
    + text("t")
    + struct.pack("<IQQQQIQ", 4, *[2**63] * 4, 0, 0),
    "an offset of 2^64 - 1": HEAD
    + struct.pack("<QQ", 1, 0)
    + text("t")
    + struct.pack("<IQIQ", 1, 32, 0, 2**64 - 1),
}


@pytest.mark.parametrize("data", HOSTILE_GGUF.values(), ids=HOSTILE_GGUF)
def test_a_hostile_gguf(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    assert all(said is not None for said in both(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**32 - 1),
        ("block_count", 0),
        ("embedding_length", 2**31),
        ("feed_forward_length", 2**32 - 1),
        ("attention.head_count", 2**32 - 1),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
    ],
)
def test_a_gguf_with_absurd_sizes(key: str, value: int, gguf: bytes, tmp_path: Path) -> None:
    """A stage would make a list with an item for each layer, or a layer of these sizes."""
    name = text(f"llama.{key}")
    at = gguf.index(name) + len(name)
    assert gguf[at : at + 4] == struct.pack("<I", 4)  # the value is a uint32
    path = tmp_path / "absurd.gguf"
    path.write_bytes(gguf[: at + 4] + struct.pack("<I", value) + gguf[at + 8 :])
    assert bounded(describe_model, path, ModelError) is not None


def test_tensors_that_overlap_are_read_within_the_file(gguf: bytes, tmp_path: Path) -> None:
    """Their bytes are what the file says, twice; nothing is read past them."""
    name = text("blk.1.attn_q.weight")
    at = gguf.index(name) + len(name)
    dimensions = struct.unpack_from("<I", gguf, at)[0]
    offset_at = at + 4 + 8 * dimensions + 4
    path = tmp_path / "overlap.gguf"
    path.write_bytes(gguf[:offset_at] + struct.pack("<Q", 0) + gguf[offset_at + 8 :])
    assert bounded(describe_model, path, ModelError) is None
    path.write_bytes(gguf[:offset_at] + struct.pack("<Q", len(gguf)) + gguf[offset_at + 8 :])
    assert bounded(describe_model, path, ModelError) is not None


# ---- safetensors and config.json -----------------------------------------------------------------


def test_safetensors_headers_that_lie(tmp_path: Path) -> None:
    folder = randommodel.write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    header: dict[str, Any] = json.loads(whole[8 : 8 + size])
    name = "model.layers.1.mlp.up_proj.weight"

    def write(text: bytes, length: int | None = None) -> None:
        told = len(text) if length is None else length
        file.write_bytes(struct.pack("<Q", told) + text + whole[8 + size :])

    for length in (0, 1, size - 1, len(whole), 2**31, 2**63, 2**64 - 1):
        write(json.dumps(header).encode(), length)
        assert bounded(describe_model, folder, ModelError) is not None
    begin, end = header[name]["data_offsets"]
    lies: list[dict[str, Any]] = [
        {"data_offsets": [begin, 2**63]},
        {"data_offsets": [-(end - begin), 0]},
        {"data_offsets": [begin]},
        {"data_offsets": [float(begin), float(end)]},
        {"data_offsets": "0,1"},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 1_000_000},
        {"shape": [True, False]},
        {"shape": [float("inf"), 1]},
        {"shape": [float("nan")]},
        {"shape": ["96", "64"]},
        {"dtype": "I4"},
        {"dtype": {}},
    ]
    for lie in lies:
        write(json.dumps({**header, name: {**header[name], **lie}}).encode())
        assert bounded(describe_model, folder, ModelError) is not None, lie
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff", b"null", b"[]"):
        write(text)
        assert bounded(describe_model, folder, ModelError) is not None, text[:9]


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = randommodel.write_folder(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    name = "model.embed_tokens.weight"
    for weight_map in (
        {name: "../../../etc/passwd"}, {name: "/etc/passwd"}, {name: ".."}, {name: ""},
        {name: "a\0b"}, {name: 7}, {name: "model.safetensors", "no.such": "model.safetensors"},
        [name], None, {name: "x" * 5000},
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert bounded(describe_model, folder, ModelError) is not None, weight_map
    index.write_text("[" * 100_000)
    assert bounded(describe_model, folder, ModelError) is not None


HOSTILE_CONFIGS: list[dict[str, Any]] = [
    {"num_hidden_layers": 10**12},
    {"num_hidden_layers": 2**31, "model_type": "qwen2"},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "4"},
    {"num_hidden_layers": 1e300},
    {"hidden_size": 2**62},
    {"hidden_size": -64},
    {"hidden_size": 0},
    {"intermediate_size": 2**62},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 0},
    {"head_dim": 2**61},
    {"vocab_size": 2**62},
    {"hidden_act": "no such"},
    {"hidden_act": {}},
    {"rope_parameters": [1]},
    {"rope_scaling": {"rope_type": "no such"}},
    {"layer_types": ["full_attention"] * 3},
    {"rms_norm_eps": "x"},
    {"model_type": ["llama"]},
    {"model_type": None},
]


@pytest.mark.parametrize("change", HOSTILE_CONFIGS, ids=str)
def test_a_hostile_config(change: dict[str, Any], tmp_path: Path) -> None:
    folder = randommodel.write_folder(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    harmless = "hidden_act" in change or "rope_parameters" in change or "layer_types" in change
    said = bounded(describe_model, folder, ModelError)
    assert said is not None or harmless


# ---- tokenizers and templates --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_a_tokenizer_whose_values_were_replaced(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    folder = randommodel.write_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    values: tuple[Any, ...] = (None, -1, 2**63, 1e300, "", "x" * 1000, [], [[]], {}, True)
    for _ in range(SEEDS):
        tree = json.loads(json.dumps(whole))
        holder: Any = tree
        key: Any = random.choice(list(holder))
        while isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.8:
            holder = holder[key]
            key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key] = random.choice(values)
        path.write_text(json.dumps(tree))
        bounded(load_tokenizer, folder, ValueError)


def templated(folder: Path, template: str) -> Any:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load_tokenizer(folder)


SAY = [{"role": "user", "content": "hi"}]
ENDLESS = {
    "text": "{{ 'x' * 10**10 }}",
    "text by a variable": "{% set n = 10000000000 %}{{ 'x' * n }}",
    "list": "{% set n = 10000000000 %}{{ ([0] * n) | length }}",
    "power": "{{ 9 ** 99999999 }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "range": "{% for i in range(10000000000) %}x{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' }}"
    "{% endfor %}{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "interpreter": "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.clear() }}",
    "mutation": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_a_400(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord.template.MAX_RENDERED_CHARS", 1 << 20)
    tokenizer = templated(randommodel.write_folder(tmp_path / "m"), template)
    with pytest.raises(TurnError) as raised:
        tokenizer.spell(SAY)
    assert (raised.value.status, raised.value.code) == (400, "template_error")


def test_a_template_may_take_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coord.template.MAX_RENDER_S", 0.05)
    slow = "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}"
    tokenizer = templated(randommodel.write_folder(tmp_path / "m"), slow)
    began = time.thread_time()
    with pytest.raises(TurnError, match="does not come to an end"):
        tokenizer.spell(SAY)
    assert time.thread_time() - began < 5.0


def test_a_sentencepiece_token_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    """Every cut of a token is looked up: its length squared."""
    fields = [
        text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("llama"),
        text("tokenizer.ggml.tokens")
        + struct.pack("<I", 9)
        + array(8, 2, text("a") + text("x" * (1 << 20))),
        text("tokenizer.ggml.scores") + struct.pack("<I", 9) + array(6, 2, bytes(8)),
    ]
    path = tmp_path / "long.gguf"
    path.write_bytes(HEAD + struct.pack("<QQ", 0, len(fields)) + b"".join(fields))
    said = bounded(load_tokenizer, path, ValueError)
    assert said is not None
    assert "1048576 characters" in said
