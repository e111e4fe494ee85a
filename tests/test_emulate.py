"""Emulated links: later, in order, many frames in the air at once, and nobody waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coord.actions import Tokens
from coord.coordinator import Coordinator
from pipeline.daemon import Worker, run_stage
from pipeline.model import ToyModel
from transport.config import Config, Limits, Model, Ring, Stage
from transport.emulate import MAX_IN_AIR, Air, Emulate, Line
from transport.frame import Envelope, Frame, Ping, Sampling
from transport.link import LinkError, PullLink, PushLink, open_pull, open_push

PATIENCE_S = 10.0
EMULATES = st.builds(
    Emulate,
    delay_ms=st.floats(0, 50),
    jitter_ms=st.floats(0, 50),
    mbit=st.sampled_from((0.0, 0.1, 8.0, 1000.0)),
    seed=st.integers(0, 9),
)
SENT = st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 1 << 20)), max_size=30)


def ping(seq: int) -> Ping:
    return Ping("ring0", 1, seq)


# ---- when a message lands ------------------------------------------------------------------------


def test_delay_adds_and_bytes_queue_for_the_bandwidth() -> None:
    line = Line(Emulate(delay_ms=20, mbit=8), "s0")  # 8 Mbit/s: 1 us per byte
    assert line.due(1.0, 1000) == pytest.approx(1.021)
    assert line.due(1.0, 2000) == pytest.approx(1.023)  # behind the first one's last byte
    assert line.due(2.0, 0) == pytest.approx(2.020)
    wide = Line(Emulate(delay_ms=20), "s0")
    assert [wide.due(1.0, 1 << 20) for _ in range(3)] == [pytest.approx(1.020)] * 3


@given(EMULATES, SENT)
def test_order_is_kept_and_no_message_is_early_or_later_than_stated(
    emulate: Emulate, sent: list[tuple[float, int]]
) -> None:
    line, again = Line(emulate, "s0"), Line(emulate, "s0")
    now = landed = free = 0.0
    for pause, size in sent:
        now += pause
        due = line.due(now, size)
        assert due == again.due(now, size), "the same seed gives the same jitter"
        free = max(free, now) + (size * 8 / (emulate.mbit * 1e6) if emulate.mbit else 0.0)
        assert due >= max(landed, free + emulate.delay_ms / 1e3) - 1e-9
        assert due <= max(landed, free + (emulate.delay_ms + emulate.jitter_ms) / 1e3) + 1e-9
        landed = due


def test_every_link_has_its_own_jitter() -> None:
    emulate = Emulate(jitter_ms=10, seed=3)
    links = [[Line(emulate, name).due(i, 1) - i for i in range(3)] for name in ("s0", "s1", "s0")]
    assert links[0] == links[2]
    assert links[0] != links[1]
    assert Line(replace(emulate, seed=4), "s0").due(0, 1) != links[0][0]


# ---- the thread ----------------------------------------------------------------------------------


def test_what_flies_lands_at_once_or_never_when_the_link_is_closed() -> None:
    for land in (True, False):
        got: list[object] = []
        air = Air(Line(Emulate(delay_ms=60_000), "s0"), got.append)
        assert air.put([b"a"])
        assert air.put([b"b"])
        air.close(land=land)
        assert got == ([[b"a"], [b"b"]] if land else [])


def test_the_air_is_bounded() -> None:
    air = Air(Line(Emulate(delay_ms=60_000), "s0"), lambda _: None)
    assert all(air.put([b"x"]) for _ in range(MAX_IN_AIR))
    assert not air.put([b"x"])
    air.close(land=False)


def test_a_link_that_is_as_it_is_has_no_air() -> None:
    for emulate, flying in ((Emulate(), 0), (Emulate(delay_ms=1), 1)):
        push = PushLink("ipc:///nowhere.sock", sender="a", incarnation=1, emulate=emulate)
        assert [thread.name for thread in threading.enumerate()].count("air") == flying
        push.close()


# ---- on sockets ----------------------------------------------------------------------------------


def test_a_blocking_sender_never_waits_and_all_frames_fly_together(tmp_path: Path) -> None:
    pull = PullLink(f"ipc://{tmp_path}/p", link="ring0.s0")
    emulate = Emulate(delay_ms=150, jitter_ms=20)
    push = PushLink(pull.address, sender="a", incarnation=1, emulate=emulate)
    started = time.monotonic()
    for i in range(50):
        assert push.send(ping(i)) == Envelope("a", 1, i)
    assert time.monotonic() - started < 0.15  # none of them waited
    assert pull.recv(0.05) is None
    assert [pull.recv(PATIENCE_S) for _ in range(50)] == [ping(i) for i in range(50)]
    took = time.monotonic() - started
    assert 0.15 <= took < 0.15 * 10  # one delay for all, not one each
    assert pull.counts.gaps == 0
    push.close()
    pull.close()


def test_a_loop_sends_through_the_air_too(tmp_path: Path) -> None:
    async def main() -> None:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        pull = await open_pull(
            f"ipc://{tmp_path}/p", lambda frame, _: got.put_nowait(frame), link="r"
        )
        push = await open_push(
            pull.address, sender="a", incarnation=1, emulate=Emulate(delay_ms=100)
        )
        started = time.monotonic()
        for i in range(20):
            push.send(ping(i))
        assert [await got.get() for _ in range(20)] == [ping(i) for i in range(20)]
        assert 0.1 <= time.monotonic() - started < 1.0
        push.send(ping(20))
        await push.close(linger_s=1.0)  # a last word is not lost
        assert await got.get() == ping(20)
        with pytest.raises(LinkError, match="closed"):
            push.send(ping(21))
        await pull.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


# ---- a whole ring in one process -----------------------------------------------------------------

STAGES = 3
DELAY_MS = 15.0


async def _decode(folder: Path, emulate: Emulate, turns: int, tokens: int) -> tuple[float, int]:
    """Seconds that `turns` turns take together, and the most frames seen in flight."""
    stages = tuple(
        Stage(f"s{i}", f"ipc://{folder}/s{i}", (2 * i, 2 * i + 2)) for i in range(STAGES)
    )
    ring = Ring("r", f"ipc://{folder}/v", stages)
    limits = Limits(slots=turns, max_model_len=512, window_frames=turns)
    config = Config(Model("toy", "toy"), (ring,), limits=limits, emulate=emulate)
    coordinator = Coordinator(config, 1, 256)
    stop = asyncio.Event()

    async def turn(number: int) -> None:
        most = 0
        stream = coordinator.submit([number, 2, 3], budget=tokens, sampling=Sampling())
        async for event in stream:
            if isinstance(event, Tokens):
                most = max(most, len(coordinator.scheduler.rings["r"].in_flight))
        seen.append(most)

    seen: list[int] = []
    async with asyncio.TaskGroup() as group:
        for number, stage in enumerate(stages, 1):
            model = ToyModel(stage.layers, 2 * STAGES, slots=turns)
            load = lambda _, model=model: model  # noqa: E731
            worker = Worker(ring, stage, limits, load, number, None, emulate)
            group.create_task(run_stage(worker, number, stop))
        await coordinator.open()
        while not coordinator.ready()[0]:
            await asyncio.sleep(0.01)
        started = time.monotonic()
        async with asyncio.TaskGroup() as load_group:
            for number in range(1, turns + 1):
                load_group.create_task(turn(number))
        took = time.monotonic() - started
        await coordinator.close()
        stop.set()
    return took, max(seen)


def test_a_round_trip_grows_by_hops_times_delay_and_a_full_pipe_does_not_care(
    tmp_path: Path,
) -> None:
    slow = Emulate(delay_ms=DELAY_MS)
    round_s = (STAGES + 1) * DELAY_MS / 1e3
    alone, _ = asyncio.run(_decode(tmp_path, slow, 1, 10))
    assert alone >= 10 * round_s
    assert alone < 10 * round_s * 3  # the toy's own time is small beside it
    together, most = asyncio.run(_decode(tmp_path, slow, 8, 10))
    assert most > STAGES  # frames fly while others are computed
    assert together < 8 * alone / 2  # eight turns in the time of a few
