"""Owns how a stage's large memory is had and given back; knows nothing of what is in it.

glibc keeps blocks of up to 32 MB for reuse once it has seen some freed; each weight that is packed
leaves one behind, and a block of 900 MB had 370 MB of holes. Elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from math import prod

import torch

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SMALL, _LARGE = 1 << 20, 32 << 20


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Within, blocks of a megabyte and more are mapped one by one; then, as glibc is by then."""
    libc = ctypes.CDLL(None)
    ours = all(hasattr(libc, name) for name in ("mallopt", "malloc_trim"))
    if ours:
        libc.mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        if ours:
            libc.mallopt(_MMAP_THRESHOLD, _LARGE)
            libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
            libc.malloc_trim(0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on CPU unwritten ones take no memory. MemoryError where there is none."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no room for {size:,} bytes") from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)
