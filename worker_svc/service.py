"""The WorkerService: order, epochs and replay. It knows steps, not models.

One stream at a time is *the* stream: the newest that opened (contract rule 7). A reader task per stream takes frames up
and stages steps with the executor; the handler itself writes frames down. Neither waits for the runner, and the runner
waits for neither.

    frames up ──► reader ──► Epoch.accept ──► Executor.submit ─ ─ (thread) ─ ─► Runner
                                                                                   │
    frames down ◄── handler ◄── StepStream.pump ◄── Epoch.remember ◄── (event loop)┘
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from stepfence.v1 import worker_service_pb2, worker_service_pb2_grpc
from worker_svc import codec
from worker_svc.epoch import Epoch
from worker_svc.errors import (
    ContractError,
    InternalFault,
    MalformedOpen,
    MalformedStep,
    NoTokenizer,
    NotReady,
    OpenRefused,
    Superseded,
)
from worker_svc.executor import Executor, Loaded
from worker_svc.runner.base import DeviceFailed, Geometry, Runner
from worker_svc.step import FailureKind, StepAnswer
from worker_svc.stream import StepStream
from worker_svc.terms import TermGuard

log = logging.getLogger(__name__)

Requests = AsyncIterator[worker_service_pb2.RunStepsRequest]
Context = grpc.aio.ServicerContext[Any, Any]
# Makes what drives the runner, as Executor does.
MakeExecutor = Callable[[Callable[[], Runner], Callable[[Epoch, StepAnswer], None]], Executor]

SERVICE_NAME: Final = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
# Reason of a refusal by a worker that was asked to stop.
_DRAINING: Final = "DRAINING"
# How long a failure of the device waits for its answer to be read before the process exits all the same.
_LAST_ANSWER_S: Final = 2.0
# How long the answers before the end of a stream wait to be read.
_LAST_FRAMES_S: Final = 1.0
_DRAIN_POLL_S: Final = 0.05
# A draining worker without rows waits so long for a step that may be on its way.
_DRAIN_QUIET_S: Final = 0.25


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    """Call `start` once it is registered with a listening server. `failed` gets a message when the process must
    exit.

    `host` is what people know this worker's machine or container by, "" for nothing. Time comes from the running loop;
    `incarnation` (None: drawn) and `make_executor` are for those who want neither chance nor threads."""

    def __init__(
        self,
        load: Callable[[], Runner],
        *,
        keep_state_s: float = 10.0,
        open_timeout_s: float = 10.0,
        host: str = "",
        served_names: Sequence[str] = (),
        incarnation: int | None = None,
        make_executor: MakeExecutor = Executor,
    ) -> None:
        self.incarnation: Final = secrets.randbits(64) if incarnation is None else incarnation
        self.failed: Final[asyncio.Future[str]] = asyncio.get_running_loop().create_future()
        self._executor: Final = make_executor(load, self._on_answer)
        self._keep_state_s: Final = keep_state_s
        self._open_timeout_s: Final = open_timeout_s
        self._served_names: Final = tuple(served_names)
        self._host: Final = host
        self._loaded: Loaded | None = None
        self._epoch: Epoch | None = None
        # num_blocks of _epoch, once the runner has opened it.
        self._opening: asyncio.Future[int] | None = None
        # (scheduler incarnation, epoch) of the newest open; outlives the epoch's state.
        self._newest: tuple[int, int] | None = None
        self._stream: StepStream | None = None
        self._terms: Final = TermGuard()
        self._forget_timer: asyncio.TimerHandle | None = None
        # Time of the loop's clock by which a drain ends; None: not draining.
        self._drain_until: float | None = None
        self._device_failure: str | None = None

    @property
    def is_draining(self) -> bool:
        return self._drain_until is not None

    async def start(self) -> Loaded:
        """Load the model in the executor's thread; until then calls are refused MODEL_LOADING. Raises what loading
        raises."""
        self._loaded = await self._executor.start()
        return self._loaded

    async def drain(self, deadline_s: float) -> bool:
        """Tell the scheduler, go on until it has taken its rows away; False when the deadline came first.

        The stream is ended at the end, in either case.
        """
        loop = asyncio.get_running_loop()
        self._drain_until = loop.time() + deadline_s
        if self._stream is not None and self._stream.is_open:
            self._stream.push(codec.encode_draining(deadline_s))
        quiet_since: float | None = None
        is_done = False
        while not is_done and loop.time() < self._drain_until:
            if not self._has_work():
                quiet_since = loop.time() if quiet_since is None else quiet_since
                is_done = self._stream is None or loop.time() - quiet_since >= _DRAIN_QUIET_S
            else:
                quiet_since = None
            if not is_done:
                await asyncio.sleep(_DRAIN_POLL_S)
        has_finished = is_done or not self._has_work()
        self._end_epoch("the worker drained")
        if self._stream is not None:
            self._stream.end(NotReady(_DRAINING, "the worker has drained and leaves"))
        return has_finished

    def stop(self, timeout_s: float) -> bool:
        """End the executor; False when the runner did not come back in time."""
        self._end_epoch("the worker stops")
        self._cancel_forgetting()
        return self._executor.stop(timeout_s)

    # --- RPCs -------------------------------------------------------------------------------------------------------

    async def GetCapabilities(
        self, request: worker_service_pb2.GetCapabilitiesRequest, context: Context
    ) -> worker_service_pb2.GetCapabilitiesResponse:
        try:
            loaded = self._require_loaded()
        except ContractError as error:
            await _abort(context, error)
        capabilities = loaded.runner.capabilities
        return codec.encode_capabilities(
            capabilities, self.incarnation, loaded.tokenizer, self._host, self._served_names
        )

    # The stubs know generators only; with `context.write` the end of a stream is seen here, in `finally`, at once.
    async def GetTokenizer(  # type: ignore[override]
        self, request: worker_service_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        try:
            loaded = self._require_loaded()
            if not loaded.tokenizer:
                raise NoTokenizer
        except ContractError as error:
            await _abort(context, error)
        for chunk in codec.tokenizer_chunks(loaded.tokenizer):
            await context.write(chunk)

    async def RunSteps(self, request_iterator: Requests, context: Context) -> None:  # type: ignore[override]
        stream = StepStream()
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            await self._write(stream, context)
        except ContractError as error:
            # A stop as asked is no trouble.
            level = logging.INFO if error.reason == _DRAINING else logging.WARNING
            log.log(level, "stream ended", extra={"reason": error.reason, "cause": error.message})
            await _abort(context, error)
        finally:
            reader.cancel()
            self._detach(stream)

    async def _write(self, stream: StepStream, context: Context) -> None:
        """Write the stream's frames until it has ended. Raises its refusal. A peer that does not read when the stream
        ends is given up after a while, with what was still to be written."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as patience:
                stream.on_end = lambda: patience.reschedule(loop.time() + _LAST_FRAMES_S)
                while (frame := await stream.next_frame()) is not None:
                    await context.write(frame)
        except TimeoutError:
            log.warning("answers could not be written before the end of their stream")
            if stream.refusal is not None:
                raise stream.refusal from None
        finally:
            stream.on_end = lambda: None

    # --- up ---------------------------------------------------------------------------------------------------------

    async def _read(self, stream: StepStream, requests: Requests) -> None:
        """Take frames until the stream ends in either direction. Whatever goes wrong ends the stream with its
        status."""
        try:
            async with asyncio.timeout(self._open_timeout_s):
                first = await anext(requests, None)
            if first is None:
                stream.end(None)
                return
            await self._open(stream, first)
            async for request in requests:
                self._take(stream, request)
            # The scheduler has nothing more to say; what it asked is still answered.
            stream.end_when_answered()
        except ContractError as error:
            # Answers that the executor has given already come first: they are on their way to this loop.
            await asyncio.sleep(0)
            stream.end(error)
        except TimeoutError:
            stream.end(MalformedOpen("OPEN_EXPECTED", f"no open within {self._open_timeout_s} s"))
        except DecodeError:
            refusal = MalformedStep("a frame is no RunStepsRequest")
            if stream.epoch is not None and not stream.is_ending:
                stream.epoch.end(refusal.message)
            stream.end(refusal)
        except Exception as error:
            # The transport's own errors: the stream is lost, what is held stays for the next one. When this side has
            # ended it, they are no news.
            level = logging.DEBUG if stream.is_ending else logging.WARNING
            log.log(level, "a stream broke", extra={"cause": f"{type(error).__name__}: {error}"})
            stream.end(None)

    async def _open(self, stream: StepStream, request: worker_service_pb2.RunStepsRequest) -> None:
        loaded = self._require_loaded()
        if self._drain_until is not None:
            raise NotReady(_DRAINING, "the worker is leaving")
        if request.WhichOneof("frame") != "open":
            raise MalformedOpen("OPEN_EXPECTED", "the first frame of a stream must carry open")
        incarnation, number, geometry = codec.decode_open(request.open)
        self._terms.check(request.open.term, asyncio.get_running_loop().time())
        codec.check_geometry(geometry, loaded.runner.capabilities)
        codec.check_features(request.open, loaded.runner.capabilities)
        epoch = self._continued(incarnation, number, geometry)
        if epoch is None:
            epoch = self._new_epoch(incarnation, number, geometry)
        self._attach(stream, epoch)
        self._terms.opened(request.open.term)
        assert self._opening is not None
        try:
            # Shielded: another stream of the same epoch may wait for it, too.
            await asyncio.shield(self._opening)
        except DeviceFailed as error:
            self._exit_soon(f"device failure: {error}")
            raise InternalFault from error
        if stream.is_ending:
            return
        stream.push(codec.encode_opened(self.incarnation, epoch.num_blocks, epoch.executed_step_seq))
        stream.is_open = True
        if self._drain_until is not None:
            stream.push(codec.encode_draining(max(0.0, self._drain_until - asyncio.get_running_loop().time())))
        log.info(
            "opened",
            extra={
                "scheduler_incarnation": f"{incarnation:016x}",
                "epoch": number,
                "num_blocks": epoch.num_blocks,
                "executed_step_seq": epoch.executed_step_seq,
            },
        )

    def _continued(self, incarnation: int, number: int, geometry: Geometry) -> Epoch | None:
        """The epoch that this open goes on with; None when it starts one. Raises OpenRefused for what is past (rule
        7)."""
        if self._newest is None or self._newest[0] != incarnation or number > self._newest[1]:
            return None
        if number < self._newest[1]:
            raise OpenRefused("EPOCH_TOO_SMALL", f"epoch {number} after epoch {self._newest[1]}")
        if self._epoch is None:
            raise OpenRefused("EPOCH_OVER", f"the state of epoch {number} was dropped: open a later one")
        self._epoch.check_reopen(geometry)
        return self._epoch

    def _new_epoch(self, incarnation: int, number: int, geometry: Geometry) -> Epoch:
        self._end_epoch("a newer epoch was opened")
        epoch = Epoch(incarnation, number, geometry)
        opening = self._executor.open(epoch)
        opening.add_done_callback(lambda done: self._on_open_done(epoch, done))
        self._epoch, self._opening, self._newest = epoch, opening, (incarnation, number)
        return epoch

    def _on_open_done(self, epoch: Epoch, done: asyncio.Future[int]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            epoch.end(f"it could not be opened: {error}")
        elif self._loaded is not None:
            epoch.start(done.result(), self._loaded.runner.capabilities)

    def _take(self, stream: StepStream, request: worker_service_pb2.RunStepsRequest) -> None:
        """One frame after open. What cannot be taken ends the epoch (rule 3), unless the stream had lost it already."""
        epoch = stream.epoch
        if stream.is_ending or epoch is None:
            return
        try:
            if request.WhichOneof("frame") != "step":
                raise MalformedStep("only steps follow an open")
            failed_step_seq = epoch.failed_step_seq
            if failed_step_seq is not None and stream.is_asked(failed_step_seq):
                # The answer to that step is on its way and ends the stream; what was sent meanwhile gets none (rule 8).
                return
            step = codec.decode_step(request.step, self._require_loaded().runner.capabilities.vocab_size)
            if epoch.accept(step):
                self._executor.submit(epoch, step)
            stream.ask(step.step_seq)
        except ContractError as error:
            epoch.end(error.message)
            raise
        except Exception as error:
            log.exception("a step could not be taken", extra={"epoch": epoch.number})
            epoch.end("internal error")
            raise InternalFault from error

    # --- down -------------------------------------------------------------------------------------------------------

    def _on_answer(self, epoch: Epoch, answer: StepAnswer) -> None:
        if epoch is self._epoch:
            self._deliver(epoch, answer)
        if answer.failure is FailureKind.DEVICE:
            self._exit_soon(answer.message)

    def _deliver(self, epoch: Epoch, answer: StepAnswer) -> None:
        epoch.remember(answer)
        if self._stream is not None:
            self._stream.pump()

    def _attach(self, stream: StepStream, epoch: Epoch) -> None:
        self._cancel_forgetting()
        if self._stream is not None:
            self._stream.end(Superseded("a newer stream was opened"))
        stream.epoch = epoch
        self._stream = stream

    def _detach(self, stream: StepStream) -> None:
        stream.end(None)
        if self._device_failure is not None:
            self._exit_now()
        if stream is not self._stream:
            return
        self._stream = None
        self._terms.ended(asyncio.get_running_loop().time())
        self._cancel_forgetting()
        self._forget_timer = asyncio.get_running_loop().call_later(self._keep_state_s, self._forget)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if self._epoch is not None:
            log.warning("no scheduler came back: its state is dropped", extra={"epoch": self._epoch.number})
        self._end_epoch("its scheduler did not come back in time")

    def _cancel_forgetting(self) -> None:
        if self._forget_timer is not None:
            self._forget_timer.cancel()
            self._forget_timer = None

    def _end_epoch(self, why: str) -> None:
        """Drop what is held, remembered answers included."""
        if self._epoch is not None:
            self._epoch.end(why)
        self._epoch = self._opening = None

    def _has_work(self) -> bool:
        if self._epoch is None or self._epoch.is_over or self._stream is None:
            return False
        # What is answered and not written yet is written while the stream ends.
        return self._epoch.num_rows_held > 0 or self._epoch.num_unanswered > 0

    def _exit_soon(self, message: str) -> None:
        self._device_failure = message
        if self._stream is None or self._stream.epoch is None:
            self._exit_now()
        else:
            asyncio.get_running_loop().call_later(_LAST_ANSWER_S, self._exit_now)

    def _exit_now(self) -> None:
        if not self.failed.done():
            self.failed.set_result(self._device_failure or "device failure")

    def _require_loaded(self) -> Loaded:
        if self._loaded is None:
            raise NotReady("MODEL_LOADING", "the model is still loading")
        return self._loaded


async def _abort(context: Context, error: ContractError) -> NoReturn:
    await context.abort(error.code, error.message, error.trailing_metadata())
    raise AssertionError("abort raises")
