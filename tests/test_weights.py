"""Both kinds of model file give the same tensors, cheaply, and say what is wrong with them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.weights import LM_HEAD, ModelError, Source, open_model
from tests.modelfile import default_model
from tests.tinymodels import (
    CASES,
    GGUF_CASES,
    published,
    reference,
    tensors,
    write_directory,
    write_gguf,
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "llama", reference("llama"))


@pytest.fixture
def llama_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "llama.gguf", reference("llama"))


def everything(source: Source, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: source.read(name, dtype) for name in source.names((0, source.layers_total))}


def one_by_one(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors as a Source names them: experts by themselves, [out, in]."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors(model).items():
        stem, _, which = name.rpartition(".")
        if ".experts." not in name:
            found[name] = value
            continue
        bias = which.endswith("_bias")
        turned = (
            value.transpose(1, 2) if model.config.model_type == "gpt_oss" and not bias else value
        )
        which = which.removesuffix("_bias") + (".bias" if bias else ".weight")
        found |= {f"{stem}.{number}.{which}": each for number, each in enumerate(turned)}
    return found


@pytest.mark.parametrize("case", CASES)
def test_directory_gives_the_checkpoint(case: str, tmp_path: Path) -> None:
    model = reference(case)
    expected = one_by_one(model)
    for state in (tensors(model), published(model)):
        source = open_model(write_directory(tmp_path, model, state))
        found = everything(source)
        if model.config.tie_word_embeddings:
            assert torch.equal(found.pop(LM_HEAD), model.lm_head.weight)
        assert set(found) == set(expected)
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
        assert source.vocabulary == model.config.vocab_size


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_gives_the_checkpoint(case: str, tmp_path: Path) -> None:
    model = reference(case, GGUF_CASES[case])
    source = open_model(write_gguf(tmp_path / "tiny.gguf", model))
    found = everything(source)
    for name, value in one_by_one(model).items():
        # gemma3's norms come back with the rounding of adding one to them
        assert (found[name] - value).abs().max() <= (1e-6 if case == "gemma3" else 0), name
    assert source.config.head_dim == model.config.head_dim
    assert source.config.tie_word_embeddings == model.config.tie_word_embeddings


def test_the_text_of_a_gemma3_with_pictures(tmp_path: Path) -> None:
    model = reference("gemma3")
    plain = write_directory(tmp_path / "text", model)
    for prefix in ("language_model.model.", "model.language_model."):
        state = {name.replace("model.", prefix, 1): value for name, value in tensors(model).items()}
        state["vision_tower.patch.weight"] = torch.zeros(3, 3)
        whole = write_directory(tmp_path / prefix, model, state)
        config = json.loads((plain / "config.json").read_text())
        outer = {"model_type": "gemma3", "text_config": config}
        (whole / "config.json").write_text(json.dumps(outer))
        found, expected = everything(open_model(whole)), everything(open_model(plain))
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_block_names_only_its_own_tensors(llama: Path) -> None:
    source = open_model(llama)
    assert source.names((2, 3)) == [f"model.layers.2.{name}" for name in source.layer_shapes(2)]
    assert source.names((0, 1))[0] == "model.embed_tokens.weight"
    assert source.names((5, 6))[-2:] == ["model.norm.weight", LM_HEAD]


@pytest.mark.parametrize("layers", [(0, 7), (3, 3), (4, 2)])
def test_layers_outside_the_model(llama: Path, layers: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match=r"no layers \[.*in a model of 6"):
        open_model(llama).names(layers)


def test_fingerprint_sees_weights_and_config(tmp_path: Path) -> None:
    model = reference("llama")
    same = {open_model(write_directory(tmp_path / name, model)).fingerprint for name in "ab"}
    assert len(same) == 1
    seen = set(same)
    for name in tensors(model):
        state = {key: value.clone() for key, value in tensors(model).items()}
        state[name].view(-1)[-1] += 1
        seen.add(open_model(write_directory(tmp_path / name, model, state)).fingerprint)
    assert len(seen) == 1 + len(tensors(model))
    model.config.rms_norm_eps *= 2
    seen.add(open_model(write_directory(tmp_path / "config", model)).fingerprint)
    assert len(seen) == 2 + len(tensors(model))


@pytest.mark.model
def test_sharded_export_of_the_real_model_is_the_same(tmp_path: Path) -> None:
    source = open_model(default_model())
    state = everything(source, torch.bfloat16)
    del state[LM_HEAD]
    names = list(state)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:100], names[100:])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(source.config.to_dict()))
    export = open_model(tmp_path)
    assert all(
        torch.equal(source.read(name, torch.bfloat16), export.read(name, torch.bfloat16))
        for name in source.names((0, 30))
    )
    assert export.config.to_dict() == source.config.to_dict()  # so they say the same tokens
    assert export.fingerprint != source.fingerprint


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such file"):
        open_model(tmp_path / "nowhere")


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_model(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        open_model(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    with pytest.raises(ModelError, match="version 1"):
        open_model(path)


def test_every_truncation_is_a_model_error(llama_gguf: Path) -> None:
    whole = llama_gguf.read_bytes()
    cut = llama_gguf.with_name("cut.gguf")
    for length in [*range(4, 3000, 13), len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated GGUF"):
            open_model(cut)


def test_broken_bytes_are_model_errors_or_harmless(llama_gguf: Path) -> None:
    whole = llama_gguf.read_bytes()
    broken = llama_gguf.with_name("broken.gguf")
    for at in range(8, 3600, 7):
        broken.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            open_model(broken)
        except ModelError:
            continue


def test_unsupported_family(tmp_path: Path, llama: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", reference("llama"), architecture="mamba")
    with pytest.raises(ModelError, match="family 'mamba' is not supported"):
        open_model(path)
    config = json.loads((llama / "config.json").read_text()) | {"model_type": "gpt2"}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="family 'gpt2' is not supported"):
        open_model(llama)


def test_missing_key_of_a_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", reference("llama"), skip_key="block_count")
    with pytest.raises(ModelError, match=r"llama\.block_count is missing"):
        open_model(path)


def test_missing_tensor(tmp_path: Path) -> None:
    model = reference("llama")
    gguf = write_gguf(tmp_path / "x.gguf", model, skip_tensor="blk.3.ffn_up.weight")
    state = tensors(model)
    del state["model.layers.3.mlp.up_proj.weight"]
    for path in (gguf, write_directory(tmp_path / "x", model, state)):
        with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight is missing"):
            open_model(path)


def test_wrong_shape(tmp_path: Path) -> None:
    model = reference("llama")
    gguf = write_gguf(tmp_path / "x.gguf", model, reshape="blk.3.ffn_up.weight")
    state = tensors(model)
    state["model.layers.3.mlp.up_proj.weight"] = torch.zeros(127, 96)
    for path in (gguf, write_directory(tmp_path / "x", model, state)):
        with pytest.raises(ModelError, match=r"up_proj\.weight is \[127, 96\], not \[128, 96\]"):
            open_model(path)


def test_broken_directories(llama: Path) -> None:
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    for length in (3, 100, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            open_model(llama)
    weights.write_bytes(struct.pack("<Q", 4) + b"nope")
    with pytest.raises(ModelError, match="not JSON"):
        open_model(llama)
    weights.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_model(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        open_model(llama)


def test_index_cannot_leave_the_directory(llama: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a file beside the index"):
        open_model(llama)


def test_length_dependent_rope_is_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="rope type 'dynamic'"):
        open_model(llama)
