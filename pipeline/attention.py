"""Owns the attention of one forward: several sequences' rows over the slots they are written to.

The library's layers reach it through AttentionInterface, pipeline.fused's call it themselves. Knows
no weight, no frame and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from pipeline.kernels import Span, attend
from pipeline.rows import Held, view, write

ATTENTION = "kvring"


@dataclass(slots=True)
class Part:
    """One segment in a forward: its slot and rows there, and its first row in the frame.

    positions: the rows as a tensor, where they change between replays of a recording.
    """

    slot: int
    start: int
    end: int
    at: int
    spans: list[Span]
    positions: torch.Tensor | None = None


@dataclass(slots=True)
class Plan:
    """What every layer of one forward shares. caches: per layer, see pipeline.rows."""

    parts: list[Part]
    caches: dict[int, Held]


def attention(
    plan: Plan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the rows' keys and values to their slots, then attend sequence by sequence.

    query [heads, rows, head_dim], key and value [key heads, rows, head_dim]: any strides; returns
    [rows, heads, head_dim], contiguous. sinks: of the heads. Padding rows stay zero.
    """
    held = plan.caches[layer]
    out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
    for part in plan.parts:
        last = part.at + part.end - part.start
        place = slice(part.start, part.end) if part.positions is None else part.positions
        write(held, part.slot, place, key[:, part.at : last], value[:, part.at : last])
        keys, values = view(held, part.slot, part.spans[-1].keys, query.dtype)
        for span in part.spans:
            low = part.at + span.start - part.start
            high = low + span.end - span.start
            found = attend(
                query[:, low:high],
                keys,
                values,
                span,
                window=window,
                scaling=scaling,
                sinks=sinks,
            )
            out[low:high] = found.transpose(0, 1)
    return out


def _of_the_library(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the library's signature
    *,
    plan: Plan,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As the library calls it: tensors of [1, heads, rows, size], giving [1, rows, heads, size]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention(
        plan, layer, query[0], key[0], value[0], scaling=scaling, window=sliding_window, sinks=s_aux
    )
    return out[None], None


AttentionInterface.register(ATTENTION, _of_the_library)
