"""Owns how a daemon is told to end: by signals, and by the end of the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable


class Stop:
    """asked: end when what runs is done. now: at once. Made in the running loop.

    The first SIGINT or SIGTERM asks; a second one, or (with_parent) the end of standard input,
    means now: the parent is gone, and the other daemons that it started with it.
    """

    def __init__(self, *, with_parent: bool) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signal)
        if with_parent:
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def _signal(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def _hurry(self) -> None:
        self.asked.set()
        self.now.set()

    def _watch_parent(self) -> None:
        # Not sys.stdin: its lock, held by this thread, would abort the interpreter's shutdown.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: it ends anyway
            self._loop.call_soon_threadsafe(self._hurry)


async def first(*waits: Awaitable[object]) -> None:
    """Wait for one of them, raise what it raised, give the others up."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
