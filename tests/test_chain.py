"""The prefix-hash chain against a naive model of it, and against digests written down once."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.chain import DIGEST_BYTES, Chain, pack_tokens, root_hash, unpack_tokens

ROOT = root_hash(b"model", b"salt")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
small_lists = st.lists(st.integers(0, 2), max_size=40)


def naive(root: bytes, tokens: list[int]) -> list[bytes]:
    """h before position 0, 1, ..., len(tokens)."""
    hashes = [root]
    for token in tokens:
        data = hashes[-1] + token.to_bytes(4, "little")
        hashes.append(blake2b(data, digest_size=16).digest())
    return hashes


def check(chain: Chain, root: bytes, tokens: list[int]) -> None:
    assert len(chain) == len(tokens)
    assert chain.tokens() == tuple(tokens)
    assert [chain.hash_before(p) for p in range(len(tokens) + 1)] == naive(root, tokens)
    assert chain.packed() == pack_tokens(tokens)


def test_known_digests() -> None:
    """Both sides of a ring may run different releases: these bytes never change."""
    assert ROOT.hex() == "58e85b5bdc5c938bc68db680becea07a"
    assert Chain(ROOT, [1, 2, 2**32 - 1]).hash_before(3).hex() == "3701719dad3c2a68cceef12070566f99"


def test_root_is_length_prefixed_case_20() -> None:
    """Case 20: no two pairs of parts join to the same root."""
    pairs = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc"), (b"", b""), (b"\0", b"")]
    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)
    state = blake2b(digest_size=16)
    for part in (b"org_1", b"2345"):
        state.update(len(part).to_bytes(8, "little") + part)
    assert root_hash(b"org_1", b"2345") == state.digest()


@given(st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=20))
def test_roots_differ_wherever_the_split_differs(a: bytes, b: bytes, c: bytes) -> None:
    if b:
        assert root_hash(a + b, c) != root_hash(a, b + c)


@given(token_lists, token_lists)
def test_extend(first: list[int], second: list[int]) -> None:
    chain = Chain(ROOT, first)
    chain.extend(second)
    check(chain, ROOT, first + second)


@given(token_lists, st.integers(0, 50), token_lists)
def test_truncate_then_extend(tokens: list[int], length: int, more: list[int]) -> None:
    chain = Chain(ROOT, tokens)
    chain.truncate(length)
    check(chain, ROOT, tokens[:length])
    chain.extend(more)
    check(chain, ROOT, tokens[:length] + more)


@given(token_lists, st.data())
def test_extend_from(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    chain = Chain(ROOT, tokens[:start])
    chain.extend_from(Chain(ROOT, tokens), end)
    check(chain, ROOT, tokens[:end])


def test_extend_from_refuses_another_history() -> None:
    other = Chain(ROOT, [1, 2, 3])
    for chain in (Chain(ROOT, [9]), Chain(root_hash(b"model", b"other"), [1])):
        with pytest.raises(AssertionError):
            chain.extend_from(other, 3)
    with pytest.raises(AssertionError):
        Chain(ROOT, [1]).extend_from(other, 4)


@given(small_lists, small_lists)
def test_common(mine: list[int], theirs: list[int]) -> None:
    same = 0
    while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
        same += 1
    assert Chain(ROOT, mine).common(pack_tokens(theirs), ROOT) == same
    assert Chain(ROOT, mine).common(bytearray(pack_tokens(theirs)), ROOT) == same
    assert Chain(ROOT, mine).common(pack_tokens(theirs), root_hash(b"model", b"")) == 0


@given(token_lists, st.data())
def test_slices_and_packing(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(start, len(tokens)))
    chain = Chain(ROOT, tokens)
    assert chain.tokens(start, end) == tuple(tokens[start:end])
    assert chain.tokens(start) == tuple(tokens[start:])
    assert unpack_tokens(pack_tokens(tokens)) == tuple(tokens)


def test_edges() -> None:
    chain = Chain(ROOT)
    assert (len(chain), chain.tokens(), chain.hash_before(0)) == (0, (), ROOT)
    assert len(ROOT) == DIGEST_BYTES
    assert repr(Chain(ROOT, [1, 2])).startswith("Chain(2 tokens, ")
    with pytest.raises(AssertionError):
        chain.hash_before(1)
    with pytest.raises(AssertionError):
        Chain(b"short")
