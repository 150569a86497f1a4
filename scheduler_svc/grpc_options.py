"""Settings of gRPC servers of this side. gRPC ignores names it does not know, so `refuse_unknown` looks each one up."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from grpc._cython import cygrpc  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16 << 20

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A second process on the same port is an error, not a partner.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Clients may ping while their call is silent, as often as they like.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    # Notices clients that are gone without a word.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


def refuse_unknown(options: Sequence[tuple[str, object]]) -> None:
    """Raises ValueError for an option name gRPC does not have and would silently ignore."""
    for name, _ in options:
        if not _is_known(name):
            raise ValueError(f"gRPC has no option {name!r}")


@cache
def _is_known(name: str) -> bool:
    # The names are constants in gRPC's library; there is no other list of them.
    wanted = name.encode() + b"\0"
    overlap = b""
    with Path(cygrpc.__file__).open("rb") as library:
        while block := library.read(1 << 20):
            if wanted in overlap + block:
                return True
            overlap = block[-len(wanted) :]
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def warn_when_exposed(address: str) -> None:
    """Say so when others than this machine can reach HOST:PORT: there is neither TLS nor authentication (D5)."""
    if not is_loopback(address.rpartition(":")[0]):
        log.warning(
            "reachable from other machines, without TLS or authentication: keep the port inside a trusted network",
            extra={"address": address},
        )
