"""Owns making the modules of a block: the library's own, filled one tensor at a time.

A module is made on the meta device; then each linear, expert and router is replaced by one that
keeps rows exact, and every other parameter is read. So a stage never holds more than its block and
one tensor twice. Knows no slot and no frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.experts import Activation, Experts, Router, expert_shapes, is_experts, is_router
from pipeline.families import Family, ropes, variant
from pipeline.fused import Fused, products, suits
from pipeline.kernels import Kernels
from pipeline.linears import Linear
from pipeline.native.layer import Native
from pipeline.probe import Work

_ACTIVATIONS = ("act_fn", "activation_fn")  # what the families' perceptrons call theirs
Read = Callable[[str], Tensor]
Rotary = dict[str, tuple[Tensor, Tensor]]


def meta_layer(family: Family, config: Any, index: int) -> nn.Module:
    """One decoder layer without memory."""
    with torch.device("meta"):
        layer: nn.Module = family.layer(config, index)
    return layer.eval().requires_grad_(False)


def tensor_shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names (below `model.layers.N.`) and shapes of a layer's tensors; experts' one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    experts = [name for name, module in layer.named_modules() if is_experts(module)]
    for name, value in layer.state_dict().items():
        if not any(name.startswith(f"{each}.") for each in experts):
            shapes[name] = tuple(value.shape)
    for name in experts:
        module: Any = layer.get_submodule(name)
        one = expert_shapes(module)
        for index in range(module.num_experts):
            shapes |= {f"{name}.{index}.{each}": shape for each, shape in one.items()}
    return shapes


def work_of(family: Family, config: Any) -> Work:
    """What the probe has to try for a model of this config."""
    variants = {variant(config, index): index for index in range(config.num_hidden_layers)}
    linears: list[tuple[int, int]] = []
    routers: list[tuple[int, int]] = []
    sinks = False
    if suits(family, config):
        linears += products(meta_layer(family, config, 0))
        variants = {}
    for index in variants.values():
        for module in meta_layer(family, config, index).modules():
            if isinstance(module, nn.Linear):
                linears.append((module.out_features, module.in_features))
            elif is_experts(module):
                linears += [(s[0], s[1]) for s in expert_shapes(module).values() if len(s) == 2]
            elif is_router(module):
                routers.append(tuple(module.weight.shape))  # type: ignore[arg-type]
            sinks = sinks or hasattr(module, "sinks")
    heads = (int(config.num_attention_heads), int(config.num_key_value_heads), head_dim(config))
    return Work(tuple(linears), tuple(routers), heads, sinks)


def head_dim(config: Any) -> int:
    """Length of a key row."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def make_layer(family: Family, config: Any, index: int, read: Read, kernels: Kernels) -> nn.Module:
    """One decoder layer with its weights. read: a tensor by its name below `model.layers.N.`."""
    layer = meta_layer(family, config, index)
    if kernels.fused:
        for name in layer.state_dict():
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, nn.Parameter(read(name), requires_grad=False))
        return Native(layer, kernels) if kernels.whole else Fused(layer, kernels)
    _fill(layer, "", read, kernels)
    return layer


def _fill(module: nn.Module, prefix: str, read: Read, kernels: Kernels) -> None:
    for name, child in list(module.named_children()):
        below = f"{prefix}{name}."
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else read(f"{below}bias")
            setattr(module, name, Linear(read(f"{below}weight"), bias, kernels))
        elif is_experts(child):
            experts = Experts(child, lambda each, at=below: read(at + each), kernels)  # type: ignore[misc]
            setattr(module, name, experts)
        elif name in _ACTIVATIONS and kernels.exact:
            setattr(module, name, Activation(child))
        else:
            _fill(child, below, read, kernels)
            if is_router(child) and kernels.exact:
                setattr(module, name, Router(child))
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(read(prefix + name), requires_grad=False))


def make_embedding(family: Family, config: Any, weight: Tensor) -> nn.Module:
    """Token ids -> rows; some families scale them."""
    if family.embedding is None:
        plain: nn.Module = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
        return plain
    with torch.device("meta"):
        scale = config.hidden_size**0.5
        made: Any = family.embedding(*weight.shape, None, embed_scale=scale)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.embed_scale = torch.tensor(made.scalar_embed_scale, device=weight.device)
    return made  # type: ignore[no-any-return]


def make_norm(family: Family, config: Any, weight: Tensor) -> nn.Module:
    """The norm behind the last layer."""
    with torch.device("meta"):
        made: nn.Module = family.norm(config.hidden_size, eps=config.rms_norm_eps)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made.eval()


def rotary_tables(
    family: Family,
    config: Any,
    divisors: Tensor | None,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Rotary:
    """For each layer type ("" where there is one): cosines and sines of positions, [positions, n].

    divisors: float32, of the frequencies; see Source.rope_divisors.
    """
    rotary: Any = family.rotary(config)
    tables: Rotary = {}
    for kind in ropes(config):
        name, typed = (f"{kind}_", {"layer_type": kind}) if kind else ("", {})
        frequencies = getattr(rotary, f"{name}inv_freq").float()
        example = rotary(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long), **typed)
        if divisors is not None:
            frequencies = frequencies / divisors
        # The library's formula, but the functions in float64 by numpy: torch's threaded float32
        # cos gave another table in 4 of 14 starts, and logits then differ by 1e-3.
        angles = torch.arange(positions).float()[:, None] * frequencies
        if example[0].shape[-1] != angles.shape[1]:  # most families want them twice
            angles = torch.cat((angles, angles), 1)
        exact = angles.double().numpy()
        scale = float(getattr(rotary, f"{name}attention_scaling"))
        cos, sin = (torch.from_numpy(f(exact) * scale).float() for f in (np.cos, np.sin))
        tables[kind] = cos.to(device, dtype), sin.to(device, dtype)
    return tables


def rotary_kind(config: Any, index: int) -> str:
    """Which of rotary_tables a layer takes."""
    return str(config.layer_types[index]) if "" not in ropes(config) else ""
