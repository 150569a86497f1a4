"""asyncio around one worker's session: dial, ask, open, send, receive, wait, and again.

    dial -> capabilities -> open -> opened -> steps and results -> lost -> dial ...

What all of it means is decided in `session.py`; here are tasks, time-outs and the transport. Everything runs on one
event loop, takes time only from it, and chance only from the generator it was given.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol, assert_never

from scheduler_svc import errors
from scheduler_svc.core.events import RankDraining, RankJoined, StepAcked, WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkLost, LinkRejected, RankUnfit
from scheduler_svc.facts import MetricsSink
from scheduler_svc.workers import codec
from scheduler_svc.workers.actions import Acked, Action, Interrupt, Joined, Leaving, Lost, Retry, Say, Transmit
from scheduler_svc.workers.codec import TokenizerPiece, WorkerCapabilities, WorkerFeature
from scheduler_svc.workers.fitness import RankRegister, SessionConfig
from scheduler_svc.workers.served_model import ServedModel
from scheduler_svc.workers.session import RankState, Timeouts, WorkerSession
from scheduler_svc.workers.transport import StepStream, WorkerLink, WorkerTransport

log = logging.getLogger(__name__)

_MAX_TOKENIZER_BYTES: Final = 256 << 20
# What a piece takes in memory besides its bytes: pieces may be empty.
_PIECE_OVERHEAD: Final = 256
# The first pause after a worker gave no tokenizer; each one after that is twice as long, up to the second number.
_TOKENIZER_RETRY_S: Final = 1.0
_MAX_TOKENIZER_RETRY_S: Final = 30.0
# A pause of the event loop longer than this means that the process itself did not run. Seconds.
_STOOD_STILL_S: Final = 1.0
_MAX_WATCH_PERIOD_S: Final = 0.25


class RankInbox(Protocol):
    """The loop, as a rank client sees it. Nothing waits."""

    def rank_joined(self, client: RankClient, event: RankJoined) -> None:
        """An epoch was opened."""

    def rank_lost(self, rank: str, epoch: int, reason: str, graceful: bool) -> None:
        """An epoch that had joined is over."""

    def rank_draining(self, event: RankDraining, epoch: int) -> None:
        """The worker wants to leave."""

    def step_acked(self, event: StepAcked) -> None:
        """A step's result arrived."""


class RankClient:
    """Keeps one worker address connected for as long as run() runs. Methods without `async` never wait."""

    def __init__(
        self,
        rank: str,
        transport: WorkerTransport,
        inbox: RankInbox,
        model: ServedModel,
        register: RankRegister,
        *,
        config: SessionConfig,
        timeouts: Timeouts,
        scheduler_incarnation: int,
        term: int = 0,
        rng: random.Random,
        metrics: MetricsSink,
        on_state: Callable[[RankClient], None],
    ) -> None:
        self.rank = rank
        # Set when the address is gone from its name: the client ends with its stream.
        self.is_orphaned = False
        self._session = WorkerSession(
            rank,
            model,
            register,
            config=config,
            timeouts=timeouts,
            scheduler_incarnation=scheduler_incarnation,
            term=term,
        )
        self._transport = transport
        self._inbox = inbox
        self._model = model
        self._timeouts = timeouts
        self._rng = rng
        self._metrics = metrics
        self._on_state = on_state
        self._reported = RankState.CONNECTING
        self._to_send = asyncio.Event()
        self._attempt: asyncio.Task[Retry] | None = None

    # --- what the loop and the status need ---

    @property
    def cause(self) -> str:
        """Why the rank is not up; "" when it is."""
        return self._session.cause

    @property
    def host(self) -> str:
        """What the newest worker there calls its machine or container; "" for nothing."""
        return self._session.host

    @property
    def features(self) -> frozenset[WorkerFeature]:
        """What the newest worker there can do, of what is known here."""
        return self._session.features

    @property
    def num_rows_held(self) -> int:
        """Rows that the worker holds, by its newest result."""
        return self._session.num_rows_held

    @property
    def epoch(self) -> int:
        """Number of the newest epoch tried; 0 before the first."""
        return self._session.epoch

    @property
    def has_epoch(self) -> bool:
        """Whether it has joined and its epoch is not over, with or without a stream just now."""
        return self._session.is_joined

    @property
    def is_connected(self) -> bool:
        """Whether steps go out right now. Without, the rank gets no further ones."""
        return self._session.is_connected

    @property
    def state(self) -> RankState:
        """The rank's state now."""
        return self._session.rank_state(self._now())

    def send(self, output: SchedulerOutput) -> None:
        """Queue a step. Ignored when its epoch is over already (the loop will hear of that next)."""
        if actions := self._session.queue(output):
            self._metrics.step_sent(output)
            self._perform(actions)

    def fail(self, epoch: int, reason: str) -> None:
        """The core refused an answer of this epoch, and treats the rank as lost already: begin a new epoch."""
        self._perform(self._session.epoch_refused(epoch, reason))

    # --- life ---

    async def run(self) -> None:
        """Connect again and again until cancelled, or until an orphaned rank's stream is gone."""
        watch = asyncio.create_task(self._watch(), name=f"watch {self.rank}")
        try:
            while True:
                pause = await self._one_attempt()
                if self.is_orphaned:
                    self._perform(self._session.close(address_is_gone=True))
                    return
                self._report()
                await asyncio.sleep(pause.seconds * (self._rng.uniform(0.5, 1.0) if pause.is_jittered else 1.0))
        finally:
            watch.cancel()
            await _gone(watch)
            self._perform(self._session.close())

    async def _one_attempt(self) -> Retry:
        # A task of its own, so that the watchdog can end it wherever it stands.
        self._attempt = asyncio.create_task(self._connect_and_serve(), name=f"rank {self.rank}")
        try:
            await asyncio.wait({self._attempt})
            return self._session.attempt_interrupted() if self._attempt.cancelled() else self._attempt.result()
        finally:
            self._attempt.cancel()
            await _gone(self._attempt)
            self._attempt = None

    async def _connect_and_serve(self) -> Retry:
        """One connection from dialing to its end; how long to wait before the next."""
        link = self._transport.connect(self.rank)
        error: Exception | None = None
        try:
            await self._serve_on(link)
        except (RankUnfit, LinkRejected, LinkLost, WorkerProtocolError, TimeoutError) as ended:
            error = ended
        finally:
            await link.close()
        actions, pause = self._session.attempt_ended(error, self._now())
        self._perform(actions)
        return pause

    async def _serve_on(self, link: WorkerLink) -> None:
        session = self._session
        async with asyncio.timeout(session.dial_timeout_s):
            capabilities = codec.decode_capabilities(await link.get_capabilities())
        self._perform(session.capabilities_arrived(capabilities))
        session.check()
        opening = session.opening()
        stream = link.run_steps()
        try:
            async with asyncio.timeout(session.open_timeout_s):
                await stream.send(opening)
                data = await stream.receive()
            if data is None:
                raise LinkLost("the worker ended the stream instead of opening it")
            self._take(data)
            await self._exchange(link, stream, capabilities)
        finally:
            stream.cancel()

    async def _exchange(self, link: WorkerLink, stream: StepStream, capabilities: WorkerCapabilities) -> None:
        """Send and receive until the stream ends; raises what ends it otherwise."""
        tasks = [
            asyncio.create_task(self._transmit(stream), name=f"sending to {self.rank}"),
            asyncio.create_task(self._fetch_tokenizer(link, capabilities), name=f"tokenizer of {self.rank}"),
        ]
        try:
            while (data := await stream.receive()) is not None:
                self._take(data)
        finally:
            for task in tasks:
                task.cancel()
                await _gone(task)

    def _take(self, data: bytes) -> None:
        self._perform(self._session.frame_arrived(codec.decode_worker_frame(data), self._now()))

    async def _transmit(self, stream: StepStream) -> None:
        with suppress(LinkLost, LinkRejected):  # the receiving side hears of it, too
            while True:
                self._to_send.clear()
                while (frame := self._session.take_frame(self._now())) is not None:
                    await stream.send(frame)
                await self._to_send.wait()

    async def _fetch_tokenizer(self, link: WorkerLink, capabilities: WorkerCapabilities) -> None:
        pause_s = _TOKENIZER_RETRY_S
        cause = ""
        while self._model.wants_tokenizer(capabilities.model):
            try:
                pieces = await self._tokenizer_pieces(link)
            except (LinkLost, LinkRejected, WorkerProtocolError) as error:
                if str(error) != cause:
                    cause = str(error)
                    log.warning("no tokenizer from rank", extra={"rank": self.rank, "cause": cause})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_TOKENIZER_RETRY_S)
            else:
                if pieces is not None:
                    self._model.keep_tokenizer(capabilities.model, pieces)
                    return
                log.warning(
                    "the model's tokenizer is too large, so clients can only send token ids: serve the model with a "
                    "smaller one",
                    extra={"rank": self.rank, "max_bytes": _MAX_TOKENIZER_BYTES},
                )
                self._model.refuse_tokenizer(capabilities.model, errors.tokenizer_too_large(_MAX_TOKENIZER_BYTES))

    async def _tokenizer_pieces(self, link: WorkerLink) -> tuple[TokenizerPiece, ...] | None:
        """None: they are too large together."""
        pieces = []
        size = 0
        async for data in link.get_tokenizer():
            piece = codec.decode_tokenizer_piece(data)
            pieces.append(piece)
            size += len(piece.data) + _PIECE_OVERHEAD
            if size > _MAX_TOKENIZER_BYTES:
                return None
        return tuple(pieces)

    # --- actions ---

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out what the session decided, in its order."""
        for action in actions:
            match action:
                case Acked():
                    step_seq = action.event.step_seq
                    self._metrics.step_acked(self.rank, step_seq, action.rtt_s, action.staged_s, action.executed_s)
                    self._inbox.step_acked(action.event)
                case Transmit():
                    self._to_send.set()
                case Say():
                    log.log(action.level, action.message, extra=dict(action.fields))
                case Joined():
                    self._inbox.rank_joined(self, action.event)
                    self._report()
                case Leaving():
                    self._inbox.rank_draining(action.event, action.epoch)
                    self._report()
                case Lost():
                    self._lost(action)
                case Interrupt():
                    if self._attempt is not None:
                        self._attempt.cancel()
                case _:
                    assert_never(action)

    def _lost(self, lost: Lost) -> None:
        self._metrics.epoch_ended(self.rank, lost.graceful)
        self._report()
        if not lost.is_known:
            self._inbox.rank_lost(self.rank, lost.epoch, lost.reason, lost.graceful)

    # --- time ---

    async def _watch(self) -> None:
        """Ask the session's watchdog again and again; also notices outages that last."""
        period_s = min(_MAX_WATCH_PERIOD_S, self._timeouts.step_watchdog_s / 8)
        before = self._now()
        while True:
            await asyncio.sleep(period_s)
            now = self._now()
            stalled_s = now - before - period_s
            before = now
            if stalled_s > _STOOD_STILL_S:
                self._session.stood_still(stalled_s)
            self._perform(self._session.watch(now))
            self._report()

    def _report(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            self._metrics.rank_changed(self.rank, state.value, self.epoch)
            self._on_state(self)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _gone(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task that was cancelled or has ended; a failure of its own is a bug and logged as such."""
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
