"""WorkerTransport over gRPC. Messages pass as bytes, encoded and decoded elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import grpc
import grpc.aio

from scheduler_svc.errors import LinkLost, LinkRefused, LinkRejected
from scheduler_svc.rpc import cluster_secret
from scheduler_svc.rpc.channels import TO_WORKER, channel
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from scheduler_svc.rpc.status import reason_of
from scheduler_svc.rpc.tls import Tls
from scheduler_svc.workers.transport import StepStream, WorkerLink
from stepfence.v1 import worker_service_pb2

_SERVICE: Final = f"/{worker_service_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}"

_DETAILS_KEY: Final = "grpc-status-details-bin"
_EOF: Final = cast(Any, grpc.aio).EOF

# What the transport itself says when it fails. Everything else was said by the worker.
_TRANSPORT_CODES: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})

# ... although it calls some of it INTERNAL: a proxy or the peer's HTTP/2 layer cut the stream; or it was cut in the
# middle of a write, in which case gRPC forgets why.
_TRANSPORT_DETAILS: Final = ("RST_STREAM", "Internal error from Core")


class GrpcTransport:
    """gRPC, one channel a link; in plain text (D5) without TLS. Every call carries the cluster secret, if there is
    one."""

    def __init__(self, secret: ClusterSecret | None = None, tls: Tls | None = None) -> None:
        self._metadata = cluster_secret.metadata_of(secret)
        self._tls = tls

    def connect(self, address: str) -> WorkerLink:
        """See WorkerTransport."""
        return _GrpcLink(channel(address, TO_WORKER, self._tls), self._metadata)


class _GrpcLink:
    def __init__(self, channel: Any, metadata: cluster_secret.Metadata) -> None:
        # Without serializers, messages are bytes; the published types do not know that they are optional.
        self._channel = channel
        self._metadata = metadata

    async def get_capabilities(self) -> bytes:
        call = self._channel.unary_unary(f"{_SERVICE}/GetCapabilities")
        request = worker_service_pb2.GetCapabilitiesRequest().SerializeToString()
        try:
            answer: bytes = await call(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None
        return answer

    async def get_tokenizer(self) -> AsyncIterator[bytes]:
        call = self._channel.unary_stream(f"{_SERVICE}/GetTokenizer")
        request = worker_service_pb2.GetTokenizerRequest().SerializeToString()
        try:
            async for piece in call(request, metadata=self._metadata):
                yield piece
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None

    def run_steps(self) -> StepStream:
        call = self._channel.stream_stream(f"{_SERVICE}/RunSteps")
        return _GrpcStepStream(call(metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close()


class _GrpcStepStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None
        except asyncio.InvalidStateError:
            raise LinkLost("the stream is over") from None
        except asyncio.CancelledError:
            raise _cancelled_or_lost() from None

    async def receive(self) -> bytes | None:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _judged(error) from None
        except asyncio.CancelledError:
            raise _cancelled_or_lost() from None
        return None if data is _EOF else data

    def cancel(self) -> None:
        self._call.cancel()


def _reason(error: grpc.aio.AioRpcError) -> str:
    for key, value in cast(Any, error.trailing_metadata()) or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return reason_of(value)
    return ""


def _cancelled_or_lost() -> BaseException:
    # gRPC reports a call that was cancelled on this side in the same way as the cancellation of the task.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return LinkLost("the stream was given up")


def _judged(error: grpc.aio.AioRpcError) -> LinkLost | LinkRejected:
    code = error.code()
    details = error.details() or ""
    reason = _reason(error)
    if reason:
        # The transport knows no such details: the worker said so, whatever the code.
        return LinkRejected(code.name, details, reason)
    if code in _TRANSPORT_CODES:
        if "Connection refused" in details:
            return LinkRefused(details)
        return LinkLost(f"{code.name}: {details}")
    if code is grpc.StatusCode.INTERNAL and any(text in details for text in _TRANSPORT_DETAILS):
        return LinkLost(f"{code.name}: {details}")
    return LinkRejected(code.name, details)
