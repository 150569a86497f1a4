"""A small scheduler that speaks RunSteps over real gRPC, for tests of workers.

It decides nothing by itself: tests say which rows compute what. `Book` keeps the counting right (step_seq, fence_seq,
processed_step_seq) so that a test writes down only what it is about, and can get any of it wrong on purpose.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.rpc import error_details_pb2, status_pb2

from stepfence.v1 import sampling_pb2, step_pb2, worker_service_pb2, worker_service_pb2_grpc

# Nothing here is a measure of speed: a loaded machine may take its time.
PATIENCE_S: Final = 30.0

GREEDY: Final = sampling_pb2.ResolvedSampling(temperature=0.0, top_p=1.0)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stream ended: the status, and the reason of its ErrorInfo ("" when it has none)."""

    code: grpc.StatusCode
    reason: str
    message: str


def column(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def ids_of(data: bytes) -> list[int]:
    return array("i", data).tolist()


def new_request(
    request_id: str,
    row: int,
    token_ids: Sequence[int],
    block_table: Sequence[int],
    *,
    num_computed: int = 0,
    num_prompt: int | None = None,
    sampling: sampling_pb2.ResolvedSampling = GREEDY,
) -> step_pb2.NewRequest:
    return step_pb2.NewRequest(
        request_id=request_id,
        row=row,
        token_ids=column(token_ids),
        block_table=column(block_table),
        num_computed_tokens=num_computed,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        sampling=sampling,
    )


class Book:
    """Numbers the steps of one epoch."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch: Final = epoch
        self.step_seq = 0
        self.fence_seq = 0
        self.processed_step_seq = 0

    def step(
        self,
        rows: Mapping[int, int] | None = None,
        *,
        new: Sequence[step_pb2.NewRequest] = (),
        appended: Sequence[tuple[int, int]] = (),
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> step_pb2.SchedulerOutput:
        """The next step; `rows` maps row to number of tokens, drafts included."""
        rows = rows or {}
        self.step_seq += 1
        self.fence_seq += 1 if rows else 0
        step = step_pb2.SchedulerOutput(
            epoch=self.epoch,
            step_seq=self.step_seq,
            fence_seq=self.fence_seq,
            processed_step_seq=self.processed_step_seq,
            new_requests=new,
            rows=column(rows),
            num_tokens=column(rows.values()),
            appended_rows=column(row for row, _ in appended),
            appended_blocks=column(block for _, block in appended),
            finished_request_ids=finished,
            preempted_request_ids=preempted,
        )
        if drafts:
            step.num_drafts = column(len(drafts.get(row, ())) for row in rows)
            step.draft_token_ids = column(token for row in rows for token in drafts.get(row, ()))
        return step

    def handled(self, result: step_pb2.StepResult) -> None:
        self.processed_step_seq = result.step_seq


class StepSession:
    """One RunSteps stream."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call: Final = call
        self.opened = worker_service_pb2.Opened()

    async def send(self, step: step_pb2.SchedulerOutput) -> None:
        await self._call.write(worker_service_pb2.RunStepsRequest(step=step))

    async def send_frame(self, frame: worker_service_pb2.RunStepsRequest) -> None:
        await self._call.write(frame)

    async def read(self) -> worker_service_pb2.RunStepsResponse | None:
        """The next frame; None when the stream is over (`ended` says how)."""
        try:
            frame = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        except grpc.aio.AioRpcError:
            return None
        return frame if isinstance(frame, worker_service_pb2.RunStepsResponse) else None

    async def result(self) -> step_pb2.StepResult:
        """The next frame, which must be a result."""
        frame = await self.read()
        assert frame is not None, f"the stream ended: {await self.ended()}"
        assert frame.WhichOneof("frame") == "result", frame
        return frame.result

    async def run(self, step: step_pb2.SchedulerOutput) -> step_pb2.StepResult:
        """Send one step and await its result."""
        await self.send(step)
        result = await self.result()
        assert (result.epoch, result.step_seq) == (step.epoch, step.step_seq)
        return result

    async def ended(self) -> Ended:
        """Read away what still comes, then tell how the stream ended."""
        while await self.read() is not None:
            pass
        code = await asyncio.wait_for(self._call.code(), PATIENCE_S)
        status = status_pb2.Status()
        for key, value in await self._call.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                status.ParseFromString(value)
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            detail.Unpack(info)
        return Ended(code, info.reason, await self._call.details() or "")

    async def finish(self) -> None:
        """Nothing more is sent; results may still come."""
        await self._call.done_writing()

    def cut(self) -> None:
        """Lose the stream."""
        self._call.cancel()


class SchedulerDouble:
    """One scheduler, alive from construction to close: an incarnation, and a connection of its own."""

    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()) -> None:
        self.incarnation = secrets.randbits(64)
        # Otherwise channels in one process share their connections.
        self._channel: Final = grpc.aio.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1), *options)
        )
        self.stub: Final[worker_service_pb2_grpc.WorkerServiceAsyncStub] = worker_service_pb2_grpc.WorkerServiceStub(
            self._channel
        )
        # Without requests at first: they are written one by one. The stubs know the other way only.
        self._run_steps: Final[Any] = self.stub.RunSteps
        self._sessions: Final[list[StepSession]] = []

    async def __aenter__(self) -> Self:
        await asyncio.wait_for(self._channel.channel_ready(), PATIENCE_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions:
            session.cut()
        await self._channel.close(None)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    async def capabilities(
        self, metadata: Sequence[tuple[str, str]] = ()
    ) -> worker_service_pb2.GetCapabilitiesResponse:
        request = worker_service_pb2.GetCapabilitiesRequest()
        return await self.stub.GetCapabilities(request, timeout=PATIENCE_S, metadata=tuple(metadata))

    def stream(self) -> StepSession:
        """A stream on which nothing was said yet."""
        session = StepSession(self._run_steps())
        self._sessions.append(session)
        return session

    async def open(self, message: worker_service_pb2.Open) -> StepSession:
        """A new stream, opened; fails when the worker refuses."""
        session = await self.try_open(message)
        frame = await session.read()
        assert frame is not None, f"not opened: {await session.ended()}"
        assert frame.WhichOneof("frame") == "opened", frame
        session.opened = frame.opened
        return session

    async def try_open(self, message: worker_service_pb2.Open) -> StepSession:
        """A new stream with open sent and nothing read."""
        session = self.stream()
        await session.send_frame(worker_service_pb2.RunStepsRequest(open=message))
        return session
