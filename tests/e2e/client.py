"""A client of the front end for tests: whole generations as values."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc as pb_grpc
from stepfence.v1 import sampling_pb2, usage_pb2

# A call that takes longer than this has hung.
DEADLINE_S = 90.0


@dataclass
class Stream:
    """What one Generate call gave, in order."""

    request_id: str = ""
    num_prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_deltas: int = 0
    finished: pb.Finished | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        """Add one message; asserts that the order is the contract's."""
        event = response.WhichOneof("event")
        assert self.finished is None, f"{event} after finished"
        if event == "accepted":
            assert not self.request_id and response.accepted.request_id
            self.request_id = response.accepted.request_id
            self.num_prompt_tokens = response.accepted.num_prompt_tokens
        elif event == "delta":
            assert self.request_id, "delta before accepted"
            assert response.delta.text or response.delta.token_ids
            self.text += response.delta.text
            self.token_ids += response.delta.token_ids
            self.num_deltas += 1
        else:
            assert event == "finished" and self.request_id
            self.finished = response.finished

    @property
    def usage(self) -> usage_pb2.Usage:
        assert self.finished is not None, "the stream has not finished"
        return self.finished.usage


@dataclass(frozen=True)
class Refusal:
    """How a call failed."""

    status: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str]
    fields: tuple[str, ...]
    usage: usage_pb2.Usage | None = None


def sampling(**given: Any) -> sampling_pb2.SamplingParams:
    """Greedy unless told otherwise."""
    return sampling_pb2.SamplingParams(**{"temperature": 0.0, **given})


@contextlib.asynccontextmanager
async def connect(address: str) -> AsyncIterator[pb_grpc.GenerationServiceAsyncStub]:
    """A stub on a channel of its own."""
    options = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


async def generate(
    stub: Any, request: pb.GenerateRequest, accepted: asyncio.Event | None = None, deadline_s: float = DEADLINE_S
) -> Stream:
    """Run one stream to its end; asserts that it succeeded and kept the order. `accepted` is set when it is queued."""
    stream = Stream()
    async for response in stub.Generate(request, timeout=deadline_s):
        stream.take(response)
        if accepted is not None:
            accepted.set()
    assert stream.finished is not None
    return stream


def refusal(error: grpc.RpcError | Any) -> Refusal:
    """Status and details of a failed call."""
    reason, metadata, fields, usage = "", {}, (), None
    status = rpc_status.from_call(_AsCall(error))  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            assert info.domain == "stepfence"
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            fields = tuple(violation.field for violation in bad.field_violations)
        elif detail.Is(usage_pb2.Usage.DESCRIPTOR):
            usage = usage_pb2.Usage()
            detail.Unpack(usage)
    return Refusal(error.code(), reason, error.details() or "", metadata, fields, usage)


class _AsCall:
    """An AioRpcError in the shape that rpc_status reads."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def trailing_metadata(self) -> Any:
        return self._error.trailing_metadata()

    def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = self._error.code()
        return code

    def details(self) -> str:
        return self._error.details() or ""
