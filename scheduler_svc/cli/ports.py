"""Which address a part of `stepfence up` gets: the one asked for, or the next free port after it."""

from __future__ import annotations

import socket
from typing import Final

from scheduler_svc.config import SettingsError

_PORTS_TO_TRY: Final = 64


def free_address(wanted: str, taken: set[str], reserved: frozenset[int] = frozenset()) -> str:
    """The first free HOST:PORT from `wanted` upwards that is not in `taken`, which it joins. Port 0: any free one.

    reserved: ports that others ask for, not to be used instead of the wanted one.
    Raises SettingsError when the host is not of this machine or no port is free.
    """
    host, _, text = wanted.rpartition(":")
    first = int(text)
    candidates = [0] * _PORTS_TO_TRY if first == 0 else range(first, min(first + _PORTS_TO_TRY, 65536))
    problem: OSError | None = None
    for port in candidates:
        if port in reserved and port != first:
            continue
        try:
            address = f"{host}:{_bind(host.strip('[]'), port)}"
        except OSError as error:
            problem = error
            continue
        if address not in taken and (first or _port(address) not in reserved):
            taken.add(address)
            return address
    raise SettingsError(f"{wanted}: no port from {first} on can be used: {problem}")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _bind(host: str, port: int) -> int:
    """The port that was bound for a moment. Raises OSError when it cannot be."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections linger may be used again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
        bound: int = probe.getsockname()[1]
    return bound
