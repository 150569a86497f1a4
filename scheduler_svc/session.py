"""Front ends: one multiplexed stream each, token ids only.

`SessionHub` and `FrontEndSession` hold the logic and know frames, not gRPC; `SessionServicer` carries frames to and
fro. The core knows a request by one integer: the number of its session and the front end's own handle side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from google.protobuf.message import DecodeError

from scheduler_svc import codec, errors
from scheduler_svc.codec import Cancellation, Hello, SessionFeature, SessionFrame, Submission, TextEnd
from scheduler_svc.core.events import (
    AbortCause,
    Event,
    RefusalReason,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    TextEnded,
    TokensProduced,
    UsageChanged,
)
from scheduler_svc.errors import Code, Failure, SessionProtocolError, SessionRefused
from scheduler_svc.facts import MetricsSink
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.rpc import tenants
from scheduler_svc.rpc.status import abort
from scheduler_svc.start_gate import StartGate
from scheduler_svc.workers.codec import ModelFacts
from scheduler_svc.workers.served_model import ServedModel
from stepfence.v1 import session_service_pb2, session_service_pb2_grpc

log = logging.getLogger(__name__)

_HANDLE_BITS: Final = 32
_HANDLE_MASK: Final = (1 << _HANDLE_BITS) - 1
# What a frame takes in memory besides its bytes.
_FRAME_OVERHEAD: Final = 256
_TOKENIZER_WAIT_S: Final = 10.0
# How long the frames before the end of a stream wait to be read.
_LAST_FRAMES_S: Final = 1.0

Frame = session_service_pb2.AttachResponse


class FrontEndSession:
    """One attached front end: its live requests, and the frames that wait for it to read them."""

    def __init__(self, hub: SessionHub, number: int, max_outgoing_bytes: int) -> None:
        self.front_end_id = ""
        # None: it has not said hello yet.
        self.hello: Hello | None = None
        self.num_live_streams = 0
        self.number = number
        self._hub = hub
        self._max_outgoing_bytes = max_outgoing_bytes
        self._is_attached = False
        # Handles accepted and not ended, with their request ids.
        self._live: dict[int, str] = {}
        # Handles submitted, as far as frames have been read (the core may be behind): what a new submit is checked
        # against.
        self._in_use: dict[int, None] = {}
        self._frame = Frame()
        self._is_frame_used = False
        self._outgoing: deque[tuple[Frame, int]] = deque()
        self._outgoing_bytes = 0
        self._readable = asyncio.Event()
        self._end: Failure | None = None
        self._ended = asyncio.Event()
        self._is_gone = False
        self._is_finishing = False

    @property
    def num_live_requests(self) -> int:
        """Requests accepted and not ended."""
        return len(self._live)

    # --- frames up ---

    async def take(self, frame: SessionFrame) -> None:
        """One frame of the front end. Waits while the scheduler has no room for more. Raises SessionProtocolError."""
        if frame.hello is not None:
            self._attach(frame.hello)
        if not self._is_attached:
            raise SessionProtocolError("the first frame must carry hello")
        self.num_live_streams = frame.num_live_streams
        for submission in frame.submissions:
            await self._take_submission(submission)
        for cancellation in frame.cancellations:
            await self._hub.loop.put(_later(self._cancel, cancellation))
        for text_end in frame.text_ends:
            await self._hub.loop.put(_later(self._end_text, text_end))
        if frame.resubmits_done:
            self._hub.gate.done(self.number)

    async def _take_submission(self, submission: Submission) -> None:
        if submission.handle in self._in_use:
            raise SessionProtocolError(f"submit {submission.handle}: the handle is in use")
        self._in_use[submission.handle] = None
        now = asyncio.get_running_loop().time()
        deadline = None if submission.timeout_s is None else now + submission.timeout_s
        if submission.output_tokens is None:
            await self._hub.gate.passed()
        arrival = self._hub.arrival(now, submission)
        await self._hub.loop.put(_later(self._submit, submission, deadline, arrival))

    def _attach(self, hello: Hello) -> None:
        if self._is_attached:
            raise SessionProtocolError("hello a second time")
        codec.check_session_features(hello, self._hub.features)
        self._hub.supersede(hello)
        self.front_end_id = hello.front_end_id
        self.hello = hello
        self._is_attached = True
        self._hub.gate.attached(self.number, again=hello.attach_seq > 1, now=asyncio.get_running_loop().time())
        self._push(codec.attached_frame(self._hub.scheduler_incarnation, self._hub.features, self._hub.term))
        self.readiness_changed(*self._hub.readiness)
        if self._hub.model.facts is not None:
            self.model_changed(self._hub.model.facts)
        if self._hub.is_draining:
            self.draining()
        log.info("front end attached", extra={"front_end": hello.front_end_id})

    # The next four run within a turn of the loop: what they see is what the core knows.

    def _submit(self, submission: Submission, deadline: float | None, arrival: float) -> Iterator[Event]:
        if self._is_gone:
            return
        handle = submission.handle
        problem = codec.parameter_problem(submission, self._hub.vocab_size)
        if problem is not None:
            name, message = problem
            self._refuse_at_the_door(
                handle,
                Failure(
                    Code.INVALID_ARGUMENT, RefusalReason.INVALID_PARAMETER.value, f"{name}: {message}", {"field": name}
                ),
            )
            return
        sampling = submission.sampling
        yield RequestArrived(
            request_id=tenants.qualified(submission.tenant, submission.request_id),
            handle=self.number << _HANDLE_BITS | handle,
            prompt=submission.prompt,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            eos_token_ids=sampling.eos_token_ids,
            stop_token_ids=sampling.stop_token_ids,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
            sampling=sampling.encoded,
            deadline=deadline,
            arrival=arrival,
            output_tokens=submission.output_tokens,
            tenant=submission.tenant,
        )

    def _cancel(self, cancellation: Cancellation) -> Iterator[Event]:
        request_id = self._live.get(cancellation.handle)
        if request_id is not None:
            yield RequestAborted(request_id, cancellation.cause)

    def _end_text(self, text_end: TextEnd) -> Iterator[Event]:
        request_id = self._live.get(text_end.handle)
        if request_id is not None:
            yield TextEnded(request_id, text_end.num_tokens)

    def _abort_all(self) -> Iterator[Event]:
        for request_id in tuple(self._live.values()):
            yield RequestAborted(request_id, AbortCause.FRONT_END_LOST)
        # Not before: until now it had to hear which of its requests ended, or it would abort their successors.
        self._hub.forget(self)

    @property
    def is_gone(self) -> bool:
        """Whether its stream is over."""
        return self._is_gone

    def lost(self) -> None:
        """The stream is gone: end its requests. Idempotent."""
        if self._is_gone:
            return
        # What it was answered up to here is still to be written; nothing is added.
        self.flush()
        self._is_gone = True
        self._hub.gate.done(self.number)
        self._hub.loop.post(self._abort_all)

    # --- effects ---

    def accepted(self, handle: int, effect: RequestAccepted) -> None:
        """The core took a request."""
        self._live[handle] = effect.request_id
        self._building().accepted.add(handle=handle, max_tokens=effect.max_tokens)

    def refused(self, handle: int, failure: Failure) -> None:
        """A request was not taken."""
        self._in_use.pop(handle, None)
        self._building().refused.add(handle=handle, failure=codec.encode_failure(failure))

    def tokens(self, handles: list[int], counts: list[int] | None, tokens: list[int]) -> None:
        """Tokens of one step. A frame has room for those of one step only."""
        if self._frame.HasField("tokens"):
            self.flush()
        codec.set_tokens(self._building(), handles, counts, tokens)

    def usage_changed(self, handle: int, effect: UsageChanged) -> None:
        """What a request has cost so far."""
        codec.add_usage(self._building(), handle, effect.usage)

    def ended(self, handle: int, effect: RequestEnded) -> None:
        """A request is over."""
        self._live.pop(handle, None)
        self._in_use.pop(handle, None)
        codec.add_ended(self._building(), handle, effect)

    def model_changed(self, facts: ModelFacts) -> None:
        """Tell about the served model."""
        frame = Frame()
        frame.model_changed.model.CopyFrom(codec.model_info(facts))
        self._push(frame)

    def readiness_changed(self, is_ready: bool, cause: str) -> None:
        """Tell whether a worker is up."""
        self._push(codec.readiness_frame(is_ready, cause))

    def draining(self) -> None:
        """Tell that new requests will be refused."""
        self._push(Frame(draining=True))

    def _refuse_at_the_door(self, handle: int, failure: Failure) -> None:
        self._hub.metrics.refused_at_the_door(failure.reason)
        self.refused(handle, failure)

    def _building(self) -> Frame:
        if not self._is_frame_used:
            self._is_frame_used = True
            self._hub.touched(self)
        return self._frame

    # --- frames down ---

    def flush(self) -> None:
        """Queue what was gathered since the last time."""
        if self._is_frame_used:
            frame = self._frame
            self._frame = Frame()
            self._is_frame_used = False
            self._push(frame)

    def _push(self, frame: Frame) -> None:
        if self._is_gone or self._ended.is_set():
            return
        if not self._is_attached:
            return
        size = frame.ByteSize() + _FRAME_OVERHEAD
        self._outgoing.append((frame, size))
        self._outgoing_bytes += size
        self._readable.set()
        if self._outgoing_bytes > self._max_outgoing_bytes:
            log.warning("front end reads too slowly", extra={"front_end": self.front_end_id})
            self.end_now(errors.SLOW_FRONT_END)

    async def next_frame(self) -> Frame | None:
        """The next frame to send; None when the stream is to be ended now."""
        while not self._outgoing:
            if self._end is not None or self._is_finishing:
                return None
            self._readable.clear()
            await self._readable.wait()
        frame, size = self._outgoing.popleft()
        self._outgoing_bytes -= size
        return frame

    def end_after_flush(self, failure: Failure) -> None:
        """End the stream when everything queued has been sent."""
        self._end = self._end or failure
        self._readable.set()

    def finish(self) -> None:
        """Have next_frame() return None when everything queued has been sent."""
        self._is_finishing = True
        self._readable.set()

    def end_now(self, failure: Failure) -> None:
        """End the stream whether or not the front end reads."""
        self._end = self._end or failure
        self._readable.set()
        self._ended.set()

    async def ended_now(self) -> None:
        """Returns when end_now() was called."""
        await self._ended.wait()

    @property
    def end(self) -> Failure | None:
        """With what the stream ends, when this side ends it."""
        return self._end


def _look_at(task: asyncio.Task[None]) -> None:
    """asyncio complains about failures nobody looked at; those of a stream that is over anyway tell nothing."""
    if not task.cancelled():
        task.exception()


def _later(make: Callable[..., Iterator[Event]], *arguments: Any) -> Callable[[], Iterator[Event]]:
    return lambda: make(*arguments)


class SessionHub:
    """All front ends; routes effects to them."""

    def __init__(
        self,
        loop: SchedulerLoop,
        model: ServedModel,
        metrics: MetricsSink,
        *,
        scheduler_incarnation: int,
        term: int,
        features: frozenset[SessionFeature],
        max_outgoing_bytes: int = 16 << 20,
        silence_s: float = 10.0,
    ) -> None:
        self.loop = loop
        self.model = model
        self.metrics = metrics
        self.scheduler_incarnation = scheduler_incarnation
        self.term = term
        self.gate = StartGate()
        # Of the newest request that came; see `arrival`.
        self._last_arrival = 0.0
        # What front ends may count on.
        self.features = features
        self.silence_s = silence_s
        self.is_draining = False
        # Whether a worker is up, and why not.
        self.readiness = (False, "starting")
        self._max_outgoing_bytes = max_outgoing_bytes
        self._sessions: dict[int, FrontEndSession] = {}
        self._next_number = 1
        # Sessions with a frame under construction in this turn, in the order they were touched.
        self._touched: dict[int, FrontEndSession] = {}

    @property
    def vocab_size(self) -> int | None:
        """Of the served model, when known."""
        return None if self.model.facts is None else self.model.facts.vocab_size

    @property
    def sessions(self) -> tuple[FrontEndSession, ...]:
        """Attached front ends, oldest first."""
        return tuple(session for session in self._sessions.values() if not session.is_gone)

    def attach(self) -> FrontEndSession:
        """A front end opened a stream; detach() must follow."""
        number = self._next_number
        self._next_number += 1
        session = FrontEndSession(self, number, self._max_outgoing_bytes)
        self._sessions[number] = session
        return session

    def supersede(self, hello: Hello) -> None:
        """A front end has opened a newer stream: end its older ones with their requests, so that none of these is in
        the way of its own continuation. Raises SessionRefused for a stream that is not the newest."""
        if not hello.incarnation:
            return
        for session in self.sessions:
            other = session.hello
            if other is None or other.incarnation != hello.incarnation:
                continue
            if other.attach_seq >= hello.attach_seq:
                raise SessionRefused("SUPERSEDED", "this front end has opened a newer stream")
            session.end_now(errors.SUPERSEDED)
            self.detach(session)

    def arrival(self, now: float, submission: Submission) -> float:
        """When a request came, in seconds of the loop's clock: new ones in the order in which they are read, no two at
        the same time; others when their front end first submitted them."""
        if submission.output_tokens is not None:
            return now - submission.age_s
        self._last_arrival = max(now, self._last_arrival + 1e-9)
        return self._last_arrival

    def detach(self, session: FrontEndSession) -> None:
        """Its stream is over. Idempotent."""
        if session.is_gone:
            return
        if session.front_end_id or session.num_live_requests:
            log.info(
                "front end left",
                extra={"front_end": session.front_end_id, "num_live_requests": session.num_live_requests},
            )
        session.lost()

    def forget(self, session: FrontEndSession) -> None:
        """Nothing of it is live any more."""
        self._sessions.pop(session.number, None)

    def touched(self, session: FrontEndSession) -> None:
        """The session has a frame to flush at the end of this turn."""
        self._touched[session.number] = session

    # --- effects ---

    def accepted(self, effect: RequestAccepted) -> None:
        """Route an effect."""
        session = self._session_of(effect.handle)
        if session is not None:
            session.accepted(effect.handle & _HANDLE_MASK, effect)

    def refused(self, effect: RequestRefused) -> None:
        """Route an effect."""
        session = self._session_of(effect.handle)
        if session is not None:
            session.refused(effect.handle & _HANDLE_MASK, errors.refusal(effect))

    def ended(self, effect: RequestEnded) -> None:
        """Route an effect."""
        session = self._session_of(effect.handle)
        if session is not None:
            session.ended(effect.handle & _HANDLE_MASK, effect)

    def usage_changed(self, effect: UsageChanged) -> None:
        """Route an effect."""
        session = self._session_of(effect.handle)
        if session is not None:
            session.usage_changed(effect.handle & _HANDLE_MASK, effect)

    def tokens(self, effect: TokensProduced) -> None:
        """Route an effect: its columns are cut by front end."""
        if len(self._sessions) == 1:
            # The usual case: all of it belongs to the one front end, unless some of it is a lost one's.
            ((number, session),) = self._sessions.items()
            if all(handle >> _HANDLE_BITS == number for handle in effect.handles):
                session.tokens([handle & _HANDLE_MASK for handle in effect.handles], effect.counts, effect.tokens)
                return
        self._cut_by_session(effect)

    def _cut_by_session(self, effect: TokensProduced) -> None:
        columns: dict[int, tuple[list[int], list[int], list[int]]] = {}
        position = 0
        for index, handle in enumerate(effect.handles):
            count = 1 if effect.counts is None else effect.counts[index]
            handles, counts, tokens = columns.setdefault(handle >> _HANDLE_BITS, ([], [], []))
            handles.append(handle & _HANDLE_MASK)
            counts.append(count)
            tokens.extend(effect.tokens[position : position + count])
            position += count
        for number, (handles, counts, tokens) in columns.items():
            session = self._sessions.get(number)
            if session is not None:
                session.tokens(handles, None if effect.counts is None else counts, tokens)

    def flush(self) -> None:
        """End of a turn: queue one frame for each front end that has something to hear."""
        for session in self._touched.values():
            session.flush()
        self._touched.clear()

    def _session_of(self, handle: int) -> FrontEndSession | None:
        return self._sessions.get(handle >> _HANDLE_BITS)

    # --- to all ---

    def model_changed(self, facts: ModelFacts) -> None:
        """The served model became known, or changed."""
        for session in self.sessions:
            session.model_changed(facts)

    def readiness_changed(self, is_ready: bool, cause: str) -> None:
        """Tell every front end, also those to come, whether a worker is up."""
        self.readiness = (is_ready, cause)
        for session in self.sessions:
            session.readiness_changed(is_ready, cause)

    def start_draining(self) -> None:
        """Tell every front end, also those to come."""
        self.is_draining = True
        for session in self.sessions:
            session.draining()

    async def end_all(self, failure: Failure, timeout_s: float) -> None:
        """End every stream after what is queued for it, or after timeout_s."""
        for session in self.sessions:
            session.end_after_flush(failure)
        try:
            async with asyncio.timeout(timeout_s):
                while self.sessions:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            for session in self.sessions:
                session.end_now(failure)


class SessionServicer(session_service_pb2_grpc.SessionServiceServicer):
    """SessionService over gRPC."""

    def __init__(self, hub: SessionHub) -> None:
        self._hub = hub

    # Frames are written to the context; the generated type knows only handlers that yield them.
    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[session_service_pb2.AttachRequest], context: Any
    ) -> None:
        """See session_service.proto."""
        session = self._hub.attach()
        reader = asyncio.create_task(self._read(session, request_iterator))
        writer = asyncio.create_task(self._write(session, context))
        stopper = asyncio.create_task(session.ended_now())
        tasks = (reader, writer, stopper)
        try:
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Also when gRPC throws the handler away: whatever happens, its requests end.
                self._hub.detach(session)
            reader.cancel()
            session.finish()
            await asyncio.wait((writer, stopper), timeout=_LAST_FRAMES_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.add_done_callback(_look_at)
                task.cancel()
        await asyncio.wait(tasks)
        end = session.end
        if reader.done() and not reader.cancelled() and reader.exception() is not None:
            end = self._read_failure(session, reader.exception())
        if end is not None:
            await abort(context, end)

    def _read_failure(self, session: FrontEndSession, error: BaseException | None) -> Failure | None:
        if isinstance(error, SessionProtocolError):
            log.warning("front end broke the protocol", extra={"front_end": session.front_end_id, "cause": str(error)})
            return Failure(Code.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", str(error))
        if isinstance(error, SessionRefused):
            log.warning("front end refused", extra={"front_end": session.front_end_id, "cause": str(error)})
            return Failure(Code.FAILED_PRECONDITION, error.reason, str(error))
        if isinstance(error, DecodeError):
            log.warning("front end broke the protocol", extra={"front_end": session.front_end_id, "cause": str(error)})
            return Failure(Code.INVALID_ARGUMENT, "PROTOCOL_VIOLATION", f"a frame cannot be taken: {error}")
        if isinstance(error, TimeoutError):
            log.warning("front end is silent", extra={"front_end": session.front_end_id})
            return errors.SILENT_FRONT_END
        log.error("reading from a front end failed", exc_info=error)
        return Failure(Code.INTERNAL, "INTERNAL_ERROR", "the scheduler failed to read this stream")

    async def _read(self, session: FrontEndSession, frames: AsyncIterator[session_service_pb2.AttachRequest]) -> None:
        iterator = aiter(frames)
        while True:
            try:
                async with asyncio.timeout(self._hub.silence_s):
                    message = await anext(iterator)
            except StopAsyncIteration:
                return
            await session.take(codec.decode_session_frame(message))

    async def _write(self, session: FrontEndSession, context: Any) -> None:
        while (frame := await session.next_frame()) is not None:
            await context.write(frame)

    async def GetModel(
        self, request: session_service_pb2.SessionServiceGetModelRequest, context: Any
    ) -> session_service_pb2.SessionServiceGetModelResponse:
        """See session_service.proto."""
        facts = self._hub.model.facts
        if facts is None:
            await abort(context, errors.NO_WORKER)
        return session_service_pb2.SessionServiceGetModelResponse(model=codec.model_info(facts))

    async def GetTokenizer(
        self, request: session_service_pb2.SessionServiceGetTokenizerRequest, context: Any
    ) -> AsyncIterator[session_service_pb2.SessionServiceGetTokenizerResponse]:
        """See session_service.proto."""
        facts = self._hub.model.facts
        if facts is None:
            await abort(context, errors.NO_WORKER)
        if not facts.tokenizer_digest:
            await abort(context, errors.NO_TOKENIZER)
        pieces = await self._hub.model.tokenizer(_TOKENIZER_WAIT_S)
        if pieces is None:
            await abort(context, errors.NO_WORKER)
        if isinstance(pieces, errors.Failure):
            await abort(context, pieces)
        for response in codec.tokenizer_responses(pieces):
            yield response
