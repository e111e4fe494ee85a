"""A chain of blocks is the whole model, and in exact mode a row's bits depend on nothing else."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline import probe
from pipeline.kernels import TILES
from pipeline.linears import Linear
from pipeline.model import ModelInfo
from pipeline.torch_model import TorchModel
from pipeline.weights import ModelError, Source, open_model
from tests.compiled import KERNELS
from tests.modelchain import chain, check_schedules, segment
from tests.modelfile import ROOT, default_model
from tests.tinymodels import reference, write_directory
from transport.frame import Sampling

# ---- the same as the library's whole model ------------------------------------------------------


@pytest.fixture(scope="module")
def source() -> Source:
    return open_model(default_model())


@pytest.mark.model
def test_real_model_equals_the_library(source: Source) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = source.config.__class__.from_dict(source.config.to_dict())
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    names = source.names((0, 30))
    model.load_state_dict({name: source.read(name, torch.float32) for name in names})
    tokens = random.Random(1).choices(range(49152), k=70)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    result = chain(source, (0, 10, 20, 30)).forward(
        segment(0, tokens, sampling=Sampling(logprobs=50))
    )[0]
    assert list(result.tokens) == expected.argmax(-1).tolist()
    for row, top in zip(expected, result.top, strict=True):
        assert max(abs(float(row[token]) - value) for token, value in top) <= 1e-3


# ---- exactness ----------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_model_is_bit_equal_on_random_schedules(
    source: Source, dtype: torch.dtype, kernels: str
) -> None:
    blocks = chain(source, (0, 30), slots=4, capacity=1024, dtype=dtype, kernels=kernels)
    assert blocks.blocks[0].info.kernel.startswith("exact;"), blocks.blocks[0].info.kernel
    check_schedules(blocks, source.vocabulary, 2, seed=1)


def test_a_failed_probe_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def differs(_: Linear, tile: int) -> bool:
        tried.append(tile)
        return False

    monkeypatch.setattr(probe, "linear_exact", differs)
    source = open_model(write_directory(tmp_path, reference("llama")))
    block = TorchModel(source, (0, 2), slots=1, capacity=10, kernels="torch")
    assert set(tried) == set(TILES)
    assert block.info.kernel.startswith("exact off (linears differ by row)")


# ---- the block itself ---------------------------------------------------------------------------


def test_info(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))

    def info(layers: tuple[int, int], dtype: torch.dtype = torch.float32) -> ModelInfo:
        return TorchModel(source, layers, slots=3, capacity=513, dtype=dtype).info

    head, tail = info((0, 2)), info((2, 6))
    assert (head.layers, head.layers_total, head.slots, head.capacity) == ((0, 2), 6, 3, 1024)
    assert (head.head, head.tail, tail.head, tail.tail) == (True, False, False, True)
    assert head.fingerprint == tail.fingerprint
    assert head.fingerprint != info((0, 2), torch.bfloat16).fingerprint
    assert "float32" in head.kernel


def test_copy_forks_a_prefix(tmp_path: Path) -> None:
    blocks = chain(open_model(write_directory(tmp_path, reference("llama"))), (0, 3, 6))
    prompt = list(range(40))
    expected = blocks.greedy(prompt, 10)
    blocks.copy(0, 1, 40)
    found = blocks.forward(segment(40, expected[:9], slot=1))[0].tokens
    assert list(found) == expected[1:]


def test_payload_keeps_its_rows(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        block = TorchModel(source, (0, 2), slots=1, capacity=10, dtype=dtype)
        payload = block.forward([segment(0, [1, 2, 3], want=0)], None).payload
        assert payload is not None
        assert payload.shape == (3, 96)
        assert len(payload.data) == 3 * 96 * size
        kept = bytes(payload.data)
        block.forward([segment(0, [4, 5, 6], want=0)], None)
        assert bytes(payload.data) == kept


def test_want_says_which_rows_are_answered(tmp_path: Path) -> None:
    blocks = chain(open_model(write_directory(tmp_path, reference("llama"))), (0, 6))
    every = blocks.forward(segment(0, range(50)))[0]
    some = blocks.forward(segment(0, range(50), want=3), segment(0, range(9), slot=1, want=0))
    assert some[0].tokens == every.tokens[-3:]
    assert (some[0].start, some[1].tokens) == (47, ())


def test_progress_rises_to_one(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))
    seen: list[float] = []
    report: Callable[[float, str], None] = lambda share, _: seen.append(share)  # noqa: E731
    TorchModel(source, (0, 6), slots=1, capacity=10, progress=report)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_impossible_blocks(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))
    with pytest.raises(ModelError, match=r"no layers \[4, 9\)"):
        TorchModel(source, (4, 9), slots=1, capacity=10)
    with pytest.raises(ModelError, match="both must be positive"):
        TorchModel(source, (0, 1), slots=0, capacity=10)


# Anonymous memory only: pages of libraries and of the mapped file belong to the system's cache.
_MEASURE = """
import json, sys, threading
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
import torch
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
torch.set_num_threads(1)
TorchModel(open_model(sys.argv[1]), (3, 4), slots=1, capacity=512)  # kernels, code, buffers
before = peak = anonymous()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
source = open_model(sys.argv[1])
model = TorchModel(source, (10, 20), slots=4, capacity=2048)
with torch.inference_mode():
    for rows in (rows for pair in model._caches.values() for rows in pair):
        rows.fill_(1)
done.set()
thread.join()
print(json.dumps([anonymous() - before, max(peak, anonymous()) - before]))
"""


@pytest.mark.model
def test_memory_of_a_middle_stage_is_its_block() -> None:
    arguments = [sys.executable, "-c", _MEASURE, str(default_model())]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    resident, peak = json.loads(done.stdout)
    block = 10 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576) * 2
    cache = 10 * 2 * 4 * 3 * 2048 * 64 * 2
    slack = 24 << 20  # one layer in float32 on its way, the allocator's leftovers
    assert resident <= block + cache + slack, (resident, block, cache)
    assert peak <= block + cache + slack, (peak, block, cache)
