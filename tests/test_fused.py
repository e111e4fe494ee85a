"""Fused layers do as the library's; recorded steps give an ordinary forward's bits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import kernels, probe
from pipeline.families import family
from pipeline.fused import Fused, suits
from pipeline.kernels import KEY_STEPS, KEYS, Kernels, Span
from pipeline.probe import Work
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
from tests.tinymodels import CASES, VOCABULARY, reference, write_directory
from transport.frame import Kind, Sampling, Segment


def test_llama_like_layers_are_fused(tmp_path: Path) -> None:
    for case, (name, _) in CASES.items():
        llama_like = name in ("llama", "mistral", "qwen2", "qwen3")
        assert suits(family(name), reference(case).config) == llama_like, case
    source = open_model(write_directory(tmp_path, reference("llama")))
    block = TorchModel(source, (0, 6), slots=1, capacity=10, exact=False)
    assert all(isinstance(layer, Fused) for _, layer in block._layers)
    assert "fused layers" in block.info.kernel


def changed(layer: Any, what: str) -> Any:
    """A library's layer that computes something else with the same modules and weights."""
    if what == "residual":
        forward = layer.forward
        layer.forward = lambda hidden, **rest: forward(hidden, **rest) + 0.1 * hidden
    elif what == "scaling":
        layer.self_attn.forward = scaled(layer.self_attn)
    elif what == "norm":
        norm = layer.input_layernorm
        layer.input_layernorm.forward = lambda x: type(norm).forward(norm, x) + x
    else:
        layer.self_attn.add_module("sinks", torch.nn.Identity())
    return layer


def scaled(attn: Any) -> Any:
    forward = attn.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        attn.scaling, kept = attn.scaling * 1.5, attn.scaling
        try:
            return forward(*args, **kwargs)
        finally:
            attn.scaling = kept

    return other


@pytest.mark.parametrize("what", ["residual", "scaling", "norm", "module"])
def test_a_layer_that_differs_is_left_to_the_library(what: str) -> None:
    class Other:
        config = staticmethod(family("llama").config)
        layer = staticmethod(lambda config, at: changed(family("llama").layer(config, at), what))

    config = Other.config(num_hidden_layers=2)
    assert suits(family("llama"), config)
    assert not suits(Other, config)


@pytest.mark.parametrize("kv", ["dtype", "int8", "fp8"])
def test_a_step_has_the_bits_of_a_forward(kv: str, tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("mistral")))
    plain, stepping = (TorchModel(source, (0, 6), slots=2, capacity=1024, kv=kv) for _ in range(2))
    assert plain.info.kernel.startswith("exact;")
    with torch.inference_mode():
        stepping._steps = stepping._make_steps()
    rng = random.Random(3)
    at = [0, 0]
    sizes = [*rng.choices(range(1, 9), k=14), 500, *rng.choices(range(1, 9), k=6)]
    for size in sizes:  # 500: no step; then over a key block's end
        slot = 0 if size > 8 else rng.randrange(2)
        tokens = tuple(rng.choices(range(VOCABULARY), k=size))
        segment = Segment(
            1, slot, at[slot], tokens, Kind.VERIFY, b"", min(size, 8), Sampling(logprobs=3)
        )
        assert stepping.forward([segment], None) == plain.forward([segment], None), (at, size)
        at[slot] += size - rng.randrange(min(size, 3))  # the rest were rejected drafts
    recorded = stepping._steps._recorded
    assert set(recorded) == {(0, KEYS), (1, KEYS), (0, 2 * KEYS)}


def test_a_step_at_the_end_of_a_slot_is_an_ordinary_forward(tmp_path: Path) -> None:
    source = open_model(write_directory(tmp_path, reference("llama")))
    block = TorchModel(source, (0, 6), slots=1, capacity=512)
    with torch.inference_mode():
        block._steps = block._make_steps()
    segment = Segment(1, 0, 0, (1,) * 506, Kind.PREFILL, b"", 0)
    block.forward([segment], None)
    last = Segment(1, 0, 506, (1,) * 6, Kind.VERIFY, b"", 6)
    assert len(block.forward([last], None).results[0].tokens) == 6
    assert not block._steps._recorded


def test_the_probe_finds_the_step_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.attend

    def blocks_of_256(*args: Any, **options: Any) -> torch.Tensor:
        found = real(*args, **options)
        span: Span = args[3]
        return found + 1 if span.keys % 256 else found  # another sum for a partial block

    monkeypatch.setattr(probe, "attend", blocks_of_256)
    chosen = choose()
    assert chosen.exact
    assert chosen.keys == 256
    monkeypatch.setattr(probe, "attend", real)
    assert choose().keys in KEY_STEPS


def choose() -> Kernels:
    with torch.inference_mode():
        work = Work(((48, 48),), (), (4, 2, 16), False)
        return probe.choose(work, torch.float32, torch.device("cpu"), exact=True)
