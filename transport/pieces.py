"""Owns how a message is cut into small parts, and put together again; knows no socket.

libzmq makes room for a message part before it knows who sends it, up to the socket's largest part.
So a link with keys takes small parts only: a stranger can have no more room than one of them. A
message with a larger part travels as an index and its pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from transport.frame import Buffer, FrameError

PIECE_BYTES = 1 << 18
INDEX = 0xC1  # begins an index: the one byte that begins no msgpack value, and so no header
_SIZE = struct.Struct("<Q")


def split(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts as they are, or an index and their pieces, none over PIECE_BYTES. Copies nothing.

    Parts are contiguous buffers.
    """
    views = [memoryview(part).cast("B") for part in parts]
    if all(view.nbytes <= PIECE_BYTES for view in views):
        return parts
    index = bytes([INDEX]) + b"".join(_SIZE.pack(view.nbytes) for view in views)
    pieces = [
        view[at : at + PIECE_BYTES] for view in views for at in range(0, view.nbytes, PIECE_BYTES)
    ]
    return [index, *pieces]


def most_pieces(max_bytes: int) -> int:
    """Parts that `split` makes at most of a message of two parts with so many bytes together."""
    return 3 + max_bytes // PIECE_BYTES


def join(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The reverse of `split`. Raises FrameError on what `split` cannot have made."""
    if not parts:
        return parts  # no message at all: decoding says so
    first = memoryview(parts[0]).cast("B")
    if not first.nbytes or first[0] != INDEX:
        return parts
    if (first.nbytes - 1) % _SIZE.size or not 1 < first.nbytes <= 1 + 2 * _SIZE.size:
        raise FrameError(f"an index of {first.nbytes} bytes")
    whole: list[Buffer] = []
    at = 1
    for (size,) in _SIZE.iter_unpack(first[1:]):
        count = -(-size // PIECE_BYTES)
        pieces = parts[at : at + count]
        at += count
        if sum(memoryview(piece).nbytes for piece in pieces) != size:
            raise FrameError(f"pieces that are not the {size} bytes of their index")
        whole.append(b"".join(pieces))
    if at != len(parts):
        raise FrameError(f"{len(parts)} pieces, and the index names {at}")
    return whole
