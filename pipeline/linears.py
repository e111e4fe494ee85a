"""Owns products with a weight: packed, plain, or quantised to int8 or int4, some rows at a time.

Which of them a block uses, and how many rows may share a call, is said by a Kernels. Knows no file
and no layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipeline.kernels import ROWS, Kernels
from pipeline.model import ModelError
from pipeline.native.library import Library, Weight, in_pairs

Call = Callable[[Tensor], Tensor]
GROUP = 32  # int4: inputs that share a scale and a zero; the smallest that torch's kernel takes
BYTES = {"int8": 1.0, "int4": 0.5 + 4 / GROUP}  # of a quantised weight; its scales are few
_INT4_OUT = 16  # and its multiple of outputs
_AT_ONCE = 512  # rows quantised together: their float32 copy is small beside a layer


class Linear(nn.Module):
    """y = x W^T + b for x [1, rows, in]; in exact mode rows must be a multiple of 8.

    weight: [out, in], consumed: the packed or quantised form replaces it. By native kernels any
    number of rows; wide: there, y is of float32. paired: for a native layer alone, see Native.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kernels: Kernels,
        *,
        wide: bool = False,
        paired: bool = False,
    ) -> None:
        super().__init__()
        self.width, self.dtype, self.device = weight.shape[1], weight.dtype, weight.device
        native = kernels.native
        self.weight: Weight | None = None
        if native is not None:
            held = self.weight = _held(native, weight, bias, kernels.weights, paired=paired)
            self.call: Call = lambda x: native.linear(x, held, wide=wide)
        else:
            self.call = _product(weight, bias, kernels)
        self.rows = kernels.linear_rows if kernels.exact and native is None else 0

    def forward(self, x: Tensor) -> Tensor:
        """[1, rows, in] -> [1, rows, out]."""
        if not self.rows or x.shape[1] <= self.rows:
            return self.call(x)
        return torch.cat([self.call(part) for part in torch.split(x, self.rows, 1)], 1)


def _held(
    native: Library, weight: Tensor, bias: Tensor | None, weights: str, *, paired: bool
) -> Weight:
    if weights == "dtype":
        return native.pack(weight, bias, paired=paired)
    outputs, inputs = weight.shape
    some = in_pairs(weight, _AT_ONCE) if paired else torch.split(weight, _AT_ONCE)
    if paired and bias is not None:
        (bias,) = in_pairs(bias, outputs)
    if weights == "int4":
        return native.pack_small(map(_int4, some), outputs, inputs, 4, bias)
    quantised = ((numbers, scale.float()) for numbers, scale in map(_int8, some))
    return native.pack_small(quantised, outputs, inputs, 8, bias)


def _product(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Call:
    if kernels.weights == "int8":
        numbers, scale = _int8(weight)
        return lambda x: _plus(torch._weight_int8pack_mm(x[0], numbers, scale), bias)
    if kernels.weights == "int4":
        return _int4_call(weight, bias)
    if not kernels.packed:
        return lambda x: F.linear(x, weight, bias)
    # Never call the packed form with fewer rows than it was packed for: each call repacks.
    packed = _pack(weight, ROWS)
    return lambda x: _packed_linear(x, packed, bias)


# ---- packed by oneDNN ----------------------------------------------------------------------------


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


# ---- quantised: torch's own CPU kernels ----------------------------------------------------------


def check_weights(weights: str, dtype: torch.dtype, device: torch.device) -> None:
    """ModelError where there is no kernel for quantised weights that is worth having."""
    if weights == "dtype":
        return
    kernel = {"int8": "_weight_int8pack_mm", "int4": "_weight_int4pack_mm_for_cpu"}[weights]
    if device.type != "cpu":
        raise ModelError(f"{weights} weights run on a CPU, not on {device.type}")
    if dtype == torch.float32:  # measured: torch's own is scalar there, 20 times the plain product
        raise ModelError(f"{weights} weights need the dtype bfloat16 or float16")
    if not hasattr(torch.ops.aten, kernel):
        raise ModelError(f"{weights} weights: torch {torch.__version__} has no {kernel}")


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers q and scales, one per output, symmetric: W[o, i] = q[o, i] * scale[o]."""
    quantised, scales = torch.empty(weight.shape, dtype=torch.int8), []
    for start in range(0, len(weight), _AT_ONCE):
        rows = weight[start : start + _AT_ONCE].float()
        # rounded first: the kernel multiplies by the scale as the dtype has it
        scale = (rows.abs().amax(1) / 127).clamp(min=2**-20).to(weight.dtype)
        scaled = torch.round(rows / scale.float()[:, None]).clamp(-127, 127)
        quantised[start : start + _AT_ONCE] = scaled.to(torch.int8)
        scales.append(scale)
    return quantised, torch.cat(scales)


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers q (int8, 0 to 15), and for each GROUP of inputs a scale and a zero, [out, groups, 2].

    W[o, i] = (q[o, i] - 8) * scale + zero.
    """
    width = weight.shape[1]
    quantised, scales = torch.empty(weight.shape, dtype=torch.int8), []
    for start in range(0, len(weight), _AT_ONCE):
        rows = weight[start : start + _AT_ONCE].float().reshape(-1, width // GROUP, GROUP)
        low, high = rows.amin(2), rows.amax(2)
        scale = ((high - low) / 15).clamp(min=2**-20).to(weight.dtype)
        zero = (low + 8 * scale.float()).to(weight.dtype)
        scaled = (rows - zero.float()[..., None]) / scale.float()[..., None] + 8
        quantised[start : start + _AT_ONCE] = torch.round(scaled).clamp(0, 15).flatten(1)
        scales.append(torch.stack((scale, zero), 2))
    return quantised, torch.cat(scales)


def _int4_call(weight: Tensor, bias: Tensor | None) -> Call:
    out, width = weight.shape
    if width % GROUP or out % _INT4_OUT:
        raise ModelError(
            f"int4 weights: a linear of [{out}, {width}] is not a multiple of "
            f"[{_INT4_OUT}, {GROUP}]; int8 takes any"
        )
    numbers, scales = _int4(weight)
    parts = [
        torch._convert_weight_to_int4pack_for_cpu(some.to(torch.int32), 1)
        for some in torch.split(numbers, _AT_ONCE)
    ]
    packed, pairs = torch.cat(parts), scales.transpose(0, 1).contiguous()
    return lambda x: _plus(torch._weight_int4pack_mm_for_cpu(x[0], packed, GROUP, pairs), bias)


def _plus(rows: Tensor, bias: Tensor | None) -> Tensor:
    return (rows if bias is None else rows + bias)[None]
