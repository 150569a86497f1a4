"""Connections are bounded below the limit of file descriptors."""

from __future__ import annotations

import resource
from types import ModuleType

import pytest

from scheduler_svc.rpc import descriptors as of_scheduler
from worker_svc import descriptors as of_worker


@pytest.fixture(params=[of_scheduler, of_worker], ids=["scheduler", "worker"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@pytest.mark.parametrize(("limit", "room"), [(1_024, 768), (512, 256), (100, 50), (1, 1)])
def test_f130_a_reserve_is_kept(module: ModuleType, limit: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert module.max_connections("127.0.0.1:0") == room


@pytest.mark.parametrize("limit", [1 << 20, resource.RLIM_INFINITY])
def test_f130_memory_bounds_them_where_descriptors_do_not(
    module: ModuleType, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert module.max_connections("127.0.0.1:0") == module.MOST_CONNECTIONS


def test_f130_each_address_of_a_host_has_its_share(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 1_024))
    two = [(None, None, 0, "", (address, 0)) for address in ("127.0.0.1", "::1", "127.0.0.1")]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: two)
    assert module.max_connections("localhost:0") == 384


def test_f130_the_limit_is_raised_to_the_hard_one(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4_096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    module.raise_limit()
    assert raised == [(4_096, 4_096)]


def test_f130_a_system_that_refuses_does_no_harm(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    module.raise_limit()
