"""Owns how a block computes, in words and numbers, and attention that keeps rows exact.

A row's result must be the same alone, in a chunk of any length, beside other slots, and with any
finite garbage after its position. What it takes (docs/exactness.md): rows padded to multiples of
8, at most `linear_rows` of them in one linear, key views of multiples of `keys`, one attention call
for at most `attention_rows` query rows. pipeline.probe finds the largest tiles that are bit-equal
to 8 rows on this machine, and the smallest step of keys. Knows no slot, no frame and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from pipeline.native.library import Library

ROWS = 8  # float32 GEMM with fewer than 4 rows, and attention with 1 to 3, are other kernels
KEYS = 512  # scaled_dot_product_attention's key block on CPU: a partial one may sum differently
KEY_STEPS = (64, 256, KEYS)  # what a view is rounded up to; with MKL's float32 256, on AMX 64 do
TILES = (128, 32, 8)  # rows of one call, largest first; bfloat16 on AMX changes kernels above 32
MAX_SHARE = 32768  # elements of a thread's least share: at::internal::GRAIN_SIZE
_VECTORS = 64  # two vectors of 16 floats are torch's step on AVX-512; half of that elsewhere
FOLD_ROWS = 64  # up to here a group's query heads share one call's rows: half the time at 1 token


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a block computes: see probe.choose. exact False: plain kernels, whatever is fastest.

    weights: "dtype" as they are, or "int8" or "int4" in the layers' linears and experts.
    fused: the layers are pipeline.fused's. keys: attention looks at a multiple of so many.
    native: products and attention are its, then tiles do not matter; whole: fused layers too, each
    in one call. why_torch: why there is no native, where it was looked for.
    """

    exact: bool
    packed: bool
    linear_rows: int
    attention_rows: int
    why_not: str = ""
    weights: str = "dtype"
    fused: bool = False
    keys: int = KEYS
    native: Library | None = None
    whole: bool = False
    why_torch: str = ""

    def describe(self, dtype: torch.dtype, device: torch.device) -> str:
        """The kernels' identity in words: equal text, equal bits (for one model)."""
        where = str(device.type)
        if device.type == "cpu":
            amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
            where = torch.backends.cpu.get_cpu_capability() + ("+AMX" if amx else "")
        linear = f"{'packed' if self.packed else 'plain'} linear"
        layers = "; fused layers" if self.fused else ""
        name = str(dtype).removeprefix("torch.")
        if self.weights != "dtype":
            linear, name = f"{self.weights} linear", f"{name} with {self.weights} weights"
        if self.native is not None:
            layers = "; whole layers" if self.whole else layers
            return f"exact; torch {torch.__version__}; {self.native.describe()}{layers}; {name}"
        if not self.exact:
            reason = f" ({self.why_not})" if self.why_not else ""
            return (
                f"exact off{reason}; torch {torch.__version__}; {where}; {linear}{layers}; {name}"
            )
        return (
            f"exact; torch {torch.__version__}; {where}; {linear} of {self.linear_rows} rows; "
            f"attention of {self.attention_rows} rows, {self.keys} keys{layers}; {name}"
            + (f"; not native: {self.why_torch}" if self.why_torch else "")
        )


PLAIN = Kernels(exact=False, packed=False, linear_rows=0, attention_rows=0)


def padded(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= count."""
    return -(-count // multiple) * multiple


# ---- attention -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Span:
    """Query rows [start, end) of one sequence and the keys they may see: one or more calls.

    keys: length of the key view. masks: float, per sliding window, made once per forward.
    positions: of the tokens where they are not [start, end), see pipeline.graphs.
    """

    start: int
    end: int
    keys: int
    rows: int
    fold: bool
    masks: dict[int | None, Tensor]
    positions: Tensor | None = None


def spans(start: int, end: int, group: int, kernels: Kernels) -> list[Span]:
    """Cut a segment's query rows [start, end) into attention calls.

    Native kernels take it whole: none. group: query heads per key head. In a folded call the rows
    are the group's heads times the tokens; else each head has its own rows.
    """
    if kernels.native is not None:
        return []
    if not kernels.exact:
        fold = group * (end - start) <= FOLD_ROWS
        rows = (end - start) * (group if fold else 1)
        return [Span(start, end, end, rows, fold, {})]
    made = []
    if padded(group * (end - start), ROWS) <= min(FOLD_ROWS, kernels.attention_rows):
        keys = padded(end, kernels.keys)
        return [Span(start, end, keys, padded(group * (end - start), ROWS), True, {})]
    for at in range(start, end, kernels.attention_rows):
        stop = min(at + kernels.attention_rows, end)
        keys = padded(stop, kernels.keys)
        made.append(Span(at, stop, keys, padded(stop - at, ROWS), False, {}))
    return made


def _mask(span: Span, window: int | None, group: int, like: Tensor) -> Tensor:
    """Additive mask [rows, keys]: 0 where key <= position (and within the window), else -inf.

    Padding rows are all 0: a row of -inf would be NaN.
    """
    keys = torch.arange(span.keys, device=like.device)
    positions = span.positions
    if positions is None:
        positions = torch.arange(span.start, span.end, device=like.device)
    positions = positions[:, None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    if span.fold and group > 1:
        hidden = hidden.repeat(group, 1)
    mask = torch.zeros(span.rows, span.keys, dtype=like.dtype, device=like.device)
    mask[: len(hidden)].masked_fill_(hidden, float("-inf"))
    return mask


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Span,
    *,
    window: int | None,
    scaling: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a span's tokens over one slot: query [heads, tokens, head_dim] -> the same.

    keys, values: [key heads, capacity, head_dim]; rows at or after span.end may hold anything
    finite. sinks: [heads] or None.
    """
    heads, tokens, size = query.shape
    groups = keys.shape[0]
    group = heads // groups
    mask = span.masks.get(window)
    if mask is None:
        mask = span.masks[window] = _mask(span, window, group, query)
    k, v = keys[:, : span.keys], values[:, : span.keys]
    if span.fold:
        used = group * tokens
        q = query.reshape(1, groups, used, size)
        if used != span.rows:
            q = F.pad(q, (0, 0, 0, span.rows - used))
        out = _softmax(q, k[None], v[None], mask, scaling, sinks, repeat=tokens)
        return out[0, :, :used].reshape(heads, tokens, size)
    q = query.reshape(groups, group, tokens, size)
    if tokens != span.rows:
        q = F.pad(q, (0, 0, 0, span.rows - tokens))
    shape = (groups, group, span.keys, size)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    out = _softmax(q, k, v, mask, scaling, sinks)
    return out[:, :, :tokens].reshape(heads, tokens, size)


def _softmax(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    sinks: Tensor | None,
    repeat: int = 0,
) -> Tensor:
    """[batch, heads, rows, size] of softmax(query keys^T * scaling + mask) values.

    A sink is one more logit in each row's sum, without a value: the row shrinks by
    s / (s + e^sink), s the sum of the others. repeat: in folded rows each sink has so many.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    if query.device.type == "cpu":  # what scaled_dot_product_attention calls, with its sums
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
        )
    else:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        logits = (query @ keys.transpose(2, 3)).float() * scaling + mask
        log_sums = logits.logsumexp(-1)
    batch, heads, rows, _ = query.shape
    if repeat:
        each = sinks.reshape(batch, heads, -1).repeat_interleave(repeat, 2)
        each = F.pad(each, (0, rows - each.shape[2]))
    else:
        each = sinks.reshape(batch, heads, 1)
    kept = in_vectors(torch.sigmoid, log_sums - each.float())
    scaled: Tensor = (out.float() * kept[..., None]).to(out.dtype)
    return scaled


def in_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """An elementwise function whose bits at an element depend on that element alone.

    torch computes with vectors, and what is left over at the end of a thread's share by another
    function, whose last bit may differ: where the shares end depends on the number of elements
    and threads. Here every share is a whole number of vectors.
    """
    flat = values.reshape(-1)
    count, threads = len(flat), torch.get_num_threads()
    if values.device.type != "cpu":
        return function(values)
    share = MAX_SHARE if count < MAX_SHARE * threads else _VECTORS * threads
    even = count - count % share if count > MAX_SHARE else 0
    parts = [function(flat[:even])] if even else []
    if even < count:
        rest = F.pad(flat[even:], (0, padded(count - even, _VECTORS) - (count - even)))
        parts.append(function(rest)[: count - even])
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.reshape(values.shape)
