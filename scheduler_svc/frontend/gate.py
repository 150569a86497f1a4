"""How many calls are taken: in all, and from one client address.

A call counts from the moment its message has been read until it has ended. A refused call holds nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import unquote

from scheduler_svc.frontend.errors import Code, Failure, RequestError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_RETRY_S: Final = 1.0
# Bits of an IPv6 address that a client can choose by itself.
_CHOSEN_BITS: Final = 64


class CallGate:
    """Counts calls. max_calls: how many there may be at once. max_calls_per_peer: how many of one address; None: as
    many as in all. An IPv6 address is one with the others of its /64. Calls from `gateways`, each of which stands for
    many clients, and calls without an address (Unix sockets) are counted in all only."""

    def __init__(
        self, *, max_calls: int, max_calls_per_peer: int | None = None, gateways: Sequence[Network] = ()
    ) -> None:
        self._max_calls = max_calls
        self._max_calls_per_peer = max_calls_per_peer
        self._gateways = tuple(gateways)
        self._num_calls = 0
        self._by_peer: Counter[Address] = Counter()
        self._bounded = lru_cache(4096)(self._find_bounded)

    @property
    def num_calls(self) -> int:
        """Calls that are now within."""
        return self._num_calls

    @property
    def num_peers(self) -> int:
        """Addresses whose calls are counted and that have one now."""
        return len(self._by_peer)

    @contextlib.contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Around one call; peer: as gRPC says it, such as "ipv4:192.0.2.1:50123". Raises RequestError
        RESOURCE_EXHAUSTED with the reason TOO_MANY_CALLS or QUEUE_FULL when there is no room."""
        address = self._bounded(peer.rpartition(":")[0])
        limit = self._max_calls_per_peer
        if address is not None and limit is not None and self._by_peer[address] >= limit:
            raise _too_many(limit)
        if self._num_calls >= self._max_calls:
            raise _full(self._max_calls)
        self._num_calls += 1
        if address is not None:
            self._by_peer[address] += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if address is not None:
                self._by_peer[address] -= 1
                if not self._by_peer[address]:
                    del self._by_peer[address]

    def _find_bounded(self, peer_without_port: str) -> Address | None:
        """The address by which its calls are bounded; None: they are not."""
        if self._max_calls_per_peer is None:
            return None
        exact = _exact_address(peer_without_port)
        if exact is None or any(exact in network for network in self._gateways):
            return None
        return _shared(exact)


def address_of(peer: str) -> Address | None:
    """The client's address in gRPC's name of a peer, of IPv6 the /64; None when it has none."""
    exact = _exact_address(peer.rpartition(":")[0])
    return None if exact is None else _shared(exact)


def _exact_address(peer_without_port: str) -> Address | None:
    kind, _, host = peer_without_port.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    try:
        address = ip_address(unquote(host).strip("[]").partition("%")[0])
    except ValueError:
        return None
    # An IPv4 client of a listener for both.
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _shared(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    return IPv6Address(int(address) >> _CHOSEN_BITS << _CHOSEN_BITS)


def _too_many(limit: int) -> RequestError:
    message = (
        f"this client address has {limit} calls open, the most that are allowed (--max-calls-per-peer); try again when "
        "one has ended. For an address that stands for many clients, the operator sets --gateway"
    )
    return _refusal("TOO_MANY_CALLS", message, "max_calls_per_peer", limit)


def _full(limit: int) -> RequestError:
    message = f"this front end has {limit} calls open, the most that are allowed (--max-calls); try again later"
    return _refusal("QUEUE_FULL", message, "max_calls", limit)


def _refusal(reason: str, message: str, setting: str, limit: int) -> RequestError:
    facts = {"setting": setting, "limit": str(limit)}
    return RequestError(Failure(Code.RESOURCE_EXHAUSTED, reason, message, facts, retry_after_s=_RETRY_S))
