"""KV rows of a byte a number: what they lose is bounded, and cached == cold keeps every bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.narrow import FP8, narrowed, widen
from pipeline.rows import NARROW, Narrow, make_rows, row_bytes, view, write
from pipeline.torch_model import TorchModel
from pipeline.weights import Source, open_model
from tests import processes, randommodel
from tests.modelchain import Chain, chain, check_schedules, segment
from tests.processes import Fleet, get, post
from tests.tinymodels import VOCABULARY, reference, write_directory
from transport.frame import Result, Sampling

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = tuple(NARROW)
# fused layers with a sliding window; the library's own layers, of two kinds
FUSED = {"mistral": True, "gemma3": False}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("rows")
    wide = {"hidden_size": 96, "intermediate_size": 96}  # which int4 takes
    return {
        case: open_model(write_directory(folder / case, reference(case, wide)))
        for case in ("llama3", *FUSED)
    }


# ---- cached == cold ------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FUSED)
def test_cached_is_cold_to_the_bit(
    case: str, dtype: torch.dtype, kv: str, sources: dict[str, Source]
) -> None:
    blocks = chain(sources[case], (0, 2, 6), slots=4, capacity=1024, dtype=dtype, kv=kv)
    kernel = blocks.blocks[0].info.kernel
    assert kernel.startswith("exact;"), kernel
    assert kernel.endswith(f"; {kv} KV")
    assert ("fused layers" in kernel) == FUSED[case]
    check_schedules(blocks, VOCABULARY, 1, seed=5)


def test_beside_smaller_weights_and_activations(sources: dict[str, Source]) -> None:
    small: dict[str, Any] = {"weights": "int4", "activations": "fp8", "kv": "int8"}
    blocks = chain(
        sources["llama3"], (0, 2, 6), slots=4, capacity=1024, dtype=torch.bfloat16, **small
    )
    kernel = blocks.blocks[0].info.kernel
    assert kernel.startswith("exact;"), kernel
    assert kernel.endswith("bfloat16 with int4 weights; fp8 activations; int8 KV")
    check_schedules(blocks, VOCABULARY, 1, seed=6)


@pytest.mark.parametrize("kv", KINDS)
def test_a_fork_and_a_parked_prefix_are_the_prefix(kv: str, sources: dict[str, Source]) -> None:
    """Behind copies between slots, to the host and back, a turn has the bits that it had."""
    blocks = chain(sources["mistral"], (0, 3, 6), slots=3, dtype=torch.bfloat16, kv=kv)
    prompt, other = [at * 7 % VOCABULARY for at in range(60)], [at % 11 for at in range(90)]
    more = [5, 80, 3, 41, 8]
    parked = 3  # numbers from the slots on
    _run(blocks, 0, 0, prompt)
    blocks.copy(0, 1, 60)
    blocks.copy(0, parked, 60)
    right = _run(blocks, 0, 60, more)
    assert _run(blocks, 1, 60, more) == right
    for slot in (0, 1, 2):  # other rows, numbers and scales, are everywhere
        _run(blocks, slot, 0, other)
    assert _run(blocks, 2, 60, more) != right
    blocks.copy(parked, 2, 60)
    assert _run(blocks, 2, 60, more) == right
    blocks.copy(2, 0, 40)  # a shorter fork, and the rest again
    _run(blocks, 0, 40, prompt[40:])
    assert _run(blocks, 0, 60, more) == right
    kept = blocks.blocks[0]._parked[parked]
    # int8 or fp8, not wide, and no more than the prefix
    held = sum(each.nbytes for rows in kept.values() for each in rows)
    assert held == 60 * blocks.blocks[0].info.row_bytes
    for block in blocks.blocks:
        block.drop(parked)
        assert not block._parked


def _run(blocks: Chain, slot: int, start: int, tokens: list[int]) -> Result:
    top = Sampling(logprobs=5)
    found = blocks.forward(segment(start, tokens, slot=slot, sampling=top))[0]
    return replace(found, turn=0, slot=0)


# ---- memory and identity -------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize(("size", "share"), [(64, 0.54), (128, 0.52)])
def test_a_slot_is_half_of_its_bytes(size: int, share: float, kv: str) -> None:
    shape, cpu = (2, 4, 1024, size), torch.device("cpu")
    wide, small = (make_rows(shape, torch.bfloat16, cpu, each) for each in ("dtype", kv))
    sizes = [sum(each.untyped_storage().nbytes() for each in held) for held in (wide, small)]
    assert sizes[1] <= share * sizes[0]
    assert [2 * 1024 * row_bytes(4, size, 2, each) for each in ("dtype", kv)] == sizes


def test_a_block_tells_its_rows_bytes(sources: dict[str, Source]) -> None:
    for kv in ("dtype", *KINDS):
        block = TorchModel(sources["mistral"], (1, 4), slots=3, capacity=600, kv=kv)
        held = sum(each.nbytes for rows in block._caches.values() for each in rows)
        assert held == 3 * 1024 * block.info.row_bytes, kv


def test_each_kind_is_another_model_to_a_ring(sources: dict[str, Source]) -> None:
    kinds = ("dtype", *KINDS)
    infos = [
        TorchModel(sources["mistral"], (0, 1), slots=1, capacity=8, kv=kv).info for kv in kinds
    ]
    assert len({each.fingerprint for each in infos}) == 3
    assert [each.kernel.rpartition("; ")[2] for each in infos] == ["bfloat16", "int8 KV", "fp8 KV"]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KINDS)
def test_only_what_is_looked_at_is_wide(kv: str) -> None:
    held = make_rows((2, 3, 4096, 16), torch.bfloat16, torch.device("cpu"), kv)
    key, value = torch.randn(2, 3, 40, 16).bfloat16()
    write(held, 1, slice(100, 140), key, value)
    found = view(held, 1, 512, torch.bfloat16)
    for wide, right in zip(found, (key, value), strict=True):
        assert wide.untyped_storage().nbytes() == 3 * 512 * 16 * 2
        # of the row's largest: half a step of int8; half of the last of 3 bits, and bfloat16's
        off = {"int8": 1 / 254, "fp8": 1 / 16}[kv] + 2**-8
        largest = right.abs().amax(2, keepdim=True)
        assert float(((wide[:, 100:140] - right).abs() / largest).max()) <= off
        assert not wide[:, :100].any()
        assert not wide[:, 140:].any()
    assert not any(each[0].float().any() for each in held)
    again = make_rows((2, 3, 4096, 16), torch.bfloat16, torch.device("cpu"), kv)
    write(again, 1, torch.arange(100, 140), key, value)
    for left, other in zip(held, again, strict=True):
        assert torch.equal(left.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv", KINDS)
def test_a_rows_bytes_are_its_own(kv: str, dtype: torch.dtype) -> None:
    """Also the zero row's, and those of the largest and smallest numbers; none becomes NaN."""
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(3, 70, 33, generator=generator).to(dtype)
    info = torch.finfo(dtype)
    for at, factor in enumerate((0.0, info.smallest_normal, 1e-4, 1e4, info.max / 8)):
        rows[:, at] = (rows[:, at].float() * factor).clamp(info.min, info.max).to(dtype)
    numbers, scales = narrowed(rows, NARROW[kv])
    wide = torch.empty_like(rows)
    widen(numbers, scales, wide)
    assert all(each.float().isfinite().all() for each in (numbers, scales, wide))
    assert not wide[:, 0].any()
    for head in range(3):
        for at in range(70):
            alone = narrowed(rows[head : head + 1, at : at + 1], NARROW[kv])
            for mine, whole in zip(alone, (numbers, scales), strict=True):
                one = mine[0, 0].view(torch.uint8)
                assert torch.equal(one, whole[head, at].contiguous().view(torch.uint8))


def test_every_number_is_read_exactly() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for numbers in (codes.view(torch.int8), codes[(codes & 0x7F) != 0x7F].view(FP8)):
        wide = torch.empty(1, 3000, len(numbers))  # several pieces
        widen(numbers.expand(wide.shape), torch.ones(1, 3000, 1), wide)
        assert torch.equal(wide, numbers.float().expand(wide.shape))


def test_what_garbage_holds_is_no_nan() -> None:
    """Zeros that nobody wrote are read as zeros: a scale of 0 is one."""
    for kv in KINDS:
        held = make_rows((1, 1, 64, 8), torch.float16, torch.device("cpu"), kv)
        assert isinstance(held, Narrow)
        assert not any(each.any() for each in view(held, 0, 64, torch.float16))


# ---- a ring of processes -------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def test_kvring_up_parks_and_forks_small_rows(fleet: Fleet, tmp_path: Path) -> None:
    """Two conversations in one slot of `kvring up --kv int8`: the first one comes back warm."""
    model = randommodel.write_folder(tmp_path / "model")
    small = ("--kv", "int8", "--activations", "fp8", "--park-mb", 64)
    started, url = fleet.up("--model", model, "--stages", 2, "--slots", 1, *small)
    fleet.ready(url)
    described = get(f"{url}/ring").json()["rings"][0]
    assert described["exact"] is True
    assert described["kernel"].endswith("fp8 activations; int8 KV")

    def ask(prompt: str, *, reuse: bool = True) -> tuple[int, str, list[float]]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
        answer = post(f"{url}/v1/completions", json={**body, "kvring": {"reuse": reuse}})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        choice = found["choices"][0]
        return cached, choice["text"], choice["logprobs"]["token_logprobs"]

    first = "The keeper of the lighthouse counted the ships. " * 3
    _, text, _ = ask(first)
    ask("A list of rivers: " * 8)  # takes the only slot
    warm = ask(f"{first}{text} And then?")
    assert warm[0] >= len(first), "parked, and restored"
    cold = ask(f"{first}{text} And then?", reuse=False)
    assert cold[0] == 0
    assert warm[1:] == cold[1:]
    assert "int8 KV" in started.output
