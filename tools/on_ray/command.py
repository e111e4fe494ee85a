"""Owns `kvring up --on ray`: connects to the cluster, and lets `kvring up` do the rest."""

from __future__ import annotations

import logging
import re
import signal
import socket
from importlib.util import find_spec
from typing import Any

from tools.errors import USAGE, ToolError
from tools.up import run_up

REACH_S = 10.0
_HOST_PORT = re.compile(r"([^\s:/]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
INSTALL = "--on ray needs Ray, which is not installed here: pip install 'kvring[ray]'"


def run_up_on_ray(
    *,
    ray_address: str | None,
    ray_place: str | None,
    ray_gpus: int | None,
    ray_cpus: float | None,
    ray_wait_s: float | None,
    **options: object,
) -> int:
    """`kvring up` with its stages on a Ray cluster. Raises ToolError."""
    if find_spec("ray") is None:
        raise ToolError(INSTALL, code=USAGE)
    ray = _connected(ray_address)
    from tools.on_ray.cluster import Cluster, Wish

    wish = Wish(
        spread=ray_place != "pack",
        gpus=ray_gpus,
        cpus=1.0 if ray_cpus is None else ray_cpus,
        wait_s=60.0 if ray_wait_s is None else ray_wait_s,
    )
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a coordinator that starts inherits it
    cluster = Cluster(wish)
    try:
        return run_up(elsewhere=cluster, **options)
    finally:
        cluster.close()
        ray.shutdown()
        signal.signal(signal.SIGUSR1, before)


def _connected(address: str | None) -> Any:
    """Ray, connected to a cluster that runs already."""
    import ray

    try:
        if address is not None:
            _reach(address)
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.CRITICAL)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"--ray-address {address}" if address else "no --ray-address"
        why = str(error).strip().splitlines()[0]
        text = "start one with `ray start --head`, or join one with `ray start --address=HOST:PORT`"
        raise ToolError(f"{where}: no Ray cluster was reached ({why}); {text}") from None
    return ray


def _reach(address: str) -> None:
    """Raises OSError at once where nobody listens: Ray would try for minutes."""
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        text = "say HOST:PORT of a cluster that this machine is part of (ray start --address=...)"
        raise ToolError(f"--ray-address {address}: {text}", code=USAGE)
    socket.create_connection((found[1].strip("[]"), int(found[2])), REACH_S).close()
