"""Owns what the daemons check before they listen: their own CURVE key, and who could reach them."""

from __future__ import annotations

from pathlib import Path

import structlog

from tools.errors import USAGE, ToolError
from transport.address import exposed
from transport.config import Config, Ring, Stage
from transport.keys import KeyFileError, read_secret
from transport.link import public_of
from transport.trust import CoordinatorTrust, StageTrust, coordinator_trust, stage_trust


def trust_of_stage(config: Config, ring: Ring, stage: Stage) -> StageTrust | None:
    """The keys of a stage's links, its secret read; None where ring.toml has none."""
    secret = _secret(f"stage {stage.name}", stage.public_key, stage.secret_key_file)
    return None if secret is None else stage_trust(config, ring, stage, secret)


def trust_of_coordinator(config: Config) -> CoordinatorTrust | None:
    """The keys of the coordinator's links, its secret read; None where ring.toml has none."""
    own = config.coordinator
    secret = _secret("the coordinator", own.public_key, own.secret_key_file)
    return None if secret is None else coordinator_trust(config, secret)


def _secret(who: str, public: str | None, file: str | None) -> str | None:
    if public is None or file is None:
        return None
    try:
        secret = read_secret(Path(file))
    except KeyFileError as error:
        raise ToolError(f"secret_key_file of {who}: {error}", code=USAGE) from None
    if public_of(secret) != public:
        raise ToolError(
            f"secret_key_file of {who}: {file} is not the secret to its public_key in ring.toml; "
            "put the file there that kvring keygen wrote for it",
            code=USAGE,
        )
    return secret


def check_link(who: str, address: str, *, keys: bool, insecure: bool) -> None:
    """Refuse a link that other machines can reach and that asks nobody for a key."""
    if keys or not exposed(address):
        return
    if not insecure:
        raise ToolError(
            f"{who} would listen on {address}, which other machines can reach, without keys: make "
            "them with kvring keygen --ring FILE, or say --insecure where every machine on that "
            "network may use the ring and read its prompts",
            code=USAGE,
        )
    structlog.get_logger().warning("insecure", listens=address, missing="CURVE keys")


def check_http(address: str, *, keys: bool, insecure: bool) -> None:
    """Refuse an HTTP address that other machines can reach and that asks nobody for a key."""
    if keys or not exposed(address):
        return
    if not insecure:
        raise ToolError(
            f"HTTP address {address}: other machines can reach it, and there are no API keys: give "
            "--api-key-file FILE (kvring apikey NAME makes its lines) or --api-key KEY, listen on "
            "127.0.0.1, or say --insecure where everybody who reaches it may use it (in a "
            "container whose port is published on 127.0.0.1 only, say --insecure)",
            code=USAGE,
        )
    structlog.get_logger().warning("insecure", listens=f"http://{address}", missing="API keys")
