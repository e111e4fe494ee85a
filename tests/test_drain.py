"""A signal lets running replies end; real processes, from `kvring coord`, `stage` and `up`."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coord.actions import Admitted, Tokens
from coord.coordinator import Coordinator
from pipeline.daemon import Worker, run_stage
from pipeline.model import Output, ToyModel
from tests import processes
from tests.processes import QUICK, TOY_LAYERS, Fleet, get, post, until, write_ring
from tests.toyclient import complete, streaming, truth
from transport.frame import Sampling, Segment, Tensor

LONG = 1500  # tokens of a reply that takes seconds
ENDLESS = 4000  # and of one that no test waits for


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


def prompt_of(seed: int) -> list[int]:
    return [seed, *range(40)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_reply_ends_before_the_coordinator_does(
    number: signal.Signals, fleet: Fleet, tmp_path: Path
) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(1), LONG) as reading:
        reading.read(5)
        running["coord"].send(number)
        body = fleet.not_ready(ring.url, "draining: 1 turn is still")
        assert body["state"] == "draining"
        refused = post(f"{ring.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert get(f"{ring.url}/health").status_code == 200
        assert len(reading.tokens) < LONG, "it still runs"
        answer = reading.rest()
    assert answer.tokens == truth(prompt_of(1), LONG)
    assert answer.finish == "length"
    assert running["coord"].wait() == 0
    assert "Traceback" not in running["coord"].errors
    assert running["s0"].popen.poll() is None, "stages are ended by who started them"


def test_a_whole_answer_and_a_queued_one_come_too(fleet: Fleet, tmp_path: Path) -> None:
    limits = replace(QUICK, slots=1)
    ring = write_ring(tmp_path / "ring.toml", stages=1, limits=limits)
    running = fleet.whole(ring)
    with (
        streaming(ring.url, prompt_of(1), LONG) as reading,
        streaming(ring.url, prompt_of(2), 20) as queued,
    ):
        reading.read(5)
        running["coord"].send(signal.SIGTERM)
        fleet.not_ready(ring.url, "draining", "2 turns")
        assert reading.rest().tokens == truth(prompt_of(1), LONG)
        assert queued.rest().tokens == truth(prompt_of(2), 20)
    assert running["coord"].wait() == 0


def test_a_second_signal_ends_it_at_once_with_one_error_event(fleet: Fleet, tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(1), ENDLESS) as reading:
        reading.read(5)
        running["coord"].send(signal.SIGTERM)
        fleet.not_ready(ring.url, "draining")
        began = time.monotonic()
        running["coord"].send(signal.SIGTERM)
        with pytest.raises(AssertionError, match="shutting_down"):
            reading.rest()
        assert running["coord"].wait() == 0
        assert time.monotonic() - began < 10, "far below what was left of drain_s"
        assert 5 <= len(reading.tokens) < ENDLESS
    assert "turns_cut_off" in running["coord"].errors
    assert "Traceback" not in running["coord"].errors


def test_what_does_not_end_within_drain_s_is_cut_off(fleet: Fleet, tmp_path: Path) -> None:
    limits = replace(QUICK, drain_s=0.3)
    ring = write_ring(tmp_path / "ring.toml", stages=1, limits=limits)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(1), ENDLESS) as reading:
        reading.read(5)
        running["coord"].send(signal.SIGTERM)
        with pytest.raises(AssertionError, match="shutting_down"):
            reading.rest()
        assert reading.step() is False, "and [DONE] behind it"
        assert running["coord"].wait() == 0


def test_a_client_that_leaves_ends_the_drain(fleet: Fleet, tmp_path: Path) -> None:
    limits = replace(QUICK, drain_s=3600)
    ring = write_ring(tmp_path / "ring.toml", stages=1, limits=limits)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(1), ENDLESS) as reading:
        reading.read(5)
        running["coord"].send(signal.SIGTERM)
        fleet.not_ready(ring.url, "draining")
    assert running["coord"].wait() == 0


def test_a_stage_that_leaves_ends_no_frame_half(fleet: Fleet, tmp_path: Path) -> None:
    """SIGTERM, exit code 0; another one takes its place and the stream goes on."""
    ring = write_ring(tmp_path / "ring.toml", stages=2)
    running = fleet.whole(ring)
    with streaming(ring.url, prompt_of(1), LONG) as reading:
        for name in ("s1", "s0"):
            reading.read(len(reading.tokens) + 20)
            running[name].expected.append(0)
            running[name].send(signal.SIGTERM)
            assert running[name].wait() == 0
            assert "Traceback" not in running[name].errors
            running[name] = fleet.stage(ring, name)
            fleet.ready(ring.url)
        assert reading.rest().tokens == truth(prompt_of(1), LONG)


class Held(ToyModel):
    """Its forwards wait, once `holds` is set, until they are let go."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.holds = False
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def forward(
        self,
        segments: Sequence[Segment],
        payload: Tensor | None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Output:
        if self.holds:
            self.begun.set()
            assert self.let_go.wait(20)
        return super().forward(segments, payload, histories)


def test_a_stage_answers_the_frame_at_hand_before_it_leaves(tmp_path: Path) -> None:
    """The signal comes in the middle of a forward: its verdict is still heard."""
    ring = write_ring(tmp_path / "ring.toml", stages=1)
    (spec,) = ring.config.rings
    model = Held((0, TOY_LAYERS), TOY_LAYERS, slots=4, capacity=4096)

    async def main() -> None:
        stop = asyncio.Event()
        worker = Worker(spec, spec.head, ring.config.limits, lambda _: model, 7)
        stage = asyncio.ensure_future(run_stage(worker, 7, stop))
        coordinator = Coordinator(ring.config, 8, 256)
        await coordinator.open()
        while not coordinator.ready()[0]:
            await asyncio.sleep(0.01)
        model.holds = True
        stream = coordinator.submit(prompt_of(1), budget=9, sampling=Sampling())
        await asyncio.to_thread(model.begun.wait, 20)
        stop.set()
        await asyncio.sleep(0.1)
        model.holds = False
        model.let_go.set()
        await stage
        events = aiter(stream)
        assert isinstance(await anext(events), Admitted)
        first = await asyncio.wait_for(anext(events), 5)
        assert isinstance(first, Tokens)
        assert list(first.tokens) == truth(prompt_of(1), 1)
        await coordinator.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


# ---- up ------------------------------------------------------------------------------------------


def test_up_lets_a_reply_end_and_then_ends_all(fleet: Fleet) -> None:
    up, url = fleet.up("--model", "toy", "--stages", "2")
    fleet.ready(url)
    with streaming(url, prompt_of(1), LONG) as reading:
        reading.read(5)
        up.send(signal.SIGINT)
        fleet.not_ready(url, "draining")
        assert len(fleet.alive()) == 4, "stages end after the coordinator"
        assert reading.rest().tokens == truth(prompt_of(1), LONG)
    assert up.wait() == 0
    assert fleet.alive() == []
    assert "Traceback" not in up.errors


def test_a_second_ctrl_c_ends_up_at_once(fleet: Fleet) -> None:
    up, url = fleet.up("--model", "toy", "--stages", "2")
    fleet.ready(url)
    with streaming(url, prompt_of(1), ENDLESS) as reading:
        reading.read(5)
        up.send(signal.SIGINT)
        until("it says how to end at once", lambda: "Ctrl-C again" in up.errors)
        began = time.monotonic()
        up.send(signal.SIGINT)
        with pytest.raises(AssertionError, match="shutting_down"):
            reading.rest()
        assert up.wait() == 0
        assert time.monotonic() - began < 10
    assert fleet.alive() == []
    assert "Traceback" not in up.errors


def test_up_waits_for_nobody_when_nobody_is_served(fleet: Fleet) -> None:
    up, url = fleet.up("--model", "toy", "--stages", "1")
    fleet.ready(url)
    assert complete(url, prompt_of(1), 10).tokens == truth(prompt_of(1), 10)
    began = time.monotonic()
    up.send(signal.SIGTERM)
    assert up.wait() == 0
    assert time.monotonic() - began < 15, "half of drain_s"
