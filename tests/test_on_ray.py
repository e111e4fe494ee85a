"""`kvring up --on ray`: stages on a local cluster of two nodes, a chat by HTTP, losses, the end.

Truth is plain serial decoding. Each node has an address of its own (127.0.0.2 and 127.0.0.3), so a
stage that moves to the other node comes back at another address.
"""

from __future__ import annotations

import re
import shlex
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import processes
from tests.processes import ROOT, Fleet, assert_clear, get, post, until
from tests.test_deploy import understood
from tests.test_processes import LONG, prompt_of
from tests.toyclient import streaming, truth
from tools import cli
from tools.errors import USAGE
from tools.on_ray import command
from tools.on_ray.node import StageHost, Taken, hold_port, installed

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
QUICK = ("--model", "toy", "--ray-cpus", "0.25")
SMALL = {
    "num_cpus": 1,
    "num_gpus": 0,
    "include_dashboard": False,
    "object_store_memory": 80 << 20,
}
NOTICE = {"health_check_period_ms": 1000}  # a node that is gone: in 5 s instead of 15 s


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with processes.fleet(tmp_path / "processes") as made:
        yield made


@contextmanager
def quiet() -> Iterator[None]:
    """Ray's own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes; a test may remove the second one, and is the last then."""
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
        utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
        made = utils.Cluster(
            initialize_head=True,
            head_node_args={"node_ip_address": HEAD, "_system_config": NOTICE, **SMALL},
        )
        made.add_node(node_ip_address=OTHER, **SMALL)
        yield made
        made.shutdown()


class Up:
    """A `kvring up --on ray` that is ready."""

    def __init__(self, fleet: Fleet, cluster: Any, *options: object) -> None:
        address = ("--on", "ray", "--ray-address", cluster.address)
        self.process, self.url = fleet.up(*QUICK, *address, *options)
        fleet.ready(self.url)

    def stages(self) -> dict[str, dict[str, Any]]:
        """What GET /ring says of each stage."""
        found = get(f"{self.url}/ring").json()["rings"][0]["stages"]
        return {stage["name"]: stage for stage in found}

    def hosts(self) -> set[str]:
        return {stage["address"].split(":")[1].strip("/") for stage in self.stages().values()}

    def worker(self, name: str) -> psutil.Process:
        """The actor's process: the stage's parent."""
        found = psutil.Process(self.stages()[name]["pid"]).parent()
        assert found is not None
        assert "ray::" in "".join(found.cmdline())
        return found


def placement_groups(cluster: Any) -> list[str]:
    """States of the cluster's placement groups."""
    import ray
    from ray.util import placement_group_table

    with quiet():
        ray.init(cluster.address, log_to_driver=False, logging_level="CRITICAL")
        states = [each["state"] for each in placement_group_table().values()]
        ray.shutdown()
    return states


def test_no_room_is_said(fleet: Fleet, cluster: Any) -> None:
    address = ("--on", "ray", "--ray-address", cluster.address, "--ray-wait-s", "1")
    up, _ = fleet.up("--model", "toy", *address, "--ray-cpus", "8")
    assert_clear(up, 1, "no room for 3 stages within 1 s", "asked for 3 x 8 CPU", "on 2 nodes")
    assert set(placement_groups(cluster)) <= {"REMOVED"}


def test_streams_outlive_an_actor_and_a_node_and_all_of_it_ends(fleet: Fleet, cluster: Any) -> None:
    """SIGKILL of an actor, then the second node goes: its stages come back on the first."""
    up = Up(fleet, cluster)
    assert up.hosts() == {HEAD, OTHER}, "spread is the default"
    said = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answer = post(f"{up.url}/v1/chat/completions", json={"model": "toy", **said})
    assert answer.status_code == 200, answer.text
    prompt, before = prompt_of(96, 60), up.stages()["s1"]
    with streaming(up.url, prompt, LONG) as reading:
        reading.read(10)
        up.worker("s1").kill()
        assert len(reading.tokens) < LONG
        replied = reading.rest()
    assert replied.tokens == truth(prompt, LONG)
    after = up.stages()["s1"]
    assert after["pid"] != before["pid"]
    assert after["address"] == before["address"], "the same node, and the same port there"
    prompt = prompt_of(97, 60)
    with streaming(up.url, prompt, LONG) as reading:
        reading.read(10)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        assert len(reading.tokens) < LONG
        replied = reading.rest()
    assert replied.tokens == truth(prompt, LONG)
    assert up.hosts() == {HEAD}
    assert "stage s1: " in up.process.errors
    pids = [stage["pid"] for stage in up.stages().values()]
    up.process.send(signal.SIGTERM)
    assert up.process.wait() == 0
    until("every stage has ended", lambda: not any(map(psutil.pid_exists, pids)))
    assert set(placement_groups(cluster)) == {"REMOVED"}


def test_no_cluster_is_said(fleet: Fleet) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    port = processes.free_ports(1)[0]
    up, _ = fleet.up("--on", "ray", "--ray-address", f"127.0.0.1:{port}", "--model", "toy")
    assert_clear(up, 1, f"--ray-address 127.0.0.1:{port}", "ray start")
    up, _ = fleet.up("--on", "ray", "--ray-address", "ray://127.0.0.1:1", "--model", "toy")
    assert_clear(up, USAGE, "a cluster that this machine is part of")


def test_a_node_without_the_model_or_with_another_kvring_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")

    def taken(model: str, kvring: str) -> Taken:
        host = StageHost()
        found = host.take(None, model, kvring)
        host.clear()
        return found

    lacks = taken(str(tmp_path / "none.gguf"), installed())
    assert f"no model at {tmp_path}/none.gguf" in lacks.flaw
    assert "kvring pull" in lacks.flaw
    assert "install the same one" in taken("toy", "0.0.0").flaw
    fine = taken("toy", installed())
    assert fine.flaw == ""
    assert re.fullmatch(rf"tcp://{re.escape(fine.host)}:\d+", fine.address)


# ---- without Ray ---------------------------------------------------------------------------------


def test_a_held_port_is_for_who_is_told_of_it() -> None:
    with hold_port("127.0.0.1", None) as holder:
        port = holder.getsockname()[1]
        with hold_port("127.0.0.1", port) as beside:  # as libzmq binds
            assert beside.getsockname()[1] == port
            beside.listen()
            with hold_port("127.0.0.1", port) as third:
                assert third.getsockname()[1] != port, "it is taken: another one"
    with hold_port("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port, "the one it had"


def test_without_ray_a_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert cli.run(["up", "--on", "ray", "--model", "toy"]) == USAGE
    assert capsys.readouterr().err == f"kvring: {command.INSTALL}\n"
    assert "pip install 'kvring[ray]'" in command.INSTALL


@pytest.mark.parametrize("option", [("--ray-gpus", "1"), ("--ray-address", "10.0.0.1:6379")])
def test_an_option_of_rays_goes_with_it(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["up", *option]) == USAGE
    assert capsys.readouterr().err == f"kvring: {option[0]} goes with --on ray\n"


def test_the_pages_commands_and_options_are_understood() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    lines = re.findall(r"^    kvring (.*)$", page, re.M)
    assert lines
    options = understood(["up"])
    for line in lines:
        assert understood(shlex.split(line, comments=True))["on"] == "ray"
    told = {name.replace("-", "_") for name in re.findall(r"`--(ray-[a-z-]+)", page)}
    assert told == {name for name in options if name.startswith("ray_")}
