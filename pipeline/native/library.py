"""Owns the native kernels: compiled where they run, once, and called from here.

The library's own operations cost 10 us and more each beside their bytes, and a row's bits are its
own in them only in tiles (docs/exactness.md); a decoder layer in one call has neither. The source
beside this file is compiled for this machine's processor by the C++ compiler that is found, and
kept in the user's cache. Knows no slot, no frame and no file of a model.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = ("vectors.h", "products.h", "attention.h", "layer.cpp")
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w")
_NO_AMX = "-DKVRING_NO_AMX"
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120  # for a compiler on a busy machine
WIDTH = 32  # inputs of a product come in multiples of it, and a head's numbers in those of half
DTYPES = (torch.float32, torch.bfloat16)


class NativeError(Exception):
    """Why there are no native kernels here."""


class Packed(ctypes.Structure):
    """A weight as products.h has it."""

    _fields_ = (
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("bits", c_int64),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
    )


class Heads(ctypes.Structure):
    """As attention.h has it."""

    _fields_ = (
        ("heads", c_int64),
        ("groups", c_int64),
        ("size", c_int64),
        ("capacity", c_int64),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("scaling", c_float),
    )


class Layer(ctypes.Structure):
    """As layer.cpp has it."""

    _fields_ = (
        ("heads", Heads),
        ("width", c_int64),
        ("inner", c_int64),
        ("eps", c_float),
        ("norm", c_void_p),
        ("norm_2", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Packed),
        ("out", Packed),
        ("gate_up", Packed),
        ("down", Packed),
    )


class Step(ctypes.Structure):
    """As layer.cpp has it."""

    _fields_ = (
        ("rows", c_int64),
        ("parts", c_int64),
        ("part", c_void_p),
        ("hidden", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("scratch", c_void_p),
        ("threads", c_int64),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvring_setup": (c_int, ()),
    "kvring_vector": (c_int, ()),
    "kvring_packed_items": (c_int64, (c_int64, c_int64)),
    "kvring_pack": (None, (c_void_p, c_int64, c_int64, c_int, c_int, c_void_p)),
    "kvring_pack_small": (None, (c_void_p, c_int64, c_int64, c_int, c_void_p)),
    "kvring_scratch_bytes": (c_int64, (POINTER(Layer), c_int64, c_int)),
    "kvring_layer": (None, (POINTER(Layer), POINTER(Step), c_int)),
    "kvring_linear_scratch_bytes": (c_int64, (c_int64, c_int64)),
    "kvring_linear": (
        None,
        (c_void_p, c_int64, POINTER(Packed), c_int, c_void_p, c_int, c_void_p, c_int64),
    ),
    "kvring_attention": (
        None,
        (
            *(POINTER(Heads), c_void_p, c_void_p, c_int64, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_int, c_int64),
        ),
    ),
}


class Library:
    """The kernels, loaded. amx: bfloat16 products run in its tiles."""

    def __init__(self, handle: Any, *, amx: bool) -> None:
        self.amx = amx
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
        self.vector = handle.kvring_vector() * 4
        self._handle = handle
        self._local = threading.local()

    def describe(self) -> str:
        """In words, for a kernel's identity."""
        return f"native, {self.vector * 8} bit vectors" + self.amx * " and AMX"

    def pack(self, weight: Tensor, bias: Tensor | None, *, paired: bool = False) -> Weight:
        """[outputs, inputs] for `linear` or a layer; paired: see layer.cpp."""
        outputs, inputs = weight.shape
        held = torch.empty(self._handle.kvring_packed_items(outputs, inputs), dtype=weight.dtype)
        weight = weight.contiguous()
        self._handle.kvring_pack(
            weight.data_ptr(), outputs, inputs, paired, weight.itemsize, held.data_ptr()
        )
        return Weight(held, _floats(bias, outputs, paired=paired), outputs, inputs)

    def pack_small(
        self,
        parts: Iterable[tuple[Tensor, Tensor]],
        outputs: int,
        inputs: int,
        bits: int,
        bias: Tensor | None,
    ) -> Weight:
        """A quantised weight, of int8 numbers [rows, inputs] with their scales, part by part.

        bits: 8, or 4 with numbers from 0 to 15. scales: of 8 bits float32 [rows], of 4 bits
        bfloat16 [rows, groups of 32, scale and zero]; see products.h. bias: as the parts' rows,
        which are a multiple of 32 in all parts but the last.
        """
        blocks = -(-outputs // WIDTH)
        held = torch.empty(blocks * WIDTH * inputs * bits // 8, dtype=torch.uint8)
        kept, at = [], 0
        for numbers, scales in parts:
            numbers = numbers.contiguous()  # noqa: PLW2901 - it has to live during the call
            to = held[at * inputs * bits // 8 :]
            self._handle.kvring_pack_small(
                numbers.data_ptr(), len(numbers), inputs, bits, to.data_ptr()
            )
            kept.append(scales)
            at += len(numbers)
        assert at == outputs, (at, outputs)
        kept.append(kept[0].new_zeros(blocks * WIDTH - outputs, *kept[0].shape[1:]))
        whole = torch.cat(kept)
        if bits == 4:
            whole = whole.view(blocks, WIDTH, -1, 2).permute(0, 2, 3, 1).contiguous()
        return Weight(held, _floats(bias, outputs, paired=False), outputs, inputs, whole, bits)

    def linear(self, x: Tensor, weight: Weight, *, wide: bool) -> Tensor:
        """[..., rows, inputs] -> [..., rows, outputs]; wide: of float32."""
        x = x.contiguous()
        rows = x.numel() // weight.inputs
        dtype = torch.float32 if wide else x.dtype
        out = torch.empty(*x.shape[:-1], weight.outputs, dtype=dtype)
        scratch = self.scratch(self._handle.kvring_linear_scratch_bytes(weight.inputs, rows))
        self._handle.kvring_linear(
            x.data_ptr(),
            rows,
            byref(weight.packed),
            x.itemsize,
            out.data_ptr(),
            wide,
            scratch,
            torch.get_num_threads(),
        )
        return out

    def attention(
        self,
        part: tuple[int, int, int],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """Query [heads, rows, size], out [rows, heads, size]: those of one sequence.

        part: its rows [start, end) and the first of them in the frame. keys and values: [key
        heads, at least end rounded up to 32, size] with its own written. window, sinks: see
        attention.h.
        """
        if query.stride(2) != 1:
            query = query.contiguous()
        sinks = None if sinks is None else sinks.float()
        address = None if sinks is None else sinks.data_ptr()
        sizes = (len(query), len(keys), query.shape[2], keys.shape[1], window or 0)
        self._handle.kvring_attention(
            byref(Heads(*sizes, address, scaling)),
            (c_int64 * 4)(0, *part),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            query.itemsize,
            torch.get_num_threads(),
        )

    def layer(self, layer: Layer, step: Step, item: int) -> None:
        """One decoder layer over step.hidden; item: bytes of its numbers."""
        step.scratch = self.scratch(
            self._handle.kvring_scratch_bytes(byref(layer), step.rows, item)
        )
        step.threads = torch.get_num_threads()
        self._handle.kvring_layer(byref(layer), byref(step), item)

    def scratch(self, size: int) -> int:
        """The address of so many bytes that hold until this thread's next call of anything here."""
        held: Tensor | None = getattr(self._local, "held", None)
        if held is None or len(held) < size + 64:
            held = self._local.held = torch.empty(size + 64, dtype=torch.uint8)
        return -(-held.data_ptr() // 64) * 64


class Weight:
    """A packed weight and what keeps its memory."""

    def __init__(
        self,
        held: Tensor,
        bias: Tensor | None,
        outputs: int,
        inputs: int,
        scales: Tensor | None = None,
        bits: int = 0,
    ) -> None:
        self.held, self.bias, self.scales = held, bias, scales
        self.outputs, self.inputs = outputs, inputs
        addresses = [None if each is None else each.data_ptr() for each in (scales, bias)]
        self.packed = Packed(held.data_ptr(), addresses[0], bits, addresses[1], outputs, inputs)


def in_pairs(rows: Tensor, most: int) -> Iterator[Tensor]:
    """The first half of [outputs, ...] and the second, alternating by 16: at most so many rows."""
    halves = rows.view(2, -1, WIDTH // 2, *rows.shape[1:])
    for some in torch.split(halves, max(1, most // WIDTH), 1):
        yield some.transpose(0, 1).reshape(-1, *rows.shape[1:])


def _floats(bias: Tensor | None, outputs: int, *, paired: bool) -> Tensor | None:
    """A bias as the kernels take it: float32, padded to whole blocks, paired as its weight."""
    if bias is None:
        return None
    if paired:
        (bias,) = in_pairs(bias, len(bias))
    made = torch.zeros(-(-outputs // WIDTH) * WIDTH)
    made[:outputs] = bias.float()
    return made


# ---- compiling -----------------------------------------------------------------------------------


@functools.cache
def library(*flags: str) -> Library:
    """The kernels for this processor, compiled if they are not in the cache. Raises NativeError.

    flags: more of them for the compiler, for another processor than this.
    """
    path = compiler()
    for extra in (flags, (*flags, _NO_AMX)):
        try:
            place = _compiled(path, extra)
        except OSError as error:  # neither a cache nor a place for temporary files, or a full disk
            raise NativeError(f"no place for them: {error}") from error
        try:
            handle = ctypes.CDLL(str(place))
        except OSError as error:
            place.unlink(missing_ok=True)
            raise NativeError(f"{place.name} does not load: {error}") from error
        amx = handle.kvring_setup()
        if amx >= 0:
            return Library(handle, amx=bool(amx))
    raise AssertionError(_NO_AMX)  # without AMX there is nothing to refuse


def cached() -> bool:
    """Whether `library` will not have to compile."""
    try:
        return _place(compiler(), ()).exists()
    except (NativeError, OSError):
        return True


def compiler() -> str:
    """Where the C++ compiler is. Raises NativeError where there is none."""
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NativeError(f"no C++ compiler ({', '.join(_COMPILERS)})")
    return found


def _place(compiler: str, extra: tuple[str, ...]) -> Path:
    """Where the kernels of this source, compiler and processor are kept."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    real = os.path.realpath(compiler)
    status = os.stat(real)
    for part in (*_FLAGS, *extra, real, status.st_size, int(status.st_mtime), _processor()):
        digest.update(f"{part}\n".encode())
    return _cache() / f"kernels-{digest.hexdigest()}.so"


def _processor() -> str:
    """What -march=native depends on: a home directory may be shared by unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache() -> Path:
    """The folder of compiled kernels: ours alone, for whoever writes there runs code in a stage."""
    try:
        folder = Path.home() / ".cache" / "kvring"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return _own_folder()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not os.access(folder, os.W_OK):
        return _own_folder()
    return folder


@functools.cache
def _own_folder() -> Path:
    """Where there is no cache: for this process alone, and as long as it runs."""
    folder = Path(tempfile.mkdtemp(prefix="kvring-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compiled(compiler: str, extra: tuple[str, ...]) -> Path:
    place = _place(compiler, extra)
    with open(place.parent / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # stages that start together wait for one compiler
        if not place.exists():
            _compile(compiler, extra, place)
    return place


def _compile(compiler: str, extra: tuple[str, ...], place: Path) -> None:
    tuned = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    made = place.with_name("being-made.so")  # one name: a stage that is killed leaves one at most
    source = str(Path(__file__).with_name(_SOURCES[-1]))
    command = [compiler, *_FLAGS, tuned, *extra, source, "-o", str(made)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode:
            words = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise NativeError(f"{compiler} failed: {words[:200]}")
        if not made.exists():
            raise NativeError(f"{compiler} made nothing")
        made.replace(place)  # whole or not at all
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{compiler}: {error}") from error
    finally:
        made.unlink(missing_ok=True)
