"""What the links cost: one round trip over three forwarding hops, raw pyzmq against kvring's links.

    python -m bench.ring_latency [--rounds 2000] [--payload 1024 65536 2097152] [--curve]

The ring is coordinator -> 3 stage processes -> coordinator on loopback, nothing is computed. "raw"
forwards multipart messages unread; "links" decodes and encodes a Run at every hop, blocking on both
ends; "aiozmq" is the same stages with the coordinator on an event loop. With --curve, "curve" is
"aiozmq" with keys on every link. All are measured in turns within one run: only their ratios mean
anything on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import zmq

from transport.frame import Free, Kind, Run, Segment, Tensor, Timing
from transport.link import (
    AsyncPush,
    PullLink,
    PushLink,
    Security,
    make_keys,
    open_pull,
    open_push,
)

HOPS = 3
WARM_ROUNDS = 50
PATIENCE_S = 20.0


def forward_raw(listen: str, target: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(listen)
    push.connect(target)
    while True:
        parts = pull.recv_multipart()
        push.send_multipart(parts)
        if len(parts) == 1:
            break
    push.close(linger=1000)


def forward_links(listen: str, target: str, keys: Security | None = None) -> None:
    pull = PullLink(listen, link=listen, security=keys)
    push = PushLink(target, sender=listen, incarnation=1, security=keys)
    while True:
        frame = pull.recv(PATIENCE_S)
        if not isinstance(frame, Run):
            break
        push.send(replace(frame, timings=(*frame.timings, Timing("stage", 10, 1000))))
    if frame is not None:
        push.send(frame)
    push.close(linger_s=1.0)


def make_security() -> Security:
    """One pair for all: what a link costs does not depend on whose keys are whose."""
    public, secret = make_keys()
    return Security(public, secret, server_key=public, allowed=(public,))


@contextmanager
def ring(
    forward: Callable[..., None], first: int, keys: Security | None = None
) -> Iterator[tuple[str, str]]:
    """Start the stages; yields the head's address and the coordinator's."""
    addresses = [f"tcp://127.0.0.1:{first + i}" for i in range(HOPS + 1)]
    spawn = multiprocessing.get_context("spawn")
    more = () if keys is None else (keys,)
    stages = [
        spawn.Process(target=forward, args=(*pair, *more), daemon=True)
        for pair in pairwise(addresses)
    ]
    for stage in stages:
        stage.start()
    try:
        yield addresses[0], addresses[-1]
    finally:
        for stage in stages:
            stage.terminate()
            stage.join()


def make_run(payload_bytes: int) -> Run:
    width = 64
    rows = payload_bytes // 4 // width
    segment = Segment(5, 1, 100, (11, 12, 13, 14), Kind.VERIFY, bytes(16), 4)
    return Run("ring0", 3, 17, (segment,), Tensor("float32", (rows, width), bytes(payload_bytes)))


def timed(rounds: int, round_trip: Callable[[], None]) -> list[float]:
    """Milliseconds of each round."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        round_trip()
        times.append((time.perf_counter() - start) * 1e3)
    return times


class Raw:
    """Round trips of unread messages."""

    def __init__(self, head: str, own: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.bind(own)
        self.push.connect(head)

    def run(self, rounds: int, payload_bytes: int) -> list[float]:
        parts = [bytes(150), bytes(payload_bytes)]

        def round_trip() -> None:
            self.push.send_multipart(parts)
            self.pull.recv_multipart()

        return timed(rounds, round_trip)


class Links:
    """Round trips of Runs, the coordinator blocking."""

    def __init__(self, head: str, own: str) -> None:
        self.pull = PullLink(own, link="verdicts")
        self.push = PushLink(head, sender="coordinator", incarnation=1)

    def run(self, rounds: int, payload_bytes: int) -> list[float]:
        frame = make_run(payload_bytes)

        def round_trip() -> None:
            self.push.send(frame)
            assert self.pull.recv(PATIENCE_S) is not None

        return timed(rounds, round_trip)


class Loop:
    """Round trips of Runs, the coordinator on an event loop."""

    def __init__(
        self, runner: asyncio.Runner, head: str, own: str, keys: Security | None = None
    ) -> None:
        self.runner = runner
        self.keys = keys
        self.arrived = asyncio.Event()
        self.push: AsyncPush = runner.run(self.open(head, own))

    async def open(self, head: str, own: str) -> AsyncPush:
        def arrived(*_: object) -> None:
            self.arrived.set()

        self.pull = await open_pull(own, arrived, link="verdicts", security=self.keys)
        return await open_push(head, sender="coordinator", incarnation=1, security=self.keys)

    def run(self, rounds: int, payload_bytes: int) -> list[float]:
        return self.runner.run(self.rounds(rounds, make_run(payload_bytes)))

    async def rounds(self, rounds: int, frame: Run) -> list[float]:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            self.arrived.clear()
            self.push.send(frame)
            await asyncio.wait_for(self.arrived.wait(), PATIENCE_S)
            times.append((time.perf_counter() - start) * 1e3)
        return times

    async def close(self) -> None:
        await self.push.close()
        await self.pull.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--payload", type=int, nargs="+", default=[1024, 65536, 2 << 20])
    parser.add_argument("--port", type=int, default=17100, help="first of 16 loopback ports")
    parser.add_argument("--curve", action="store_true", help="also with keys on every link")
    given = parser.parse_args()
    keys = make_security() if given.curve else None
    with (
        ring(forward_raw, given.port) as raw_ends,
        ring(forward_links, given.port + 4) as link_ends,
        ring(forward_links, given.port + 8) as loop_ends,
        ring(forward_links, given.port + 12, keys) if keys else nullcontext(("", "")) as curve_ends,
        asyncio.Runner() as runner,
    ):
        loop = Loop(runner, *loop_ends)
        links = Links(*link_ends)
        rings: dict[str, Raw | Links | Loop] = {
            "raw": Raw(*raw_ends), "links": links, "aiozmq": loop,
        }  # fmt: skip
        curve = Loop(runner, *curve_ends, keys) if keys else None
        if curve is not None:
            rings["curve"] = curve
        print(f"{'payload':>9} " + " ".join(f"{name + ' ms':>10} {'ratio':>6}" for name in rings))
        for payload in given.payload:
            rounds = given.rounds if payload < 1 << 20 else max(50, given.rounds // 10)
            times: dict[str, list[float]] = {name: [] for name in rings}
            for each in rings.values():
                each.run(WARM_ROUNDS, payload)
            for _ in range(10):  # in turns, so that a neighbour's burst hits all alike
                for name, each in rings.items():
                    times[name] += each.run(rounds // 10, payload)
            medians = {name: statistics.median(values) for name, values in times.items()}
            print(
                f"{payload:9d} "
                + " ".join(f"{ms:10.3f} {ms / medians['raw']:6.2f}" for ms in medians.values())
            )
        links.push.send(Free("ring0", 0, 0, 0))
        runner.run(loop.close())
        if curve is not None:
            runner.run(curve.close())


if __name__ == "__main__":
    main()
