"""A whole front end on the test's loop, between a client over real gRPC and a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.config import FrontendSettings
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.server import SERVICE, FrontEndProcess
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc, usage_pb2
from stepfence.v1.sampling_pb2 import SamplingParams
from tests.support.session_double import SessionDouble

# The type stubs lack it.
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class FrontEndUnderTest:
    process: FrontEndProcess
    double: SessionDouble
    channel: grpc.aio.Channel
    serving: asyncio.Task[int]

    @property
    def stub(self) -> Any:
        return generation_service_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.process.port}"

    async def health(self, service: str = SERVICE) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        return int(response.status)

    async def until_health(self, status: int) -> None:
        await until(lambda: self.process.front_end.not_ready_cause is None if status == SERVING else True)
        async with asyncio.timeout(30):
            while await self.health() != status:
                await asyncio.sleep(0.01)

    async def until_nothing_is_left(self) -> None:
        """No client call, no live request, no handle at the scheduler."""
        front_end = self.process.front_end
        await until(
            lambda: (
                front_end.num_streams == 0
                and front_end.num_live == 0
                and front_end._session.num_handles == 0
                and not self.double.live
            )
        )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def front_end(
    double: SessionDouble,
    *,
    ready: bool = True,
    limits: Limits | None = None,
    secret: ClusterSecret | None = None,
    **settings: Any,
) -> AsyncIterator[FrontEndUnderTest]:
    """Attached to the double, and ready unless told otherwise; ended at once afterwards."""
    process = FrontEndProcess(
        FrontendSettings(**{"listen": "127.0.0.1:0", "scheduler": double.address, **settings}),
        limits=limits,
        secret=secret,
    )
    serving = asyncio.create_task(process.serve())
    await process.listening.wait()
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{process.port}",
        options=(("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)),
    )
    under_test = FrontEndUnderTest(process, double, channel, serving)
    try:
        if ready:
            await under_test.until_health(SERVING)
        yield under_test
    finally:
        await channel.close(None)
        process.stop()
        process.stop()
        await asyncio.wait_for(serving, 30)


@contextlib.asynccontextmanager
async def served(double: SessionDouble | None = None, **settings: Any) -> AsyncIterator[FrontEndUnderTest]:
    async with double or SessionDouble() as scheduler, front_end(scheduler, **settings) as under_test:
        yield under_test


def text_request(text: str = "hi", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def sampled(text: str = "hi", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=SamplingParams(**sampling))


def complete(request: pb.GenerateRequest) -> pb.CompleteRequest:
    return pb.CompleteRequest(request=request)


@dataclass
class Refusal:
    code: str
    reason: str
    message: str
    domain: str
    metadata: dict[str, str]
    fields: list[str]
    retry_after_s: float | None
    usage: usage_pb2.Usage | None


def read_refusal(error: grpc.aio.AioRpcError) -> Refusal:
    trailers: Any = error.trailing_metadata()
    data = dict(trailers)["grpc-status-details-bin"]
    assert isinstance(data, bytes)
    status = status_pb2.Status.FromString(data)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    info, bad_request, retry, usage = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        usage_pb2.Usage(),
    )
    found = {
        type(message).__name__ for message in (info, bad_request, retry, usage) for any_ in status.details
        if any_.Unpack(message)
    }  # fmt: skip
    return Refusal(
        code=error.code().name,
        reason=info.reason,
        message=status.message,
        domain=info.domain,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad_request.field_violations],
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if "RetryInfo" in found else None,
        usage=usage if "Usage" in found else None,
    )


async def refusal(call: Any) -> Refusal:
    """How a call fails; it must. Streams are read to their end."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not EOF:
                pass
            await call
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    raise AssertionError("the call ended OK")


@dataclass
class Streamed:
    """A stream that ended OK, checked for its order."""

    accepted: pb.Accepted
    deltas: list[pb.Delta] = field(default_factory=list)
    finished: pb.Finished = field(default_factory=pb.Finished)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


async def read_stream(call: Any) -> Streamed:
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(events) - 2), "finished"]
    assert all(event.delta.text or event.delta.token_ids for event in events[1:-1])
    return Streamed(events[0].accepted, [event.delta for event in events[1:-1]], events[-1].finished)


async def until_taken(under_test: FrontEndUnderTest) -> None:
    """Until the front end has seen all that was sent so far: frames are taken in order, and so is this one."""
    other = asyncio.ensure_future(under_test.stub.Complete(complete(text_request()), timeout=30))
    marker = await under_test.double.next_request()
    marker.accept()
    marker.end_length()
    await other
