"""Owns exactness: linears and attention whose rows' bits do not depend on the rows beside them.

A row's result must be the same alone, in a chunk of any length, beside other slots, and with any
finite garbage after its position. What it takes (docs/exactness.md): rows padded to multiples of
8, at most `linear_rows` of them in one linear, key views of multiples of `keys`, one attention call
for at most `attention_rows` query rows. `choose` probes this machine for the largest tiles that
are bit-equal to 8 rows, and the smallest step of keys. Knows no slot, no frame and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

ROWS = 8  # float32 GEMM with fewer than 4 rows, and attention with 1 to 3, are other kernels
KEYS = 512  # scaled_dot_product_attention's key block on CPU: a partial one may sum differently
KEY_STEPS = (64, 256, KEYS)  # what a view is rounded up to; with MKL's float32 256, on AMX 64 do
TILES = (128, 32, 8)  # rows of one call, largest first; bfloat16 on AMX changes kernels above 32
FOLD_ROWS = 64  # up to here a group's query heads share one call's rows: half the time at 1 token
_PROBE_KEYS = 2 * KEYS


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a block computes: see `choose`. exact False: plain kernels, whatever is fastest.

    fused: the layers are pipeline.fused's. keys: attention looks at a multiple of so many.
    """

    exact: bool
    packed: bool
    linear_rows: int
    attention_rows: int
    why_not: str = ""
    fused: bool = False
    keys: int = KEYS

    def describe(self, dtype: torch.dtype, device: torch.device) -> str:
        """The kernels' identity in words: equal text, equal bits (for one model)."""
        where = str(device.type)
        if device.type == "cpu":
            amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
            where = torch.backends.cpu.get_cpu_capability() + ("+AMX" if amx else "")
        linear = f"{'packed' if self.packed else 'plain'} linear"
        layers = "; fused layers" if self.fused else ""
        name = str(dtype).removeprefix("torch.")
        if not self.exact:
            reason = f" ({self.why_not})" if self.why_not else ""
            return (
                f"exact off{reason}; torch {torch.__version__}; {where}; {linear}{layers}; {name}"
            )
        return (
            f"exact; torch {torch.__version__}; {where}; {linear} of {self.linear_rows} rows; "
            f"attention of {self.attention_rows} rows, {self.keys} keys{layers}; {name}"
        )


PLAIN = Kernels(exact=False, packed=False, linear_rows=0, attention_rows=0)


def padded(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= count."""
    return -(-count // multiple) * multiple


# ---- linears -------------------------------------------------------------------------------------


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True where oneDNN's pre-packed linear exists: a private operator, so it is tried."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ones(ROWS, ROWS, dtype=dtype)
        rows = torch.ones(ROWS, ROWS, dtype=dtype)
        result = _packed_linear(rows, _pack(weight, ROWS), None)
        return bool((result == ROWS).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _pack(weight: Tensor, rows: int) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def _packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


class Linear(nn.Module):
    """y = x W^T + b for x [1, rows, in]; in exact mode rows must be a multiple of 8.

    weight: [out, in], consumed: the packed form replaces it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        # Never call the packed form with fewer rows than it was packed for: each call repacks.
        self.weight = _pack(weight, ROWS) if kernels.packed else weight
        self.bias = bias
        self.call: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
            _packed_linear if kernels.packed else F.linear
        )
        self.rows = kernels.linear_rows if kernels.exact else 0

    def forward(self, x: Tensor) -> Tensor:
        """[1, rows, in] -> [1, rows, out]."""
        if not self.rows or x.shape[1] <= self.rows:
            return self.call(x, self.weight, self.bias)
        parts = [self.call(part, self.weight, self.bias) for part in torch.split(x, self.rows, 1)]
        return torch.cat(parts, 1)


def replace_linears(module: nn.Module, kernels: Kernels) -> None:
    """Put a Linear in the place of each nn.Linear below `module`, freeing weights one by one."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.data
            setattr(module, name, Linear(child.weight.data, bias, kernels))
        else:
            replace_linears(child, kernels)


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

    group: query heads per key head. In a folded call the rows are the group's heads times the
    tokens; else each head has its own rows.
    """
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
    query: Tensor, keys: Tensor, values: Tensor, span: Span, *, window: int | None, scaling: float
) -> Tensor:
    """Attention of a span's tokens over one slot: query [heads, tokens, head_dim] -> the same.

    keys, values: [key heads, capacity, head_dim]; rows at or after span.end may hold anything
    finite.
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
        out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, scale=scaling)
        return out[0, :, :used].reshape(heads, tokens, size)
    q = query.reshape(groups, group, tokens, size)
    if tokens != span.rows:
        q = F.pad(q, (0, 0, 0, span.rows - tokens))
    shape = (groups, group, span.keys, size)
    k, v = k[:, None].expand(shape), v[:, None].expand(shape)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out[:, :, :tokens].reshape(heads, tokens, size)


# ---- the start-up probe --------------------------------------------------------------------------


def choose(
    shapes: Iterable[tuple[int, ...]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
) -> Kernels:
    """Find the largest tiles that keep rows bit-equal here; `exact` False: PLAIN.

    shapes: [out, in] of the layers' linears. heads: query heads, key heads, head_dim. Weights and
    rows are random with a fixed seed, so all stages of one machine kind find the same. Where even
    8-row tiles fail the result has exact False and says why.
    """
    if not exact:
        return PLAIN
    packed = can_pack(dtype, device)
    kernels = Kernels(True, packed, 0, 0)
    generator = torch.Generator().manual_seed(1)
    weights = [
        (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype).to(device)
        for shape in sorted(set(shapes))
    ]
    linears = [Linear(weight, None, replace(kernels, linear_rows=TILES[0])) for weight in weights]
    linear_rows = next((n for n in TILES if all(linear_exact(each, n) for each in linears)), 0)
    if not linear_rows:
        return replace(PLAIN, why_not="linears differ by row")
    kernels = replace(kernels, linear_rows=linear_rows)
    for rows in TILES:
        tried = replace(kernels, attention_rows=rows)
        if _attention_exact(heads, dtype, device, tried):
            steps = (replace(tried, keys=step) for step in KEY_STEPS)
            return next(each for each in steps if _keys_exact(heads, dtype, device, each))
    return replace(PLAIN, why_not="attention differs by row")


def linear_exact(linear: Linear, tile: int) -> bool:
    """True when every call of 8, 16, ... `tile` rows gives each row the bits of an 8-row call."""
    width = _width(linear)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, tile + ROWS, width, generator=generator)
    x = x.to(linear.weight.dtype).to(linear.weight.device)
    call = linear.call
    single = torch.cat(
        [call(part, linear.weight, linear.bias) for part in torch.split(x, ROWS, 1)], 1
    )
    # Starting at row 1 moves every row to another place among other neighbours.
    return all(
        torch.equal(
            call(x[:, 1 : 1 + n].contiguous(), linear.weight, linear.bias), single[:, 1 : 1 + n]
        )
        for n in range(ROWS, tile + 1, ROWS)
    )


def _width(linear: Linear) -> int:
    return int(linear.weight.shape[1])


def _attention_exact(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> bool:
    """True when chunks of many sizes give each row the bits it has alone, on wider views too."""
    start, last = KEYS - 40, KEYS + 40  # the chunks cross a key block
    random = _RandomAttention(heads, dtype, device)

    def run(low: int, high: int) -> Tensor:
        return random.run(low, high, kernels)

    alone = torch.cat([run(at, at + 1) for at in range(start, last)], 1)
    chunks = [(start, start + n) for n in (2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 34, 35)]
    chunks += [(start + 5, start + 5 + n) for n in (36, 40, 48, 63, 64, 65, 67, 72)]
    chunks += [(start, last)]
    return all(
        torch.equal(run(low, high), alone[:, low - start : high - start]) for low, high in chunks
    )


def _keys_exact(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> bool:
    """True when views of every multiple of `kernels.keys` give the bits of whole key blocks."""
    if kernels.keys == KEYS:
        return True
    random = _RandomAttention(heads, dtype, device)
    whole = replace(kernels, keys=KEYS)
    rows = [each for each in (1, 8, 16, 32, 64, 128) if each <= kernels.attention_rows]
    return all(
        torch.equal(random.run(end - n, end, kernels), random.run(end - n, end, whole))
        for end in range(kernels.keys, _PROBE_KEYS, kernels.keys)
        for n in rows
        if n <= end
    )


class _RandomAttention:
    """Attention over random queries, keys and values, always the same ones."""

    def __init__(
        self, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        count, self.groups, self.size = heads
        generator = torch.Generator().manual_seed(3)

        def random(count: int) -> Tensor:
            made = torch.randn(count, _PROBE_KEYS, self.size, generator=generator)
            return made.to(dtype).to(device)

        self.query, self.keys, self.values = random(count), random(self.groups), random(self.groups)

    def run(self, low: int, high: int, kernels: Kernels) -> Tensor:
        """The results of query rows [low, high), [heads, rows, head_dim]."""
        cut = spans(low, high, len(self.query) // self.groups, kernels)
        parts = [
            attend(
                self.query[:, s.start : s.end],
                self.keys,
                self.values,
                s,
                window=None,
                scaling=self.size**-0.5,
            )
            for s in cut
        ]
        return torch.cat(parts, 1)


def linear_shapes(shapes: dict[str, Any]) -> list[tuple[int, int]]:
    """The [out, in] shapes among a layer's tensors."""
    return [(shape[0], shape[1]) for shape in shapes.values() if len(shape) == 2]
