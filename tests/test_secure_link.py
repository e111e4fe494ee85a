"""Links with keys: who gets in, what peers are told, and large frames in pieces."""

from __future__ import annotations

import asyncio
import queue
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_link import ANY_PORT, ping, received, run
from transport.emulate import Emulate
from transport.frame import Frame, FrameError, Kind, Run, Segment, Tensor
from transport.link import (
    LinkError,
    PeerEvent,
    PullLink,
    PushLink,
    Security,
    make_keys,
    open_pull,
    open_push,
)
from transport.peers import LOG_EVERY_S, PeerWatch, Refusals, Seen
from transport.pieces import INDEX, PIECE_BYTES, join, most_pieces, split

SERVER, SERVER_SECRET = make_keys()
CLIENT, CLIENT_SECRET = make_keys()
DOOR = Security(SERVER, SERVER_SECRET, allowed=(CLIENT,))
MEMBER = Security(CLIENT, CLIENT_SECRET, server_key=SERVER)
SEGMENT = Segment(5, 1, 100, (11, 12, 13, 14), Kind.VERIFY, bytes(16), 4)


def large(rows: int) -> Run:
    data = bytes(range(256)) * 4 * rows
    return Run("r", 3, 17, (SEGMENT,), Tensor("float32", (rows, 256), data))


# ---- pieces --------------------------------------------------------------------------------------


@given(
    st.binary(min_size=1, max_size=100),
    st.none() | st.integers(0, 5 * PIECE_BYTES) | st.sampled_from([PIECE_BYTES, PIECE_BYTES + 1]),
)
def test_pieces_make_the_message_again(header: bytes, size: int | None) -> None:
    parts = [b"\x96" + header] + ([] if size is None else [bytes(size)])
    pieces = split(parts)
    assert max(memoryview(piece).nbytes for piece in pieces) <= PIECE_BYTES
    assert len(pieces) <= most_pieces(sum(len(part) for part in parts))
    assert [bytes(part) for part in join([bytes(piece) for piece in pieces])] == parts


def test_an_array_is_cut_by_its_bytes() -> None:
    view = memoryview(bytes(range(256)) * 4 * PIECE_BYTES).cast("I")
    assert join(split([b"h", view])) == [b"h", view.tobytes()]


def test_a_small_message_travels_as_it_is() -> None:
    parts = [b"header", bytes(PIECE_BYTES)]
    assert split(parts) is parts
    assert join(parts) is parts


SIZE = (7).to_bytes(8, "little")
FAR = (1 << 63).to_bytes(8, "little")


@pytest.mark.parametrize(
    "parts",
    [
        [bytes([INDEX])],
        [bytes([INDEX]) + SIZE[:7], b"x" * 7],
        [bytes([INDEX]) + SIZE * 3, b"x" * 7, b"x" * 7, b"x" * 7],
        [bytes([INDEX]) + SIZE],
        [bytes([INDEX]) + SIZE, b"x" * 8],
        [bytes([INDEX]) + SIZE, b"x" * 7, b"x"],
        [bytes([INDEX]) + FAR, b"x"],
        [bytes([INDEX]) + FAR * 2],
    ],
)
def test_pieces_that_nobody_cut(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        join(parts)


# ---- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("emulate", [None, Emulate(delay_ms=1)])
def test_large_frames_between_blocking_links(emulate: Emulate | None) -> None:
    pull = PullLink(ANY_PORT, link="l", security=DOOR)
    push = PushLink(pull.address, sender="a", incarnation=1, security=MEMBER, emulate=emulate)
    frames: list[Frame] = [large(1), large(5000), ping(0), large(256), large(257)]
    for frame in frames:
        push.send(frame)
        assert received(pull, 1) == [frame]
        assert pull.header == push.header, "the frame's own, not an index of pieces"
    assert pull.counts.undecodable == 0
    push.close()
    pull.close()


def test_large_frames_between_links_of_a_loop() -> None:
    async def main() -> None:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        pull = await open_pull(
            ANY_PORT, lambda frame, _: got.put_nowait(frame), link="l", security=DOOR
        )
        push = await open_push(pull.address, sender="a", incarnation=1, security=MEMBER)
        for frame in (large(1), large(5000), ping(0)):
            push.send(frame)
            assert await got.get() == frame
        await push.close()
        await pull.close()

    run(main)


def test_a_frame_over_the_limit_is_dropped_after_so_many_pieces() -> None:
    said: list[str] = []
    pull = PullLink(ANY_PORT, link="l", security=DOOR, max_bytes=PIECE_BYTES, on_drop=said.append)
    push = PushLink(pull.address, sender="a", incarnation=1, security=MEMBER)
    push.send(large(100_000))  # 100 MB, of which the receiver keeps 17
    push.send(ping(1))
    assert ping(1) in received(pull, 2)
    assert "pieces" in said[0]
    push.close()
    pull.close()


@pytest.mark.parametrize(
    ("security", "why"),
    [
        (None, "it has no keys"),
        (Security(*make_keys(), server_key=SERVER), "its key is not one of those allowed here"),
        (replace(MEMBER, server_key=CLIENT), "its handshake is not for this side's public key"),
    ],
)
def test_who_is_refused_and_why(security: Security | None, why: str) -> None:
    seen: queue.Queue[PeerEvent] = queue.Queue()
    pull = PullLink(ANY_PORT, link="l", security=DOOR, on_peer=seen.put)
    push = PushLink(pull.address, sender="a", incarnation=1, security=security)
    push.send(ping(0))
    assert seen.get(timeout=10) == PeerEvent("l", "refused", pull.address, why)
    assert pull.recv(0.1) is None
    push.close()
    member = PushLink(pull.address, sender="a", incarnation=1, security=MEMBER)
    member.send(ping(1))
    assert received(pull, 1) == [ping(1)]
    events = [seen.get(timeout=10).event]
    while events[-1] == "refused":  # the stranger had tried again
        events.append(seen.get(timeout=10).event)
    assert events[-1] == "connected"
    member.close()
    assert seen.get(timeout=10).event == "disconnected"
    pull.close()


@pytest.mark.parametrize("refusal", ["its key", "the other side's key"])
def test_a_peer_that_was_refused_gets_in_once_the_keys_are_right(refusal: str) -> None:
    if refusal == "its key":
        wrong = replace(DOOR, allowed=(SERVER,))
    else:
        wrong = Security(*make_keys(), allowed=(CLIENT,))
    seen: queue.Queue[PeerEvent] = queue.Queue()
    pull = PullLink(ANY_PORT, link="l", security=wrong)
    address = pull.address
    push = PushLink(address, sender="a", incarnation=1, security=MEMBER, on_peer=seen.put)

    async def main() -> None:
        loop_push = await open_push(
            address, sender="b", incarnation=1, security=MEMBER, on_peer=seen.put
        )
        refused = [await asyncio.to_thread(seen.get) for _ in range(2)]
        assert {each.event for each in refused} == {"refused"}
        await asyncio.to_thread(pull.close)
        again = await asyncio.to_thread(lambda: PullLink(address, link="l", security=DOOR))
        senders: set[str] = set()
        while senders != {"a", "b"}:
            push.send(ping(0))
            with suppress(LinkError):  # until it has connected again
                loop_push.send(ping(0))
            if await asyncio.to_thread(again.recv, 0.2) is not None:
                assert again.envelope is not None
                senders.add(again.envelope.sender)
        await loop_push.close()
        again.close()

    run(main)
    push.close()


def test_two_doors_of_one_process_let_in_different_peers() -> None:
    other, other_secret = make_keys()
    doors = [DOOR, replace(DOOR, allowed=(other,)), replace(DOOR, allowed=())]
    pulls = [PullLink(ANY_PORT, link="l", security=door) for door in doors]
    guests = [MEMBER, Security(other, other_secret, server_key=SERVER)]
    for guest in guests:
        pushes = [
            PushLink(pull.address, sender="a", incarnation=1, security=guest) for pull in pulls
        ]
        for push in pushes:
            push.send(ping(0))
        got = [pull.recv(0.3) is not None for pull in pulls]
        assert got == [guest is guests[0], guest is guests[1], False]
        for push in pushes:
            push.close()
    for pull in pulls:
        pull.close()


# ---- what a monitor's events mean ----------------------------------------------------------------


def told(*events: tuple[Seen, int]) -> list[str]:
    peers = PeerWatch("l")
    found = [peers.take(seen, value, "tcp://h:1") for seen, value in events]
    return [f"{each.event} {each.why}".strip() for each in found if each is not None]


def test_events_of_peers() -> None:
    opened, let_in, closed = Seen.OPENED, Seen.LET_IN, Seen.CLOSED
    assert told((opened, 5), (let_in, 0), (closed, 5)) == ["connected", "disconnected"]
    assert told((opened, 5), (closed, 5)) == ["refused it made no handshake"]
    assert told((opened, 5), (Seen.NO_KEY, 9), (closed, 5)) == ["refused it has no keys"]
    assert told((opened, 4), (opened, 5), (let_in, 0), (closed, 5), (closed, 4)) == [
        "connected",
        "disconnected",
        "refused it made no handshake",
    ]


def test_refusals_are_counted_and_told_at_a_rate() -> None:
    refusals = Refusals()
    event = PeerEvent("l", "refused", "tcp://h:1", "it has no keys")
    assert refusals.note(replace(event, event="connected"), 0.0) is None
    first = refusals.note(event, 0.0)
    assert first is not None
    assert (first["count"], first["total"], first["why"]) == (1, 1, "it has no keys")
    assert [refusals.note(event, at) for at in (0.1, 5.0, LOG_EVERY_S - 0.1)] == [None] * 3
    later = refusals.note(event, LOG_EVERY_S)
    assert later is not None
    assert (later["count"], later["total"]) == (4, 5)
