"""Owns what a computer has left: memory that a process may still take, and which computer it is.

A container's limit counts where it is lower than what the machine has.
"""

from __future__ import annotations

import resource
import socket
from hashlib import blake2b
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_memory() -> tuple[int, int]:
    """Bytes of main memory: what a process may still take, and all of it."""
    found = psutil.virtual_memory()
    free, total = int(found.available), int(found.total)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free, total
    return max(0, min(free, limit - used)), min(total, limit)


def computer() -> str:
    """Equal for the processes of one running computer, and of no other."""
    try:
        text = BOOT.read_text()
    except OSError:
        text = socket.gethostname()
    return blake2b(text.encode(), digest_size=6).hexdigest()


def open_files() -> int:
    """How many files and sockets a process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
