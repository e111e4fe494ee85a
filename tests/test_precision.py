"""Smaller weights and smaller activations: what they lose is bounded, and exact mode keeps bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.kernels import PLAIN, in_vectors
from pipeline.linears import Linear, check_weights
from pipeline.model import ModelError
from pipeline.native.library import library
from pipeline.torch_model import TorchModel
from pipeline.weights import Source, open_model
from pipeline.wire import Wire
from tests.compiled import KERNELS, NATIVE
from tests.modelchain import chain, check_schedules
from tests.tinymodels import VOCABULARY, reference, write_directory

WIDE = {"hidden_size": 96, "intermediate_size": 96, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """Tiny models whose linears int4 takes: multiples of 32 in, of 16 out."""
    folder = tmp_path_factory.mktemp("wide")
    return {
        case: open_model(write_directory(folder / case, reference(case, WIDE)))
        for case in ("llama3", "qwen3_moe")
    }


MODES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": torch.float16},
    "bfloat16-int8": {"dtype": torch.bfloat16, "weights": "int8"},
    "float16-int8": {"dtype": torch.float16, "weights": "int8"},
    "bfloat16-int4": {"dtype": torch.bfloat16, "weights": "int4"},
    "float16-int4": {"dtype": torch.float16, "weights": "int4"},
    "bfloat16-fp8": {"dtype": torch.bfloat16, "activations": "fp8"},
    "float16-fp8": {"dtype": torch.float16, "activations": "fp8"},
    "float32-fp8": {"dtype": torch.float32, "activations": "fp8"},
}


@pytest.mark.parametrize("kernels", ["torch", pytest.param("auto", marks=NATIVE)])
@pytest.mark.parametrize("mode", MODES)
def test_cached_is_cold_to_the_bit(mode: str, kernels: str, sources: dict[str, Source]) -> None:
    options = {**MODES[mode], "kernels": kernels}
    blocks = chain(sources["llama3"], (0, 2, 6), slots=4, capacity=1024, **options)
    native = kernels == "auto" and MODES[mode]["dtype"] != torch.float16
    assert ("; native, " in blocks.blocks[0].info.kernel) == native
    assert blocks.blocks[0].info.kernel.startswith("exact;"), blocks.blocks[0].info.kernel
    check_schedules(blocks, VOCABULARY, 1, seed=3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_quantised_experts_keep_their_rows_too(kernels: str, sources: dict[str, Source]) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "weights": "int4", "kernels": kernels}
    blocks = chain(sources["qwen3_moe"], (0, 3, 6), slots=4, capacity=1024, **options)
    assert blocks.blocks[0].info.kernel.startswith("exact;"), blocks.blocks[0].info.kernel
    check_schedules(blocks, VOCABULARY, 1, seed=4)


def test_modes_are_other_models_to_a_ring(sources: dict[str, Source]) -> None:
    def block(**options: Any) -> TorchModel:
        options = {"dtype": torch.float32, **options}
        return TorchModel(sources["llama3"], (0, 1), slots=1, capacity=8, **options)

    made = {"plain": block(), **{name: block(**options) for name, options in MODES.items()}}
    assert len({each.info.fingerprint for each in made.values()}) == len(made)
    int8 = block(**MODES["bfloat16-int8"], kernels="torch")
    assert "int8 linear" in int8.info.kernel
    assert int8.info.fingerprint == made["bfloat16-int8"].info.fingerprint
    assert "bfloat16 with int8 weights" in made["bfloat16-int8"].info.kernel
    assert made["bfloat16-fp8"].info.kernel.endswith("fp8 activations")
    small = {"dtype": torch.bfloat16, "exact": False}
    plain = block(weights="int8", **small)
    assert plain.info.kernel.startswith("exact off")
    assert plain.info.fingerprint != block(**small).info.fingerprint


@pytest.mark.parametrize(("weights", "off"), [("int8", 0.02), ("int4", 0.15)])
@pytest.mark.parametrize(
    ("dtype", "native"),
    [
        (torch.float16, False),
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=NATIVE),
    ],
    ids=str,
)
def test_quantised_weights_are_near(
    weights: str, off: float, dtype: torch.dtype, native: bool
) -> None:
    """A product's rows, relative to their length; outputs on both sides of a block of rows."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(528, 96, generator=generator).to(dtype)
    x = torch.randn(1, 8, 96, generator=generator).to(dtype)
    kernels = replace(PLAIN, native=library() if native else None)
    right, found = (
        Linear(weight.clone(), weight[:, 0].clone(), replace(kernels, weights=kind))(x).float()
        for kind in ("dtype", weights)
    )
    difference = (found - right).norm(dim=2) / right.norm(dim=2)
    assert 0 < float(difference.max()) < off


def test_int4_says_what_it_cannot_take(tmp_path: Path) -> None:
    model = reference("llama", {"hidden_size": 48, "intermediate_size": 80})
    source = open_model(write_directory(tmp_path, model))
    with pytest.raises(
        ModelError, match=r"of \[48, 80\] is not a multiple of \[16, 32\]; int8 takes any$"
    ):
        TorchModel(source, (0, 1), slots=1, capacity=8, weights="int4")
    for weights in ("int8", "int4"):
        with pytest.raises(ModelError, match=f"{weights} weights run on a CPU, not on cuda"):
            check_weights(weights, torch.bfloat16, torch.device("cuda:0"))
        with pytest.raises(ModelError, match=f"{weights} weights need the dtype bfloat16 or"):
            check_weights(weights, torch.float32, torch.device("cpu"))


# ---- the wire -----------------------------------------------------------------------------------


def test_fp8_rows_are_near_and_their_own() -> None:
    wire = Wire(torch.bfloat16, 96, fp8=True)
    rows = torch.randn(5, 96).bfloat16() * torch.tensor([[1e-3], [1.0], [300.0], [1e5], [0.0]])
    rows = rows.bfloat16()
    whole = wire.pack(rows)
    assert (whole.dtype, whole.shape, len(whole.data)) == ("uint8", (5, 100), 500)
    back = wire.unpack(whole, 8)
    assert back.shape == (1, 8, 96)
    assert not back[0, 4:].any()
    largest = rows[:4].abs().amax(1, keepdim=True)
    assert ((back[0, :4] - rows[:4]).abs() / largest).max() <= 2**-4
    for number in range(5):
        alone = wire.pack(rows[number : number + 1])
        assert bytes(alone.data) == bytes(whole.data[number * 100 : (number + 1) * 100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_go_as_their_dtype_otherwise(dtype: torch.dtype) -> None:
    wire = Wire(dtype, 6, fp8=False)
    rows = torch.randn(3, 6).to(dtype)
    packed = wire.pack(rows)
    assert packed.shape == (3, 6)
    assert len(packed.data) == 18 * dtype.itemsize
    assert torch.equal(wire.unpack(packed, 8)[0, :3], rows)


# ---- elementwise --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(88, 1536), (97, 1535), (40, 2880), (1, 7)])
def test_no_vector_is_cut(shape: tuple[int, int]) -> None:
    """With plain silu 5 and 7 threads change a few of 786,432 elements, and so does a row alone."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([in_vectors(torch.sigmoid, row) for row in values])
        for count in (1, 2, 3, 5, 7):
            torch.set_num_threads(count)
            assert torch.equal(in_vectors(torch.sigmoid, values).reshape(-1), alone), count
    finally:
        torch.set_num_threads(threads)
