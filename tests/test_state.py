"""The state file and when it is written: rows in, rows out, bounds, and nothing per token."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

import coord.store
from coord.coordinator import TurnStream
from coord.saving import Saver
from coord.store import Saved, Store, StoreError
from tests.localring import LocalRing
from transport.chain import pack_tokens
from transport.frame import GREEDY

SAVED = Saved(b"print", b"salt", pack_tokens((1, 2, 3)), "session", True, 1000.0, 0.0)


def rows(path: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT * FROM holding ORDER BY ring, number").fetchall()
    connection.close()
    return found


def test_what_is_put_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.put("r", 1, SAVED)
    store.put("r", 2, SAVED)
    store.put("r", 2, None)
    store.say(b"a", b"old")
    store.say(b"b", b"two")
    store.close()
    store = Store(tmp_path / "state")
    assert store.holdings() == [
        ("r", 1, b"print", b"salt", SAVED.tokens, "session", 1, 1000.0, 0.0)
    ]
    assert store.spoken() == [(b"a", b"old"), (b"b", b"two")]
    store.say(b"a", b"new")
    store.close()
    store = Store(tmp_path / "state")
    assert store.spoken() == [(b"b", b"two"), (b"a", b"new")], "said again: the newest"
    store.close()


def test_what_was_said_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 38: the oldest go first, also those of an earlier process."""
    monkeypatch.setattr(coord.store, "SPOKEN_BYTES", 100)
    for start in (0, 10):
        store = Store(tmp_path / "state")
        for number in range(start, start + 10):
            store.say(bytes((number,)), b"x" * 30)
        store.close()
    store = Store(tmp_path / "state")
    assert [key for key, _ in store.spoken()] == [b"\x11", b"\x12", b"\x13"]
    store.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.put("r", 1, SAVED)
    with pytest.raises(StoreError, match="another coordinator writes there"):
        Store(tmp_path / "state")
    store.close()
    assert len(rows(tmp_path / "state")) == 1


def made(path: Path) -> tuple[LocalRing, Saver]:
    """A ring whose coordinator starts with the file."""
    ring = LocalRing()
    saver = ring._saver = Saver(Store(path), ring.scheduler.rings, ring._salts)
    return ring, saver


async def finish(stream: TurnStream) -> None:
    async for _ in stream:
        pass


def start(ring: LocalRing, prompt: list[int], budget: int) -> TurnStream:
    return ring.submit(prompt, budget=budget, sampling=GREEDY, salt=b"me")


def test_nothing_is_written_per_token(tmp_path: Path) -> None:
    """A turn of 600 tokens, and what it left: prompt + committed - 1 rows under its salt."""

    async def play() -> None:
        ring, saver = made(tmp_path / "state")
        await ring.open()
        await asyncio.sleep(0.1)
        looks = saver.looks
        await finish(start(ring, [1] * 20, 600))
        await asyncio.sleep(0.2)
        assert 1 <= saver.looks - looks <= 3
        await ring.close()

    asyncio.run(play())
    ((name, _, _, salt, tokens, *_),) = rows(tmp_path / "state")
    assert (name, salt, len(tokens)) == ("r0", b"me", 4 * 619)  # type: ignore[arg-type]


def test_a_ring_that_has_not_formed_deletes_nothing(tmp_path: Path) -> None:
    """Killed before the roll call: the next coordinator still has all of it."""
    store = Store(tmp_path / "state")
    store.put("r0", 1, SAVED)
    store.close()

    async def play() -> None:
        ring, saver = made(tmp_path / "state")
        ring._recall()
        assert list(ring.scheduler.rings["r0"].remembered) == [1]
        assert not saver.look()
        await ring.close()

    asyncio.run(play())
    assert len(rows(tmp_path / "state")) == 1


def test_what_the_stages_struck_out_is_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.put("r0", 1, SAVED)
    store.close()

    async def play() -> None:
        ring, _ = made(tmp_path / "state")
        ring._recall()
        await ring.open()
        assert all(each.chain is None for each in ring.scheduler.rings["r0"].ledger.slots)
        await ring.close()

    asyncio.run(play())
    assert rows(tmp_path / "state") == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("ring", "q"),
        ("number", -1),
        ("number", 1 << 31),
        ("fingerprint", b""),
        ("salt", b"x" * 65),
        ("salt", "text"),
        ("tokens", b""),
        ("tokens", b"abc"),
        ("hint", "x" * 129),
        ("proven", None),
        ("used_at", "now"),
        ("keep_until", b""),
    ],
)
def test_a_row_that_makes_no_sense_is_deleted(column: str, value: object, tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    store.put("r0", 1, SAVED)
    store.put("r0", 2, SAVED)
    store.close()
    with sqlite3.connect(tmp_path / "state") as connection:
        connection.execute(f"UPDATE holding SET {column} = ? WHERE number = 1", (value,))
    connection.close()

    async def play() -> None:
        ring, _ = made(tmp_path / "state")
        ring._recall()
        assert list(ring.scheduler.rings["r0"].remembered) == [2]
        await ring.close()

    asyncio.run(play())
    assert [row[1] for row in rows(tmp_path / "state")] == [2]


def test_rows_whose_salt_was_forgotten_are_not_kept(tmp_path: Path) -> None:
    """Without it they could not be proven, and nobody would be known to own them."""

    async def play() -> None:
        ring, saver = made(tmp_path / "state")
        await ring.open()
        await finish(start(ring, [1] * 20, 3))
        saver.look()
        ring._salts.clear()
        await ring.close()

    asyncio.run(play())
    assert rows(tmp_path / "state") == []
