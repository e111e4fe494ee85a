"""Each family's chain of blocks is the library's whole model, and exact mode keeps every bit of it.

Sliding windows, two rope bases, sinks, fused projections, scaled embeddings, capped logits and
experts are the library's: what is ours is how rows, slots and weights reach them.
"""

from pathlib import Path

import pytest
import torch

from pipeline.torch_model import TorchModel
from pipeline.weights import ModelError, open_model
from tests.compiled import KERNELS
from tests.modelchain import chain, check_schedules, segment
from tests.tinymodels import CASES, GGUF_CASES, VOCABULARY, reference, write_directory, write_gguf
from transport.frame import Result, Sampling

ALL = Sampling(logprobs=VOCABULARY)
IDS = torch.randint(VOCABULARY, (1, 75), generator=torch.Generator().manual_seed(1))


def log_probabilities(result: Result) -> torch.Tensor:
    """[positions, vocabulary] from a result that lists them all."""
    rows = [[x for _, x in sorted(top)] for top in result.top]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_a_ring_says_what_the_library_generates(case: str, kernels: str, tmp_path: Path) -> None:
    """Chunked prefill, then a warm turn: its slot is cut back, and another text follows."""
    model = reference(case)
    source = open_model(write_directory(tmp_path, model))
    blocks = chain(source, (0, 1, 4, 6), kernels=kernels)

    def generated(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        found: list[int] = made[0, len(prompt) :].tolist()
        return found

    prompt = IDS[0].tolist()
    first = blocks.greedy(prompt, 20, chunk=32)
    assert first == generated(prompt, 20)
    follow_up = [*prompt, *first[:9], *prompt[40:70]]
    warm = blocks.greedy(follow_up, 20, held=len(prompt) + 9, chunk=16)
    assert warm == generated(follow_up, 20)


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_the_librarys(case: str, exact: bool, tmp_path: Path) -> None:
    model = reference(case)
    with torch.no_grad():
        expected = torch.log_softmax(model(IDS).logits[0].double(), -1)
    blocks = chain(open_model(write_directory(tmp_path, model)), (0, 1, 4, 6), exact=exact)
    assert blocks.blocks[0].info.kernel.startswith("exact;" if exact else "exact off")
    tokens = IDS[0].tolist()
    results = [
        blocks.forward(segment(a, tokens[a:b], sampling=ALL))[0]
        for a, b in ((0, 30), (30, 31), (31, 75))
    ]
    found = torch.cat([log_probabilities(result) for result in results])
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_gives_the_same_answers(case: str, tmp_path: Path) -> None:
    model = reference(case, GGUF_CASES[case])
    with torch.no_grad():
        expected = torch.log_softmax(model(IDS).logits[0].double(), -1)
    blocks = chain(open_model(write_gguf(tmp_path / "tiny.gguf", model)), (0, 6), exact=False)
    result = blocks.forward(segment(0, IDS[0].tolist(), sampling=ALL))[0]
    assert (log_probabilities(result) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_families_are_bit_equal_on_random_schedules(
    case: str, dtype: torch.dtype, kernels: str, tmp_path: Path
) -> None:
    source = open_model(write_directory(tmp_path, reference(case)))
    blocks = chain(source, (0, 2, 6), slots=4, capacity=1024, dtype=dtype, kernels=kernels)
    said = blocks.blocks[0].info.kernel
    assert said.startswith("exact;"), said
    assert ("native" in said) == (kernels == "native"), said
    check_schedules(blocks, VOCABULARY, 1, seed=2)


def test_longrope_serves_its_first_context(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("phi3long")))
    assert source.context == 1024
    with pytest.raises(ModelError, match=r"1025 rows, but its rope type, longrope, .*1024"):
        TorchModel(source, (0, 1), slots=1, capacity=1025)


@pytest.mark.parametrize(
    ("key", "value"), [("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)]
)
def test_what_no_layer_would_do_is_refused(key: str, value: object, tmp_path: Path) -> None:
    model = reference("gemma3")
    setattr(model.config, key, value)
    with pytest.raises(ModelError, match=f"{key} is set"):
        open_model(write_directory(tmp_path, model))
