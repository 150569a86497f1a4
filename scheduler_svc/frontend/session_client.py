"""The front end's one stream to the scheduler: opened, kept, opened again for ever.

Nothing here knows gRPC: a SessionTransport is passed in, time comes from the running loop and chance from the given
generator, so the same logic runs against a simulated network on virtual time.

The loss of a stream is a pause: live requests are kept and submitted again on the next one, with what they have
yielded. Only when no scheduler comes back in time do they end.

What a caller may rely on: every submit that is not refused at once gets exactly one of `refused` or `ended` on its
sink, and nothing after that, unless it was released first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler_svc.frontend import codec
from scheduler_svc.frontend.calls import CancelReason, ModelDescription, Submission
from scheduler_svc.frontend.containment import is_containable
from scheduler_svc.frontend.errors import (
    MODEL_CHANGED,
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
from scheduler_svc.frontend.live_requests import CANCELLED, GOES_ON, OVERDUE, CallSink, LiveRequest
from scheduler_svc.frontend.outbox import Outbox
from scheduler_svc.frontend.text import Tokenizer
from stepfence.v1 import model_pb2, session_service_pb2
from stepfence.v1.session_service_pb2 import AttachRequest, AttachResponse

# Revision of the protos that is spoken here. Peers whose revisions differ by one work together; revision 1 was never
# released.
PROTOCOL_REVISION = 2
_OLDEST_REVISION = 2
# Handles travel in int32 columns.
_MAX_HANDLE = 2**31 - 1
# So long after the end of a scheduler's stream an older one is not attached to: no longer, since clocks may step back.
# Seconds.
_TERM_REMEMBERED_S = 10.0

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

    async def get_tokenizer(self) -> Sequence[model_pb2.TokenizerChunk]:
        """Also raises TokenizerError, when there is one that will never be given."""
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
    # Without a scheduler for so long, live requests end.
    scheduler_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """tokenizer None: the model has none, or one that cannot be used."""

    description: ModelDescription
    tokenizer: Tokenizer | None


LoadTokenizer = Callable[[Mapping[str, bytes]], Awaitable[Tokenizer]]


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
        needs_tenants: bool = False,
    ) -> None:
        """needs_tenants: a scheduler that does not keep tenants apart is left again."""
        self._transport = transport
        self._load_tokenizer = load_tokenizer
        self._front_end_id = front_end_id
        self._rng = rng
        self._needs_tenants = needs_tenants
        self._incarnation = rng.getrandbits(64)
        self._timing = timing or SessionTiming()
        self._limits = limits or Limits()
        self._outbox = Outbox(self._limits)
        # By handle, in the order of their submission; released ones too, until the scheduler ends them.
        self._live: dict[int, LiveRequest] = {}
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
        # Since when no scheduler is attached; None before the first one, and when the pause has lasted too long.
        self._paused_since: float | None = None
        self._pause_moved = asyncio.Event()
        # Of the scheduler attached now.
        self._can_resubmit = False
        # Requests of the stream before are being submitted again; new ones wait behind them.
        self._is_resubmitting = False
        # Of the scheduler attached now or last, and when its stream ended.
        self._term = 0
        self._term_ended_at = 0.0

    # --- what holds now ---

    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def num_handles(self) -> int:
        """Requests the scheduler has not ended yet, released ones included."""
        return len(self._live)

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
        """What is served now; during a pause, what was served before it. Raises RequestError UNAVAILABLE."""
        if self._is_pausing and self._known is not None:
            return self._known
        if not self._attached:
            raise RequestError(SCHEDULER_LOST)
        if self._model is None:
            raise RequestError(NO_WORKER)
        return self._model

    # --- requests ---

    def submit(self, submission: Submission, sink: CallSink) -> int:
        """Send a request, or keep it for the next scheduler during a pause; its handle. Raises RequestError."""
        model = self.model.description
        if self._scheduler_draining:
            raise RequestError(SCHEDULER_DRAINING)
        if self._outbox.full:
            message = "the scheduler takes requests more slowly than they come; try again later"
            raise RequestError(Failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, retry_after_s=1.0))
        if not self._attached and sum(not r.is_accepted for r in self._live.values()) >= self._limits.max_held_requests:
            raise RequestError(replace(SCHEDULER_LOST, retry_after_s=1.0))
        handle = self._free_handle()
        request = self._live[handle] = LiveRequest(handle, submission, sink, model, asyncio.get_running_loop().time())
        if self._attached and not self._is_resubmitting:
            self._send(request)
        else:
            # It may have a deadline.
            self._pause_moved.set()
        return handle

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """End a request. Its sink still gets `ended`. No effect when it has ended."""
        request = self._live.get(handle)
        if request is None:
            return
        if request.is_sent:
            request.cancelled = reason
            self._outbox.put_cancel(codec.encode_cancel(handle, reason))
        else:
            self._end(request, CANCELLED[reason])

    def release(self, handle: int) -> None:
        """The sink is to hear of this request no more. The handle stays taken until the scheduler ends it."""
        request = self._live.get(handle)
        if request is not None:
            request.sink = None

    def text_ended(self, handle: int, num_tokens: int) -> None:
        """A stop string completed within output token num_tokens - 1."""
        request = self._live.get(handle)
        if request is not None and request.is_sent:
            request.text_has_ended = True
            self._outbox.put_text_ended(session_service_pb2.TextEnded(handle=handle, num_tokens=num_tokens))

    def no_stream_left(self) -> None:
        """The last client stream ended: say so now and not with the next heartbeat, so that idle looks idle at once."""
        self._outbox.nudge()

    def _free_handle(self) -> int:
        while self._next_handle in self._live:
            self._next_handle = self._next_handle % _MAX_HANDLE + 1
        handle = self._next_handle
        self._next_handle = handle % _MAX_HANDLE + 1
        return handle

    def _send(self, request: LiveRequest) -> None:
        self._outbox.put_submit(request.submit(asyncio.get_running_loop().time()))

    def _end(self, request: LiveRequest, failure: Failure | None) -> None:
        """End a request here, whether or not the scheduler knows of it. failure None: it ended well."""
        if not request.is_sent:
            self._live.pop(request.handle, None)
        request.end(failure, asyncio.get_running_loop().time())

    # --- the stream ---

    async def run(self) -> None:
        """Keep attached until cancelled."""
        watch = asyncio.create_task(self._watch_pause())
        try:
            await self._keep_attached()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _keep_attached(self) -> None:
        backoff_s = self._timing.first_backoff_s
        while True:
            try:
                await self._serve()
            except asyncio.CancelledError:
                self._lose("the front end stops", logging.INFO)
                self._give_up()
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
        """The stream is over. Live requests wait for the next one, but those whose end needs no scheduler."""
        now = asyncio.get_running_loop().time()
        if self._scheduler_draining:
            # It had said that it would go.
            level = logging.INFO
        log.log(
            level if self._attached else logging.DEBUG,
            "scheduler lost",
            extra={"cause": because, "requests_kept": len(self._live)},
        )
        if self._attached:
            self._paused_since = self._term_ended_at = now
        self._attached = False
        self._is_resubmitting = False
        self._scheduler_draining = False
        self._no_worker_because = None
        self._lost_because = because
        self._model = None
        self._outbox.clear()
        for request in list(self._live.values()):
            verdict = request.stream_lost(now)
            if verdict is not GOES_ON:
                self._end(request, verdict)
        self._pause_moved.set()
        self.on_change()

    # --- the pause between two schedulers ---

    @property
    def _is_pausing(self) -> bool:
        """No scheduler is attached, and one was a short while ago: calls wait for the next one."""
        return not self._attached and self._paused_since is not None

    async def _watch_pause(self) -> None:
        """End requests whose deadlines pass while no scheduler counts them, and all when the pause lasts too long."""
        loop = asyncio.get_running_loop()
        while True:
            self._pause_moved.clear()
            wakes_at = self._look_at_pause(loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(wakes_at):
                    await self._pause_moved.wait()

    def _look_at_pause(self, now: float) -> float | None:
        """When to look again; None: when something happens."""
        if self._paused_since is None or self._attached:
            return None
        ends_at = self._paused_since + self._timing.scheduler_grace_s
        if now >= ends_at:
            self._give_up()
            return None
        for request in list(self._live.values()):
            if request.deadline is not None and request.deadline <= now:
                self._end(request, OVERDUE)
            elif request.deadline is not None:
                ends_at = min(ends_at, request.deadline)
        return ends_at

    def _give_up(self) -> None:
        """No scheduler came back in time: end everything."""
        self._paused_since = None
        if self._live:
            log.warning("no scheduler came back in time", extra={"requests_ended": len(self._live)})
        for request in list(self._live.values()):
            self._end(request, SCHEDULER_LOST)

    async def _resubmit(self) -> None:
        """Submit again what earlier streams had accepted, in the order of age, then what came during the pause."""
        for request in [request for request in self._live.values() if request.is_accepted]:
            if not self._can_resubmit:
                self._end(request, SCHEDULER_LOST)
            else:
                await self._send_unless_over(request)
        self._outbox.put_resubmits_done()
        self._is_resubmitting = False
        for request in list(self._live.values()):
            await self._send_unless_over(request)

    async def _send_unless_over(self, request: LiveRequest) -> None:
        await self._outbox.room()
        if self._live.get(request.handle) is request and not request.is_sent:
            self._send(request)
            # A long history takes a while to copy: others get their turn.
            await asyncio.sleep(0)

    # --- one stream ---

    async def _serve(self) -> None:
        """One stream from hello to its end; raises SessionLost or SessionProtocolError."""
        stream = self._transport.attach()
        helpers: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._timing.attach_timeout_s):
                await self._greet(stream)
            helpers.append(asyncio.create_task(self._help(stream, lambda: self._send_frames(stream))))
            helpers.append(asyncio.create_task(self._help(stream, self._keep_model_known)))
            helpers.append(asyncio.create_task(self._help(stream, self._resubmit)))
            while True:
                await self._take(await stream.receive())
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
        self._check_term(frame.attached.term)
        self.accepts_priority = session_service_pb2.SESSION_FEATURE_PRIORITY in frame.attached.features
        if self._needs_tenants and session_service_pb2.SESSION_FEATURE_TENANTS not in frame.attached.features:
            raise SessionProtocolError(
                "the scheduler does not keep tenants apart: bring it to this front end's release"
            )
        self._can_resubmit = session_service_pb2.SESSION_FEATURE_RESUBMIT in frame.attached.features
        self._attached = self._is_resubmitting = True
        self._model_wanted.set()
        log.info("attached to the scheduler", extra={"incarnation": f"{frame.attached.scheduler_incarnation:016x}"})
        await self._take(frame)
        self.on_change()

    def _check_term(self, term: int) -> None:
        """Raises SessionLost for a scheduler that started before the one that was attached last."""
        is_remembered = asyncio.get_running_loop().time() - self._term_ended_at < _TERM_REMEMBERED_S
        if 0 < term < self._term and is_remembered:
            raise SessionLost("a scheduler answers that is older than the last one: stop the older one")
        self._term = term

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

    async def _take(self, frame: AttachResponse) -> None:
        if frame.HasField("model_changed"):
            self._model_wanted.set()
            self._end_requests_of_other_models(codec.decode_model(frame.model_changed.model))
        self._take_answers(frame)
        await self._take_output(frame)
        if frame.HasField("readiness"):
            self._no_worker_because = None if frame.readiness.ready else frame.readiness.cause
            self.on_change()
        if frame.draining and not self._scheduler_draining:
            self._scheduler_draining = True
            self.on_change()

    def _take_answers(self, frame: AttachResponse) -> None:
        for accepted in frame.accepted:
            if (request := self._live.get(accepted.handle)) is not None:
                request.accepted(accepted.max_tokens)
        for refused in frame.refused:
            if (request := self._live.pop(refused.handle, None)) is not None:
                request.refused(codec.decode_failure(refused.failure), asyncio.get_running_loop().time())

    async def _take_output(self, frame: AttachResponse) -> None:
        if frame.HasField("tokens"):
            await self._take_tokens(frame.tokens)
        for changed in frame.usage_changed:
            if (request := self._live.get(changed.handle)) is not None:
                request.usage.changed(codec.decode_usage(changed.usage), asyncio.get_running_loop().time())
        for message in frame.ended:
            ended = codec.decode_ended(message)
            if (request := self._live.pop(message.handle, None)) is not None:
                request.ended(ended)

    async def _take_tokens(self, columns: session_service_pb2.TokenColumns) -> None:
        """In parts, between which others get their turn: a frame has the tokens of all requests, and what each of them
        costs depends on its request's stop strings."""
        size = self._limits.max_tokens_at_once
        num_taken = 0
        for handle, token_ids in codec.decode_tokens(columns):
            for start in range(0, len(token_ids), size):
                part = token_ids[start : start + size]
                if num_taken + len(part) > size:
                    await asyncio.sleep(0)
                    num_taken = 0
                num_taken += len(part)
                # It may have ended meanwhile.
                if (request := self._live.get(handle)) is not None:
                    request.tokens(part)

    def _end_requests_of_other_models(self, model: ModelDescription) -> None:
        """A text cannot be continued by another model than the one that began it."""
        for request in list(self._live.values()):
            if request.sink is not None and not request.fits(model):
                if request.is_sent:
                    self.cancel(request.handle, CancelReason.ABORTED)
                self._end(request, MODEL_CHANGED)

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
        try:
            for chunk in await self._transport.get_tokenizer():
                files.setdefault(chunk.file_name, bytearray()).extend(chunk.data)
            return ServedModel(description, await self._load_tokenizer({name: bytes(d) for name, d in files.items()}))
        except SessionLost:
            raise
        except Exception as error:
            # TokenizerError, or that no thread can be had to load it in. Token ids can still be served.
            log.error(TOKENIZER_UNUSABLE, extra={"cause": str(error), "model": description.name})
            return ServedModel(description, None)
