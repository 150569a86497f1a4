"""D59: calls between the parts carry the cluster secret, and a stranger's are refused (F124)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from scheduler_svc.config import FrontendSettings
from scheduler_svc.frontend.server import FrontEndProcess
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from stepfence.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    sampling_pb2,
    session_service_pb2,
    session_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from tests.support.scheduler_process import RunningScheduler, running_scheduler, state_of, until
from tests.support.worker_fixtures import OwnWorker, own_worker

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
SECRET = ClusterSecret("the-secret-of-this-test")
OTHER = ClusterSecret("another-secret-altogether")
WRONG_CREDENTIALS = {
    "none": ((), "CLUSTER_SECRET_MISSING"),
    "another deployment's": (OTHER.metadata, "CLUSTER_SECRET_WRONG"),
}
# Every RPC between the parts.
CALLS: dict[str, Callable[[grpc.aio.Channel, Any], Any]] = {
    "WorkerService.GetCapabilities": lambda channel, metadata: worker_service_pb2_grpc.WorkerServiceStub(
        channel
    ).GetCapabilities(worker_service_pb2.GetCapabilitiesRequest(), metadata=metadata),
    "WorkerService.GetTokenizer": lambda channel, metadata: worker_service_pb2_grpc.WorkerServiceStub(
        channel
    ).GetTokenizer(worker_service_pb2.GetTokenizerRequest(), metadata=metadata),
    "WorkerService.RunSteps": lambda channel, metadata: worker_service_pb2_grpc.WorkerServiceStub(channel).RunSteps(
        _frames(worker_service_pb2.RunStepsRequest(open=worker_service_pb2.Open(epoch=1))), metadata=metadata
    ),
    "SessionService.Attach": lambda channel, metadata: session_service_pb2_grpc.SessionServiceStub(channel).Attach(
        _frames(session_service_pb2.AttachRequest()), metadata=metadata
    ),
    "SessionService.GetModel": lambda channel, metadata: session_service_pb2_grpc.SessionServiceStub(channel).GetModel(
        session_service_pb2.SessionServiceGetModelRequest(), metadata=metadata
    ),
    "SessionService.GetTokenizer": lambda channel, metadata: session_service_pb2_grpc.SessionServiceStub(
        channel
    ).GetTokenizer(session_service_pb2.SessionServiceGetTokenizerRequest(), metadata=metadata),
    "AdminService.GetStatus": lambda channel, metadata: admin_service_pb2_grpc.AdminServiceStub(channel).GetStatus(
        admin_service_pb2.GetStatusRequest(), metadata=metadata
    ),
    "AdminService.AuditKv": lambda channel, metadata: admin_service_pb2_grpc.AdminServiceStub(channel).AuditKv(
        admin_service_pb2.AuditKvRequest(), metadata=metadata
    ),
    "AdminService.Drain": lambda channel, metadata: admin_service_pb2_grpc.AdminServiceStub(channel).Drain(
        admin_service_pb2.DrainRequest(), metadata=metadata
    ),
    "AdminService.ResetPrefixCache": lambda channel, metadata: admin_service_pb2_grpc.AdminServiceStub(
        channel
    ).ResetPrefixCache(admin_service_pb2.ResetPrefixCacheRequest(), metadata=metadata),
}


async def _frames(frame: Any) -> AsyncIterator[Any]:
    yield frame


@asynccontextmanager
async def deployment() -> AsyncIterator[tuple[OwnWorker, RunningScheduler]]:
    """A scripted worker and its scheduler, both with the secret; ready."""
    async with (
        own_worker(secret="the-secret-of-this-test") as worker,
        running_scheduler(worker.target.address, secret=SECRET) as scheduler,
    ):
        await scheduler.ready()
        yield worker, scheduler


async def _refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and reason of a call that must fail."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            while await call.read() is not EOF:
                pass
    except grpc.aio.AioRpcError as error:
        trailers: Any = error.trailing_metadata()
        details = dict(trailers).get("grpc-status-details-bin", b"")
        info = error_details_pb2.ErrorInfo()
        for detail in status_pb2.Status.FromString(details).details:
            detail.Unpack(info)
        return error.code(), info.reason
    raise AssertionError("the call was not refused")


def test_every_rpc_between_the_parts_is_tried() -> None:
    modules = (worker_service_pb2, session_service_pb2, admin_service_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    assert {f"{service.name}.{method.name}" for service in services for method in service.methods} == CALLS.keys()


@pytest.mark.parametrize("credential", WRONG_CREDENTIALS)
async def test_f124_a_stranger_is_refused_every_rpc_and_nothing_happens(credential: str) -> None:
    metadata, reason = WRONG_CREDENTIALS[credential]
    async with deployment() as (worker, scheduler):
        epoch = (await scheduler.status()).ranks[0].epoch
        for name, call in CALLS.items():
            address = worker.target.address if name.startswith("Worker") else scheduler.address
            async with grpc.aio.insecure_channel(address) as channel:
                async with asyncio.timeout(30):
                    answer = await _refused(call(channel, metadata))
            assert answer == (grpc.StatusCode.UNAUTHENTICATED, reason), name
        status = await scheduler.status()
        assert not status.draining and status.ready
        # The worker was not taken over.
        assert [(state_of(rank), rank.epoch) for rank in status.ranks] == [("up", epoch)]


async def test_a_scheduler_without_the_secret_says_so_and_keeps_asking() -> None:
    async with (
        own_worker(secret="the-secret-of-this-test") as worker,
        running_scheduler(worker.target.address) as scheduler,
        asyncio.timeout(30),
    ):
        while "--cluster-secret-file" not in (rank := (await scheduler.status()).ranks[0]).cause:
            await asyncio.sleep(0.01)
        assert state_of(rank) == "connecting"


async def test_a_front_end_without_the_secret_names_it_as_what_keeps_it_from_being_ready() -> None:
    async with deployment() as (_, scheduler), _front_end(scheduler.address, None) as front_end:
        await until(lambda: "cluster secret" in (front_end.front_end.not_ready_cause or ""))


@asynccontextmanager
async def _front_end(scheduler_address: str, secret: ClusterSecret | None) -> AsyncIterator[FrontEndProcess]:
    settings = FrontendSettings(listen="127.0.0.1:0", scheduler=scheduler_address)
    process = FrontEndProcess(settings, secret=secret)
    serving = asyncio.create_task(process.serve())
    await process.listening.wait()
    try:
        yield process
    finally:
        process.stop()
        process.stop()
        await serving


def _long_request(request_id: str = "") -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        request_id=request_id, text="hello", sampling=sampling_pb2.SamplingParams(max_tokens=900, ignore_eos=True)
    )


@asynccontextmanager
async def _clients() -> AsyncIterator[Any]:
    async with deployment() as (_, scheduler), _front_end(scheduler.address, SECRET) as front_end:
        await until(lambda: front_end.front_end.not_ready_cause is None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front_end.port}") as channel:
            yield generation_service_pb2_grpc.GenerationServiceStub(channel)


async def test_f124_a_client_cannot_abort_by_an_id_that_another_client_chose() -> None:
    async with _clients() as stub:
        call = stub.Generate(_long_request("order-17"))
        assert (await call.read()).accepted.request_id == "order-17"
        chosen = generation_service_pb2.AbortRequest(request_id="order-17")
        free = generation_service_pb2.AbortRequest(request_id="order-18")
        for metadata in ((), OTHER.metadata):
            # The same answer whether the id is live or not: it must not tell who runs what.
            for request in (chosen, free):
                assert await _refused(stub.Abort(request, metadata=metadata)) == (
                    grpc.StatusCode.PERMISSION_DENIED,
                    "ABORT_NOT_ALLOWED",
                )
        assert not call.done()
        await stub.Abort(chosen, metadata=SECRET.metadata)
        assert await _refused(call) == (grpc.StatusCode.CANCELLED, "ABORTED")


async def test_f124_an_id_that_looks_drawn_but_was_chosen_is_protected_all_the_same() -> None:
    async with _clients() as stub:
        chosen = "gen-" + "0" * 32
        call = stub.Generate(_long_request(chosen))
        await call.read()
        abort = generation_service_pb2.AbortRequest(request_id=chosen)
        assert (await _refused(stub.Abort(abort)))[1] == "ABORT_NOT_ALLOWED"
        await stub.Abort(abort, metadata=SECRET.metadata)
        assert (await _refused(call))[1] == "ABORTED"
        # Ended, it is an id of that form which is not live.
        assert (await _refused(stub.Abort(abort)))[1] == "REQUEST_NOT_FOUND"


async def test_an_id_that_the_server_drew_can_be_aborted_by_its_holder() -> None:
    async with _clients() as stub:
        call = stub.Generate(_long_request())
        request_id = (await call.read()).accepted.request_id
        await stub.Abort(generation_service_pb2.AbortRequest(request_id=request_id))
        assert await _refused(call) == (grpc.StatusCode.CANCELLED, "ABORTED")
