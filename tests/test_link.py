"""The links on real sockets: order, loss that is seen, and nothing that stops a reader."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from transport.codec import encode
from transport.frame import Envelope, Frame, FrameError, LinkGap, Ping, Run, Tensor
from transport.link import (
    HWM_FRAMES,
    LinkError,
    PeerEvent,
    PullLink,
    PushLink,
    open_pull,
    open_push,
)

PATIENCE_S = 10.0
ANY_PORT = "tcp://127.0.0.1:*"


def ping(seq: int) -> Ping:
    return Ping("ring0", 1, seq)


def big(size: int) -> Run:
    data = bytes(range(256)) * (size // 256)
    return Run("ring0", 1, 2, (), Tensor("uint8", (size,), data))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an asyncio test; whatever it logs as unhandled fails it."""
    unhandled: list[Any] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: unhandled.append(context)
        )
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(bounded())
    gc.collect()
    assert unhandled == []


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ANY_PORT if request.param == "tcp" else f"ipc://{tmp_path}/s.sock"


@contextmanager
def raw_push(address: str) -> Iterator[Any]:
    """The socket of a peer that says whatever a test wants."""
    push = PushLink(address, sender="raw", incarnation=1)
    yield push._socket
    push.close()


def received(pull: PullLink, count: int) -> list[Frame]:
    frames = [pull.recv(PATIENCE_S) for _ in range(count)]
    assert None not in frames
    return frames  # type: ignore[return-value]


# ---- the four pairings ---------------------------------------------------------------------------


def test_blocking_to_blocking(address: str) -> None:
    pull = PullLink(address, link="ring0.s0")
    push = PushLink(pull.address, sender="coordinator", incarnation=7)
    assert pull.recv(0) is None
    for i in range(100):
        assert push.send(ping(i)) == Envelope("coordinator", 7, i)
    for i in range(100):
        assert pull.recv(PATIENCE_S) == ping(i)
        assert pull.envelope == Envelope("coordinator", 7, i)
    assert pull.recv(0.01) is None
    assert (pull.counts.frames, pull.counts.gaps) == (100, 0)
    push.close()
    pull.close()


def test_loop_to_loop(address: str) -> None:
    async def main() -> None:
        got: asyncio.Queue[tuple[Frame, Envelope]] = asyncio.Queue()
        pull = await open_pull(address, lambda *pair: got.put_nowait(pair), link="ring0.s0")
        push = await open_push(pull.address, sender="coordinator", incarnation=7)
        for i in range(100):
            push.send(ping(i))
        for i in range(100):
            assert await got.get() == (ping(i), Envelope("coordinator", 7, i))
        await push.close()
        await pull.close()
        await pull.wait()

    run(main)


def test_loop_to_thread_and_back(address: str, tmp_path: Path) -> None:
    """A stage's compute thread between the coordinator's two ends."""

    async def main() -> None:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        back = await open_pull(f"ipc://{tmp_path}/c.sock", lambda f, _: got.put_nowait(f), link="v")
        pull = PullLink(address, link="ring0.s0")

        def stage() -> None:
            push = PushLink(back.address, sender="s0", incarnation=8)
            for _ in range(51):
                frame = pull.recv(PATIENCE_S)
                assert frame is not None
                push.send(frame)
            push.close(linger_s=PATIENCE_S)
            pull.close()

        push = await open_push(pull.address, sender="coordinator", incarnation=7)
        thread = asyncio.create_task(asyncio.to_thread(stage))
        sent: list[Frame] = [*map(ping, range(50)), big(3 << 20)]
        for frame in sent:
            push.send(frame)
        assert [await got.get() for _ in sent] == sent
        await thread
        await push.close()
        await back.close()

    run(main)


@pytest.mark.parametrize("size", [0, 256, 64 << 10, 1 << 20, 20 << 20])
def test_large_frames(size: int) -> None:
    pull = PullLink(ANY_PORT, link="l")
    push = PushLink(pull.address, sender="a", incarnation=1)
    for _ in range(2):
        push.send(big(size))
        assert received(pull, 1) == [big(size)]
    push.close()
    pull.close()


def test_several_senders_keep_their_own_numbers() -> None:
    pull = PullLink(ANY_PORT, link="verdicts")
    with ExitStack() as stack:
        for name in ("s0", "s0/control", "s1"):
            push = PushLink(pull.address, sender=name, incarnation=1)
            stack.callback(push.close)
            for i in range(3):
                push.send(ping(i))
        frames = received(pull, 9)
    assert sorted(frame.seq for frame in frames if isinstance(frame, Ping)) == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    assert pull.counts.gaps == 0
    pull.close()


def test_frames_sent_before_the_peer_is_up_arrive(tmp_path: Path) -> None:
    push = PushLink(f"ipc://{tmp_path}/s.sock", sender="a", incarnation=1)
    push.send(ping(0))
    pull = PullLink(push.address, link="l")
    assert received(pull, 1) == [ping(0)]
    push.close()
    pull.close()


# ---- loss ----------------------------------------------------------------------------------------


def test_a_jump_is_a_gap_before_the_frame() -> None:
    pull = PullLink(ANY_PORT, link="ring0.s1")
    with raw_push(pull.address) as raw:
        for number in (0, 4, 2, 4, 5):
            raw.send_multipart(encode(ping(number), Envelope("s0", 7, number)))
        for incarnation, number in [(8, 0), (7, 6), (8, 1), (9, 2)]:
            raw.send_multipart(encode(ping(number), Envelope("s0", incarnation, number)))
        frames = received(pull, 8)
    assert frames == [
        ping(0), LinkGap("s0", 1, 4), ping(4), ping(5),
        ping(0), ping(1), LinkGap("s0", 0, 2), ping(2),
    ]  # fmt: skip
    counts = pull.counts
    assert (counts.frames, counts.gaps, counts.lost) == (6, 2, 5)
    assert (counts.duplicates, counts.stale, counts.undecodable) == (2, 1, 0)
    pull.close()


def test_a_gap_in_the_loop_has_the_envelope_of_its_frame() -> None:
    async def main() -> None:
        got: asyncio.Queue[tuple[Frame, Envelope]] = asyncio.Queue()
        pull = await open_pull(ANY_PORT, lambda *pair: got.put_nowait(pair), link="verdicts")
        with raw_push(pull.address) as raw:
            raw.send_multipart(encode(ping(3), Envelope("s2", 7, 3)))
            assert await got.get() == (LinkGap("s2", 0, 3), Envelope("s2", 7, 3))
            assert await got.get() == (ping(3), Envelope("s2", 7, 3))
        await pull.close()

    run(main)


def test_a_rebound_receiver_sees_one_gap_at_most(address: str) -> None:
    """Frames in the old socket are gone; the new one must not take what follows for the start."""
    first = PullLink(address, link="l")
    push = PushLink(first.address, sender="a", incarnation=1)
    for i in range(10):
        push.send(ping(i))
    received(first, 5)
    first.close()
    second = PullLink(first.address, link="l")
    for i in range(10, 20):
        push.send(ping(i))
    gap = second.recv(PATIENCE_S)
    assert isinstance(gap, LinkGap)
    assert (gap.expected, 5 <= gap.got <= 10) == (0, True)
    assert received(second, 20 - gap.got) == [ping(i) for i in range(gap.got, 20)]
    assert second.recv(0.01) is None
    push.close()
    second.close()


RECEIVER = """
import sys
from transport.link import PullLink
pull = PullLink(sys.argv[1], link="l")
print("bound", flush=True)
while True:
    frame = pull.recv(60.0)
    print(frame.seq, flush=True)
    if frame.seq == 3:
        sys.stdin.read()
"""


def test_a_killed_receiver_comes_back_to_a_gap(address: str, tmp_path: Path) -> None:
    probe = PullLink(address, link="l")
    address = probe.address
    probe.close()
    child = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, address],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    push = PushLink(address, sender="a", incarnation=1)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        for i in range(50):
            push.send(ping(i))
        assert [child.stdout.readline() for _ in range(4)] == [b"0\n", b"1\n", b"2\n", b"3\n"]
        os.kill(child.pid, signal.SIGKILL)
    pull = PullLink(address, link="l")
    for i in range(50, 60):
        push.send(ping(i))
    gap = pull.recv(PATIENCE_S)
    assert isinstance(gap, LinkGap)
    assert (gap.expected, 4 <= gap.got <= 50) == (0, True)
    assert received(pull, 60 - gap.got) == [ping(i) for i in range(gap.got, 60)]
    push.close()
    pull.close()


# ---- nonsense and bugs do not stop a reader ------------------------------------------------------

NONSENSE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [b"x"] * 3,
    [b"x"] * 50,
    [bytes(100_000)],
    [bytes(encode(ping(0), Envelope("a", 1, 0))[0]), b"extra"],
    [b"\x91" * 5000],
]


def test_nonsense_is_counted_and_dropped() -> None:
    dropped: list[str] = []
    pull = PullLink(ANY_PORT, link="ring0.s0", on_drop=dropped.append)
    with raw_push(pull.address) as raw:
        for message in NONSENSE:
            raw.send_multipart(message)
        raw.send_multipart(encode(ping(0), Envelope("a", 1, 0)))
        assert received(pull, 1) == [ping(0)]
    assert pull.counts.undecodable == len(NONSENSE)
    assert all(reason.startswith("ring0.s0: ") for reason in dropped)
    told = [reason.rpartition("(")[2] for reason in dropped]
    assert told == [f"{count} dropped so far)" for count in (1, 2, 4, 8)]
    pull.close()


def test_nonsense_does_not_extend_the_wait() -> None:
    pull = PullLink(ANY_PORT, link="l")
    with raw_push(pull.address) as raw:
        for _ in range(100):
            raw.send(b"\xc1")
        while pull.counts.undecodable < 100:
            assert pull.recv(0.01) is None
    pull.close()


def test_nonsense_in_the_loop() -> None:
    async def main() -> None:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        pull = await open_pull(ANY_PORT, lambda frame, _: got.put_nowait(frame), link="l")
        with raw_push(pull.address) as raw:
            for message in NONSENSE:
                raw.send_multipart(message)
            raw.send_multipart(encode(ping(0), Envelope("a", 1, 0)))
            assert await got.get() == ping(0)
        # An all-empty message reaches aiozmq's reader only with the next one: that is this ping.
        assert pull.counts.undecodable == len(NONSENSE)
        await pull.close()

    run(main)


def test_a_bug_in_the_callback_reaches_the_owner() -> None:
    async def main() -> None:
        def broken(frame: Frame, envelope: Envelope) -> None:
            raise AssertionError(frame)

        pull = await open_pull(ANY_PORT, broken, link="l")
        push = await open_push(pull.address, sender="a", incarnation=1)
        push.send(ping(1))
        push.send(ping(2))
        with pytest.raises(AssertionError, match="seq=1"):
            await pull.wait()
        await pull.close()
        await push.close()

    run(main)


def test_cancelling_wait_leaves_the_link_open() -> None:
    async def main() -> None:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        pull = await open_pull(ANY_PORT, lambda frame, _: got.put_nowait(frame), link="l")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pull.wait(), 0.01)
        push = await open_push(pull.address, sender="a", incarnation=1)
        push.send(ping(1))
        assert await got.get() == ping(1)
        await push.close()
        await pull.close()

    run(main)


# ---- peers ---------------------------------------------------------------------------------------


def test_peer_events() -> None:
    async def main() -> None:
        seen: asyncio.Queue[PeerEvent] = asyncio.Queue()
        pull = await open_pull(ANY_PORT, lambda *_: None, link="l", on_peer=seen.put_nowait)
        push = PushLink(pull.address, sender="a", incarnation=1)
        assert await seen.get() == PeerEvent("l", "connected", pull.address)
        push.close()
        assert await seen.get() == PeerEvent("l", "disconnected", pull.address)
        await pull.close()

    run(main)


def test_push_events_tell_of_a_peer_that_comes_and_goes(tmp_path: Path) -> None:
    async def main() -> None:
        seen: asyncio.Queue[PeerEvent] = asyncio.Queue()
        address = f"ipc://{tmp_path}/s.sock"
        push = await open_push(address, sender="a", incarnation=1, on_peer=seen.put_nowait)
        for _ in range(2):
            pull = PullLink(address, link="l")
            assert await seen.get() == PeerEvent("a", "connected", address)
            pull.close()
            assert await seen.get() == PeerEvent("a", "disconnected", address)
        await push.close()

    run(main)


def test_a_peer_that_takes_nothing_times_out(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody.sock"
    push = PushLink(address, sender="a", incarnation=1, timeout_s=0.05)
    for i in range(HWM_FRAMES):
        assert push.send(ping(i)).number == i
    for _ in range(2):
        with pytest.raises(
            LinkError, match=r"nobody.sock took no frame for 0.05 s; is that process"
        ):
            push.send(ping(0))
    pull = PullLink(address, link="l")
    received(pull, HWM_FRAMES)
    assert push.send(ping(0)).number == HWM_FRAMES  # a frame that was not sent has no number
    assert received(pull, 1) == [ping(0)]
    push.close()
    pull.close()


def test_a_peer_that_takes_nothing_is_an_error_in_the_loop(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/nobody.sock"
        push = await open_push(address, sender="a", incarnation=1)
        for i in range(HWM_FRAMES + 1):
            assert push.send(ping(i)).number == i
        with pytest.raises(LinkError, match=r"nobody.sock is 1000 frames behind; is it running"):
            push.send(ping(0))
        got: asyncio.Queue[Frame] = asyncio.Queue()
        pull = await open_pull(address, lambda frame, _: got.put_nowait(frame), link="l")
        assert [await got.get() for _ in range(HWM_FRAMES + 1)] == [
            ping(i) for i in range(HWM_FRAMES + 1)
        ]
        assert push.send(ping(0)).number == HWM_FRAMES + 1
        assert await got.get() == ping(0)
        await push.close()
        with pytest.raises(LinkError, match="is closed"):
            push.send(ping(0))
        await push.close()
        await pull.close()

    run(main)


def test_close_without_a_peer_does_not_wait(tmp_path: Path) -> None:
    async def main() -> None:
        push = await open_push(f"ipc://{tmp_path}/nobody.sock", sender="a", incarnation=1)
        for i in range(HWM_FRAMES + 1):
            push.send(ping(i))
        await push.close()

    run(main)


def test_sockets_made_after_others_closed_still_hear() -> None:
    """aiozmq: a close with unread messages can leave the next socket of that fd deaf."""

    async def main() -> None:
        for round_number in range(30):
            got: asyncio.Queue[Frame] = asyncio.Queue()
            pull = await open_pull(ANY_PORT, lambda *pair, q=got: q.put_nowait(pair[0]), link="l")
            push = await open_push(pull.address, sender="a", incarnation=1)
            for _ in range(5):
                push.send(big(256 << 10))
            assert await got.get() == big(256 << 10), round_number
            await pull.close()  # four frames unread
            await push.close()

    run(main)


def test_too_large_a_frame_is_refused_where_it_is_sent() -> None:
    pull = PullLink(ANY_PORT, link="l", max_bytes=16 << 20)
    push = PushLink(pull.address, sender="a", incarnation=1, max_bytes=1 << 20)
    with pytest.raises(FrameError, match=r"Run of 2097152 bytes is over limits.max_frame_bytes"):
        push.send(big(2 << 20))
    assert push.send(big(1 << 20)).number == 0
    received(pull, 1)
    push.close()
    pull.close()


def test_too_large_a_message_never_reaches_memory() -> None:
    """libzmq cuts the connection; the reader lives and the loss shows as a gap."""
    pull = PullLink(ANY_PORT, link="l", max_bytes=1 << 20)
    push = PushLink(pull.address, sender="a", incarnation=1)
    push.send(ping(0))
    received(pull, 1)
    push.send(big(20 << 20))
    push.send(ping(2))
    frames: list[Frame | None] = []
    for seq in range(3, 1000):
        frames.append(pull.recv(0.1))
        if frames[-1] is not None:
            break
        push.send(ping(seq))
    gap = frames[-1]
    assert isinstance(gap, LinkGap)
    assert (gap.expected, gap.got >= 2) == (1, True)
    push.close()
    pull.close()
