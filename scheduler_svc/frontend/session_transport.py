"""SessionTransport over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from scheduler_svc.frontend.errors import SessionLost
from scheduler_svc.grpc_options import MAX_MESSAGE_BYTES
from stepfence.v1 import model_pb2, session_service_pb2, session_service_pb2_grpc

if TYPE_CHECKING:
    from scheduler_svc.frontend.session_client import SessionStream

# Seconds; a scheduler that answers no unary call for so long is asked again.
_CALL_TIMEOUT_S: Final = 30.0

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # gRPC's own waiting between attempts must not be longer than ours.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 400),
    # A scheduler that was started anew may have another address behind the same name; gRPC would look again after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # A scheduler whose host vanished sends nothing, not even the end of the connection.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Other channels of this process do not share its connections and their waiting.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcTransport:
    """Calls one scheduler. Use within a running loop; `close` it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = session_service_pb2_grpc.SessionServiceStub(self._channel)

    def attach(self) -> SessionStream:
        return _GrpcStream(self._stub.Attach(), self._address)

    async def get_model(self) -> model_pb2.ModelInfo | None:
        request = session_service_pb2.SessionServiceGetModelRequest()
        try:
            response = await self._stub.GetModel(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return None
            raise _lost(self._address, error) from error
        model: model_pb2.ModelInfo = response.model
        return model

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]:
        request = session_service_pb2.SessionServiceGetTokenizerRequest()
        try:
            return [response.chunk async for response in self._stub.GetTokenizer(request, timeout=_CALL_TIMEOUT_S)]
        except grpc.aio.AioRpcError as error:
            raise _lost(self._address, error) from error

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
