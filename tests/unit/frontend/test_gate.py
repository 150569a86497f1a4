"""The gate that counts a front end's calls."""

from __future__ import annotations

import contextlib
from ipaddress import ip_network

import pytest

from scheduler_svc.frontend.errors import RequestError
from scheduler_svc.frontend.gate import CallGate, address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:50123", "192.0.2.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50123", "2001:db8:1:2::"),
        ("ipv6:[2001:db8:1:2::9]:50123", "2001:db8:1:2::"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50123", "fe80::"),
        ("ipv6:[::ffff:192.0.2.7]:50123", "192.0.2.7"),
        ("unix:/run/socket", None),
        ("unix:", None),
        ("", None),
    ],
)
def test_f123_a_peer_is_an_address_without_its_port(peer: str, address: str | None) -> None:
    """The last 64 bits of an IPv6 address are the client's own to choose, so they are left out."""
    found = address_of(peer)
    assert (None if found is None else str(found)) == address


def _reason(gate: CallGate, peer: str) -> str:
    with pytest.raises(RequestError) as refused, gate.call(peer):
        pass
    return refused.value.failure.reason


def test_f123_calls_are_counted_by_address_and_in_all() -> None:
    gate = CallGate(max_calls=3, max_calls_per_peer=2, gateways=(ip_network("198.51.100.0/24"),))
    with contextlib.ExitStack() as held:
        held.enter_context(gate.call("ipv4:192.0.2.1:1"))
        held.enter_context(gate.call("ipv4:192.0.2.1:2"))
        assert _reason(gate, "ipv4:192.0.2.1:3") == "TOO_MANY_CALLS"
        held.enter_context(gate.call("ipv4:198.51.100.1:1"))
        assert _reason(gate, "ipv4:198.51.100.1:2") == "QUEUE_FULL"
        assert _reason(gate, "unix:") == "QUEUE_FULL"
    with gate.call("ipv4:192.0.2.1:4"):
        assert gate.num_calls == 1
    assert gate.num_calls == 0 and gate.num_peers == 0


def test_f123_a_gateway_and_an_unbounded_peer_have_only_the_common_bound() -> None:
    gate = CallGate(max_calls=100, max_calls_per_peer=1, gateways=(ip_network("2001:db8::/32"), ip_network("10.0.0.1")))
    with contextlib.ExitStack() as held:
        for port in range(10):
            held.enter_context(gate.call(f"ipv4:10.0.0.1:{port}"))
            held.enter_context(gate.call(f"ipv6:[2001:db8::1]:{port}"))
    unbounded = CallGate(max_calls=100, max_calls_per_peer=None)
    with contextlib.ExitStack() as held:
        for port in range(10):
            held.enter_context(unbounded.call(f"ipv4:10.0.0.1:{port}"))
