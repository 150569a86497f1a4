"""Calls that are begun and not made, at the gRPC port of every part: what a stranger can hold with them is bounded, by
number and by time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_svc.rpc import message_budget as schedulers_budget
from scheduler_svc.rpc import reflection as schedulers_reflection
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from tests.contract.frontend.harness import served
from tests.support.http2_peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    MAX_CONCURRENT_STREAMS,
    RST_STREAM,
    Http2Peer,
    frame,
    message,
)
from tests.support.scheduler_process import running_scheduler
from tests.support.worker_fixtures import own_worker
from worker_svc import reflection as workers_reflection
from worker_svc import requests as workers_requests

_SECRET = "a-secret-for-tests-0123456789"
_CHECK = "/grpc.health.v1.Health/Check"
_REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_CANCEL = b"\0\0\0\x08"
_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _RESOURCE_EXHAUSTED, _UNAUTHENTICATED = 3, 4, 8, 16

Serve = Callable[[], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def _scheduler() -> AsyncIterator[str]:
    async with running_scheduler(secret=ClusterSecret(_SECRET)) as scheduler:
        yield scheduler.address


@asynccontextmanager
async def _front_end() -> AsyncIterator[str]:
    async with served() as under_test:
        yield under_test.address


@asynccontextmanager
async def _worker() -> AsyncIterator[str]:
    async with own_worker(secret=_SECRET) as worker:
        yield worker.target.address


EVERY_PORT = pytest.mark.parametrize("serve", [_scheduler, _front_end, _worker])


async def _is_served(address: str) -> bool:
    async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@EVERY_PORT
async def test_streams_that_are_reset_at_once_are_refused_beyond_a_bound(serve: Serve) -> None:
    async with serve() as address, Http2Peer(address) as peer:
        assert peer.settings[MAX_CONCURRENT_STREAMS] <= 4608
        num_streams = 3 * peer.settings[MAX_CONCURRENT_STREAMS]
        opened = [peer.head(1 + 2 * i, _CHECK) + frame(RST_STREAM, 0, 1 + 2 * i, _CANCEL) for i in range(num_streams)]
        await peer.send(b"".join(opened))
        # A stream beyond the bound is reset by the server.
        while (await peer.next_frame()).kind != RST_STREAM:
            pass
        assert await _is_served(address)


@EVERY_PORT
async def test_a_call_without_a_request_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, "REQUEST_TIMEOUT_S", 0.2)
    async with serve() as address, Http2Peer(address) as peer:
        await peer.send(peer.head(1, _CHECK))
        assert await peer.status(1) == (_INVALID_ARGUMENT, "no request came within 0.2 s")
        # A request that comes byte by byte is one that does not come.
        await peer.send(peer.head(3, _CHECK) + frame(DATA, 0, 3, message(b"\x0a\x05")[:6]))
        assert (await peer.status(3))[0] == _INVALID_ARGUMENT
        assert await _is_served(address)


@EVERY_PORT
async def test_a_call_that_ends_without_a_request_is_answered(serve: Serve) -> None:
    async with serve() as address, Http2Peer(address) as peer:
        await peer.send(peer.head(1, _CHECK, END_HEADERS | END_STREAM))
        assert await peer.status(1) == (_INVALID_ARGUMENT, "the call ended without a request")


@EVERY_PORT
async def test_of_too_many_calls_without_a_request_the_oldest_gives_way(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, "MAX_WAITING", 3)
    async with serve() as address, Http2Peer(address) as peer:
        for stream in (1, 3, 5, 7):
            await peer.send(peer.head(stream, _CHECK))
        code, text = await peer.status(1)
        assert code == _INVALID_ARGUMENT and "newer calls" in text
        # The others are still there.
        await peer.send(frame(DATA, END_STREAM, 7, message(b"")))
        assert (await peer.status(7))[0] == 0
        assert await _is_served(address)


@pytest.mark.parametrize(
    ("serve", "path"),
    [
        (_scheduler, "/stepfence.v1.AdminService/GetStatus"),
        (_scheduler, "/stepfence.v1.SessionService/Attach"),
        (_worker, "/stepfence.v1.WorkerService/GetCapabilities"),
        (_worker, "/stepfence.v1.WorkerService/RunSteps"),
    ],
)
async def test_a_call_without_the_secret_is_refused_before_its_request_comes(serve: Serve, path: str) -> None:
    async with serve() as address, Http2Peer(address) as peer:
        await peer.send(peer.head(1, path))
        assert (await peer.status(1))[0] == _UNAUTHENTICATED


@EVERY_PORT
async def test_bytes_that_are_no_message_are_refused_without_a_line_in_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as address, Http2Peer(address) as peer:
        for stream, path in ((1, _CHECK), (3, _REFLECT)):
            await peer.send(peer.head(stream, path) + frame(DATA, END_STREAM, stream, message(b"\xff\xff\xff")))
            assert (await peer.status(stream))[0] == _INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@EVERY_PORT
async def test_reflection_streams_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (schedulers_reflection, workers_reflection):
        monkeypatch.setattr(module, "MAX_STREAMS", 2)
    async with serve() as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        held = [stub.ServerReflectionInfo() for _ in range(2)]
        for call in held:
            await call.write(question)
            assert (await call.read()).list_services_response.service
        third = stub.ServerReflectionInfo(iter([question]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await third.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        again = stub.ServerReflectionInfo(iter([question]))
        assert (await again.read()).list_services_response.service


@EVERY_PORT
async def test_a_silent_reflection_stream_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (schedulers_reflection, workers_reflection):
        monkeypatch.setattr(module, "SILENCE_S", 0.2)
    async with serve() as address, Http2Peer(address) as peer:
        await peer.send(peer.head(1, _REFLECT))
        assert await peer.status(1) == (_DEADLINE_EXCEEDED, "no request for 0.2 s")


def _set(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    for module in (schedulers_budget, workers_requests):
        monkeypatch.setattr(module, name, value)
