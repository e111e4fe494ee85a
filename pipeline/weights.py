"""Owns what a model file is to a stage: its config, its tensors by name, and its fingerprint.

Tensors have their Hugging Face names and are read one at a time, so that a stage materialises its
own block and nothing else. The two kinds of file are pipeline.gguf_file and
pipeline.safetensors_dir. Knows no slot, no frame and no kernel.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from pipeline.families import FAMILIES, Family, family
from pipeline.model import ModelError as ModelError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
MAX_LAYERS = 1 << 16  # as in ring.toml
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
)
# The others rescale with the length of the sequence at hand: a row would depend on later rows.
_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: its stored dtype's name, shape, and bytes [offset, offset + size)."""

    name: str
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class MappedFile:
    """A read-only file in memory; pages are private copies on write, so views may be writable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # ACCESS_COPY, not ACCESS_READ: torch warns about buffers it may not write.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path}: is empty") from error

    def release(self, offset: int, size: int) -> None:
        """Give the pages of [offset, offset + size) back: they stay in the system's file cache."""
        start = offset - offset % mmap.PAGESIZE
        self.data.madvise(mmap.MADV_DONTNEED, start, offset + size - start)


class Source:
    """An opened model. Attributes: path, family, config (a transformers config), entries by name.

    Opening checks that every tensor of the whole model is present with the right shape.
    """

    def __init__(
        self, path: Path, kind: Family, config: Any, entries: dict[str, Entry], tied: bool
    ) -> None:
        self.path = path
        self.family = kind
        self.config = config
        self.entries = entries
        self._tied = tied
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _ROPE:
            raise ModelError(f"{path}: rope type {rope!r} is not supported")
        self._check()

    @property
    def layers_total(self) -> int:
        """Decoder layers of the whole model."""
        return int(self.config.num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, and of the LM head."""
        return int(self.config.vocab_size)

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
            names += [f"model.layers.{layer}.{name}" for name in self.layer_shapes]
        return names + ([FINAL_NORM, LM_HEAD] if last == total else [])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor as a fresh, contiguous copy in `dtype`. `lm_head.weight` may be tied."""
        entry = self._entry(name)
        tensor = self._load(entry, dtype)
        entry.file.release(entry.offset, entry.size)
        return tensor

    def size(self, name: str) -> int:
        """Bytes in the file that `read` reads."""
        return self._entry(name).size

    def _entry(self, name: str) -> Entry:
        return self.entries[EMBEDDING if name == LM_HEAD and self._tied else name]

    @cached_property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names (below `model.layers.N.`) and shapes of one layer's tensors."""
        try:
            with torch.device("meta"):
                layer = self.family.layer(self.config, 0)
        except CONFIG_ERRORS as error:
            raise ModelError(f"{self.path}: its config makes no layer: {error}") from error
        return {name: tuple(value.shape) for name, value in layer.state_dict().items()}

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes naming the whole model: equal on every stage, whatever its layers.

        BLAKE2b of the config keys that change the computation, of every tensor's name, stored
        dtype and shape, and of SAMPLES blocks of 4 KiB spread over every tensor from its first to
        its last byte. A fine-tune differs in nearly every block; a change of a few bytes between
        the blocks is not seen. A GGUF file and a safetensors copy of it are two models.
        """
        state = blake2b(digest_size=FINGERPRINT_BYTES)
        config = {key: getattr(self.config, key, None) for key in _CONFIG_KEYS}
        state.update(json.dumps([self.family.name, config], sort_keys=True).encode())
        for name, entry in sorted(self.entries.items()):
            state.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            room = max(entry.size - SAMPLE_BYTES, 0)
            length = min(entry.size, SAMPLE_BYTES)
            for start in sorted({room * i // (SAMPLES - 1) for i in range(SAMPLES)}):
                at = entry.offset + start
                state.update(entry.file.data[at : at + length])
            # A fault maps 64 KiB around it: the samples alone would keep 70 MB of a 94 MB file.
            entry.file.release(0, len(entry.file.data))
        return state.digest()

    def _load(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def _check(self) -> None:
        """Every tensor of the model is here and has the shape that the config gives it."""
        hidden, vocabulary = int(self.config.hidden_size), self.vocabulary
        self._want(EMBEDDING, (vocabulary, hidden))
        self._want(FINAL_NORM, (hidden,))
        if not self._tied:
            self._want(LM_HEAD, (vocabulary, hidden))
        for layer in range(self.layers_total):  # ends at the first that is missing
            for name, shape in self.layer_shapes.items():
                self._want(f"model.layers.{layer}.{name}", shape)

    def _want(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self.entries.get(name)
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
        return make()
    except CONFIG_ERRORS as error:
        raise ModelError(f"{path}: no {kind.name} config: {error}") from error


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
