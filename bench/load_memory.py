"""Peak resident memory of each stage of a big model: at load, and with all rows written and read.

python -m bench.load_memory [--stages 3] [--dtype bfloat16] [--weights dtype] [--kv dtype]
                            [--rows 2048] [--model DIR]
Without --model a random llama of 2.2 GB is written to a temporary folder (and removed). Each stage
loads in a process of its own, as `kvring stage` would, writes every row of its slots, and computes
a token behind a slot's others. Allowed: its block, its slots, with --kv int8 or fp8 one slot of one
layer in the dtype, and 400 MB, of which Python, torch and transformers take most.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALLOWED_MB = 400
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SLOTS = 4
_STAGE = """
import json, sys
from pathlib import Path
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
path, first, last, dtype, weights, kv, slots, rows = sys.argv[1:]
from pipeline.torch_model import DTYPES, TorchModel
from pipeline.weights import open_model
imported = peak()
import torch
model = TorchModel(open_model(path), (int(first), int(last)), slots=int(slots), capacity=int(rows),
                   dtype=DTYPES[dtype], weights=weights, kv=kv, threads=1)
loaded = peak()
with torch.inference_mode():
    for pair in model._caches.values():
        for each in pair:
            each.fill_(1)
from transport.codec import ITEM_BYTES
from transport.frame import Kind, Segment, Tensor
name, length = model.info.activations
zeros = Tensor(name, (1, length), bytes(ITEM_BYTES[name] * length))
token = Segment(0, 0, int(rows) - 1, (1,), Kind.VERIFY, b"", 1)
model.forward([token], None if model.info.head else zeros)
print(json.dumps([imported, loaded, peak(), model.info.row_bytes]))
"""


def tensors() -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "lm_head.weight", (CONFIG["vocab_size"], hidden)


def write_model(folder: Path) -> Path:
    """Random bfloat16 weights, a file for each layer."""
    weight_map: dict[str, str] = {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    norms = ["model.norm.weight"]
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms += [f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"]
    files["norms"] = {name: torch.ones(CONFIG["hidden_size"]).bfloat16() for name in norms}
    weight_map |= dict.fromkeys(norms, "norms.safetensors")
    for name, shape in tensors():
        file = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        files.setdefault(file, {})[name] = (torch.randn(shape) * 0.02).bfloat16()
        weight_map[name] = f"{file}.safetensors"
        for done in [each for each in files if each != file]:
            save_file(files.pop(done), folder / f"{done}.safetensors")
    for file, state in files.items():
        save_file(state, folder / f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def wide_bytes(path: Path, dtype: str, kv: str, rows: int) -> int:
    from pipeline.weights import open_model
    from tools.doctor.need import need_of

    return 0 if kv == "dtype" else rows * need_of(open_model(path), dtype).row


def block_bytes(path: Path, layers: tuple[int, int], dtype: str, weights: str) -> int:
    from pipeline.torch_model import DTYPES
    from pipeline.weights import EMBEDDING, LM_HEAD, open_model

    source, size = open_model(path), DTYPES[dtype].itemsize
    hidden = source.config.hidden_size
    total = 0
    for name in source.names(layers):
        if name in (EMBEDDING, LM_HEAD):
            total += source.vocabulary * hidden * size
            continue
        shape = source.layer_shapes(layers[0]).get(name.split(".", 3)[-1], (hidden,))
        count = torch.Size(shape).numel()
        # int4: half a byte, and a scale and a zero for each 32
        each = {"int8": 1.0, "int4": 0.5 + 2 * size / 32}.get(weights, size)
        total += int(count * (each if len(shape) == 2 else size))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="dtype")
    parser.add_argument("--kv", default="dtype")
    parser.add_argument("--rows", type=int, default=2048, help="of each slot")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvring-load-") as scratch:
        path = options.model or write_model(Path(scratch))
        from pipeline.load import describe_model

        total, _ = describe_model(str(path))
        cuts = [total * i // options.stages for i in range(options.stages + 1)]
        print("| layers | block MB | slots MB | imports MB | peak at load MB | peak MB | over MB |")
        print("|---|---|---|---|---|---|---|")
        wide, worst = wide_bytes(path, options.dtype, options.kv, options.rows), 0.0
        for first, last in pairwise(cuts):
            words = [path, first, last, options.dtype, options.weights, options.kv]
            words += [SLOTS, options.rows]
            command = [sys.executable, "-c", _STAGE, *map(str, words)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            imported, loaded, peak, row = json.loads(done.stdout)
            block = block_bytes(path, (first, last), options.dtype, options.weights)
            slots = SLOTS * options.rows * row
            over = (peak - block - slots - wide) / 1e6
            worst = max(worst, over)
            row_text = [block, slots, imported, loaded, peak]
            cells = " | ".join(f"{each / 1e6:.0f}" for each in row_text)
            print(f"| [{first}, {last}) | {cells} | {over:.0f} |", flush=True)
    beyond = "block and slots" + (f" and {wide / 1e6:.0f}" if wide else "")
    print(f"over: at most {worst:.0f} MB beyond {beyond}; {ALLOWED_MB} are allowed")
    if worst > ALLOWED_MB:
        sys.exit(1)


if __name__ == "__main__":
    main()
