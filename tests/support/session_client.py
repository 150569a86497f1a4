"""A front end reduced to its stream: attaches, submits token ids, collects what comes back. It checks what any front
end relies on: one answer to a submit, no token before it, nothing after the end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from stepfence.v1 import sampling_pb2, session_service_pb2, session_service_pb2_grpc, usage_pb2


@dataclass
class Stream:
    """One request, as its client sees it."""

    handle: int
    request_id: str
    prompt: list[int]
    accepted: session_service_pb2.SubmitAccepted | None = None
    refused: session_service_pb2.Failure | None = None
    tokens: list[int] = field(default_factory=list)
    end: session_service_pb2.RequestEnded | None = None
    # What the scheduler said of its cost, last.
    usage: usage_pb2.Usage | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.refused is not None

    @property
    def failure(self) -> session_service_pb2.Failure | None:
        """Why it was refused or ended early."""
        if self.refused is not None:
            return self.refused
        return self.end.failure if self.end is not None and self.end.HasField("failure") else None

    @property
    def reason(self) -> int:
        """FinishReason, when it ended well."""
        assert self.end is not None and self.end.HasField("ok"), self.failure
        return self.end.ok.reason

    async def until(self, num_tokens: int, timeout_s: float = 20.0) -> None:
        """Wait for so many tokens, or the end."""
        async with asyncio.timeout(timeout_s):
            while len(self.tokens) < num_tokens and not self.is_over:
                self.changed.clear()
                await self.changed.wait()

    async def over(self, timeout_s: float = 30.0) -> Stream:
        """Wait for its end."""
        async with asyncio.timeout(timeout_s):
            while not self.is_over:
                self.changed.clear()
                await self.changed.wait()
        return self

    async def answered(self, timeout_s: float = 20.0) -> Stream:
        """Wait until it is accepted or refused."""
        async with asyncio.timeout(timeout_s):
            while self.accepted is None and self.refused is None:
                self.changed.clear()
                await self.changed.wait()
        return self


LENGTH = usage_pb2.FINISH_REASON_LENGTH
STOP = usage_pb2.FINISH_REASON_STOP


class SessionClient:
    """Use as an async context manager."""

    def __init__(
        self,
        address: str,
        front_end_id: str = "test",
        *,
        heartbeat_s: float | None = 0.5,
        incarnation: int = 0,
        attach_seq: int = 0,
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self.attached: session_service_pb2.Attached | None = None
        self.model_changes: list[session_service_pb2.ModelChanged] = []
        self.is_told_to_drain = False
        # (ready, cause), as told.
        self.readiness: list[tuple[bool, str]] = []
        self.errors: list[str] = []
        # Set when the stream is over.
        self.ended = asyncio.Event()
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self._front_end_id = front_end_id
        self._incarnation = incarnation
        self._attach_seq = attach_seq
        self._heartbeat_s = heartbeat_s
        self._channel = grpc.aio.insecure_channel(address)
        self.stub: Any = session_service_pb2_grpc.SessionServiceStub(self._channel)
        self._outgoing: asyncio.Queue[session_service_pb2.AttachRequest | None] = asyncio.Queue()
        self._next_handle = 1
        self._tasks: list[asyncio.Task[None]] = []
        self._call: Any = None
        self._attached_event = asyncio.Event()
        # Cleared, the client stops reading.
        self.reading = asyncio.Event()
        self.reading.set()

    async def __aenter__(self) -> SessionClient:
        hello = session_service_pb2.Hello(
            front_end_id=self._front_end_id,
            protocol_revision=2,
            front_end_incarnation=self._incarnation,
            attach_seq=self._attach_seq,
        )
        self.send(session_service_pb2.AttachRequest(hello=hello))
        self._call = self.stub.Attach(self._requests())
        self._tasks.append(asyncio.create_task(self._read()))
        if self._heartbeat_s is not None:
            self._tasks.append(asyncio.create_task(self._beat(self._heartbeat_s)))
        async with asyncio.timeout(20):
            await self._attached_event.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Go without a word: the stream is cancelled."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def send(self, frame: session_service_pb2.AttachRequest) -> None:
        """Send any frame."""
        self._outgoing.put_nowait(frame)

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        handle: int | None = None,
        priority: int = 0,
        output_token_ids: Iterable[int] = (),
        age_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Submit a greedy request without stop ids."""
        prompt = list(prompt)
        handle = handle or self._next_handle
        self._next_handle = max(self._next_handle, handle) + 1
        stream = Stream(handle, request_id or f"{self._front_end_id}-{handle}", prompt)
        self.streams[handle] = stream
        submit = session_service_pb2.Submit(
            handle=handle,
            request_id=stream.request_id,
            prompt_token_ids=array("i", prompt).tobytes(),
            sampling=sampling_pb2.ResolvedSampling(max_tokens=max_tokens, **{"top_p": 1.0, **sampling}),
            priority=priority,
            output_token_ids=array("i", output_token_ids).tobytes(),
        )
        if age_s is not None:
            submit.age.FromNanoseconds(round(age_s * 1e9))
        if timeout_s is not None:
            submit.timeout.FromNanoseconds(round(timeout_s * 1e9))
        self.send(session_service_pb2.AttachRequest(submits=[submit]))
        return stream

    def half_close(self) -> None:
        """Send nothing more, and read on."""
        self._outgoing.put_nowait(None)

    def cancel(self, stream: Stream, reason: int = session_service_pb2.CANCEL_REASON_ABORTED) -> None:
        """End a request."""
        cancel = session_service_pb2.Cancel(handle=stream.handle, reason=reason)  # type: ignore[arg-type]
        self.send(session_service_pb2.AttachRequest(cancels=[cancel]))

    def end_text(self, stream: Stream, num_tokens: int) -> None:
        """A stop string completed."""
        ended = session_service_pb2.TextEnded(handle=stream.handle, num_tokens=num_tokens)
        self.send(session_service_pb2.AttachRequest(text_ended=[ended]))

    async def _requests(self) -> AsyncIterator[session_service_pb2.AttachRequest]:
        while (frame := await self._outgoing.get()) is not None:
            yield frame

    async def _beat(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            live = sum(not stream.is_over for stream in self.streams.values())
            self.send(session_service_pb2.AttachRequest(num_live_streams=live))

    async def _read(self) -> None:
        try:
            while True:
                await self.reading.wait()
                frame = await self._call.read()
                if frame is grpc.aio.EOF:  # type: ignore[attr-defined]
                    self.status = await self._call.code()
                    return
                self._take(frame)
        except grpc.aio.AioRpcError as error:
            self.status, self.details = error.code(), error.details() or ""
        finally:
            self.ended.set()
            self._attached_event.set()

    def _take(self, frame: session_service_pb2.AttachResponse) -> None:
        if frame.HasField("attached"):
            self._expect(self.attached is None, "attached twice")
            self.attached = frame.attached
            self._attached_event.set()
        self._expect(self.attached is not None, "a frame before attached")
        if frame.HasField("model_changed"):
            self.model_changes.append(frame.model_changed)
        self.is_told_to_drain |= frame.draining
        if frame.HasField("readiness"):
            self.readiness.append((frame.readiness.ready, frame.readiness.cause))
        for accepted in frame.accepted:
            stream = self._touch(accepted.handle)
            self._expect(stream.accepted is None and not stream.is_over, f"accepted {accepted.handle} out of turn")
            stream.accepted = accepted
        for refused in frame.refused:
            stream = self._touch(refused.handle)
            self._expect(stream.accepted is None and not stream.is_over, f"refused {refused.handle} out of turn")
            stream.refused = refused.failure
        self._take_tokens(frame)
        for said in frame.usage_changed:
            stream = self._touch(said.handle)
            self._expect(stream.accepted is not None and not stream.is_over, f"usage of {said.handle} out of turn")
            stream.usage = said.usage
        for ended in frame.ended:
            stream = self._touch(ended.handle)
            self._expect(stream.accepted is not None and not stream.is_over, f"ended {ended.handle} out of turn")
            stream.end = ended

    def _take_tokens(self, frame: session_service_pb2.AttachResponse) -> None:
        if not frame.HasField("tokens"):
            return
        handles, ids = _ints(frame.tokens.handles), _ints(frame.tokens.token_ids)
        counts = _ints(frame.tokens.counts) or [1] * len(handles)
        self._expect(len(set(handles)) == len(handles), "a handle twice in the columns of one step")
        at = 0
        for handle, count in zip(handles, counts, strict=True):
            stream = self._touch(handle)
            self._expect(stream.accepted is not None and not stream.is_over, f"tokens of {handle} out of turn")
            stream.tokens += ids[at : at + count]
            at += count
        self._expect(at == len(ids), "columns of different length")

    def _touch(self, handle: int) -> Stream:
        stream = self.streams[handle]
        stream.changed.set()
        return stream

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.errors.append(otherwise)


def _ints(column: bytes) -> list[int]:
    return list(memoryview(column).cast("i")) if column else []
