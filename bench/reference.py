"""Greedy tokens of a three-block chain against Hugging Face generate: float32, the same weights.

python -m bench.reference MODEL [--tokens N] [--prompts N]
Lists every prompt's first difference with the reference's gap between its two largest logits
there; exits with 1 when a gap is 1e-3 or more (smaller ones are a tie to float32 sums).
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.prompts import PROMPTS
from pipeline.torch_model import TorchModel
from pipeline.weights import Source, open_model
from transport.frame import Kind, Segment

CHUNK = 256
TIE = 1e-3


def reference_model(source: Source) -> Any:
    """The library's whole model with the same float32 weights."""
    config = source.config.__class__.from_dict(source.config.to_dict())
    name = type(config).__name__.removesuffix("Config")
    module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
    with torch.device("meta"):
        model = getattr(module, f"{name}ForCausalLM")(config)
    names = source.names((0, source.layers_total))
    state = {tensor: source.read(tensor, torch.float32) for tensor in names}
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = source.family.rotary(config)  # its buffers are not in a checkpoint
    model.generation_config.eos_token_id = None  # both sides run to the full length
    return model.eval()


def chain_tokens(blocks: Sequence[TorchModel], prompt: list[int], count: int) -> list[int]:
    """Greedy tokens through the blocks, the prompt in chunks."""
    made: list[int] = []
    at, pending = 0, prompt
    while len(made) < count:
        piece, pending = pending[:CHUNK], pending[CHUNK:]
        want = 0 if pending else 1
        segment = Segment(0, 0, at, tuple(piece), Kind.PREFILL, b"", want)
        payload = None
        for block in blocks:
            output = block.forward([segment], payload)
            payload = output.payload
        at += len(piece)
        if want:
            made.append(output.results[0].tokens[0])
            pending = made[-1:]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = open_model(options.model)
    total = source.layers_total
    cuts = (0, total // 3, total * 2 // 3, total)
    blocks = [
        TorchModel(source, cut, slots=1, capacity=4096, dtype=torch.float32)
        for cut in pairwise(cuts)
    ]
    model = reference_model(source)
    path = source.path
    tokenizer = (
        AutoTokenizer.from_pretrained(path)
        if path.is_dir()
        else AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    )
    same = bad = 0
    for number, text in enumerate(PROMPTS[: options.prompts]):
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.tokens,
            pad_token_id=0,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = made.sequences[0, len(prompt) :].tolist()
        found = chain_tokens(blocks, prompt, options.tokens)
        if found == expected:
            same += 1
            print(f"{number:2d}  {len(prompt):5d} tokens  equal", flush=True)
            continue
        at = next(i for i in range(options.tokens) if found[i] != expected[i])
        first, second = torch.topk(made.logits[at][0], 2).values.tolist()
        bad += first - second >= TIE
        print(
            f"{number:2d}  {len(prompt):5d} tokens  differs at {at}: {found[at]} is "
            f"{expected[at]} in the reference, whose top-two gap is {first - second:.1e}",
            flush=True,
        )
    print(
        f"{same} of {min(options.prompts, len(PROMPTS))} prompts equal, {bad} differ beyond a tie"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
