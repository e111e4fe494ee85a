"""Opening links: addresses in use, bad ones, and CURVE keys; each error says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_link import ANY_PORT, ping, received, run
from transport.frame import Envelope
from transport.link import LinkError, PullLink, PushLink, Security, make_keys, open_pull, open_push


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return ANY_PORT if request.param == "tcp" else f"ipc://{tmp_path}/s.sock"


def test_address_in_use(address: str) -> None:
    pull = PullLink(address, link="l")
    message = rf"cannot bind {pull.address}: Address already in use; another process listens there"
    with pytest.raises(LinkError, match=message.replace("*", r"\*")):
        PullLink(pull.address, link="l")

    async def main() -> None:
        with pytest.raises(LinkError, match="another process listens there"):
            await open_pull(pull.address, lambda *_: None, link="l")

    run(main)
    push = PushLink(pull.address, sender="a", incarnation=1)
    push.send(ping(0))
    assert received(pull, 1) == [ping(0)]  # it still owns the address
    push.close()
    pull.close()


def test_an_address_is_free_again_after_close(address: str) -> None:
    pull = PullLink(address, link="l")
    address = pull.address
    pull.close()

    async def main() -> None:
        again = await open_pull(address, lambda *_: None, link="l")
        await again.close()

    run(main)
    PullLink(address, link="l").close()


BAD_ADDRESSES = {
    "tcp://192.0.2.1:7100": "not an address of this machine: set `bind` beside `address`",
    "tcp://nobody.invalid:7100": "not an address of this machine: set `bind` beside `address`",
    "tcp://127.0.0.1": "not an address: write tcp://host:port or ipc://path",
    "udp://127.0.0.1:7100": "not an address: write tcp://host:port or ipc://path",
    "127.0.0.1:7100": "not an address: write tcp://host:port or ipc://path",
    "ipc:///no/such/folder/s.sock": "the folder of the ipc path does not exist: create it",
    "ipc:///tmp/" + "x" * 110: "an ipc path has at most 107 bytes: choose a shorter one",
}


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_bad_addresses(address: str) -> None:
    async def main() -> None:
        with pytest.raises(LinkError) as caught:
            await open_pull(address, lambda *_: None, link="l")
        assert f"cannot bind {address}: " in str(caught.value)
        assert BAD_ADDRESSES[address] in str(caught.value)

    run(main)
    with pytest.raises(LinkError, match=r"cannot bind") as caught:
        PullLink(address, link="l")
    assert BAD_ADDRESSES[address] in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "udp://127.0.0.1:7100", "nonsense"])
def test_bad_addresses_to_push(address: str) -> None:
    async def main() -> None:
        with pytest.raises(LinkError, match=r"cannot connect to.*write tcp://host:port"):
            await open_push(address, sender="a", incarnation=1)

    run(main)
    with pytest.raises(LinkError, match=r"cannot connect to.*write tcp://host:port"):
        PushLink(address, sender="a", incarnation=1)


def test_a_host_name_can_be_bound() -> None:
    PullLink("tcp://localhost:*", link="l").close()


# ---- CURVE ---------------------------------------------------------------------------------------


def test_curve() -> None:
    server_public, server_secret = make_keys()
    public, secret = make_keys()
    pull = PullLink(
        ANY_PORT, link="l", security=Security(server_public, server_secret, allowed=(public,))
    )
    good = Security(public, secret, server_public)
    push = PushLink(pull.address, sender="a", incarnation=1, security=good)
    plain = PushLink(pull.address, sender="b", incarnation=1)
    wrong = PushLink(
        pull.address, sender="c", incarnation=1, security=Security(public, secret, public)
    )
    for link in (plain, wrong, push):
        link.send(ping(0))
    assert received(pull, 1) == [ping(0)]
    assert pull.envelope == Envelope("a", 1, 0)
    assert pull.recv(0.1) is None
    for link in (plain, wrong, push):
        link.close()
    pull.close()
