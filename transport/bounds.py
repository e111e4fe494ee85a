"""Owns the check that a msgpack text declares no more items than it has bytes for.

A reader allocates a list by its declared length before it sees an item: 1,024 nested lists of
65,536 items each are 512 MiB for a text of 66 KB. Most texts can't do that, and are told apart by
counting bytes; the others are walked once.
"""

from __future__ import annotations

from transport.frame import Buffer

ITEM_BYTES = 8  # of a list, before its items
HARMLESS_BYTES = 4 << 20
MAX_NESTED = 1024  # lists that the reader has open at once; more are refused by it
MAX_DEPTH = 32  # of the texts that are walked; a frame's deepest place is 8
_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD
# Bytes of the fields behind a marker: of a fixed size, and of the length of a text or binary.
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1,
    0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNTED = {_ARRAY_16: 2, _ARRAY_32: 4}


def overdrawn(text: Buffer, most: int) -> bool:
    """True when reading `text` with lists of at most `most` items could allocate far beyond it.

    False for some texts that are no msgpack: the reader refuses those without allocating.
    """
    data = text if isinstance(text, bytes) else bytes(text)
    wide = min(data.count(b"\xdc") + data.count(b"\xdd"), MAX_NESTED)
    if wide * min(len(data), most) * ITEM_BYTES <= HARMLESS_BYTES:
        return False
    return _walk(data)


def _walk(data: bytes) -> bool:
    """True when some list declares more items than bytes are left, or lists nest too deeply."""
    at, size = 0, len(data)
    owed = 1  # items that the lists so far have declared and that were not met yet
    open_lists: list[int] = []  # items still to come of each
    while at < size and owed:
        marker = data[at]
        at += 1
        owed -= 1
        items = 0
        if 0x90 <= marker <= 0x9F:
            items = marker & 0x0F
        elif marker in _COUNTED:
            width = _COUNTED[marker]
            items = int.from_bytes(data[at : at + width], "big")
            at += width
        elif 0xA0 <= marker <= 0xBF:
            at += marker & 0x1F
        elif marker in _SIZED:
            width = _SIZED[marker]
            at += width + int.from_bytes(data[at : at + width], "big")
        elif marker in _FIXED:
            at += _FIXED[marker]
        elif 0x80 <= marker <= 0x8F or 0xC1 <= marker <= 0xDF:
            return False  # maps and extensions: the reader stops here, too
        if open_lists:
            open_lists[-1] -= 1
        owed += items
        if owed > size - at:
            return True
        if items:
            open_lists.append(items)
        while open_lists and not open_lists[-1]:
            open_lists.pop()
        if len(open_lists) > MAX_DEPTH:
            return True
    return False
