"""The front end's one stream to the scheduler: opened, kept, opened again for ever.

Nothing here knows gRPC: a SessionTransport is passed in, time comes from the running loop and chance from the given
generator, so the same logic runs against a simulated network on virtual time.

What a caller may rely on: every submit that is not refused at once gets exactly one of `refused`, `ended` or `lost`
on its sink, and nothing after that, unless it was released first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.frontend import codec
from scheduler_svc.frontend.calls import CancelReason, Ended, ModelDescription, Submission
from scheduler_svc.frontend.containment import is_containable
from scheduler_svc.frontend.errors import (
    NO_WORKER,
    SCHEDULER_DRAINING,
    SCHEDULER_LOST,
    Code,
    Failure,
    RequestError,
    SessionLost,
    SessionProtocolError,
)
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.text import Tokenizer
from stepfence.v1 import model_pb2, session_service_pb2
from stepfence.v1.session_service_pb2 import AttachRequest, AttachResponse

# Revision of the protos that is spoken here. Peers whose revisions differ by one work together; revision 1 was never
# released.
PROTOCOL_REVISION = 2
_OLDEST_REVISION = 2
# Handles travel in int32 columns.
_MAX_HANDLE = 2**31 - 1

# Once for each model, however often the scheduler is lost.
TOKENIZER_UNUSABLE = (
    "the model's tokenizer cannot be used, so only token ids are served: repair the model's files, then start its "
    "workers and the front ends anew"
)

log = logging.getLogger(__name__)


class SessionStream(Protocol):
    """One Attach stream. send and receive raise SessionLost when it is over, however it ended."""

    async def send(self, frame: AttachRequest) -> None: ...

    async def receive(self) -> AttachResponse: ...

    def close(self) -> None:
        """Ends the stream; a pending send or receive raises. May be called again."""
        ...


class SessionTransport(Protocol):
    """The calls of SessionService. All of them raise SessionLost when the scheduler does not answer OK."""

    def attach(self) -> SessionStream: ...

    async def get_model(self) -> model_pb2.ModelInfo | None:
        """None: not available now, as before any worker has joined."""
        ...

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]: ...


class CallSink(Protocol):
    """Receives what happens to one submitted request. Called from the loop; must neither block nor raise."""

    def accepted(self, max_tokens: int) -> None: ...

    def tokens(self, token_ids: Sequence[int]) -> None: ...

    def refused(self, failure: Failure) -> None: ...

    def ended(self, ended: Ended) -> None: ...

    def lost(self) -> None:
        """The stream to the scheduler is gone, and the request with it."""
        ...


@dataclass(frozen=True, slots=True)
class SessionTiming:
    """In seconds."""

    first_backoff_s: float = 0.1
    max_backoff_s: float = 0.4
    # A backoff is varied by up to this part of it, either way.
    jitter: float = 0.25
    # Between frames when there is nothing to say.
    heartbeat_s: float = 1.0
    # A scheduler that opens the stream but does not say attached is given up.
    attach_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """tokenizer None: the model has none, or one that cannot be used."""

    description: ModelDescription
    tokenizer: Tokenizer | None


LoadTokenizer = Callable[[Mapping[str, bytes]], Awaitable[Tokenizer]]


class Outbox:
    """Frames to send. The scheduler takes the parts of a frame in the order of its fields, so a frame is closed when
    something is put in that must not overtake what is already there."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._frames: deque[AttachRequest] = deque()
        self._num_bytes = 0
        self._frame_bytes = 0
        self.filled = asyncio.Event()

    @property
    def full(self) -> bool:
        return self._num_bytes >= self._limits.max_outbox_bytes

    def put_submit(self, submit: session_service_pb2.Submit) -> None:
        size = submit.ByteSize()
        last = self._frames[-1] if self._frames else None
        if (
            last is None
            or last.cancels
            or last.text_ended
            or len(last.submits) >= self._limits.max_frame_items
            or self._frame_bytes + size > self._limits.max_frame_bytes
        ):
            last = self._open()
        last.submits.append(submit)
        self._frame_bytes += size
        self._num_bytes += size
        self.filled.set()

    def put_cancel(self, cancel: session_service_pb2.Cancel) -> None:
        last = self._frames[-1] if self._frames else None
        if last is None or last.text_ended or len(last.cancels) >= self._limits.max_frame_items:
            last = self._open()
        last.cancels.append(cancel)
        self.filled.set()

    def put_text_ended(self, text_ended: session_service_pb2.TextEnded) -> None:
        last = self._frames[-1] if self._frames else None
        if last is None or len(last.text_ended) >= self._limits.max_frame_items:
            last = self._open()
        last.text_ended.append(text_ended)
        self.filled.set()

    def nudge(self) -> None:
        """Have a frame sent although there is nothing to put into it."""
        self.filled.set()

    def take(self) -> AttachRequest | None:
        if not self._frames:
            self.filled.clear()
            return None
        frame = self._frames.popleft()
        self._num_bytes -= sum(submit.ByteSize() for submit in frame.submits)
        if not self._frames:
            self.filled.clear()
        return frame

    def clear(self) -> None:
        self._frames.clear()
        self._num_bytes = 0
        self.filled.clear()

    def _open(self) -> AttachRequest:
        frame = AttachRequest()
        self._frames.append(frame)
        self._frame_bytes = 0
        return frame


class SessionClient:
    """Attached to one scheduler for as long as `run` runs. Not thread-safe: everything happens on one loop."""

    def __init__(
        self,
        transport: SessionTransport,
        load_tokenizer: LoadTokenizer,
        *,
        front_end_id: str,
        rng: random.Random,
        limits: Limits | None = None,
        timing: SessionTiming | None = None,
    ) -> None:
        self._transport = transport
        self._load_tokenizer = load_tokenizer
        self._front_end_id = front_end_id
        self._rng = rng
        self._incarnation = rng.getrandbits(64)
        self._timing = timing or SessionTiming()
        self._limits = limits or Limits()
        self._outbox = Outbox(self._limits)
        self._sinks: dict[int, CallSink | None] = {}
        self._next_handle = 1
        self._attached = False
        self._scheduler_draining = False
        # Why no worker is up, as the scheduler says it; None when one is.
        self._no_worker_because: str | None = None
        self._lost_because = "not attached yet"
        self._model_wanted = asyncio.Event()
        self._model: ServedModel | None = None
        # Survives the loss of the stream: most schedulers come back with the same model.
        self._known: ServedModel | None = None
        # The last one in the log.
        self._fetch_failure = ""
        # Told with every frame; kept by whoever counts client streams.
        self.num_live_streams = 0
        # Called after every change of `not_ready_cause`.
        self.on_change: Callable[[], None] = lambda: None
        # Whether requests may have a priority.
        self.accepts_priority = False
        self._attach_seq = 0

    # --- what holds now ---

    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def num_handles(self) -> int:
        """Requests the scheduler has not ended yet, released ones included."""
        return len(self._sinks)

    @property
    def not_ready_cause(self) -> str | None:
        """Why new requests would be refused, or wait for a worker; None when neither."""
        if not self._attached:
            return f"no connection to the scheduler: {self._lost_because}"
        if self._model is None:
            return "no worker has joined the scheduler yet"
        if self._scheduler_draining:
            return "the scheduler is draining"
        return None if self._no_worker_because is None else f"the scheduler is not ready: {self._no_worker_because}"

    @property
    def model(self) -> ServedModel:
        """What is served now. Raises RequestError UNAVAILABLE."""
        if not self._attached:
            raise RequestError(SCHEDULER_LOST)
        if self._model is None:
            raise RequestError(NO_WORKER)
        return self._model

    # --- requests ---

    def submit(self, submission: Submission, sink: CallSink) -> int:
        """Send a request; its handle. Raises RequestError when it cannot even be sent."""
        if not self._attached:
            raise RequestError(SCHEDULER_LOST)
        if self._scheduler_draining:
            raise RequestError(SCHEDULER_DRAINING)
        if self._outbox.full:
            message = "the scheduler takes requests more slowly than they come; try again later"
            raise RequestError(Failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, retry_after_s=1.0))
        handle = self._free_handle()
        self._sinks[handle] = sink
        self._outbox.put_submit(codec.encode_submit(handle, submission))
        return handle

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """End a request. Its sink still gets `ended`. No effect when it has ended."""
        if handle in self._sinks:
            self._outbox.put_cancel(codec.encode_cancel(handle, reason))

    def release(self, handle: int) -> None:
        """Nobody wants to hear of this request any more. The handle stays taken until the scheduler ends it."""
        if handle in self._sinks:
            self._sinks[handle] = None

    def text_ended(self, handle: int, num_tokens: int) -> None:
        """A stop string completed within output token num_tokens - 1."""
        if handle in self._sinks:
            self._outbox.put_text_ended(session_service_pb2.TextEnded(handle=handle, num_tokens=num_tokens))

    def no_stream_left(self) -> None:
        """The last client stream ended: say so now and not with the next heartbeat, so that idle looks idle at once."""
        self._outbox.nudge()

    def _free_handle(self) -> int:
        while self._next_handle in self._sinks:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        return handle

    # --- the stream ---

    async def run(self) -> None:
        """Keep attached until cancelled."""
        backoff_s = self._timing.first_backoff_s
        while True:
            try:
                await self._serve()
            except asyncio.CancelledError:
                self._lose("the front end stops", logging.INFO)
                raise
            except BaseException as error:
                if not is_containable(error):
                    raise
                if not isinstance(error, SessionLost | SessionProtocolError):
                    log.exception("session failed")
                if self._attached:
                    backoff_s = self._timing.first_backoff_s
                self._lose(str(error))
            await asyncio.sleep(self._jittered(backoff_s))
            backoff_s = min(backoff_s * 2, self._timing.max_backoff_s)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self._timing.jitter * (2 * self._rng.random() - 1))

    def _lose(self, because: str, level: int = logging.WARNING) -> None:
        """Every live request ends with the stream."""
        log.log(
            level if self._attached else logging.DEBUG,
            "scheduler lost",
            extra={"cause": because, "requests_ended": len(self._sinks)},
        )
        self._attached = False
        self._scheduler_draining = False
        self._no_worker_because = None
        self._lost_because = because
        self._model = None
        self._outbox.clear()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            if sink is not None:
                sink.lost()
        self.on_change()

    async def _serve(self) -> None:
        """One stream from hello to its end; raises SessionLost or SessionProtocolError."""
        stream = self._transport.attach()
        helpers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._timing.attach_timeout_s):
                await self._greet(stream)
            helpers.append(asyncio.create_task(self._help(stream, lambda: self._send_frames(stream))))
            helpers.append(asyncio.create_task(self._help(stream, self._keep_model_known)))
            while True:
                self._take(await stream.receive())
        except TimeoutError:
            raise SessionLost(f"the scheduler did not answer within {self._timing.attach_timeout_s:g} s") from None
        finally:
            stream.close()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _greet(self, stream: SessionStream) -> None:
        self._attach_seq += 1
        hello = session_service_pb2.Hello(
            front_end_id=self._front_end_id,
            protocol_revision=PROTOCOL_REVISION,
            front_end_incarnation=self._incarnation,
            attach_seq=self._attach_seq,
        )
        await stream.send(AttachRequest(hello=hello, num_live_streams=self.num_live_streams))
        frame = await stream.receive()
        if not frame.HasField("attached"):
            raise SessionProtocolError("the first frame does not say attached")
        revision = frame.attached.protocol_revision
        if not max(_OLDEST_REVISION, PROTOCOL_REVISION - 1) <= revision <= PROTOCOL_REVISION + 1:
            raise SessionProtocolError(
                f"the scheduler speaks protocol revision {revision}, this front end revision {PROTOCOL_REVISION}: "
                "bring both to releases whose revisions differ by one at most"
            )
        self.accepts_priority = session_service_pb2.SESSION_FEATURE_PRIORITY in frame.attached.features
        self._attached = True
        self._model_wanted.set()
        log.info("attached to the scheduler", extra={"incarnation": f"{frame.attached.scheduler_incarnation:016x}"})
        self._take(frame)
        self.on_change()

    async def _help(self, stream: SessionStream, work: Callable[[], Awaitable[None]]) -> None:
        """Work beside the receiving; when it fails, the stream ends, and receiving with it."""
        try:
            await work()
        except SessionLost:
            stream.close()
        except BaseException as error:
            if not is_containable(error):
                raise
            log.exception("session failed")
            stream.close()

    async def _send_frames(self, stream: SessionStream) -> None:
        while True:
            frame = self._outbox.take() or AttachRequest()
            frame.num_live_streams = self.num_live_streams
            await stream.send(frame)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.heartbeat_s):
                    await self._outbox.filled.wait()

    # --- frames down ---

    def _take(self, frame: AttachResponse) -> None:
        self._take_answers(frame)
        self._take_output(frame)
        if frame.HasField("model_changed"):
            self._model_wanted.set()
        if frame.HasField("readiness"):
            self._no_worker_because = None if frame.readiness.ready else frame.readiness.cause
            self.on_change()
        if frame.draining and not self._scheduler_draining:
            self._scheduler_draining = True
            self.on_change()

    def _take_answers(self, frame: AttachResponse) -> None:
        for accepted in frame.accepted:
            if (sink := self._sinks.get(accepted.handle)) is not None:
                sink.accepted(accepted.max_tokens)
        for refused in frame.refused:
            if (sink := self._sinks.pop(refused.handle, None)) is not None:
                sink.refused(codec.decode_failure(refused.failure))

    def _take_output(self, frame: AttachResponse) -> None:
        if frame.HasField("tokens"):
            for handle, token_ids in codec.decode_tokens(frame.tokens):
                if (sink := self._sinks.get(handle)) is not None:
                    sink.tokens(token_ids)
        for message in frame.ended:
            ended = codec.decode_ended(message)
            if (sink := self._sinks.pop(message.handle, None)) is not None:
                sink.ended(ended)

    # --- the model ---

    async def _keep_model_known(self) -> None:
        """Fetches the model whenever it may have changed, again and again until that works."""
        backoff_s = self._timing.first_backoff_s
        while True:
            await self._model_wanted.wait()
            self._model_wanted.clear()
            if await self._fetch_model():
                backoff_s = self._timing.first_backoff_s
                continue
            self._model_wanted.set()
            await asyncio.sleep(self._jittered(backoff_s))
            backoff_s = min(backoff_s * 2, self._timing.max_backoff_s)

    async def _fetch_model(self) -> bool:
        try:
            info = await self._transport.get_model()
            if info is None:
                return False
            served = await self._served(codec.decode_model(info))
        except SessionLost as error:
            if str(error) != self._fetch_failure:
                self._fetch_failure = str(error)
                log.warning("could not fetch the model", extra={"cause": str(error)})
            return False
        self._fetch_failure = ""
        changed = self._model is None or self._model.description != served.description
        self._known = self._model = served
        if changed:
            log.info("serving a model", extra={"model": served.description.name})
            self._compare_with_limits(served.description)
            self.on_change()
        return True

    def _compare_with_limits(self, model: ModelDescription) -> None:
        # Ids travel as varints of seven bits a byte.
        id_bytes = -(-max(model.vocab_size - 1, 1).bit_length() // 7)
        fitting = self._limits.max_message_bytes // id_bytes
        if model.max_model_len > fitting:
            log.warning(
                "token ids as many as the model allows do not fit into one message: raise --max-prompt-bytes",
                extra={"model": model.name, "max_model_len": model.max_model_len, "num_ids_that_fit": fitting},
            )

    async def _served(self, description: ModelDescription) -> ServedModel:
        digest = description.tokenizer_digest
        if not digest:
            return ServedModel(description, None)
        if self._known is not None and self._known.description.tokenizer_digest == digest:
            return ServedModel(description, self._known.tokenizer)
        files: dict[str, bytearray] = {}
        for chunk in await self._transport.get_tokenizer():
            files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
        try:
            return ServedModel(description, await self._load_tokenizer({name: bytes(d) for name, d in files.items()}))
        except Exception as error:
            # TokenizerError, or that no thread can be had to load it in. Token ids can still be served.
            log.error(TOKENIZER_UNUSABLE, extra={"cause": str(error), "model": description.name})
            return ServedModel(description, None)
