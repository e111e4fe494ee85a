"""Owns a real block: decoder layers [first, last) of a model with a static KV buffer per slot.

The layers are transformers' own, built for the block alone; this file gives them the rows of
several sequences at once, keeps their keys and values, and picks tokens at the tail. What keeps
rows exact is pipeline.kernels. Knows no link and no prefix hashes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import nn

from pipeline.attention import ATTENTION, Part, Plan
from pipeline.experts import Experts
from pipeline.fused import suits
from pipeline.graphs import Steps, fits
from pipeline.heap import lean
from pipeline.kernels import KEYS, ROWS, TILES, in_vectors, padded, spans
from pipeline.layers import (
    head_dim,
    make_embedding,
    make_layer,
    make_norm,
    rotary_kind,
    rotary_tables,
    work_of,
)
from pipeline.linears import BYTES, Linear, check_weights
from pipeline.model import ModelInfo, Output
from pipeline.probe import choose, linear_exact
from pipeline.rows import Held, make_rows, row_bytes
from pipeline.rule import Choice, Tally, result
from pipeline.sample import NOTHING, pick
from pipeline.weights import EMBEDDING, FINAL_NORM, LM_HEAD, ModelError, Source
from pipeline.wire import Wire
from transport.frame import Result, Sampling, Segment, Tensor

LOGIT_ROWS = 32  # rows projected at once: 32 x 49,152 x 4 bytes = 6 MB of logits, not 100 MB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchModel:
    """Layers [first, last) of an opened model as a StageModel.

    source: see weights.open_model. slots and capacity: KV rows per slot, rounded up to a multiple
    of 512. dtype: of weights, KV and activations; but weights "int8" or "int4" for those of the
    layers' linears and experts, activations "fp8" for rows between stages, kv "int8" or "fp8" for
    rows in slots. exact: see docs/exactness.md; info.kernel says whether it is kept. threads: of
    torch, for the whole process; None leaves them. progress is called with (share done in [0, 1],
    what is being done).
    """

    def __init__(
        self,
        source: Source,
        layers: tuple[int, int],
        *,
        slots: int,
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        weights: str = "dtype",
        activations: str = "dtype",
        kv: str = "dtype",
        exact: bool = True,
        threads: int | None = None,
        progress: Callable[[float, str], None] | None = None,
    ) -> None:
        source.names(layers)  # refuses a range outside the model
        if slots < 1 or capacity < 1:
            raise ModelError(f"{slots} slots of {capacity} rows: both must be positive")
        if source.rope_limit is not None and capacity > source.rope_limit:
            raise ModelError(
                f"{source.path}: slots of {capacity} rows, but its rope type, longrope, "
                f"serves {source.rope_limit}"
            )
        check_weights(weights, dtype, torch.device(device))
        if threads is not None:
            torch.set_num_threads(threads)
        self._report = progress or (lambda _share, _what: None)
        self._first, self._last = layers
        self._dtype, self._device = dtype, torch.device(device)
        self._slots, self._capacity = slots, padded(capacity, KEYS)
        self._config = copy.deepcopy(source.config)
        self._config._attn_implementation = ATTENTION
        self._heads = int(self._config.num_attention_heads)
        self._groups = int(self._config.num_key_value_heads)
        self._size = head_dim(self._config)
        self._fp8, self._kv = activations == "fp8", kv
        self._wire = Wire(dtype, int(self._config.hidden_size), fp8=self._fp8)
        with torch.inference_mode(), lean():
            self._report(0.0, "probing kernels")
            work = work_of(source.family, self._config)
            fused = suits(source.family, self._config)
            kernels = choose(work, dtype, self._device, exact=exact, weights=weights)
            self._kernels = replace(kernels, fused=fused)
            self._load(source)
            # Only there launching takes longer than running; the library's layers may wait inside.
            record = self._device.type == "cuda" and self._kernels.exact and fused
            self._steps = self._make_steps() if record else None
        self._info = self._describe(source)
        self._report(1.0, "loaded")

    @property
    def info(self) -> ModelInfo:
        """See StageModel."""
        return self._info

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        """See StageModel. payload: [tokens, hidden] in the block's dtype."""
        count = sum(len(segment.tokens) for segment in segments)
        rows = padded(count, ROWS) if self._kernels.exact else count
        plan, positions = self._plan(segments, rows)
        if self._info.head:
            hidden = self._embed(segments, rows)
        else:
            assert payload is not None
            assert payload.shape[0] == count, (payload.shape, count)
            hidden = self._sent(self._wire.unpack(payload, rows))
        for experts in self._experts:
            experts.rows = count
        if self._steps is not None and fits(plan, self._capacity):
            hidden = self._steps.run(plan.parts[0], hidden)
        else:
            hidden = self._through(hidden, self._sent(torch.tensor(positions)), plan)
        if self._info.tail:
            return Output(None, self._results(segments, hidden[0], histories))
        return Output(self._wire.pack(hidden[0, :count]))

    def _through(self, hidden: torch.Tensor, positions: torch.Tensor, plan: Plan) -> torch.Tensor:
        """All layers over [1, rows, hidden]; positions: [rows]."""
        rotary = {
            kind: (cos[positions][None], sin[positions][None])
            for kind, (cos, sin) in self._rotary.items()
        }
        for kind, layer in self._layers:
            hidden = layer(hidden, position_embeddings=rotary[kind], plan=plan)
        return hidden

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """See StageModel."""
        for layer, held in self._caches.items():
            here = self._parked.get(source)
            found = tuple(each[source] for each in held) if here is None else here[layer]
            if target < self._slots:
                for each, rows in zip(held, found, strict=True):
                    each[target, :, :length] = rows[:, :length]
            else:
                parked = self._parked.setdefault(target, {})
                parked[layer] = tuple(rows[:, :length].to("cpu", copy=True) for rows in found)

    def drop(self, parked: int) -> None:
        """See StageModel."""
        self._parked.pop(parked, None)

    # ---- construction ----------------------------------------------------------------------------

    def _load(self, source: Source) -> None:
        first, last = self._first, self._last
        self._unread = self._weights = sum(
            source.size(name) for name in source.names((first, last))
        )
        self._weight_bytes = self._end_bytes = 0
        self._item_bytes = BYTES.get(self._kernels.weights, self._dtype.itemsize)
        shape = (self._slots, self._groups, self._capacity, self._size)
        self._layers: list[tuple[str, nn.Module]] = []  # with the rotary table that each takes
        self._caches: dict[int, Held] = {}
        # host copies of a slot's [key heads, rows, ...] of each, by parked number and layer
        self._parked: dict[int, dict[int, tuple[torch.Tensor, ...]]] = {}
        if first == 0:
            table = self._read(source, EMBEDDING)
            self._embedding = make_embedding(source.family, self._config, table)
        if last == source.layers_total:  # first: it is the largest, and packed it is here twice
            norm = self._read(source, FINAL_NORM)
            self._norm = make_norm(source.family, self._config, norm)
            self._head = self._lm_head(source)
        for index in range(first, last):
            kind = rotary_kind(self._config, index)
            self._layers.append((kind, self._layer(source, index)))
            self._caches[index] = make_rows(shape, self._dtype, self._device, self._kv)
        modules = [module for _, layer in self._layers for module in layer.modules()]
        self._experts = [module for module in modules if isinstance(module, Experts)]
        self._rotary = rotary_tables(
            source.family,
            self._config,
            source.rope_divisors,
            self._capacity,
            self._dtype,
            self._device,
        )

    def _make_steps(self) -> Steps:
        like = torch.empty(int(self._config.hidden_size), dtype=self._dtype, device=self._device)
        group = self._heads // self._groups
        return Steps(self._through, Plan([], self._caches), like, group, self._kernels)

    def _read(self, source: Source, name: str) -> torch.Tensor:
        tensor = source.read(name, self._dtype).to(self._device)
        self._unread -= source.size(name)
        done, whole = self._weights - self._unread, self._weights
        self._report(done / whole, f"reading weights, {done / 1e6:,.0f} of {whole / 1e6:,.0f} MB")
        end = name in (EMBEDDING, LM_HEAD)
        each = tensor.itemsize if end or tensor.ndim < 2 else self._item_bytes
        self._weight_bytes += int(tensor.numel() * each)
        self._end_bytes += tensor.nbytes if end else 0
        return tensor

    def _layer(self, source: Source, index: int) -> nn.Module:
        prefix = f"model.layers.{index}."

        def read(name: str) -> torch.Tensor:
            return self._read(source, prefix + name)

        return make_layer(source.family, self._config, index, read, self._kernels)

    def _lm_head(self, source: Source) -> Linear:
        kernels = replace(self._kernels, linear_rows=LOGIT_ROWS, weights="dtype")
        head = Linear(self._read(source, LM_HEAD), None, kernels)
        if kernels.exact:
            # Its own probe, on its own weights: logits are not cached, so the tile is no identity.
            tile = next((n for n in TILES if n <= LOGIT_ROWS and linear_exact(head, n)), 0)
            if tile:
                head.rows = tile
            else:
                self._kernels = replace(self._kernels, exact=False, why_not="LM head")
        return head

    def _describe(self, source: Source) -> ModelInfo:
        identity = blake2b(source.fingerprint, digest_size=16)
        # Kernels are not part of it: rows live and die with the process that computed them, and a
        # stage that begins anew has every row behind it computed again.
        identity.update(f"{self._dtype} {self._kernels.weights} {self._fp8}".encode())
        if self._kv != "dtype":
            identity.update(f" {self._kv} KV".encode())
        row = row_bytes(self._groups, self._size, self._dtype.itemsize, self._kv)
        return ModelInfo(
            (self._first, self._last),
            source.layers_total,
            identity.digest(),
            self._slots,
            self._capacity,
            source.vocabulary,
            self._kernel(),
            row * (self._last - self._first),
            self._wire.row,
            self._weight_bytes,
            self._end_bytes,
        )

    def _kernel(self) -> str:
        """What a stage's rows depend on beside the model, in words."""
        words = self._kernels.describe(self._dtype, self._device) + self._fp8 * "; fp8 activations"
        return words + (self._kv != "dtype") * f"; {self._kv} KV"

    # ---- one forward -----------------------------------------------------------------------------

    def _plan(self, segments: Sequence[Segment], rows: int) -> tuple[Plan, list[int]]:
        parts: list[Part] = []
        positions: list[int] = []
        for segment in segments:
            cut = spans(segment.start, segment.end, self._heads // self._groups, self._kernels)
            parts.append(Part(segment.slot, segment.start, segment.end, len(positions), cut))
            positions.extend(range(segment.start, segment.end))
        positions.extend([0] * (rows - len(positions)))
        return Plan(parts, self._caches), positions

    def _embed(self, segments: Sequence[Segment], rows: int) -> torch.Tensor:
        ids = [token for segment in segments for token in segment.tokens]
        ids.extend([0] * (rows - len(ids)))
        embedded: torch.Tensor = self._embedding(self._sent(torch.tensor(ids)))
        return embedded[None]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device. From pinned memory the copy waits for nothing."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _results(
        self,
        segments: Sequence[Segment],
        hidden: torch.Tensor,
        histories: Sequence[Sequence[int]],
    ) -> tuple[Result, ...]:
        # row, position of the token, its segment's sampling and tally
        wanted: list[tuple[int, int, Sampling, Tally | None]] = []
        at = 0
        for index, segment in enumerate(segments):
            count, tally = len(segment.tokens), None
            if segment.want and segment.sampling.shaping is not None:
                tally = Tally(segment, histories[index] if histories else ())
            for offset in range(count - segment.want, count):
                wanted.append((at + offset, segment.start + offset + 1, segment.sampling, tally))
            at += count
        choices: list[Choice] = []
        for first in range(0, len(wanted), LOGIT_ROWS):
            some = wanted[first : first + LOGIT_ROWS]
            logits = self._logits(hidden, [row for row, *_ in some])
            choices += [
                pick(row, sampling, position, tally.before(position) if tally else NOTHING)
                for row, (_, position, sampling, tally) in zip(logits, some, strict=True)
            ]
        results = []
        at = 0
        for segment in segments:
            results.append(result(segment, choices[at : at + segment.want]))
            at += segment.want
        return tuple(results)

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """float32 [len(rows), vocabulary] of some rows of [rows, hidden]."""
        count = len(rows)
        if self._kernels.exact:
            rows = rows + [rows[0]] * (padded(count, ROWS) - count)
        chosen = hidden[self._sent(torch.tensor(rows))][None]
        logits: torch.Tensor = self._head(self._norm(chosen))
        cap = getattr(self._config, "final_logit_softcapping", None)
        if cap is not None:  # as the library's whole models do behind their LM head
            logits = in_vectors(torch.tanh, logits / cap) * cap
        # One wait for all rows; and only the host's argmax takes the first of equals.
        return logits[0, :count].float().cpu()
