"""Owns what a model file is to a stage: its config, its tensors by name, and its fingerprint.

Tensors have their Hugging Face names and are read one at a time, so that a stage materialises its
own block and nothing else. The two kinds of file are pipeline.gguf_file and
pipeline.safetensors_dir. Knows no slot, no frame and no kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from pipeline.families import FAMILIES, Family, family, ropes, variant
from pipeline.layers import meta_layer, tensor_shapes
from pipeline.model import ModelError as ModelError
from pipeline.mxfp4 import unpacked
from pipeline.tensors import Entry, Made, with_experts

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
MAX_LAYERS = 1 << 16  # as in ring.toml
MAX_EXPERTS = 1 << 10  # of a layer; each has names of its own
# What transformers and torch raise for a config that is none: sizes of 2^62, strings for numbers.
CONFIG_ERRORS = (
    StrictDataclassError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
FINGERPRINT_BYTES = 16
SAMPLES = 4  # blocks of each tensor that the fingerprint reads: first, two between, last
SAMPLE_BYTES = 4096  # a page: smaller blocks would cost the same faults
_FEW = 4096  # tensors; where there are more, as of experts, each is read in one place
_AT_ONCE = 1 << 20  # elements converted at once: 4 MB of float32, not a whole embedding's 113 MB
# Everything in a config that changes what the layers compute; not names, dtypes or defaults of
# generation. max_position_embeddings is absent: the rope table is made for any length.
_CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "layer_types",
    "hidden_activation",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "swiglu_alpha",
    "swiglu_limit",
)
# What would change the answer and is nobody's layer to say: refused where a config sets it.
_REFUSED = {
    "attn_logit_softcapping": "caps its attention's logits, which the library's layers do not",
    "use_bidirectional_attention": "lets a token see later ones",
}
# The others rescale with the length of the sequence at hand: a row would depend on later rows.
# longrope does so once, at the length that it was first trained with: up to there it serves.
_ROPE = ("default", "linear", "llama3", "yarn", "longrope")


class Source:
    """An opened model. Attributes: path, family, config (a transformers config).

    entries: stored tensors by their Hugging Face names. revision: what names the whole model where
    only some of its files are here; else None. layers: whose tensors have to be here.

    Opening checks that those, of the whole model or of `layers`, are present with the right shape.
    """

    def __init__(
        self,
        path: Path,
        kind: Family,
        config: Any,
        entries: Mapping[str, Entry],
        *,
        tied: bool,
        revision: str | None = None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        self.path = path
        self.family = kind
        self.config = config
        self._stored = entries
        self._revision = revision
        self._tied = tied
        self._layer_shapes: dict[bool, dict[str, tuple[int, ...]]] = {}
        for rope in ropes(config).values():
            if rope.get("rope_type", "default") not in _ROPE:
                raise ModelError(f"{path}: rope type {rope['rope_type']!r} is not supported")
        for key, what in _REFUSED.items():
            if getattr(config, key, None):
                raise ModelError(f"{path}: {key} is set: this model {what}")
        experts = getattr(config, "num_experts", 0)
        self._tensors = with_experts(entries, experts, in_turn=kind.name == "gpt_oss")
        self._check(layers or (0, self.layers_total))

    @property
    def layers_total(self) -> int:
        """Decoder layers of the whole model."""
        return int(self.config.num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, and of the LM head."""
        return int(self.config.vocab_size)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that a slot may hold."""
        longest = int(self.config.max_position_embeddings)
        return longest if self.rope_limit is None else min(longest, self.rope_limit)

    @property
    def rope_limit(self) -> int | None:
        """The position from which on earlier rows would be other ones; None where they never are.

        A table of longrope is another one for longer sequences.
        """
        for rope in ropes(self.config).values():
            if rope.get("rope_type") == "longrope":
                first = rope.get("original_max_position_embeddings")
                return int(first or self.config.original_max_position_embeddings)
        return None

    @property
    def rope_divisors(self) -> torch.Tensor | None:
        """float32 [head_dim / 2] to divide the rotary frequencies by; None where there are none."""
        return None

    def names(self, layers: tuple[int, int]) -> list[str]:
        """Tensors that the block [first, last) needs, in reading order; head and tail included."""
        first, last = layers
        total = self.layers_total
        if not 0 <= first < last <= total:
            raise ModelError(f"{self.path}: no layers [{first}, {last}) in a model of {total}")
        names = [EMBEDDING] if first == 0 else []
        for layer in range(first, last):
            names += [f"model.layers.{layer}.{name}" for name in self.layer_shapes(layer)]
        return names + ([FINAL_NORM, LM_HEAD] if last == total else [])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor as a fresh, contiguous copy in `dtype`. `lm_head.weight` may be tied."""
        made = self._made(name)
        if isinstance(made, Entry):
            return self._load(made, dtype)
        if made.packed:
            blocks, scales = made.parts
            return unpacked(blocks, scales, dtype)
        parts = [self._load(part, dtype) for part in made.parts]
        if made.transposed:
            return parts[0].t().contiguous()
        return torch.stack(parts, 1).flatten(0, 1) if made.interleaved else torch.cat(parts)

    def size(self, name: str) -> int:
        """Bytes in the file that `read` reads."""
        made = self._made(name)
        return made.size if isinstance(made, Entry) else sum(part.size for part in made.parts)

    def _made(self, name: str) -> Entry | Made:
        return self._tensors[EMBEDDING if name == LM_HEAD and self._tied else name]

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Names (below `model.layers.N.`) and shapes of one layer's tensors."""
        try:
            like = variant(self.config, layer)
            if like not in self._layer_shapes:
                made = meta_layer(self.family, self.config, layer)
                self._layer_shapes[like] = tensor_shapes(made)
        except CONFIG_ERRORS as error:
            raise ModelError(f"{self.path}: its config makes no layer: {error}") from error
        return self._layer_shapes[like]

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes naming the whole model: equal on every stage, whatever its layers.

        BLAKE2b of the config keys that change the computation, of every tensor's name, stored
        dtype and shape, and of SAMPLES blocks of 4 KiB spread over every tensor from its first to
        its last byte. A fine-tune differs in nearly every block; a change of a few bytes between
        the blocks is not seen. A GGUF file and a safetensors copy of it are two models. Where only
        some files are here, the config and the revision, which names the content of all of them.
        """
        state = blake2b(digest_size=FINGERPRINT_BYTES)
        config = {key: getattr(self.config, key, None) for key in _CONFIG_KEYS}
        state.update(json.dumps([self.family.name, config], sort_keys=True).encode())
        if self._revision is not None:
            state.update(self._revision.encode())
            return state.digest()
        samples = SAMPLES if len(self._stored) <= _FEW else 1
        for name, entry in sorted(self._stored.items()):
            state.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            room = max(entry.size - SAMPLE_BYTES, 0)
            length = min(entry.size, SAMPLE_BYTES)
            for start in sorted({room * i // (SAMPLES - 1) for i in range(samples)}):
                at = entry.offset + start
                state.update(entry.file.data[at : at + length])
            # A fault maps 64 KiB around it: the samples alone would keep 70 MB of a 94 MB file.
            entry.file.release(0, len(entry.file.data))
        return state.digest()

    def _load(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """A stored tensor, some rows at a time: pages of the file are given back on the way."""
        rows, width = prod(entry.shape[:-1]), entry.shape[-1]
        tensor = torch.empty(rows, width, dtype=dtype)
        step, row = max(1, _AT_ONCE // width), entry.size // rows
        for start in range(0, rows, step):
            part = tensor[start : start + step]
            self._rows(entry, start, part)
            entry.file.release(entry.offset + start * row, len(part) * row)
        return self._finish(entry, tensor.reshape(entry.shape))

    def _rows(self, entry: Entry, start: int, into: torch.Tensor) -> None:
        """Fill `into` [rows, width] with the stored rows from `start` on."""
        raise NotImplementedError

    def _finish(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The tensor in the order that the library's layers want."""
        return tensor

    def _check(self, layers: tuple[int, int]) -> None:
        """Every tensor of these layers is here and has the shape that the config gives it."""
        hidden, vocabulary = int(self.config.hidden_size), self.vocabulary
        if layers[0] == 0 < layers[1]:
            self._want(EMBEDDING, (vocabulary, hidden))
        if layers[1] == self.layers_total:
            self._want(FINAL_NORM, (hidden,))
            self._want(EMBEDDING if self._tied else LM_HEAD, (vocabulary, hidden))
        for layer in range(*layers):  # ends at the first that is missing
            for name, shape in self.layer_shapes(layer).items():
                self._want(f"model.layers.{layer}.{name}", shape)

    def _want(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._tensors.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        if entry.shape != shape:
            raise ModelError(
                f"{self.path}: tensor {name} is {list(entry.shape)}, not {list(shape)}"
            )


def make_config(kind: Family, path: Path, layers: object, make: Callable[[], Any]) -> Any:
    """A transformers config of what a file says; ModelError for what the library can't take.

    layers: as the file says, before the library makes a list with an item for each.
    """
    if isinstance(layers, int | float) and not 1 <= layers <= MAX_LAYERS:
        raise ModelError(f"{path}: {layers} layers: 1 to {MAX_LAYERS} are possible")
    try:
        config = make()
    except CONFIG_ERRORS as error:
        raise ModelError(f"{path}: no {kind.name} config: {error}") from error
    experts = getattr(config, "num_experts", 0)
    if not isinstance(experts, int) or not 0 <= experts <= MAX_EXPERTS:
        raise ModelError(f"{path}: {experts!r} experts: up to {MAX_EXPERTS} are possible")
    return config


def open_model(path: str | Path) -> Source:
    """Open a GGUF file or a Hugging Face directory; ModelError says what is wrong with it.

    Reads headers only (0.1 s for a 49,152-token vocabulary): no tensor is materialised.
    """
    from pipeline.gguf_file import GgufSource
    from pipeline.safetensors_dir import SafetensorsSource

    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    return SafetensorsSource(path) if path.is_dir() else GgufSource(path)


def supported_family(path: Path, name: object) -> Family:
    """The family called `name`; ModelError when a stage cannot run it."""
    if name not in FAMILIES:
        raise ModelError(
            f"{path}: family {name!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    return family(str(name))
