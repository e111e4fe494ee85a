"""Owns the state file: what a coordinator writes down so that its successor need not start cold.

SQLite, written by one thread: the event loop only hands over. Knows no ring and no policy. All that
it holds is a hint: an old or a lost row costs a prefill, and a killed process loses no more than
what was not yet handed over.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

APPLICATION = 0x6B767273  # "kvrs", in bytes 68 to 72 of the file
VERSION = 1
SPOKEN_BYTES = 16 << 20  # of replies' ids; the oldest go first
CLOSE_S = 5.0  # for the last write; a disk that takes longer must not hold up the exit
_MAGIC = b"SQLite format 3\0"
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE holding (
    ring TEXT, number INTEGER, fingerprint BLOB, salt BLOB, tokens BLOB, hint TEXT,
    proven INTEGER, used_at REAL, keep_until REAL, PRIMARY KEY (ring, number)
);
CREATE TABLE spoken (at INTEGER PRIMARY KEY, key BLOB UNIQUE, body BLOB);
"""


class StoreError(Exception):
    """The file can't be used; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One slot or parked prefix. tokens: packed ids. used_at, keep_until: seconds since 1970."""

    fingerprint: bytes
    salt: bytes
    tokens: bytes
    hint: str
    proven: bool
    used_at: float
    keep_until: float


class Store:
    """One state file, for this process alone while it is open. `put` and `say` never wait."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError where the file is not ours, in use, or can't be written.

        A damaged one is moved aside: `moved` says to where.
        """
        self.path = path
        self.moved: Path | None = None
        self._log = structlog.get_logger()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: {_why(error)}") from None
        self._spoken_bytes: int = self._one("SELECT coalesce(sum(length(body)), 0) FROM spoken")
        self._holdings: dict[tuple[str, int], Saved | None] = {}
        self._spoken: dict[bytes, bytes] = {}
        self._closing = self._failing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)
        self._thread.start()

    def _open(self) -> sqlite3.Connection:
        if self._is_new_or_ours():
            try:
                return _connect(self.path)
            except sqlite3.OperationalError:
                raise  # in use, or the disk: the file itself may be well
            except sqlite3.DatabaseError:
                self.moved = self.path.with_name(f"{self.path.name}.damaged")
                os.replace(self.path, self.moved)
                for end in ("-wal", "-shm"):  # they belong to the damaged one
                    self.path.with_name(self.path.name + end).unlink(missing_ok=True)
                self._is_new_or_ours()
                return _connect(self.path)
        raise StoreError(f"{self.path}: not a state file of kvring; remove it, or name another one")

    def _is_new_or_ours(self) -> bool:
        """Makes the file if need be, for its owner's eyes alone."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            start = os.read(descriptor, 100)
        finally:
            os.close(descriptor)
        ours = start[:16] == _MAGIC and start[68:72] == APPLICATION.to_bytes(4, "big")
        return not start or ours

    def _one(self, question: str) -> Any:
        return self._connection.execute(question).fetchone()[0]

    # ---- what was written ----

    def holdings(self) -> list[tuple[Any, ...]]:
        """Rows (ring, number, *fields of Saved), last used first; call before the first `put`."""
        return self._connection.execute(
            "SELECT ring, number, fingerprint, salt, tokens, hint, proven, used_at, keep_until"
            " FROM holding ORDER BY used_at DESC"
        ).fetchall()

    def spoken(self) -> list[tuple[Any, Any]]:
        """(key, body) of `say`, oldest first; call before the first `put`."""
        return self._connection.execute("SELECT key, body FROM spoken ORDER BY at").fetchall()

    # ---- what is to be written ----

    def put(self, ring: str, number: int, saved: Saved | None) -> None:
        """A slot or parked prefix is as `saved` now; None: it holds nothing."""
        with self._changed:
            self._holdings[ring, number] = saved  # bounded: one for each slot and parked prefix
            self._changed.notify()

    def say(self, key: bytes, body: bytes) -> None:
        """The ids of a text are known under a key; an earlier body is replaced."""
        with self._changed:
            self._spoken[key] = body
            self._changed.notify()

    def close(self) -> None:
        """Write what is left and close the file."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    # ---- the writing thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._holdings or self._spoken or self._closing):
                    self._changed.wait()
                holdings, self._holdings = self._holdings, {}
                spoken, self._spoken = self._spoken, {}
                if not holdings and not spoken:
                    break
            try:
                with self._connection:  # one transaction
                    self._write(holdings, spoken)
                self._failing = False
            except sqlite3.Error as error:
                if not self._failing:
                    self._log.warning("state_not_saved", file=str(self.path), reason=str(error))
                self._failing = True
        self._connection.close()

    def _write(
        self, holdings: dict[tuple[str, int], Saved | None], spoken: dict[bytes, bytes]
    ) -> None:
        run = self._connection.execute
        for (ring, number), s in holdings.items():
            if s is None:
                run("DELETE FROM holding WHERE ring = ? AND number = ?", (ring, number))
                continue
            run(
                "INSERT OR REPLACE INTO holding VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (ring, number, s.fingerprint, s.salt, s.tokens, s.hint, s.proven, s.used_at,
                 s.keep_until),
            )  # fmt: skip
        for key, body in spoken.items():
            found = run("SELECT length(body) FROM spoken WHERE key = ?", (key,)).fetchone()
            run("DELETE FROM spoken WHERE key = ?", (key,))
            run("INSERT INTO spoken (key, body) VALUES (?, ?)", (key, body))
            self._spoken_bytes += len(body) - (found[0] if found else 0)
        while self._spoken_bytes > SPOKEN_BYTES:
            at, size = run("SELECT at, length(body) FROM spoken ORDER BY at LIMIT 1").fetchone()
            run("DELETE FROM spoken WHERE at = ?", (at,))
            self._spoken_bytes -= size


def _connect(path: Path) -> sqlite3.Connection:
    """The file, checked and locked. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        connection.rollback()
        if version == 0:  # new: before WAL, so that the first 100 bytes say whose file it is
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"version {version}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 4194304")
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        connection.execute("SELECT count(tokens) FROM holding").fetchone()
        connection.execute("SELECT count(body) FROM spoken").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    locked = "locked" in str(error)
    return "another coordinator writes there" if locked else str(error)
