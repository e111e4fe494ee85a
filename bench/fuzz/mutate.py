"""Owns the ways to spoil a message: on the header's tree of values, on its bytes, on its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import msgpack

from transport.frame import Buffer

Parts: TypeAlias = list[bytes]
Tree: TypeAlias = list[Any]
INTEGERS = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
REALS = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, -1e308, 1.0, 2.0)
TEXTS = ("", "\0", "x" * 129, "y" * 4097, "r", "Run", "ሴ" * 128, "z" * 70_000)
FOREIGN: tuple[Any, ...] = (
    None,
    True,
    False,
    1,
    1.5,
    "text",
    b"bytes",
    [],
    [[]],
    {},
    {1: 2},
    bytes(16),
    bytes(17),
)
# Markers of a length: fixarray, fixmap and fixstr carry it, the others are followed by it.
_WIDE = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def mutate(parts: list[Buffer], other: list[Buffer], random: Random) -> tuple[str, Parts]:
    """The message spoiled in one to three ways; the name of the first. other: to splice with."""
    spoiled = [bytes(part) for part in parts]
    first = ""
    for _ in range(1 if random.random() < 0.8 else random.randrange(2, 4)):
        name, how = random.choice(WAYS)
        spoiled = how(spoiled, [bytes(part) for part in other], random)
        first = first or name
    return first, spoiled


# ---- the tree ----


def _tree(parts: Parts) -> Tree | None:
    if not parts:
        return None
    try:
        found = msgpack.unpackb(
            parts[0], max_array_len=min(len(parts[0]), 1 << 12), strict_map_key=False
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    return found if isinstance(found, list) and found else None


def _packed(tree: Any, parts: Parts) -> Parts:
    try:
        return [msgpack.packb(tree), *parts[1:]]
    except (ValueError, OverflowError, RecursionError):
        return parts


def _place(tree: Tree, random: Random) -> tuple[Tree, int]:
    """A random item of the tree: the list that holds it, and its index there."""
    holder, index = tree, random.randrange(len(tree))
    while isinstance(holder[index], list) and holder[index] and random.random() < 0.85:
        holder = holder[index]
        index = random.randrange(len(holder))
    return holder, index


def _edit(parts: Parts, random: Random, change: Callable[[Tree, int], None]) -> Parts:
    tree = _tree(parts)
    if tree is None:
        return parts
    change(*_place(tree, random))
    return _packed(tree, parts)


def _set_from(values: tuple[Any, ...]) -> Callable[[Parts, Parts, Random], Parts]:
    def how(parts: Parts, _: Parts, random: Random) -> Parts:
        def change(holder: Tree, index: int) -> None:
            holder[index] = random.choice(values)

        return _edit(parts, random, change)

    return how


def _number(parts: Parts, _: Parts, random: Random) -> Parts:
    """Another number where a number stands: the type is right, the value is not."""
    tree = _tree(parts)
    if tree is None:
        return parts
    for _try in range(8):
        holder, index = _place(tree, random)
        if type(holder[index]) is int:
            holder[index] = random.choice(INTEGERS)
            break
        if type(holder[index]) is float:
            holder[index] = random.choice(REALS)
            break
    return _packed(tree, parts)


def _repeat(parts: Parts, _: Parts, random: Random) -> Parts:
    def change(holder: Tree, index: int) -> None:
        times = random.choice((1, 1, 2, 300, 2000))
        holder[index:index] = [holder[index]] * times

    return _edit(parts, random, change)


def _remove(parts: Parts, _: Parts, random: Random) -> Parts:
    def change(holder: Tree, index: int) -> None:
        del holder[index]

    return _edit(parts, random, change)


def _swap(parts: Parts, _: Parts, random: Random) -> Parts:
    def change(holder: Tree, index: int) -> None:
        other = random.randrange(len(holder))
        holder[index], holder[other] = holder[other], holder[index]

    return _edit(parts, random, change)


def _nest(parts: Parts, _: Parts, random: Random) -> Parts:
    """Wrapped in lists, up to more than any reader's stack holds."""
    data = parts[0] if parts else b""
    depth = random.choice((1, 2, 50, 500, 1100, 30_000))
    at = random.randrange(len(data) + 1)
    return [data[:at] + b"\x91" * depth + data[at:], *parts[1:]]


def _declare(parts: Parts, _: Parts, random: Random) -> Parts:
    """Many nested lists that each declare far more than follows."""
    count = random.choice((1000, 4000, 60_000))
    opening = b"\xdc" + count.to_bytes(2, "big")
    return [opening * random.choice((3, 100, 1000, 20_000)), *parts[1:]]


def _graft(parts: Parts, other: Parts, random: Random) -> Parts:
    """A piece of another message's tree."""
    mine, theirs = _tree(parts), _tree(other)
    if mine is None or theirs is None:
        return parts
    holder, index = _place(mine, random)
    giver, taken = _place(theirs, random)
    holder[index] = giver[taken]
    return _packed(mine, parts)


# ---- the bytes ----


def _flip(parts: Parts, _: Parts, random: Random) -> Parts:
    data = bytearray((parts[0] if parts else b"") or b"\0")
    for _bit in range(random.randrange(1, 9)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return [bytes(data), *parts[1:]]


def _cut(parts: Parts, _: Parts, random: Random) -> Parts:
    data = parts[0] if parts else b""
    return [data[: random.randrange(len(data) + 1)], *parts[1:]]


def _insert(parts: Parts, _: Parts, random: Random) -> Parts:
    data = parts[0] if parts else b""
    at = random.randrange(len(data) + 1)
    return [data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:], *parts[1:]]


def _splice(parts: Parts, other: Parts, random: Random) -> Parts:
    mine, theirs = parts[0] if parts else b"", other[0]
    cut, join = random.randrange(len(mine) + 1), random.randrange(len(theirs) + 1)
    return [mine[:cut] + theirs[join:], *parts[1:]]


def _length(parts: Parts, _: Parts, random: Random) -> Parts:
    """One declared length becomes another."""
    data = bytearray((parts[0] if parts else b"") or b"\0")
    places = [at for at, byte in enumerate(data) if byte in _WIDE or 0x80 <= byte <= 0xBF]
    if not places:
        return parts
    at = random.choice(places)
    width = _WIDE.get(data[at])
    if width is None:
        data[at] = (data[at] & 0xF0) | random.randrange(16)
    else:
        lie = random.choice((0, 1, 255, 65_535, 2**31, 2**32 - 1))
        data[at + 1 : at + 1 + width] = (lie % (1 << 8 * width)).to_bytes(width, "big")
    return [bytes(data), *parts[1:]]


def _junk(_: Parts, __: Parts, random: Random) -> Parts:
    return [random.randbytes(random.randrange(200)) for _part in range(random.randrange(4))]


# ---- the parts ----


def _parts(parts: Parts, other: Parts, random: Random) -> Parts:
    """Parts that are missing, doubled, empty, too long, or another message's."""
    payload = parts[1] if len(parts) > 1 else b""
    return random.choice(
        (
            parts[:1],
            [*parts, payload],
            [*parts, *parts],
            [*parts[:1], b""],
            [*parts[:1], payload + b"\0"],
            [*parts[:1], payload[:-1]],
            [*parts[:1], bytes(random.choice((8, 4096, 70_000)))],
            [*parts[:1], *other],
            [*other[:1], *parts[1:]],
            [*parts[:1], *[b""] * 40],
            parts[1:],
            [],
        )
    )


WAYS: tuple[tuple[str, Callable[[Parts, Parts, Random], Parts]], ...] = (
    ("bits flipped", _flip),
    ("truncated", _cut),
    ("bytes inserted", _insert),
    ("spliced bytes", _splice),
    ("length lies", _length),
    ("foreign type", _set_from(FOREIGN)),
    ("number out of range", _number),
    ("real number", _set_from(REALS)),
    ("text", _set_from(TEXTS)),
    ("item repeated", _repeat),
    ("item removed", _remove),
    ("items swapped", _swap),
    ("nested", _nest),
    ("declared, not sent", _declare),
    ("grafted piece", _graft),
    ("parts", _parts),
    ("junk", _junk),
)
