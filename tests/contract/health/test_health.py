"""grpc.health.v1 as scheduler, front end and worker serve it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.rpc.health import HealthServicer as SchedulersHealth
from scheduler_svc.rpc.message_budget import MessageBudget
from tests.support.deaf_caller import DeafWatcher
from worker_svc.health import HealthServicer as WorkersHealth

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
BOTH = pytest.mark.parametrize("kind", [SchedulersHealth, WorkersHealth])


@asynccontextmanager
async def _serving(checks: Any) -> AsyncIterator[tuple[Any, str]]:
    server = grpc.aio.server(interceptors=(MessageBudget(),) if isinstance(checks, SchedulersHealth) else ())
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel), address
    await server.stop(0)


def _of(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def _next(watch: Any) -> int:
    async with asyncio.timeout(30):
        return int((await watch.read()).status)


@BOTH
async def test_f119_check_and_list_say_what_was_set(kind: Any) -> None:
    checks = kind()
    async with _serving(checks) as (stub, _):
        assert (await stub.Check(_of(""))).status == _SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(_of("a"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        checks.set("a", is_serving=False)
        assert (await stub.Check(_of("a"))).status == _NOT_SERVING
        checks.set("a", is_serving=True)
        assert (await stub.Check(_of("a"))).status == _SERVING
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: status.status for name, status in listed.statuses.items()} == {"": _SERVING, "a": _SERVING}


@BOTH
async def test_f119_watch_sends_every_change_of_its_service_and_nothing_else(kind: Any) -> None:
    checks = kind()
    async with _serving(checks) as (stub, _):
        watch = stub.Watch(_of("a"))
        assert await _next(watch) == _UNKNOWN
        checks.set("other", is_serving=True)
        checks.set("a", is_serving=False)
        assert await _next(watch) == _NOT_SERVING
        checks.set("a", is_serving=False)
        checks.set("a", is_serving=True)
        assert await _next(watch) == _SERVING
        watch.cancel()


@BOTH
async def test_f119_more_watchers_than_are_allowed_are_refused_until_one_leaves(kind: Any) -> None:
    checks = kind(2)
    async with _serving(checks) as (stub, _):
        watches = [stub.Watch(_of("")) for _ in range(2)]
        for watch in watches:
            assert await _next(watch) == _SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _next(stub.Watch(_of("")))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(_of(""))).status == _SERVING
        watches[0].cancel()
        async with asyncio.timeout(30):
            while len(checks._changes) == 2:
                await asyncio.sleep(0.01)
        assert await _next(stub.Watch(_of(""))) == _SERVING


@BOTH
async def test_f119_no_name_is_kept_that_is_no_name(kind: Any) -> None:
    async with _serving(kind()) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _next(stub.Watch(_of("a" * 257)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@BOTH
async def test_f119_a_watcher_that_does_not_read_delays_nothing(kind: Any) -> None:
    checks = kind()
    async with _serving(checks) as (stub, address):
        watch = stub.Watch(_of("a"))
        assert await _next(watch) == _UNKNOWN
        with await asyncio.to_thread(DeafWatcher, address, "a") as deaf:
            async with asyncio.timeout(30):
                while len(checks._changes) < 2:
                    await asyncio.sleep(0.01)
            for is_serving, status in ((False, _NOT_SERVING), (True, _SERVING), (False, _NOT_SERVING)):
                checks.set("a", is_serving=is_serving)
                assert await _next(watch) == status
                assert (await stub.Check(_of("a"))).status == status
            assert deaf.num_answer_bytes == 0
        # It is gone, and forgotten.
        async with asyncio.timeout(30):
            while len(checks._changes) > 1:
                await asyncio.sleep(0.01)
        watch.cancel()
