"""A chain of blocks is the whole model, and in exact mode a row's bits depend on nothing else."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipeline import kernels
from pipeline.model import ModelInfo
from pipeline.torch_model import TorchModel
from pipeline.weights import ModelError, Source, open_model
from tests.modelfile import ROOT, default_model
from tests.tinymodels import CASES, VOCABULARY, reference, write_directory
from transport.frame import GREEDY, Kind, Result, Sampling, Segment, Tensor

ALL = Sampling(logprobs=VOCABULARY)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 34, 35, 63, 64, 65, 66, 67, 97)


def segment(
    start: int,
    tokens: Sequence[int],
    *,
    slot: int = 0,
    want: int | None = None,
    sampling: Sampling = GREEDY,
) -> Segment:
    count = len(tokens) if want is None else want
    return Segment(slot, slot, start, tuple(tokens), Kind.PREFILL, b"", count, sampling)


@dataclass
class Chain:
    """Blocks run one after the other in this process: a ring without links."""

    blocks: list[TorchModel]

    def forward(self, *segments: Segment) -> tuple[Result, ...]:
        payload: Tensor | None = None
        for block in self.blocks:
            output = block.forward(segments, payload)
            payload = output.payload
        return output.results

    def copy(self, source: int, target: int, length: int) -> None:
        for block in self.blocks:
            block.copy(source, target, length)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        made = [self.forward(segment(0, prompt, want=1))[0].tokens[0]]
        while len(made) < count:
            at = len(prompt) + len(made) - 1
            made.append(self.forward(segment(at, made[-1:]))[0].tokens[0])
        return made


def chain(
    source: Source,
    cuts: Sequence[int],
    *,
    slots: int = 2,
    capacity: int = 512,
    dtype: torch.dtype = torch.float32,
    exact: bool = True,
) -> Chain:
    return Chain(
        [
            TorchModel(source, cut, slots=slots, capacity=capacity, dtype=dtype, exact=exact)
            for cut in pairwise(cuts)
        ]
    )


def log_probabilities(result: Result) -> torch.Tensor:
    """[positions, vocabulary] from a result that lists them all."""
    rows = [[x for _, x in sorted(top)] for top in result.top]
    return torch.tensor(rows, dtype=torch.float64)


# ---- the same as the library's whole model ------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_chain_equals_the_whole_model(case: str, exact: bool, tmp_path: Path) -> None:
    model = reference(case)
    source = open_model(write_directory(tmp_path, model))
    blocks = chain(source, (0, 1, 4, 6), exact=exact)
    ids = torch.randint(VOCABULARY, (1, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0].double(), -1)
    tokens = ids[0].tolist()
    pieces = [(0, 30), (30, 31), (31, 75)]
    results = [blocks.forward(segment(a, tokens[a:b], sampling=ALL))[0] for a, b in pieces]
    found = torch.cat([log_probabilities(result) for result in results])
    assert (found - expected).abs().max() <= 1e-4
    assert [t for r in results for t in r.tokens] == expected.argmax(-1).tolist()
    if exact:
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
        )
        assert blocks.greedy(tokens, 40) == whole[0, 75:].tolist()


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


@torch.inference_mode()
def spoil(blocks: Chain, seed: int) -> None:
    """Fill every KV row of every slot with large finite garbage."""
    generator = torch.Generator().manual_seed(seed)
    for block in blocks.blocks:
        for pair in block._caches.values():
            for rows in pair:
                rows.copy_(torch.randn(rows.shape, generator=generator) * 30)


def run_schedule(blocks: Chain, tokens: Sequence[int], start: int, rng: random.Random) -> Result:
    """Write tokens [start, ...) to slot 1 in random pieces, beside others, with rejected drafts."""
    parts: list[Result] = []
    sampling = Sampling(logprobs=5)
    at, busy = start, 0
    while at < len(tokens):
        size = min(rng.choice(SIZES), len(tokens) - at)
        drafts: list[int] = []
        if rng.random() < 0.4:  # a wrong tail, overwritten by the next piece
            drafts = rng.choices(range(VOCABULARY), k=rng.choice((1, 2, 3, 8)))
        mine = segment(at, [*tokens[at : at + size], *drafts], slot=1, sampling=sampling)
        frame = [mine]
        for slot in (2, 3):
            if rng.random() < 0.5:
                count = rng.choice(SIZES)
                other = segment(busy, rng.choices(range(VOCABULARY), k=count), slot=slot, want=1)
                frame.insert(rng.randrange(len(frame) + 1), other)
                busy = (busy + count) % 400
        torch.set_num_threads(rng.choice((1, 2)))
        found = blocks.forward(*frame)[frame.index(mine)]
        parts.append(Result(1, 1, at, found.tokens[:size], found.logprobs[:size], found.top[:size]))
        at += size
    return Result(
        1,
        1,
        start,
        tuple(token for part in parts for token in part.tokens),
        tuple(value for part in parts for value in part.logprobs),
        tuple(top for part in parts for top in part.top),
    )


def check_schedules(blocks: Chain, vocabulary: int, count: int, seed: int) -> None:
    """All schedules give the bits of one token at a time; rows 470 to 640 cross a key block."""
    threads = torch.get_num_threads()
    try:
        rng = random.Random(seed)
        tokens = rng.choices(range(min(vocabulary, 1000)), k=570)
        prefix = 498
        spoil(blocks, seed)
        for at in range(0, prefix, 83):
            blocks.forward(segment(at, tokens[at : at + 83], slot=0, want=0))
        blocks.copy(0, 1, prefix)
        single = [
            blocks.forward(segment(at, [tokens[at]], slot=1, sampling=Sampling(logprobs=5)))[0]
            for at in range(prefix, len(tokens))
        ]
        for number in range(count):
            spoil_tail(blocks, prefix, number)
            found = run_schedule(blocks, tokens, prefix, random.Random(seed * 100 + number))
            assert found.tokens == tuple(result.tokens[0] for result in single), (seed, number)
            assert found.logprobs == tuple(result.logprobs[0] for result in single), (seed, number)
            assert found.top == tuple(result.top[0] for result in single), (seed, number)
        # A cold prefill from row 0 in other pieces gives the same rows too.
        found = run_schedule(blocks, tokens, 0, random.Random(seed))
        assert found.top[prefix:] == tuple(result.top[0] for result in single)
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def spoil_tail(blocks: Chain, prefix: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for block in blocks.blocks:
        for pair in block._caches.values():
            for rows in pair:
                tail = rows[1, :, prefix:]
                tail.copy_(torch.randn(tail.shape, generator=generator) * 30)


@pytest.mark.model
@pytest.mark.timeout(900)  # 190 s at a load of 9 on 2 cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_model_is_bit_equal_on_random_schedules(source: Source, dtype: torch.dtype) -> None:
    blocks = chain(source, (0, 30), slots=4, capacity=1024, dtype=dtype)
    assert blocks.blocks[0].info.kernel.startswith("exact;"), blocks.blocks[0].info.kernel
    check_schedules(blocks, source.vocabulary, 2, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_families_are_bit_equal_on_random_schedules(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = open_model(write_directory(tmp_path, reference(case)))
    blocks = chain(source, (0, 2, 6), slots=4, capacity=1024, dtype=dtype)
    assert blocks.blocks[0].info.kernel.startswith("exact;"), blocks.blocks[0].info.kernel
    check_schedules(blocks, VOCABULARY, 3, seed=2)


def test_a_failed_probe_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def differs(_: kernels.Linear, tile: int) -> bool:
        tried.append(tile)
        return False

    monkeypatch.setattr(kernels, "linear_exact", differs)
    source = open_model(write_directory(tmp_path, reference("llama")))
    block = TorchModel(source, (0, 2), slots=1, capacity=10)
    assert set(tried) == set(kernels.TILES)
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
        assert payload.shape == (3, 48)
        assert len(payload.data) == 3 * 48 * size
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
