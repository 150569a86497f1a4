"""One worker's session as a state machine: events in, actions out. No I/O, no tasks, no chance; time comes in as `now`.

An *epoch* is what the core knows as a joined rank. It outlives its stream as long as the same worker process answers
again soon: then the stream is opened with the same epoch, and every unacknowledged step is sent again, byte for byte
(contract rule 7; the worker answers repeated steps from memory). An epoch ends, once and for good, when

  - the oldest unacknowledged step has no result for too long, or the worker is out of reach for as long (watchdog),
  - connections to its address are refused,
  - another process answers there (new worker incarnation),
  - the worker ended the stream with an error, failed a step, or answered wrongly (rules 3, 8, 9),
  - the core refused an answer,
  - a draining worker left,
  - this scheduler ends the session.

`_MOVES` below is the whole table of states. The mirror image on the worker's side is `worker_svc/epoch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from scheduler_svc.core.events import RankDraining, RankJoined, StepAcked, WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkLost, LinkRefused, LinkRejected, RankUnfit
from scheduler_svc.workers import codec
from scheduler_svc.workers.actions import Acked, Action, Interrupt, Joined, Leaving, Lost, Retry, Say, Transmit
from scheduler_svc.workers.codec import (
    Opened,
    StepResult,
    WorkerCapabilities,
    WorkerDraining,
    WorkerFeature,
    WorkerFrame,
    WorkerProgress,
)
from scheduler_svc.workers.fitness import RankRegister, SessionConfig, check_limits, required_features
from scheduler_svc.workers.served_model import ServedModel
from scheduler_svc.workers.window import StepWindow

# More than any device holds. To count so many takes this process half a second.
_MAX_NUM_BLOCKS: Final = 1 << 22
# A stream that lasted for so long was no failed attempt. Seconds.
_STABLE_S: Final = 10.0
# ErrorInfo reason of a worker that is leaving.
_DRAINING: Final = "DRAINING"
# Code of a worker that cannot be opened as asked.
_UNFIT_CODE: Final = "INVALID_ARGUMENT"
# Code of a worker that another scheduler has opened.
_TAKEN_OVER_CODE: Final = "ABORTED"
# ErrorInfo reason of a worker that a scheduler which started later has opened.
_NEWER_SCHEDULER: Final = "NEWER_SCHEDULER"
# The cluster secret is missing or wrong: the same call cannot succeed until an operator changes something.
_NOT_LET_IN_CODE: Final = "UNAUTHENTICATED"


class RankState(str, Enum):
    """What GetStatus says about a rank."""

    CONNECTING = "connecting"
    UP = "up"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a session waits for what. Seconds."""

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


# --- states ---------------------------------------------------------------------------------------------------------


class State(Enum):
    """Where a session stands. CUT: the epoch lives and has no stream; a stream that opens it again is still CUT."""

    DISCONNECTED = "no epoch"
    OPENING = "an epoch is being opened"
    UP = "steps go out"
    DRAINING = "steps go out, and the worker wants to leave"
    CUT = "the epoch has no stream"
    OVER = "the session has ended"


class Move(Enum):
    """What takes a session from one state to another."""

    OPEN = "an open of a new epoch is sent"
    JOIN = "the worker has opened the new epoch"
    ABANDON = "the new epoch was not opened"
    LEAVE = "the worker announces that it drains"
    CUT = "the stream is lost"
    REOPEN = "the worker has opened the epoch again"
    REOPEN_LEAVING = "the same, for a worker that drains"
    END = "the epoch is over"
    CLOSE = "the session is given up"


_MOVES: Final[Mapping[tuple[State, Move], State]] = {
    (State.DISCONNECTED, Move.OPEN): State.OPENING,
    (State.OPENING, Move.JOIN): State.UP,
    (State.OPENING, Move.ABANDON): State.DISCONNECTED,
    (State.UP, Move.LEAVE): State.DRAINING,
    (State.UP, Move.CUT): State.CUT,
    (State.DRAINING, Move.CUT): State.CUT,
    (State.CUT, Move.REOPEN): State.UP,
    (State.CUT, Move.REOPEN_LEAVING): State.DRAINING,
    (State.UP, Move.END): State.DISCONNECTED,
    (State.DRAINING, Move.END): State.DISCONNECTED,
    (State.CUT, Move.END): State.DISCONNECTED,
    (State.DISCONNECTED, Move.CLOSE): State.OVER,
}

# The epoch lives: the core knows the rank.
_JOINED: Final = frozenset({State.UP, State.DRAINING, State.CUT})
# Steps go out right now.
_CONNECTED: Final = frozenset({State.UP, State.DRAINING})


class WorkerSession:
    """One rank. An attempt is `capabilities_arrived`, `check`, `opening`, `frame_arrived` again and again, and at last
    `attempt_ended` or `attempt_interrupted`. What the first four raise ends the attempt, and `attempt_ended` must be
    given it: LinkLost, LinkRefused, LinkRejected, RankUnfit or WorkerProtocolError.
    """

    def __init__(
        self,
        rank: str,
        model: ServedModel,
        register: RankRegister,
        *,
        config: SessionConfig,
        timeouts: Timeouts,
        scheduler_incarnation: int,
        term: int = 0,
    ) -> None:
        self.rank = rank
        self.state = State.DISCONNECTED
        # Number of the newest epoch tried; 0 before the first.
        self.epoch = 0
        # Why the rank is not up; "" when it is.
        self.cause = "not connected yet"
        # What the newest worker there calls its machine or container; "" for nothing. Stays when it is lost.
        self.host = ""
        self.features: frozenset[WorkerFeature] = frozenset()
        self.num_rows_held = 0
        self._model = model
        self._register = register
        self._config = config
        self._timeouts = timeouts
        self._scheduler_incarnation = scheduler_incarnation
        self._term = term
        self._was_joined = False
        # The worker has announced that it drains; survives a lost stream of the epoch.
        self._is_leaving = False
        # Of the present attempt, and of the epoch.
        self._capabilities: WorkerCapabilities | None = None
        self._incarnation = 0
        self._drained_incarnation: int | None = None
        self._window = StepWindow(0)
        self._lost_at: float | None = None
        # Attempts in a row that ended soon and without a result.
        self._num_failures = 0
        self._connected_at = 0.0

    # --- what holds now ---

    @property
    def is_joined(self) -> bool:
        """Whether it has an epoch, with or without a stream just now."""
        return self.state in _JOINED

    @property
    def is_connected(self) -> bool:
        """Whether steps go out right now."""
        return self.state in _CONNECTED

    def rank_state(self, now: float) -> RankState:
        """What GetStatus says."""
        if not self.is_joined:
            return RankState.LOST if self._was_joined else RankState.CONNECTING
        if self.state is State.CUT and self._outage_s(now) >= self._timeouts.outage_grace_s:
            return RankState.LOST
        return RankState.DRAINING if self._is_leaving else RankState.UP

    @property
    def dial_timeout_s(self) -> float:
        """Seconds for a connection and the worker's capabilities."""
        return self._timeouts.redial_timeout_s if self.is_joined else self._timeouts.capabilities_timeout_s

    @property
    def open_timeout_s(self) -> float:
        """Seconds for the answer to `opening`: a first open may allocate the KV pool, a later one finds it there."""
        is_new = self.state is State.OPENING
        return self._timeouts.first_steps_watchdog_s if is_new else self._timeouts.step_watchdog_s

    def _outage_s(self, now: float) -> float:
        return 0.0 if self._lost_at is None else now - self._lost_at

    def _move(self, move: Move) -> None:
        self.state = _MOVES[self.state, move]

    # --- an attempt, from dialing to its end ---

    def capabilities_arrived(self, capabilities: WorkerCapabilities) -> list[Action]:
        """Ends the old epoch when another process answers than before. `check` says whether the new one may join."""
        self._capabilities = capabilities
        actions: list[Action] = []
        if self.is_joined and capabilities.worker_incarnation != self._incarnation:
            actions = self._end("the worker process was replaced", graceful=self._is_leaving)
        self.host, self.features = capabilities.host, capabilities.features
        return actions

    def check(self) -> None:
        """Raises RankUnfit or LinkLost when this worker process may not be opened. To be asked before the open is sent:
        an open takes a worker away from another stream, also from one of this scheduler."""
        capabilities = self._asked()
        if not self.is_joined and capabilities.worker_incarnation == self._drained_incarnation:
            raise LinkLost("drained, waiting for its process to end")
        check_limits(capabilities, self._config)
        self._model.check(capabilities.model)
        self._register.claim(capabilities.worker_incarnation, self.rank)

    def opening(self) -> bytes:
        """The first frame up: a new epoch, or the living one again."""
        capabilities = self._asked()
        if not self.is_joined:
            self.epoch = self._register.next_epoch(self.rank)
            self._move(Move.OPEN)
        config = self._config
        return codec.encode_open(
            scheduler_incarnation=self._scheduler_incarnation,
            term=self._term,
            epoch=self.epoch,
            block_size=config.block_size,
            num_rows=config.num_rows,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=min(config.max_model_len, capabilities.model.max_model_len),
            max_inflight_steps=config.max_inflight_steps,
            required_features=required_features(config),
        )

    def frame_arrived(self, frame: WorkerFrame, now: float) -> list[Action]:
        """One frame down. Raises what ends the attempt."""
        if not self.is_connected:
            if not isinstance(frame, Opened):
                raise WorkerProtocolError("the first frame is not opened")
            return self._opened(frame, now)
        if isinstance(frame, StepResult):
            return self._result(frame, now)
        if isinstance(frame, WorkerDraining):
            return self._leaving(frame)
        if isinstance(frame, WorkerProgress):
            return self._progress(frame)
        raise WorkerProtocolError("opened a second time")

    def take_frame(self, now: float) -> bytes | None:
        """The next step frame to send on the present stream, if any."""
        return self._window.take_frame(now) if self.is_connected else None

    def attempt_ended(self, error: Exception | None, now: float) -> tuple[list[Action], Retry]:
        """The attempt is over. error: what ended it; None when the worker ended the stream in order."""
        if self.is_connected and now - self._connected_at >= _STABLE_S:
            self._num_failures = 0
        error = self._judged(error)
        match error:
            case None if self._is_leaving:
                actions = self._end("the worker drained and left", graceful=True)
            case RankUnfit():
                actions = self._unfit(str(error))
            case WorkerProtocolError():
                actions = self._wrong_answer(f"wrong answer: {error}")
            case LinkRejected():
                actions = self._rejected(error)
            case _:
                cause = "the worker ended the stream" if error is None else str(error) or "no answer in time"
                actions = self._stream_lost(cause, now, is_refused=isinstance(error, LinkRefused))
        self._leave_attempt()
        return actions, self._retry(error)

    def attempt_interrupted(self) -> Retry:
        """The attempt was given up after an Interrupt."""
        self._leave_attempt()
        return self._retry(None)

    def _leave_attempt(self) -> None:
        # An open without an answer leaves nothing behind.
        if self.state is State.OPENING:
            self._move(Move.ABANDON)
        if self.is_connected:
            self._move(Move.CUT)
        if not self.is_joined and self._capabilities is not None:
            self._register.release(self._capabilities.worker_incarnation, self.rank)
        self._capabilities = None

    def _asked(self) -> WorkerCapabilities:
        assert self._capabilities is not None, "capabilities come first in an attempt"
        return self._capabilities

    def _judged(self, error: Exception | None) -> Exception | None:
        """The same error; RankUnfit where asking the same again at once cannot help."""
        if isinstance(error, LinkRejected):
            if error.code == _NOT_LET_IN_CODE:
                return RankUnfit(error.message)
            if error.reason == _NEWER_SCHEDULER:
                return RankUnfit(error.message)
            # What was asked for is wrong for this worker (a pool without room for a block, say).
            if self.state is State.OPENING and error.code == _UNFIT_CODE:
                return RankUnfit(str(error))
        return error

    def _retry(self, error: Exception | None) -> Retry:
        if isinstance(error, RankUnfit):
            return Retry(self._timeouts.unfit_retry_s)
        if isinstance(error, LinkRejected) and error.code == _TAKEN_OVER_CODE:
            # Another scheduler opened this worker. Taking it back at once would make the two throw each other out.
            return Retry(self._timeouts.taken_over_retry_s)
        limit_s = min(self._timeouts.reconnect_max_s, self._timeouts.reconnect_min_s * 2.0**self._num_failures)
        self._num_failures = min(self._num_failures + 1, 16)
        return Retry(limit_s, is_jittered=True)

    # --- opened ---

    def _opened(self, opened: Opened, now: float) -> list[Action]:
        capabilities = self._asked()
        if opened.worker_incarnation != capabilities.worker_incarnation:
            raise LinkLost("the worker process was replaced while it was opened")
        return self._joined(opened, capabilities, now) if self.state is State.OPENING else self._reopened(opened, now)

    def _joined(self, opened: Opened, capabilities: WorkerCapabilities, now: float) -> list[Action]:
        if opened.num_blocks < 2:
            raise RankUnfit(f"its pool has {opened.num_blocks} blocks, at least 2 are needed (block 0 holds nothing)")
        if opened.num_blocks > _MAX_NUM_BLOCKS:
            raise RankUnfit(f"its pool has {opened.num_blocks} blocks, at most {_MAX_NUM_BLOCKS} are counted here")
        if opened.executed_step_seq != 0:
            raise WorkerProtocolError(f"a new epoch begins with step {opened.executed_step_seq} executed")
        model = capabilities.model
        self._model.adopt(model)
        self._incarnation = capabilities.worker_incarnation
        self._window = StepWindow(capabilities.max_message_bytes)
        self._was_joined = True
        self._is_leaving = False
        self.num_rows_held = 0
        self._move(Move.JOIN)
        self._connected(now)
        fields = {
            **self._facts(),
            "num_blocks": opened.num_blocks,
            "model": model.name,
            "worker": capabilities.description,
        }
        event = RankJoined(
            rank=self.rank,
            epoch=self.epoch,
            num_blocks=opened.num_blocks,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            max_step_bytes=capabilities.max_message_bytes,
            features=tuple(sorted(feature.name for feature in capabilities.features)),
        )
        return [Say(logging.INFO, "rank up", fields), Joined(event), Transmit()]

    def _reopened(self, opened: Opened, now: float) -> list[Action]:
        newest = self._window.newest_seq
        if opened.executed_step_seq > newest:
            raise WorkerProtocolError(f"step {opened.executed_step_seq} executed, the newest sent is {newest}")
        acknowledged = self._window.num_acknowledged
        if opened.executed_step_seq < acknowledged:
            # Replaying the rest would only be refused for its gap.
            raise LinkRejected(
                "epoch forgotten",
                f"the worker has executed step {opened.executed_step_seq} of it, {acknowledged} were acknowledged: "
                "another scheduler opened it meanwhile",
            )
        self._move(Move.REOPEN_LEAVING if self._is_leaving else Move.REOPEN)
        self._connected(now)
        fields = {"rank": self.rank, "epoch": self.epoch, "num_steps_replayed": len(self._window)}
        return [Say(logging.INFO, "stream to rank opened again", fields), Transmit()]

    def _connected(self, now: float) -> None:
        self._window.start_stream()
        self._connected_at = now
        self._lost_at = None
        self.cause = ""

    # --- steps and results ---

    def queue(self, output: SchedulerOutput) -> list[Action]:
        """Send a step of the core. Ignored when its epoch is over already (the loop will hear of that next)."""
        if not self.is_joined or output.epoch != self.epoch:
            return []
        self._window.queue(output)
        return [Transmit()]

    def _result(self, result: StepResult, now: float) -> list[Action]:
        if result.epoch != self.epoch:
            raise WorkerProtocolError(f"a result of epoch {result.epoch} in epoch {self.epoch}")
        rtt_s = self._window.acknowledge(result, now)
        self._num_failures = 0
        self.num_rows_held = result.num_rows_held
        event = StepAcked(self.rank, self.epoch, result.step_seq, result.sampled, result.counts, result.row_errors)
        return [Acked(event, rtt_s, result.staged_us * 1e-6, result.executed_us * 1e-6)]

    def _progress(self, frame: WorkerProgress) -> list[Action]:
        if frame.epoch != self.epoch:
            raise WorkerProtocolError(f"progress of epoch {frame.epoch} in epoch {self.epoch}")
        self._window.take_progress(frame.progress_seq)
        return []

    def _leaving(self, frame: WorkerDraining) -> list[Action]:
        if self._is_leaving:
            return []
        self._is_leaving = True
        self._move(Move.LEAVE)
        self._drained_incarnation = self._incarnation
        self.cause = f"draining, at most {frame.deadline_s:.0f} s"
        fields = {**self._facts(), "deadline_s": frame.deadline_s}
        return [Say(logging.INFO, "rank draining", fields), Leaving(RankDraining(self.rank), self.epoch)]

    def epoch_refused(self, epoch: int, reason: str) -> list[Action]:
        """The core refused an answer of this epoch, and treats the rank as lost already: begin a new epoch."""
        if not self.is_joined or epoch != self.epoch:
            return []
        return [*self._end(reason, is_known=True), Interrupt()]

    # --- ends ---

    def _rejected(self, error: LinkRejected) -> list[Action]:
        is_leaving = error.reason == _DRAINING
        if is_leaving and self.is_joined:
            # The worker said so before its rows were gone: its drain deadline passed, or it did not announce the drain.
            self._drained_incarnation = self._incarnation
        actions = self._end(str(error), graceful=is_leaving)
        self.cause = str(error)
        return actions

    def _wrong_answer(self, cause: str) -> list[Action]:
        # Without an epoch, no end of one says it.
        return self._end(cause) or self._note_refusal(cause)

    def _unfit(self, cause: str) -> list[Action]:
        return self._end(f"it may not serve here: {cause}") + self._note_refusal(cause)

    def _note_refusal(self, cause: str) -> list[Action]:
        """Say it once, not with every attempt."""
        is_news, self.cause = cause != self.cause, cause
        fields = {"rank": self.rank, "host": self.host, "cause": cause}
        return [Say(logging.WARNING, "rank refused", fields)] if is_news else []

    def _stream_lost(self, cause: str, now: float, *, is_refused: bool) -> list[Action]:
        """The transport failed, now or while connecting: keep the epoch for a while, or end it."""
        self.cause = cause
        if not self.is_joined:
            return []
        if self.is_connected:
            self._move(Move.CUT)
        actions: list[Action] = []
        if self._lost_at is None:
            self._lost_at = now
            actions.append(Say(logging.WARNING, "stream to rank lost", {**self._facts(), "cause": cause}))
        if is_refused and (self._is_leaving or self._outage_s(now) >= self._timeouts.refused_grace_s):
            actions += self._end(f"its address refuses connections: {cause}", graceful=self._is_leaving)
        return actions

    def _end(self, reason: str, *, graceful: bool = False, is_known: bool = False) -> list[Action]:
        """The epoch is over; nothing when there is none."""
        if not self.is_joined:
            return []
        num_unacknowledged = len(self._window)
        self._move(Move.END)
        self._is_leaving = False
        self._register.release(self._incarnation, self.rank)
        self._window = StepWindow(0)
        self._lost_at = None
        self.num_rows_held = 0
        self.cause = reason
        level = logging.INFO if graceful else logging.WARNING
        fields = {**self._facts(), "cause": reason, "num_steps_unacknowledged": num_unacknowledged}
        return [Say(level, "rank lost", fields), Lost(self.epoch, reason, graceful, is_known)]

    def close(self, *, address_is_gone: bool = False) -> list[Action]:
        """End the session for good. address_is_gone: its name has this address no more; else this scheduler stops."""
        if address_is_gone:
            actions = self._end("its address is gone from the name service", graceful=self._is_leaving)
        else:
            actions = self._end("this scheduler ended the session", graceful=True)
        if self.state is State.OPENING:
            self._move(Move.ABANDON)
        if self.state is not State.OVER:
            self._move(Move.CLOSE)
        return actions

    # --- time ---

    def watch(self, now: float) -> list[Action]:
        """The watchdog; to be asked several times per `step_watchdog_s`."""
        reason = self._overdue(now)
        return [] if reason is None else [*self._end(reason, graceful=self._is_leaving), Interrupt()]

    def _overdue(self, now: float) -> str | None:
        if not self.is_joined:
            return None
        limit_s = self._timeouts.step_watchdog_s
        if self._lost_at is not None and now - self._lost_at >= limit_s:
            return f"watchdog: out of reach for {limit_s:g} s ({self.cause})"
        return self._window.overdue(now, limit_s, self._timeouts.first_steps_watchdog_s)

    def stood_still(self, seconds: float) -> None:
        """This process did not run for so long (suspended, swapped out); that time counts against no worker."""
        self._window.postpone(seconds)
        if self._lost_at is not None:
            self._lost_at += seconds

    def _facts(self) -> dict[str, object]:
        """What lines of the log say about an epoch."""
        return {"rank": self.rank, "host": self.host, "epoch": self.epoch}
