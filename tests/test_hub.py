"""A stage fetches its own shards of a hub's repository, once, and goes on where it was cut off."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from pipeline.hub import find
from pipeline.load import _open, describe_model, vocabulary_of
from pipeline.model import ModelError
from pipeline.weights import open_model
from tests import processes
from tests.fakehub import COMMIT, NAME, FakeHub, fake_hub
from tests.modelchain import chain
from tests.processes import get, post
from tests.randommodel import CONTEXT, LAYERS, VOCABULARY, write_folder

PATH = f"hf://{NAME}"


def sharded(folder: Path) -> Path:
    """The random llama with one file for its ends and one for each layer."""
    write_folder(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for name in state:
        number = name.split(".")[2] if ".layers." in name else "ends"
        weight_map[name] = f"model-{number}.safetensors"
    for file in set(weight_map.values()):
        save_file({n: value for n, value in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "picture.png").write_bytes(b"not asked for")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(sharded(tmp_path / "origin")) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


def shards(hub: FakeHub) -> set[str]:
    found = {name for name in hub.fetched if name.endswith(".safetensors")}
    hub.asked.clear()
    return found


def test_a_stage_fetches_the_shards_of_its_block(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    middle, report = _open(PATH, (1, 3), lambda share, what: seen.append((share, what)))
    assert "picture.png" not in hub.fetched
    assert shards(hub) == {"model-1.safetensors", "model-2.safetensors"}
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 0.5
    assert "of 0 MB" in seen[-1][1]
    report(0.0, "the rest")
    assert seen[-1] == (0.5, "the rest")
    head, _ = _open(PATH, (0, 1), report)
    assert shards(hub) == {"model-0.safetensors", "model-ends.safetensors"}
    tail, _ = _open(PATH, (3, 4), report)  # its LM head is the embedding
    assert shards(hub) == {"model-3.safetensors"}
    assert head.fingerprint == middle.fingerprint == tail.fingerprint
    whole = open_model(tmp_path / "origin")
    assert whole.fingerprint != head.fingerprint
    for source, block in ((head, (0, 1)), (middle, (1, 3)), (tail, (3, 4))):
        for name in source.names(block):
            assert torch.equal(source.read(name, torch.float32), whole.read(name, torch.float32))
    prompt = list(range(40))
    assert chain(middle, (1, 3)).blocks[0].info.layers == (1, 3)
    assert len(chain(whole, (0, 4)).greedy(prompt, 3)) == 3


def test_a_block_that_was_not_fetched_is_missing(hub: FakeHub) -> None:
    middle, _ = _open(PATH, (1, 3), lambda _share, _what: None)
    with pytest.raises(KeyError):
        middle.read("model.layers.3.mlp.up_proj.weight", torch.float32)
    with pytest.raises(ModelError, match=r"no layers \[3, 5\) in a model of 4"):
        _open(PATH, (3, 5), lambda _share, _what: None)


def test_a_file_that_was_cut_off_is_gone_on_with(hub: FakeHub) -> None:
    repository = find(PATH)
    whole = hub.files["model-1.safetensors"]
    (repository.folder / ".model-1.safetensors.part").write_bytes(whole[:1000])
    _open(PATH, (1, 2), lambda _share, _what: None)
    assert ("model-1.safetensors", "bytes=1000-") in hub.asked
    assert (repository.folder / "model-1.safetensors").read_bytes() == whole


def test_a_damaged_file_is_refused(hub: FakeHub) -> None:
    hub.lies = True
    with pytest.raises(ModelError, match=r"hf://tiny/llama@0123.*: could not be .*came damaged"):
        _open(PATH, (1, 2), lambda _share, _what: None)


def test_what_is_here_needs_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_model(PATH) == (LAYERS, CONTEXT)
    assert vocabulary_of(PATH) == VOCABULARY
    assert shards(hub) == set()
    _open(PATH, (1, 2), lambda _share, _what: None)
    hub.asked.clear()
    dead = "http://127.0.0.1:9"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(hub.url, dead)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", dead)
    for path in (PATH, f"{PATH}@{COMMIT}"):
        _open(path, (1, 2), lambda _share, _what: None)
    with pytest.raises(ModelError, match=r"hf://tiny/llama@0123.*: could not be fetched"):
        _open(PATH, (2, 3), lambda _share, _what: None)
    with pytest.raises(ModelError, match="hf://other/name: could not be fetched"):
        describe_model("hf://other/name")


def test_a_family_is_refused_before_its_weights(hub: FakeHub) -> None:
    config = json.loads(hub.files["config.json"]) | {"model_type": "mamba"}
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(ModelError, match="family 'mamba' is not supported"):
        _open(PATH, (0, 4), lambda _share, _what: None)
    assert shards(hub) == set()


def test_a_ring_of_a_hubs_model(hub: FakeHub, tmp_path: Path) -> None:
    with processes.fleet(tmp_path / "fleet") as fleet:
        _, url = fleet.up("--model", PATH, "--stages", "2", "--dtype", "float32")
        fleet.ready(url)
        assert [each["id"] for each in get(f"{url}/v1/models").json()["data"]] == ["llama"]
        body = {"prompt": [1, 2, 3, 4], "max_tokens": 4, "temperature": 0, "logprobs": 1}
        answer = post(f"{url}/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert {name for name, _ in hub.asked if hub.asked.count((name, None)) > 1} == set()
