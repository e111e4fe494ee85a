"""The native kernels: right, exact, portable, and left alone where they can't serve."""

import copy
import random
import re
import stat
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.attention import Part, Plan
from pipeline.fused import Fused
from pipeline.kernels import PLAIN, spans
from pipeline.linears import Linear
from pipeline.load import load_model
from pipeline.model import ModelError
from pipeline.native import library as module
from pipeline.native import probe
from pipeline.native.layer import Native
from pipeline.native.library import Library, library
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tests.compiled import NATIVE
from tests.modelchain import chain, check_schedules
from tests.tinymodels import VOCABULARY, reference, write_directory
from transport.config import Config, Coordinator, Limits, Model, Ring, Stage

pytestmark = NATIVE
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 7, 8, 12, 13, 16, 17, 31, 32, 33, 40, 64, 97]
# As this machine has it, its vectors alone, and the machines that have less.
BUILDS: dict[str, tuple[str, ...]] = {
    "all": (),
    "no AMX": ("-DKVRING_NO_AMX",),
    "AVX2": ("-march=x86-64-v3",),
    "SSE2": ("-march=x86-64",),
}


@pytest.fixture(params=BUILDS, scope="module")
def native(request: pytest.FixtureRequest) -> Library:
    return library(*BUILDS[request.param])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (33, 96), (100, 64), (576, 1536)])
def test_products(native: Library, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = normal(1, outputs, inputs).to(dtype), normal(2, outputs).to(dtype)
    x = normal(3, max(ROWS), inputs).to(dtype)
    right = x.double() @ weight.double().T + bias.double()
    packed = native.pack(weight, bias)
    whole = native.linear(x, packed, wide=True)
    assert off(whole, right) <= 2e-6
    for rows in ROWS:
        start = random.Random(rows).randrange(max(ROWS) - rows + 1)
        part = slice(start, start + rows)
        assert torch.equal(native.linear(x[part], packed, wide=True), whole[part]), rows
    assert torch.equal(native.linear(x, packed, wide=False), whole.to(dtype))
    bare = native.linear(x, native.pack(weight, None), wide=True)
    assert off(bare, right - bias.double()) <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_quantised_weights(native: Library, dtype: torch.dtype, bits: int) -> None:
    outputs, inputs = 64, 96
    generator = torch.Generator().manual_seed(7)
    low, high = (-127, 128) if bits == 8 else (0, 16)
    numbers = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    scales = normal(8, outputs)
    if bits == 4:
        scales = normal(8, outputs, inputs // 32, 2).bfloat16()
    if bits == 8:
        weight = numbers.double() * scales.double()[:, None]
    else:
        scale, zero = scales.double().repeat_interleave(32, 1).unbind(2)
        weight = (numbers.double() - 8) * scale + zero
    x, bias = normal(9, max(ROWS), inputs).to(dtype), normal(10, outputs)
    packed = native.pack_small([(numbers, scales)], outputs, inputs, bits, bias)
    whole = native.linear(x, packed, wide=True)
    right = x.double() @ weight.T + bias.double()
    # 4 bits are rounded to the dtype once more
    assert off(whole, right) <= (5e-3 if bits == 4 and dtype == torch.bfloat16 else 2e-6)
    for rows in ROWS:
        assert torch.equal(native.linear(x[:rows], packed, wide=True), whole[:rows]), rows


@pytest.mark.parametrize("weights", ["dtype", "int8", "int4"])
def test_gates_and_ups_alternate(weights: str) -> None:
    """More of them than are quantised at once, and no multiple of that."""
    weight, bias, x = normal(1, 2 * 528, 96), normal(2, 2 * 528), normal(3, 1, 8, 96)
    plain, paired = (
        Linear(
            weight.bfloat16(),
            bias.bfloat16(),
            replace(PLAIN, exact=True, native=library(), weights=weights),
            paired=paired,
        )(x.bfloat16())[0]
        for paired in (False, True)
    )
    for at in range(0, 528, 16):
        gates, ups = plain[:, at : at + 16], plain[:, 528 + at : 528 + at + 16]
        assert torch.equal(paired[:, 2 * at : 2 * at + 32], torch.cat((gates, ups), 1)), at


def attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[rows, heads, size] by the definition, in float64."""
    heads, rows, size = query.shape
    group = heads // len(keys)
    k, v = (each.double().repeat_interleave(group, 0) for each in (keys, values))
    logits = query.double() @ k.transpose(1, 2) * size**-0.5
    position, key = torch.arange(start, start + rows)[:, None], torch.arange(k.shape[1])
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    logits.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(heads, rows, 1)), 2)
    shares = torch.softmax(logits, 2)[..., : k.shape[1]]
    return (shares @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "size", "window", "sunk"),
    [
        (6, 2, 16, None, False),
        (9, 3, 64, None, False),
        (8, 1, 80, 24, False),
        (4, 4, 128, None, True),
        (2, 1, 256, 300, True),
    ],
)
def test_attention(
    native: Library,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    size: int,
    window: int | None,
    sunk: bool,
) -> None:
    start, rows, capacity = 215, 97, 512  # over the end of a block of 256 keys
    keys, values = normal(4, 2, 2, groups, capacity, size).to(dtype)
    sinks = normal(6, heads).to(dtype) * 3 if sunk else None
    query = normal(5, heads, rows, size).to(dtype)
    right = attended(query, keys[1], values[1], start, window, sinks)

    def run(first: int, last: int) -> torch.Tensor:
        """Rows [first, last), behind one row of another slot."""
        frame = torch.cat((query[:, :1], query[:, first:last]), 1)
        part = (start + first, start + last, 1)
        out = torch.full((last - first + 1, heads, size), 7.0, dtype=dtype)
        native.attention(part, frame, keys[1], values[1], out, size**-0.5, window, sinks)
        assert (out[0] == 7).all()
        return out[1:]

    whole = run(0, rows)
    assert off(whole, right) <= (5e-6 if dtype == torch.float32 else 2e-2)
    for count in ROWS:
        first = random.Random(count).randrange(rows - count + 1)
        assert torch.equal(run(first, first + count), whole[first : first + count]), count
    for slots in (keys, values):  # what no row may see changes none
        slots[1, :, start + rows :] = 1e3
        slots[0, :, 4:] = -1e3
    assert torch.equal(run(0, rows), whole)


@pytest.mark.parametrize("build", ["no AMX", "AVX2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_are_exact_with_any_build(
    build: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "library", lambda: library(*BUILDS[build]))
    source = open_model(write_directory(tmp_path, reference("qwen3")))
    blocks = chain(source, (0, 2, 6), slots=4, capacity=1024, dtype=dtype, kernels="native")
    assert "whole layers" in blocks.blocks[0].info.kernel
    check_schedules(blocks, VOCABULARY, 1, seed=3)


@pytest.mark.parametrize("build", BUILDS)
def test_gates_far_below_0(build: str) -> None:
    """Where e^-x is more than a float holds, a perceptron's gate is 0, with any build."""
    kernels = replace(PLAIN, exact=True, native=library(*BUILDS[build]))
    layer = copy.deepcopy(reference("llama").model.layers[0]).requires_grad_(requires_grad=False)
    layer.mlp.gate_proj.weight *= 1000
    rows, (cos, sin) = normal(11, 1, 40, 96), normal(12, 2, 1, 40, 16)
    found = []
    for kind in (Fused, Native):
        caches = torch.zeros(2, 1, 2, 512, 16)
        part = Part(0, 0, 40, 0, spans(0, 40, 3, PLAIN))
        plan = Plan([part], {0: (caches[0], caches[1])})
        own = kind(copy.deepcopy(layer), kernels if kind is Native else PLAIN)
        found.append(own(rows.clone(), position_embeddings=(cos, sin), plan=plan).double())
    assert off(found[1], found[0]) <= 1e-5


def test_whole_layers_are_those_that_fuse(tmp_path: Path) -> None:
    for case in ("llama3", "qwen3", "gemma3", "gpt_oss"):
        source = open_model(write_directory(tmp_path / case, reference(case)))
        block = TorchModel(source, (0, 3), slots=1, capacity=10, kernels="native")
        whole = [isinstance(layer, Native) for _, layer in block._layers]
        assert whole == [case in ("llama3", "qwen3")] * 3, case


# ---- where they can't serve ----------------------------------------------------------------------


def block(path: Path, **options: Any) -> TorchModel:
    source = open_model(write_directory(path, reference("llama")))
    return TorchModel(source, (0, 1), slots=1, capacity=10, **options)


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is compiled yet, and the cache is a folder of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(probe, "library", library.__wrapped__)
    monkeypatch.setattr(module, "_FLAGS", tuple(f.replace("-O3", "-O0") for f in module._FLAGS))
    return tmp_path / ".cache" / "kvring"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"),
        ("echo it is broken >&2; echo so >&2; exit 1", r"/c\+\+ failed: it is broken$"),
        ("exit 1", r"/c\+\+ failed: no message$"),
        ("exit 0", r"/c\+\+ made nothing$"),
        ("for last; do :; done; echo nothing > $last", r"kernels-[0-9a-f]+\.so does not load: "),
    ],
)
def test_without_a_compiler_torch_serves(
    script: str, why: str, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        compiler = tmp_path / "c++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel = block(tmp_path).info.kernel
    assert kernel.startswith("exact;")
    assert "; not native: " in kernel
    with pytest.raises(ModelError, match=f"^kernels 'native': .*{why}"):
        block(tmp_path, kernels="native")
    assert not list(uncached.glob("*.so"))  # nothing broken is kept


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_without_a_place_for_them_torch_serves(
    missing: str, tmp_path: Path, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only system without a /tmp, and a cache that nothing can be written to."""

    def refused(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    if missing == "folder":
        uncached.parent.write_text("not a directory")
        monkeypatch.setattr(module, "_own_folder", module._own_folder.__wrapped__)
        monkeypatch.setattr(tempfile, "mkdtemp", refused)
    else:
        (uncached / "lock").mkdir(parents=True)
    why = "not native: no place for them: .* (No space left on device|Is a directory)"
    assert re.search(why, block(tmp_path / "model").info.kernel)


def test_what_they_do_not_know(tmp_path: Path) -> None:
    why = "not native: there are none for float16"
    assert why in block(tmp_path, dtype=torch.float16).info.kernel
    with pytest.raises(ModelError, match="kernels 'native': there are none for float16"):
        block(tmp_path, dtype=torch.float16, kernels="native")


def test_a_width_that_they_do_not_take(tmp_path: Path) -> None:
    model = reference("llama", {"intermediate_size": 80})
    source = open_model(write_directory(tmp_path, model))
    said = TorchModel(source, (0, 1), slots=1, capacity=10).info.kernel
    assert "not native: a product's 80 inputs are not a multiple of 32" in said


def test_kernels_that_are_wrong_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Library.linear

    def wrong(self: Library, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return real(self, x, *args, **options) * 1.01

    def uneven(self: Library, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return real(self, x, *args, **options) * (1 + 1e-6 * (len(x) > 1))

    monkeypatch.setattr(Library, "linear", wrong)
    assert "not native: a product of 96 inputs is off by 1.0e-02" in block(tmp_path).info.kernel
    monkeypatch.setattr(Library, "linear", uneven)
    assert "not native: a product of 96 inputs differs by row" in block(tmp_path).info.kernel


def test_they_are_compiled_once_and_kept_privately(
    uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not module.cached()
    library.__wrapped__()
    (_,) = uncached.glob("*.so")
    assert stat.S_IMODE(uncached.stat().st_mode) == 0o700
    assert module.cached()
    monkeypatch.setattr(subprocess, "run", None)  # nothing is compiled again
    library.__wrapped__()


def test_a_cache_that_others_can_write_is_not_used(uncached: Path) -> None:
    uncached.mkdir(parents=True)
    uncached.chmod(0o777)
    library.__wrapped__()
    assert not list(uncached.iterdir())


def test_a_stage_of_ring_toml_gets_its_kernels(tmp_path: Path) -> None:
    path = str(write_directory(tmp_path, reference("llama")))
    said = {}
    for kernels in ("auto", "torch"):
        stage = Stage("s0", "ipc://x", (0, 6), kernels=kernels)
        ring = Ring("ring0", "ipc://y", (stage,))
        config = Config(Model(path, "m"), (ring,), Coordinator(), Limits(slots=1))
        seen: list[str] = []
        model = load_model(config, ring, stage, "cpu", lambda _, what, s=seen: s.append(what))  # type: ignore[misc]
        said[kernels] = model.info
    assert "native" in said["auto"].kernel
    assert "native" not in said["torch"].kernel
    assert said["auto"].fingerprint == said["torch"].fingerprint  # one ring may have both
