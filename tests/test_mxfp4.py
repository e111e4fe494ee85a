"""A gpt_oss as the hub has it, its experts in MXFP4, is the library's model of the same values.

And no other quantised folder is taken for one that a stage can read.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssForCausalLM, Mxfp4Config

from pipeline.load import _open
from pipeline.mxfp4 import unpacked
from pipeline.safetensors_dir import shards_of
from pipeline.tensors import Entry, MappedFile
from pipeline.torch_model import TorchModel
from pipeline.weights import ModelError, open_model
from tests.fakehub import NAME, FakeHub
from tests.modelchain import chain, check_schedules, segment
from tests.test_families import ALL, IDS, log_probabilities
from tests.test_hub import hub as hub
from tests.tinymodels import (
    E2M1,
    VOCABULARY,
    as_published_gpt_oss,
    reference,
    write_directory,
)

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of 32


@torch.no_grad()
def published(folder: Path) -> Any:
    """Writes the folder; the library's model of what its tensors mean."""
    model = reference("gpt_oss", SIZES)
    write_directory(folder, model, as_published_gpt_oss(model))
    return model


def test_two_blocks_say_what_the_library_generates(tmp_path: Path) -> None:
    model = published(tmp_path)
    blocks = chain(open_model(tmp_path), (0, 3, 6))
    assert blocks.blocks[0].info.kernel.startswith("exact;")
    prompt = IDS[0].tolist()
    made = model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )
    assert blocks.greedy(prompt, 20, chunk=32) == made[0, len(prompt) :].tolist()
    with torch.no_grad():
        expected = torch.log_softmax(model(IDS).logits[0].double(), -1)
    parts = [
        log_probabilities(blocks.forward(segment(a, prompt[a:b], sampling=ALL))[0])
        for a, b in pairwise((0, 32, 33, 75))
    ]
    assert (torch.cat(parts) - expected).abs().max() <= 1e-4


def test_the_library_reads_the_same_values(tmp_path: Path) -> None:
    """Its own reading of the folder, which is to bfloat16, in which these values are exact."""
    published(tmp_path)
    whole = GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    source = open_model(tmp_path)
    for layer in range(6):
        experts = whole.model.layers[layer].mlp.experts
        for which in ("gate_up_proj", "down_proj"):
            for number, values in enumerate(getattr(experts, which)):
                name = f"model.layers.{layer}.mlp.experts.{number}.{which}.weight"
                assert torch.equal(source.read(name, torch.bfloat16), values.t()), name


@pytest.mark.parametrize("weights", ["dtype", "int8"])
def test_bits_do_not_depend_on_the_schedule(weights: str, tmp_path: Path) -> None:
    published(tmp_path)
    source = open_model(tmp_path)
    blocks = chain(source, (0, 3, 6), slots=4, capacity=1024, dtype=torch.bfloat16, weights=weights)
    assert blocks.blocks[0].info.kernel.startswith("exact;")
    check_schedules(blocks, VOCABULARY, 1, seed=3)


def test_every_byte_and_scale(tmp_path: Path) -> None:
    """All 256 bytes under scales from the least to the largest that a float32 has values for."""
    scales = torch.tensor([[0, 1, 100, 127], [128, 140, 254, 252]] * 2, dtype=torch.uint8)
    blocks = torch.arange(256).to(torch.uint8).reshape(4, 4, 16)
    path = tmp_path / "bytes"
    path.write_bytes(blocks.numpy().tobytes() + scales.numpy().tobytes())
    file = MappedFile(path)
    found = unpacked(
        Entry("blocks", file, "U8", (4, 4, 16), 0, 256),
        Entry("scales", file, "U8", (4, 4), 256, 16),
        torch.float32,
    )
    for row in range(4):
        for column in range(128):
            byte = int(blocks[row, column // 32, column % 32 // 2])
            half = byte >> 4 if column % 2 else byte & 15
            value = float(E2M1[half]) * 2.0 ** (int(scales[row, column // 32]) - 127)
            expected = torch.tensor(value, dtype=torch.float64).float()
            assert found[row, column] == expected, (row, column)


def sharded(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """A file for the ends, and two for each layer: one of its scales, one of all else."""
    names = {
        name: f"{name.split('.')[2] if '.layers.' in name else 'ends'}-{name.endswith('_scales')}"
        for name in state
    }
    (folder / "model.safetensors").unlink()
    for file in set(names.values()):
        held = {name: state[name].clone() for name in state if names[name] == file}
        save_file(held, folder / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for name, file in names.items()}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_a_stage_fetches_the_shards_of_its_own_experts(hub: FakeHub, tmp_path: Path) -> None:
    """Also where a layer's blocks are in one file and its scales in the next."""
    model = reference("gpt_oss", SIZES)
    with torch.no_grad():
        state = as_published_gpt_oss(model)
    sharded(write_directory(tmp_path / "oss", model, state), state)
    hub.files = {each.name: each.read_bytes() for each in (tmp_path / "oss").iterdir()}
    source, _ = _open(f"hf://{NAME}", (2, 4), lambda _share, _what: None)
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == {
        f"{layer}-{scales}.safetensors" for layer in (2, 3) for scales in (True, False)
    }
    read = source.read("model.layers.2.mlp.experts.5.down_proj.weight", torch.float32)
    assert torch.equal(read, model.model.layers[2].mlp.experts.down_proj[5].t())
    block = TorchModel(source, (2, 4), slots=1, capacity=512)
    assert block.info.layers == (2, 4)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = reference("gpt_oss", SIZES)
    with torch.no_grad():
        state = as_published_gpt_oss(model)
    name = "model.layers.4.mlp.experts.down_proj_scales"
    write_directory(tmp_path, model, state | {name: state[name][:, :, :-1].clone()})
    with pytest.raises(
        ModelError,
        match=r"layers\.4\.mlp\.experts: down_proj_blocks .*down_proj_scales \[8, 64, 2\]",
    ):
        open_model(tmp_path)
    for wrong in (name, name.replace("_scales", "_blocks")):  # as many numbers, but of more bytes
        write_directory(tmp_path, model, state | {wrong: state[wrong].half()})
        with pytest.raises(ModelError, match=r" F16 .*are not MXFP4 of 8 experts"):
            open_model(tmp_path)
    del state[name]
    write_directory(tmp_path, model, state)
    with pytest.raises(ModelError, match=r"layers\.4\.mlp\.experts\.0\.down_proj.* is missing"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"]
)
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    """Before a weight is looked at: there is none."""
    config = reference("llama").config.to_dict()
    for key in ("quantization_config", "compression_config"):
        said = json.dumps(config | {key: {"quant_method": method}})
        (tmp_path / "config.json").write_text(said)
        with pytest.raises(ModelError, match=f"of llama, by {method}, is not supported"):
            open_model(tmp_path)
        with pytest.raises(ModelError, match=f", by {method}, is not"):
            shards_of(tmp_path, (0, 1))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    with pytest.raises(ModelError, match="by an unnamed method, is not"):
        open_model(tmp_path)
    text = reference("gemma3").config.to_dict()
    outer = {"model_type": "gemma3", "text_config": text}
    outer["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ModelError, match=f"of gemma3_text, by {method},"):
        open_model(tmp_path)
    oss = reference("gpt_oss").config.to_dict() | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(oss))
    expected = "neither" if method == "mxfp4" else f"of gpt_oss, by {method},"
    with pytest.raises(ModelError, match=expected):
        open_model(tmp_path)


LOADED = """
import sys
from pathlib import Path
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
import torch
from pipeline.torch_model import TorchModel
from pipeline.weights import open_model
source = open_model(sys.argv[1])
source.layer_shapes(0)
before = peak()
model = TorchModel(source, (0, 2), slots=1, capacity=512, threads=1)
print(model.info.weight_bytes, peak() - before)
"""


def test_a_layers_experts_are_never_here_twice(tmp_path: Path) -> None:
    """A layer of 16 experts of 6.3 MB, 101 MB in bfloat16: what is beside the block is no layer."""
    inner, experts = 1024, 16
    changes = {"hidden_size": inner, "intermediate_size": inner, "num_hidden_layers": 2}
    model = reference("gpt_oss", changes | {"num_local_experts": 1})
    state = {}
    for name, value in model.to(torch.bfloat16).state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            wide = ".mlp." in name and value.shape[0] == 1
            state[name] = value.repeat_interleave(experts, 0) if wide else value.clone()
            continue
        shape = (experts, value.shape[2], value.shape[1] // 32)
        state[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
    model.config.num_local_experts = experts
    model.config.quantization_config = {"quant_method": "mxfp4"}
    write_directory(tmp_path, model, state)
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    block, taken = map(int, ran.stdout.split())
    assert block > 200e6
    beside = (taken - block) / 1e6
    assert beside < 90, f"{beside:.0f} MB beside a block of {block / 1e6:.0f}"
