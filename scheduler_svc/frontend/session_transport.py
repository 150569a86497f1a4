"""SessionTransport over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from scheduler_svc.frontend.errors import SessionLost, TokenizerError
from scheduler_svc.rpc import cluster_secret
from scheduler_svc.rpc.channels import TO_SCHEDULER, channel
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from scheduler_svc.rpc.tls import Tls
from stepfence.v1 import model_pb2, session_service_pb2, session_service_pb2_grpc

if TYPE_CHECKING:
    from scheduler_svc.frontend.session_client import SessionStream

# Seconds; a scheduler that answers no unary call for so long is asked again.
_CALL_TIMEOUT_S: Final = 30.0
# Seconds; a scheduler that sends no further part of a tokenizer for so long is asked again.
_CHUNK_TIMEOUT_S: Final = 30.0
# Of all files together. A scheduler passes on no more either.
_MAX_TOKENIZER_BYTES: Final = 256 << 20


class GrpcTransport:
    """Calls one scheduler. Use within a running loop; `close` it. Every call carries the cluster secret, if there is
    one."""

    def __init__(self, address: str, secret: ClusterSecret | None = None, tls: Tls | None = None) -> None:
        self._address = address
        self._metadata = cluster_secret.metadata_of(secret)
        self._tls = tls
        self._replaced: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._tls_version = 0 if self._tls is None else self._tls.look_again()
        self._channel = channel(self._address, TO_SCHEDULER, self._tls)
        self._stub: Any = session_service_pb2_grpc.SessionServiceStub(self._channel)

    def attach(self) -> SessionStream:
        if self._tls is not None and self._tls.look_again() != self._tls_version:
            # A channel keeps the certificate that it was made with.
            closing = asyncio.ensure_future(self._channel.close(None))
            self._replaced.add(closing)
            closing.add_done_callback(self._replaced.discard)
            self._open()
        return _GrpcStream(self._stub.Attach(metadata=self._metadata), self._address)

    async def get_model(self) -> model_pb2.ModelInfo | None:
        request = session_service_pb2.SessionServiceGetModelRequest()
        try:
            response = await self._stub.GetModel(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise _lost(self._address, error) from error
        model: model_pb2.ModelInfo = response.model
        return model

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]:
        """See SessionTransport."""
        call = self._stub.GetTokenizer(session_service_pb2.SessionServiceGetTokenizerRequest(), metadata=self._metadata)
        chunks: list[model_pb2.TokenizerChunk] = []
        size = 0
        try:
            while (chunk := await self._next_chunk(call)) is not None:
                chunks.append(chunk)
                size += len(chunk.data)
                if size > _MAX_TOKENIZER_BYTES:
                    raise TokenizerError(f"the tokenizer's files have more than {_MAX_TOKENIZER_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                # It would be answered again: there is a tokenizer, but it cannot be passed on.
                raise TokenizerError(error.details()) from error
            raise _lost(self._address, error) from error
        finally:
            call.cancel()
        return chunks

    async def _next_chunk(self, call: Any) -> model_pb2.TokenizerChunk | None:
        """None at the end."""
        try:
            async with asyncio.timeout(_CHUNK_TIMEOUT_S):
                response = await call.read()
        except TimeoutError:
            raise SessionLost(f"{self._address}: no part of the tokenizer for {_CHUNK_TIMEOUT_S:g} s") from None
        return response.chunk if isinstance(response, session_service_pb2.SessionServiceGetTokenizerResponse) else None

    async def close(self) -> None:
        await self._channel.close(None)


class _GrpcStream:
    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    async def send(self, frame: session_service_pb2.AttachRequest) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise _lost(self._address, error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise SessionLost("the stream is closed") from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise

    async def receive(self) -> session_service_pb2.AttachResponse:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _lost(self._address, error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise SessionLost("the stream is closed") from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        if not isinstance(frame, session_service_pb2.AttachResponse):
            raise SessionLost("the scheduler ended the stream")
        return frame

    def close(self) -> None:
        self._call.cancel()

    def _raise_if_closed(self) -> None:
        """A call that was cancelled from this side raises CancelledError, as a cancelled task does; tell them apart."""
        task = asyncio.current_task()
        if self._call.cancelled() and (task is None or not task.cancelling()):
            raise SessionLost("the stream is closed")


def _lost(address: str, error: grpc.aio.AioRpcError) -> SessionLost:
    return SessionLost(f"{address}: {error.code().name}: {error.details()}")
