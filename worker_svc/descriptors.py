"""How many file descriptors this process may have, and so how many connections its servers take.

A process without a free descriptor can accept nothing: connections stay in the kernel's queue, and calls and health
checks on them wait for their deadline. So servers close connections beyond a bound that lies below the limit.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Final

# Kept for everything that is no connection of the server: the model's files, devices.
RESERVE: Final = 256
# Connections that the server takes at most: one scheduler, probes, and people who look.
MOST_CONNECTIONS: Final = 1_024


def raise_limit() -> None:
    """Let this process have as many descriptors as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Systems may refuse "unlimited".
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(listen: str) -> int:
    """Connections that a gRPC server which listens on HOST:PORT may have at each of the host's addresses: together, and
    with the reserve (half of a small limit), they stay below the limit of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    room = soft - min(RESERVE, soft // 2)
    return max(1, min(room // _num_addresses(listen), MOST_CONNECTIONS))


def _num_addresses(listen: str) -> int:
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return len({info[4][0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}) or 1
    except OSError:
        return 1
