"""One rank's stream: connect, open an epoch, send steps, take results, and judge what a failure means.

    dial -> capabilities -> open -> opened -> steps and results -> lost -> dial ...

An *epoch* is what the core knows as a joined rank. It survives the loss of the stream as long as the same worker
process answers again soon: then the stream is opened with the same epoch and every unacknowledged step is sent again,
byte for byte (contract rule 7; the worker answers repeated steps from memory). It ends, once and for good, when

  - the oldest unacknowledged step stays without a result for too long, or the worker is out of reach as long
  (watchdog),
  - nobody listens at the address any more,
  - another process answers there (new worker incarnation),
  - the worker ended the stream with an error, failed a step, or answered wrongly (rules 3, 8, 9),
  - the loop says so, because the core refused an answer,
  - a draining worker left.

Everything here runs on one event loop, takes time only from it, and randomness only from the generator it was given.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from scheduler_svc import codec
from scheduler_svc.codec import Opened, StepResult, WorkerCapabilities, WorkerDraining
from scheduler_svc.core.events import RankDraining, RankJoined, StepAcked, WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkLost, LinkRefused, LinkRejected, RankUnfit
from scheduler_svc.facts import MetricsSink
from scheduler_svc.served_model import ServedModel
from scheduler_svc.worker_transport import StepStream, WorkerLink, WorkerTransport

log = logging.getLogger(__name__)

# Steps of an epoch for which the longer watchdog holds: compilation and warm-up happen in them.
_FIRST_STEPS: Final = 3
_MAX_TOKENIZER_BYTES: Final = 256 << 20
# More than any device holds; counting so many takes this process a gigabyte.
_MAX_NUM_BLOCKS: Final = 1 << 24
_TOKENIZER_RETRY_S: Final = 1.0
# ErrorInfo reason of a worker that is leaving.
_DRAINING: Final = "DRAINING"
# Code of a worker that cannot be opened as asked.
_UNFIT_CODE: Final = "INVALID_ARGUMENT"
# The cluster secret is missing or wrong: the same call cannot succeed until an operator changes something.
_NOT_LET_IN: Final = "UNAUTHENTICATED"


class RankState(str, Enum):
    """What GetStatus says about a rank."""

    CONNECTING = "connecting"
    UP = "up"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an epoch is opened with. max_model_len is the configured one; the worker's own may be smaller."""

    block_size: int
    num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    max_inflight_steps: int


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a rank client waits for what. Seconds."""

    step_watchdog_s: float = 10.0
    first_steps_watchdog_s: float = 120.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 0.5
    # Before a worker that may not join is asked again.
    unfit_retry_s: float = 3.0
    # Before a worker that another scheduler took over is opened again.
    taken_over_retry_s: float = 5.0
    capabilities_timeout_s: float = 5.0
    # The same while an epoch waits for its stream: a dial that hangs must not outlast the outage.
    redial_timeout_s: float = 2.0
    # An epoch whose worker's address refuses connections for so long is over.
    refused_grace_s: float = 1.0
    # A stream lost for less than this does not make the rank "lost".
    outage_grace_s: float = 1.0


class RankInbox(Protocol):
    """The loop, as a rank client sees it. Nothing waits."""

    def rank_joined(self, client: RankClient, event: RankJoined) -> None:
        """An epoch was opened."""

    def rank_lost(self, rank: str, epoch: int, reason: str, blameless: bool) -> None:
        """An epoch that had joined is over."""

    def rank_draining(self, event: RankDraining, epoch: int) -> None:
        """The worker wants to leave."""

    def step_acked(self, event: StepAcked) -> None:
        """A step's result arrived."""


class RankRegister:
    """What must hold across rank clients, and across their lives: one worker process is not two ranks because two
    addresses lead to it, and a rank's epochs never start over."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        self._epochs: dict[str, int] = {}

    def next_epoch(self, rank: str) -> int:
        """From 1."""
        epoch = self._epochs[rank] = self._epochs.get(rank, 0) + 1
        return epoch

    def claim(self, worker_incarnation: int, rank: str) -> None:
        """Raises RankUnfit when another rank holds it."""
        holder = self._ranks.setdefault(worker_incarnation, rank)
        if holder != rank:
            raise RankUnfit(f"the same worker process is rank {holder} already")

    def release(self, worker_incarnation: int, rank: str) -> None:
        """The rank's epoch is over."""
        if self._ranks.get(worker_incarnation) == rank:
            del self._ranks[worker_incarnation]


@dataclass(slots=True)
class _SentStep:
    """A step frame until its result is in. core_seq None: it only carried ahead what did not fit
    (codec.encode_step)."""

    wire_seq: int
    core_seq: int | None
    data: bytes
    sent_at: float | None = None


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
        geometry: Geometry,
        patience: Patience,
        scheduler_incarnation: int,
        rng: random.Random,
        metrics: MetricsSink,
        on_state: Callable[[RankClient], None],
    ) -> None:
        self.rank = rank
        self.cause = "not connected yet"
        # What the newest worker there calls its machine or container; "" for nothing. Stays when it is lost.
        self.host = ""
        self.num_rows_held = 0
        # Set when the address is gone from its name: the client ends with its stream.
        self.is_orphaned = False
        self._transport = transport
        self._inbox = inbox
        self._model = model
        self._register = register
        self._geometry = geometry
        self._patience = patience
        self._scheduler_incarnation = scheduler_incarnation
        self._rng = rng
        self._metrics = metrics
        self._on_state = on_state

        self._epoch = 0
        self._is_joined = False
        self._is_connected = False
        self._is_draining = False
        self._was_joined = False
        self._incarnation = 0
        self._drained_incarnation: int | None = None
        self._max_message_bytes = 0
        self._reported = RankState.CONNECTING

        # Frames without a result, oldest first; the first _num_transmitted of them are on this stream.
        self._steps: deque[_SentStep] = deque()
        self._num_transmitted = 0
        self._next_wire_seq = 1
        # (core step_seq, its wire number) of steps the core may still name as processed.
        self._wire_numbers: deque[tuple[int, int]] = deque()
        self._processed_wire_seq = 0
        self._to_send = asyncio.Event()
        # Since when the oldest unacknowledged frame has been the oldest; since when the stream of a joined rank is
        # gone.
        self._oldest_since = 0.0
        self._lost_at: float | None = None
        self._attempt: asyncio.Task[float] | None = None
        self._num_failures = 0

    # --- what the loop and the status need ---

    @property
    def epoch(self) -> int:
        """Number of the newest epoch tried; 0 before the first."""
        return self._epoch

    @property
    def has_epoch(self) -> bool:
        """Whether it has joined and its epoch is not over, with or without a stream just now."""
        return self._is_joined

    @property
    def is_connected(self) -> bool:
        """Whether steps go out right now. Without, the rank gets no further ones."""
        return self._is_joined and self._is_connected

    @property
    def state(self) -> RankState:
        """The rank's state now."""
        if not self._is_joined:
            return RankState.LOST if self._was_joined else RankState.CONNECTING
        if not self._is_connected and self._outage_s() >= self._patience.outage_grace_s:
            return RankState.LOST
        return RankState.DRAINING if self._is_draining else RankState.UP

    def send(self, output: SchedulerOutput) -> None:
        """Queue a step. Ignored when its epoch is over already (the loop will learn it next)."""
        if not self._is_joined or output.epoch != self._epoch:
            return
        while self._wire_numbers and self._wire_numbers[0][0] <= output.processed_step_seq:
            self._processed_wire_seq = self._wire_numbers.popleft()[1]
        first = self._next_wire_seq
        frames = codec.encode_step(output, first, self._processed_wire_seq, self._max_message_bytes)
        self._next_wire_seq += len(frames)
        for index, data in enumerate(frames):
            is_last = index == len(frames) - 1
            self._steps.append(_SentStep(first + index, output.step_seq if is_last else None, data))
        self._wire_numbers.append((output.step_seq, first + len(frames) - 1))
        self._metrics.step_sent(output)
        self._to_send.set()

    def fail(self, epoch: int, reason: str) -> None:
        """The core refused an answer of this epoch, and treats the rank as lost already: begin a new epoch."""
        if self._is_joined and epoch == self._epoch:
            self._close_epoch(reason)
            self._interrupt()

    # --- life ---

    async def run(self) -> None:
        """Connect again and again until cancelled, or until an orphaned rank's stream is gone."""
        watch = asyncio.create_task(self._watch(), name=f"watch {self.rank}")
        try:
            while True:
                pause_s = await self._one_attempt()
                if self.is_orphaned:
                    self._end_epoch("its address is gone from the name service", blameless=self._is_draining)
                    return
                self._report()
                await asyncio.sleep(pause_s)
        finally:
            watch.cancel()
            await _gone(watch)
            self._end_epoch("this scheduler let go of it", blameless=True)

    async def _one_attempt(self) -> float:
        # A task of its own, so that the watchdog can end it wherever it stands.
        self._attempt = asyncio.create_task(self._connect_and_serve(), name=f"rank {self.rank}")
        try:
            await asyncio.wait({self._attempt})
            if self._attempt.cancelled():
                return self._pause()
            return self._attempt.result()
        finally:
            self._attempt.cancel()
            await _gone(self._attempt)
            self._attempt = None

    def _interrupt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()

    async def _connect_and_serve(self) -> float:
        """One connection from dialing to its end; returns the seconds to wait before the next."""
        link = self._transport.connect(self.rank)
        try:
            await self._serve_on(link)
            if self._is_joined:
                self._stream_lost("the worker ended the stream")
            return self._pause()
        except RankUnfit as error:
            return self._unfit(str(error))
        except LinkRejected as error:
            return self._unfit(error.message) if error.code == _NOT_LET_IN else self._rejected(error)
        except WorkerProtocolError as error:
            self._end_epoch(f"wrong answer: {error}")
            return self._pause()
        except (LinkLost, TimeoutError) as error:
            self._stream_lost(str(error) or "no answer in time", is_refused=isinstance(error, LinkRefused))
            return self._pause()
        finally:
            self._is_connected = False
            await link.close()

    async def _serve_on(self, link: WorkerLink) -> None:
        patience = self._patience
        async with asyncio.timeout(patience.redial_timeout_s if self._is_joined else patience.capabilities_timeout_s):
            capabilities = codec.decode_capabilities(await link.get_capabilities())
        self._judge(capabilities)
        stream = link.run_steps()
        try:
            await self._open(stream, capabilities)
            tasks = [
                asyncio.create_task(self._transmit(stream), name=f"sending to {self.rank}"),
                asyncio.create_task(self._fetch_tokenizer(link, capabilities), name=f"tokenizer of {self.rank}"),
            ]
            try:
                await self._receive(stream)
            finally:
                for task in tasks:
                    task.cancel()
                    await _gone(task)
        finally:
            stream.cancel()

    # --- opening ---

    def _judge(self, capabilities: WorkerCapabilities) -> None:
        """Decide whether this worker process may be opened; ends the old epoch when it is another process than
        before."""
        if self._is_joined and capabilities.worker_incarnation != self._incarnation:
            self._end_epoch("the worker process was replaced", blameless=self._is_draining)
        self.host = capabilities.host
        if not self._is_joined and capabilities.worker_incarnation == self._drained_incarnation:
            raise LinkLost("drained, waiting for its process to end")
        geometry = self._geometry
        if capabilities.protocol_revision < codec.PROTOCOL_REVISION:
            raise RankUnfit(
                f"it speaks protocol revision {capabilities.protocol_revision}, not {codec.PROTOCOL_REVISION}"
            )
        if geometry.block_size % capabilities.block_size_multiple:
            raise RankUnfit(
                f"the block size must be a multiple of {capabilities.block_size_multiple} for it, "
                f"--block-size is {geometry.block_size}"
            )
        if geometry.num_rows > capabilities.max_num_rows:
            raise RankUnfit(
                f"it has at most {capabilities.max_num_rows} rows, {geometry.num_rows} are needed: "
                "lower --max-num-seqs or --max-inflight-steps"
            )
        if geometry.max_num_batched_tokens > capabilities.max_num_batched_tokens:
            raise RankUnfit(
                f"it takes at most {capabilities.max_num_batched_tokens} tokens a step, --max-num-batched-tokens is "
                f"{geometry.max_num_batched_tokens}"
            )
        needed = self._largest_indivisible_bytes(capabilities)
        if needed > capabilities.max_message_bytes:
            raise RankUnfit(
                f"it takes messages of at most {capabilities.max_message_bytes} bytes, the longest request may need "
                f"{needed}: lower --max-model-len"
            )
        self._model.check(capabilities.model)

    def _largest_indivisible_bytes(self, capabilities: WorkerCapabilities) -> int:
        geometry = self._geometry
        longest = self._max_model_len(capabilities)
        return codec.largest_row_bytes(longest, geometry.block_size) + codec.columns_bytes(
            geometry.num_rows, geometry.max_num_batched_tokens
        )

    def _max_model_len(self, capabilities: WorkerCapabilities) -> int:
        return min(self._geometry.max_model_len, capabilities.model.max_model_len)

    async def _open(self, stream: StepStream, capabilities: WorkerCapabilities) -> None:
        is_new = not self._is_joined
        if is_new:
            self._epoch = self._register.next_epoch(self.rank)
        epoch = self._epoch
        geometry = self._geometry
        opening = codec.encode_open(
            scheduler_incarnation=self._scheduler_incarnation,
            epoch=epoch,
            block_size=geometry.block_size,
            num_rows=geometry.num_rows,
            max_num_batched_tokens=geometry.max_num_batched_tokens,
            max_model_len=self._max_model_len(capabilities),
            max_inflight_steps=geometry.max_inflight_steps,
        )
        # A first open may allocate the KV pool; a later one finds it there.
        patience = self._patience
        async with asyncio.timeout(patience.first_steps_watchdog_s if is_new else patience.step_watchdog_s):
            try:
                await stream.send(opening)
                data = await stream.receive()
            except LinkRejected as error:
                # What was asked for is wrong for this worker (a pool without room for a block): asking the same again
                # at once cannot help.
                if is_new and error.code == _UNFIT_CODE:
                    raise RankUnfit(str(error)) from None
                raise
        if data is None:
            raise LinkLost("the worker ended the stream instead of opening it")
        frame = codec.decode_worker_frame(data)
        if not isinstance(frame, Opened):
            raise WorkerProtocolError("the first frame is not opened")
        if frame.worker_incarnation != capabilities.worker_incarnation:
            raise LinkLost("the worker process was replaced while it was opened")
        if is_new:
            self._joined(frame, capabilities)
        else:
            self._reopened(frame)

    def _joined(self, opened: Opened, capabilities: WorkerCapabilities) -> None:
        if opened.num_blocks < 2:
            raise RankUnfit(f"its pool has {opened.num_blocks} blocks, at least 2 are needed (block 0 holds nothing)")
        if opened.num_blocks > _MAX_NUM_BLOCKS:
            raise RankUnfit(f"its pool has {opened.num_blocks} blocks, at most {_MAX_NUM_BLOCKS} are counted here")
        if opened.executed_step_seq != 0:
            raise WorkerProtocolError(f"a new epoch begins with step {opened.executed_step_seq} executed")
        self._register.claim(capabilities.worker_incarnation, self.rank)
        try:
            self._model.adopt(capabilities.model)
        except RankUnfit:
            self._register.release(capabilities.worker_incarnation, self.rank)
            raise
        self._incarnation = capabilities.worker_incarnation
        self._max_message_bytes = capabilities.max_message_bytes
        self._steps.clear()
        self._wire_numbers.clear()
        self._next_wire_seq = 1
        self._processed_wire_seq = 0
        self._is_joined = self._was_joined = True
        self._is_draining = False
        self.num_rows_held = 0
        self._connected()
        event = RankJoined(
            rank=self.rank,
            epoch=self._epoch,
            num_blocks=opened.num_blocks,
            max_model_len=capabilities.model.max_model_len,
            vocab_size=capabilities.model.vocab_size,
        )
        log.info(
            "rank up",
            extra={
                **self._facts(),
                "num_blocks": opened.num_blocks,
                "model": capabilities.model.name,
                "worker": capabilities.description,
            },
        )
        self._inbox.rank_joined(self, event)
        self._report()

    def _reopened(self, opened: Opened) -> None:
        newest = self._next_wire_seq - 1
        if opened.executed_step_seq > newest:
            raise WorkerProtocolError(f"step {opened.executed_step_seq} executed, the newest sent is {newest}")
        acknowledged = newest - len(self._steps)
        if opened.executed_step_seq < acknowledged:
            # Replaying the rest would only be refused for its gap.
            raise LinkRejected(
                "epoch forgotten",
                f"the worker has executed step {opened.executed_step_seq} of it, {acknowledged} were acknowledged: "
                "another scheduler opened it meanwhile",
            )
        log.info(
            "stream to rank opened again",
            extra={"rank": self.rank, "epoch": self._epoch, "num_steps_replayed": len(self._steps)},
        )
        self._connected()
        self._report()

    def _connected(self) -> None:
        self._num_transmitted = 0
        self._num_failures = 0
        self._lost_at = None
        self._is_connected = True
        self.cause = ""
        self._to_send.set()

    # --- steps and results ---

    async def _transmit(self, stream: StepStream) -> None:
        with suppress(LinkLost, LinkRejected):  # the receiving side learns of it, too
            while True:
                self._to_send.clear()
                # A step that had to be cut must not make more of them wait at the worker than it was told at open.
                while self._num_transmitted < min(len(self._steps), self._geometry.max_inflight_steps):
                    step = self._steps[self._num_transmitted]
                    self._num_transmitted += 1
                    if step.sent_at is None:
                        step.sent_at = self._now()
                        if self._num_transmitted == 1:
                            self._oldest_since = step.sent_at
                    await stream.send(step.data)
                await self._to_send.wait()

    async def _receive(self, stream: StepStream) -> None:
        """Take frames until the stream ends; raises what ends it otherwise."""
        while (data := await stream.receive()) is not None:
            frame = codec.decode_worker_frame(data)
            if isinstance(frame, StepResult):
                self._take_result(frame)
            elif isinstance(frame, WorkerDraining):
                self._take_draining(frame)
            else:
                raise WorkerProtocolError("opened a second time")
        if self._is_draining:
            self._end_epoch("the worker drained and left", blameless=True)

    def _take_result(self, result: StepResult) -> None:
        step = self._steps[0] if self._num_transmitted else None
        if result.epoch != self._epoch:
            raise WorkerProtocolError(f"a result of epoch {result.epoch} in epoch {self._epoch}")
        if step is None or result.step_seq != step.wire_seq:
            expected = "none" if step is None else f"step {step.wire_seq}"
            raise WorkerProtocolError(f"a result of step {result.step_seq}, expected {expected}")
        if result.error is not None:
            raise LinkRejected("step failed", f"step {result.step_seq}: {result.error}")
        if step.core_seq is None and result.sampled:
            raise WorkerProtocolError(f"step {result.step_seq} has no tokens, its result has {len(result.sampled)}")
        self._steps.popleft()
        self._num_transmitted -= 1
        now = self._now()
        self._oldest_since = now
        self.num_rows_held = result.num_rows_held
        if len(self._steps) > self._num_transmitted:
            self._to_send.set()
        if step.core_seq is None:
            return
        rtt_s = now - (now if step.sent_at is None else step.sent_at)
        self._metrics.step_acked(self.rank, step.core_seq, rtt_s, result.staged_us * 1e-6, result.executed_us * 1e-6)
        self._inbox.step_acked(StepAcked(self.rank, self._epoch, step.core_seq, result.sampled, result.counts))

    def _take_draining(self, frame: WorkerDraining) -> None:
        if self._is_draining:
            return
        self._is_draining = True
        self._drained_incarnation = self._incarnation
        self.cause = f"draining, at most {frame.deadline_s:.0f} s"
        log.info("rank draining", extra={**self._facts(), "deadline_s": frame.deadline_s})
        self._inbox.rank_draining(RankDraining(self.rank), self._epoch)
        self._report()

    async def _fetch_tokenizer(self, link: WorkerLink, capabilities: WorkerCapabilities) -> None:
        while self._model.wants_tokenizer(capabilities.model):
            try:
                pieces = []
                size = 0
                async for data in link.get_tokenizer():
                    piece = codec.decode_tokenizer_piece(data)
                    pieces.append(piece)
                    size += len(piece.data)
                    if size > _MAX_TOKENIZER_BYTES:
                        raise WorkerProtocolError(f"the tokenizer is larger than {_MAX_TOKENIZER_BYTES} bytes")
                self._model.keep_tokenizer(capabilities.model, tuple(pieces))
            except (LinkLost, LinkRejected, WorkerProtocolError) as error:
                log.warning("no tokenizer from rank", extra={"rank": self.rank, "cause": str(error)})
                await asyncio.sleep(_TOKENIZER_RETRY_S)

    # --- ends ---

    def _rejected(self, error: LinkRejected) -> float:
        is_leaving = error.reason == _DRAINING
        if is_leaving and self._is_joined:
            # It said so before the rows were gone: its drain deadline passed, or it forgot to say.
            self._drained_incarnation = self._incarnation
        self._end_epoch(str(error), blameless=is_leaving)
        self.cause = str(error)
        if error.code == "ABORTED":
            # Another scheduler opened this worker. Taking it back at once would make the two throw each other out.
            return self._patience.taken_over_retry_s
        return self._pause()

    def _unfit(self, cause: str) -> float:
        self._end_epoch(f"it may not serve here: {cause}")
        if cause != self.cause:
            log.warning("rank refused", extra={"rank": self.rank, "host": self.host, "cause": cause})
        self.cause = cause
        return self._patience.unfit_retry_s

    def _stream_lost(self, cause: str, *, is_refused: bool = False) -> None:
        """The transport failed, now or while connecting: keep the epoch for a while, or end it."""
        self.cause = cause
        self._is_connected = False
        if not self._is_joined:
            return
        if self._lost_at is None:
            self._lost_at = self._now()
            log.warning("stream to rank lost", extra={**self._facts(), "cause": cause})
        if is_refused and (self._is_draining or self._outage_s() >= self._patience.refused_grace_s):
            self._end_epoch(f"nobody listens there any more: {cause}", blameless=self._is_draining)

    def _end_epoch(self, reason: str, *, blameless: bool = False) -> None:
        """The epoch is over: tell the loop, unless it never joined or ended before."""
        if not self._is_joined:
            return
        self._close_epoch(reason, blameless)
        self._inbox.rank_lost(self.rank, self._epoch, reason, blameless)

    def _close_epoch(self, reason: str, blameless: bool = False) -> None:
        self._is_joined = self._is_connected = self._is_draining = False
        self._register.release(self._incarnation, self.rank)
        num_unacked = len(self._steps)
        self._steps.clear()
        self._num_transmitted = 0
        self._lost_at = None
        self.num_rows_held = 0
        self.cause = reason
        log.log(
            logging.INFO if blameless else logging.WARNING,
            "rank lost",
            extra={**self._facts(), "cause": reason, "num_steps_unacknowledged": num_unacked},
        )
        self._metrics.epoch_ended(self.rank, blameless)
        self._report()

    # --- time ---

    async def _watch(self) -> None:
        """The watchdog; also notices outages that last."""
        period_s = min(0.25, self._patience.step_watchdog_s / 8)
        before = self._now()
        while True:
            await asyncio.sleep(period_s)
            now = self._now()
            stalled_s = now - before - period_s
            before = now
            if stalled_s > 1.0:
                # This very process stood still (suspended, swapped out): results may be waiting to be read.
                self._oldest_since += stalled_s
                if self._lost_at is not None:
                    self._lost_at += stalled_s
            reason = self._overdue(now)
            if reason is not None:
                self._end_epoch(reason, blameless=self._is_draining)
                self._interrupt()
            self._report()

    def _overdue(self, now: float) -> str | None:
        if not self._is_joined:
            return None
        limit_s = self._patience.step_watchdog_s
        if self._lost_at is not None and now - self._lost_at >= limit_s:
            return f"watchdog: out of reach for {limit_s:g} s ({self.cause})"
        if not self._steps or self._steps[0].sent_at is None:
            return None
        oldest = self._steps[0]
        if oldest.wire_seq <= _FIRST_STEPS:
            limit_s = max(limit_s, self._patience.first_steps_watchdog_s)
        if now - self._oldest_since >= limit_s:
            return f"watchdog: no result of step {oldest.wire_seq} within {limit_s:g} s"
        return None

    def _outage_s(self) -> float:
        return 0.0 if self._lost_at is None else self._now() - self._lost_at

    def _pause(self) -> float:
        """Seconds before the next attempt: growing with failures in a row, jittered."""
        limit_s = min(self._patience.reconnect_max_s, self._patience.reconnect_min_s * 2.0**self._num_failures)
        self._num_failures = min(self._num_failures + 1, 16)
        return limit_s * self._rng.uniform(0.5, 1.0)

    def _facts(self) -> dict[str, object]:
        """What lines of the log say about an epoch."""
        return {"rank": self.rank, "host": self.host, "epoch": self._epoch}

    def _report(self) -> None:
        state = self.state
        if state is not self._reported:
            self._reported = state
            self._metrics.rank_changed(self.rank, state.value, self._epoch)
            self._on_state(self)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _gone(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task that was cancelled or has ended; a failure of its own is a bug and told as such."""
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
