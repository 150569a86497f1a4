"""Settings of gRPC servers of this side, and their ports. gRPC ignores names it does not know, so `refuse_unknown`
looks each one up."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import grpc.aio
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


def listen(server: grpc.aio.Server, address: str) -> int:
    """Let `server` listen on HOST:PORT; the real port. Raises OSError whose text is the system's reason."""
    # Asked first: gRPC tells the reason only in a line of its own on stderr.
    cause = _bind_error(address)
    if cause is None:
        try:
            if port := server.add_insecure_port(address):
                return port
        except RuntimeError as error:
            cause = str(error)
    raise OSError(cause or "taken, or not of this machine")


def _bind_error(address: str) -> str | None:
    """Why HOST:PORT cannot be listened on, in the system's words; None when it can."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    cause = "no address"
    try:
        # A machine without IPv6 listens on 0.0.0.0 instead.
        hosts = (host, "0.0.0.0") if host == "::" else (host,)
        found = [info for name in hosts for info in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)]
    except OSError as error:
        return error.strerror or str(error)
    for family, kind, _, _, where in found:
        try:
            with socket.socket(family, kind) as probe:
                # As servers do: a port whose last connections linger may be used again.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                return None
        except OSError as error:
            cause = error.strerror or str(error)
    return cause


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
