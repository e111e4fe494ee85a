"""The default model on a ring: drafts, neighbours and warmth change no token (CASES 1, 11).

One pair of blocks serves every ring here: a new ring's stages know nothing of the rows that an
earlier one left, so each begins cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from coord.draft import Drafter, LookupDrafter
from coord.draft_model import ModelDrafter
from coord.drafting import DraftRunner
from coord.tokenizer import Tokenizer, load_tokenizer
from pipeline.model import ToyModel
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tests import drafts
from tests.memoryring import MemoryRing, limits
from tests.modelfile import default_model
from tools.drafting import load_draft_model
from transport.frame import GREEDY, Sampling, Shaping

pytestmark = pytest.mark.model

LAYERS, SLOTS, ROWS = 30, 3, 512
COUNT = 16
JSON = (
    'Call the tool once for each row, with these arguments.\n{"name": "set_cell", "arguments": '
    '{"row": 1, "column": "A", "value": "x"}}\n{"name": "set_cell", "arguments": {"row": 2, '
    '"column": "A", "value": "x"}}\n{"name": "set_cell", "arguments":'
)
SEEDED = Sampling(1.2, 50, 0.95, 0.02, 7)
SHAPED = Sampling(0.9, seed=3, shaping=Shaping(1.2, 0.4, 0.3, ((28, -5.0),), 12))


@pytest.fixture(scope="module")
def blocks() -> Iterator[list[TorchModel]]:
    source, threads = open_model(default_model()), torch.get_num_threads()
    yield [
        TorchModel(source, cut, slots=SLOTS, capacity=ROWS, dtype=torch.bfloat16, threads=1)
        for cut in ((0, 15), (15, 30))
    ]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(default_model())


class RealRing(MemoryRing):
    """Two stages of the default model."""

    def __init__(self, blocks: list[TorchModel], drafter: Callable[[], Drafter] | None) -> None:
        self._blocks = blocks
        bounds = limits(slots=SLOTS, max_model_len=ROWS, chunk_tokens=64)
        super().__init__(2, bounds=bounds, slots=SLOTS, drafter=drafter, layers=LAYERS)
        self.form()

    def _model(self, index: int) -> ToyModel:
        return cast("ToyModel", self._blocks[index])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SHAPED], ids=["greedy", "seeded", "shaped"])
def test_case_11_the_same_tokens_drafted_alone_together_cold_and_warm(
    blocks: list[TorchModel], tokenizer: Tokenizer, sampling: Sampling
) -> None:
    prompt = tokenizer.encode(JSON)
    stops = tokenizer.stops
    plain = RealRing(blocks, None).ask(prompt, COUNT, stops=stops, sampling=sampling).tokens
    assert plain
    ring = RealRing(blocks, LookupDrafter)
    other = ring.submit(tokenizer.encode("Once upon a time"), 12, sampling=SEEDED)
    turn = ring.submit(prompt, COUNT, stops, sampling=sampling)
    ring.pump()
    assert ring.replies[other].over
    assert ring.replies[turn].tokens == plain
    warm = ring.ask(prompt, COUNT, stops=stops, sampling=sampling)
    assert warm.admitted[0].matched == len(prompt) - 1
    assert warm.tokens == plain
    if sampling is GREEDY:
        assert ring.scheduler.totals.drafts_accepted > COUNT // 2
    if sampling is SHAPED:
        assert len(plain) > 12


def test_the_model_drafts_for_itself(blocks: list[TorchModel], tokenizer: Tokenizer) -> None:
    """Greedy turns accept nearly all of it; sampled ones give what they gave without it."""
    path = str(default_model())
    model, vocabulary = load_draft_model(drafts.config(path, path), tokenizer.vocabulary)
    runner = DraftRunner(model, vocabulary)
    prompt = tokenizer.encode("Three rivers of Europe, and what each is known for:")
    for sampling in (GREEDY, SEEDED):
        plain = RealRing(blocks, None).ask(prompt, COUNT, sampling=sampling).tokens
        ring = RealRing(blocks, ModelDrafter)
        turn = ring.submit(prompt, COUNT, sampling=sampling)
        drafts.pump(ring, runner)
        runner.forget(turn)
        assert ring.replies[turn].tokens == plain
        if sampling is GREEDY:
            totals = ring.scheduler.totals
            assert totals.drafts_accepted > 3 * totals.drafts_rejected
            assert totals.drafts_accepted > COUNT // 2


def test_no_stop_token_before_min_tokens(blocks: list[TorchModel], tokenizer: Tokenizer) -> None:
    """CASE 34: with the end likeliest from the first token on."""
    bias = tuple((token, 100.0) for token in tokenizer.stops)
    prompt, stops = tokenizer.encode("Yes or no?"), tokenizer.stops
    ring = RealRing(blocks, LookupDrafter)
    for least in (0, 3):
        wanted = Sampling(shaping=Shaping(bias=bias, min_tokens=least))
        reply = ring.ask(prompt, 8, stops=stops, sampling=wanted)
        assert len(reply.tokens) == least + 1
        assert reply.finished == "stop"
