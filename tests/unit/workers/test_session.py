"""A worker's session as a state machine: its table, what it does at every event, and what always holds."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.errors import LinkLost, LinkRefused, LinkRejected, RankUnfit
from scheduler_svc.workers.actions import Acked, Action, Interrupt, Joined, Lost, Retry
from scheduler_svc.workers.codec import (
    ModelFacts,
    Opened,
    StepResult,
    WorkerCapabilities,
    WorkerDraining,
    WorkerFeature,
    WorkerProgress,
)
from scheduler_svc.workers.fitness import RankRegister, SessionConfig
from scheduler_svc.workers.served_model import ServedModel
from scheduler_svc.workers.session import _MOVES, Move, State, Timeouts, WorkerSession
from stepfence.v1 import worker_service_pb2

CAPABILITIES = WorkerCapabilities(
    protocol_revision=2,
    worker_incarnation=7,
    model=ModelFacts("m", 260, 4096, "", b""),
    block_size_multiple=1,
    max_num_rows=1024,
    max_num_batched_tokens=8192,
    max_message_bytes=16 << 20,
    max_num_drafts=16,
    features=frozenset(WorkerFeature),
    description="scripted cpu",
    host="h",
)
CONFIG = SessionConfig(block_size=16, num_rows=64, max_num_batched_tokens=256, max_model_len=4096, max_inflight_steps=2)


def session(register: RankRegister | None = None, rank: str = "a:1", **config: Any) -> WorkerSession:
    return WorkerSession(
        rank,
        ServedModel(lambda: False, lambda facts: None),
        register or RankRegister(),
        config=replace(CONFIG, **config),
        timeouts=Timeouts(),
        scheduler_incarnation=99,
    )


def step(epoch: int, seq: int, processed: int = 0) -> SchedulerOutput:
    """A step that only carries ids."""
    return SchedulerOutput(
        rank="a:1",
        epoch=epoch,
        step_seq=seq,
        fence_seq=0,
        processed_step_seq=processed,
        new_requests=(),
        rows=array("i"),
        num_tokens=array("i"),
        appended_rows=array("i"),
        appended_blocks=array("i"),
        preempted_request_ids=(),
        finished_request_ids=(f"r{seq}",),
        deferred_frees=(),
        num_drafts=None,
        draft_token_ids=array("i"),
        total_num_tokens=0,
    )


def result(epoch: int, seq: int, **fields: Any) -> StepResult:
    return StepResult(epoch, seq, [], None, 0, 0, 0, **fields)


def opened(capabilities: WorkerCapabilities = CAPABILITIES, executed: int = 0) -> Opened:
    return Opened(capabilities.worker_incarnation, 512, executed)


def join(one: WorkerSession, now: float = 0.0, capabilities: WorkerCapabilities = CAPABILITIES) -> list[Action]:
    one.capabilities_arrived(capabilities)
    one.check()
    one.opening()
    return one.frame_arrived(opened(capabilities), now)


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_state_can_be_reached_and_left() -> None:
    reached, frontier = {State.DISCONNECTED}, deque([State.DISCONNECTED])
    while frontier:
        state = frontier.popleft()
        for (origin, _), target in _MOVES.items():
            if origin is state and target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(State)
    assert {origin for origin, _ in _MOVES} == set(State) - {State.OVER}
    assert {move for _, move in _MOVES} == set(Move)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_a_move_that_the_table_does_not_have_is_a_bug(state: State, move: Move) -> None:
    one = session()
    one.state = state
    if (state, move) in _MOVES:
        one._move(move)
        assert one.state is _MOVES[state, move]
    else:
        with pytest.raises(KeyError):
            one._move(move)
        assert one.state is state


# --- events ---------------------------------------------------------------------------------------------------------


def test_an_open_names_the_epoch_and_what_it_is_opened_with() -> None:
    one = session()
    one.capabilities_arrived(replace(CAPABILITIES, model=replace(CAPABILITIES.model, max_model_len=100)))
    one.check()
    message = worker_service_pb2.RunStepsRequest.FromString(one.opening()).open
    assert (message.scheduler_incarnation, message.epoch, message.max_model_len) == (99, 1, 100)
    assert not one.is_joined and one.epoch == 1
    one.attempt_ended(LinkLost("cut"), 0.0)
    assert one.state is State.DISCONNECTED and one.epoch == 1
    # What was tried is not tried again under the same number: the worker may have opened it.
    one.capabilities_arrived(CAPABILITIES)
    one.check()
    assert worker_service_pb2.RunStepsRequest.FromString(one.opening()).open.epoch == 2


def test_the_core_hears_of_the_rank_with_what_the_worker_has() -> None:
    capabilities = replace(CAPABILITIES, features=frozenset(WorkerFeature), max_message_bytes=9 << 20)
    (joined,) = [action for action in join(session(), capabilities=capabilities) if isinstance(action, Joined)]
    event = joined.event
    assert (event.num_blocks, event.max_step_bytes, event.features) == (512, 9 << 20, ("DRAFTS", "SAMPLED_DRAFTS"))


def test_a_cut_stream_is_opened_again_and_everything_unacknowledged_is_sent_again() -> None:
    one = session()
    join(one)
    for seq in (1, 2):
        one.queue(step(1, seq))
    first = [one.take_frame(0.0), one.take_frame(0.0)]
    assert one.take_frame(0.0) is None
    acked = [action for action in one.frame_arrived(result(1, 1), 0.5) if isinstance(action, Acked)]
    assert [(action.event.step_seq, action.rtt_s) for action in acked] == [(1, 0.5)]
    one.queue(step(1, 3))
    _, pause = one.attempt_ended(LinkLost("cut"), 1.0)
    assert pause == Retry(0.1, is_jittered=True) and one.state is State.CUT
    assert one.take_frame(1.0) is None
    one.capabilities_arrived(CAPABILITIES)
    one.check()
    message = worker_service_pb2.RunStepsRequest.FromString(one.opening()).open
    assert message.epoch == 1
    assert not any(isinstance(action, Joined) for action in one.frame_arrived(opened(executed=1), 1.5))
    assert one.take_frame(1.5) == first[1]
    assert one.take_frame(1.5) is not None


def test_a_draining_worker_whose_stream_is_cut_drains_when_it_is_back() -> None:
    one = session()
    join(one)
    one.frame_arrived(WorkerDraining(5.0), 0.0)
    assert one.state is State.DRAINING
    one.attempt_ended(LinkLost("cut"), 0.1)
    one.capabilities_arrived(CAPABILITIES)
    one.check()
    one.opening()
    one.frame_arrived(opened(), 0.2)
    assert one.state is State.DRAINING
    actions, _ = one.attempt_ended(None, 0.3)
    assert [(action.graceful, action.epoch) for action in actions if isinstance(action, Lost)] == [(True, 1)]
    # The same process is not opened once more.
    one.capabilities_arrived(CAPABILITIES)
    with pytest.raises(LinkLost, match="drained"):
        one.check()


@pytest.mark.parametrize(
    "error, retry",
    [
        (LinkLost("cut"), Retry(0.1, is_jittered=True)),
        (TimeoutError(), Retry(0.1, is_jittered=True)),
        (LinkRejected("ABORTED", "another scheduler", "SUPERSEDED"), Retry(5.0)),
        (LinkRejected("UNAUTHENTICATED", "no secret", "CLUSTER_SECRET_MISSING"), Retry(3.0)),
        (LinkRejected("FAILED_PRECONDITION", "no"), Retry(0.1, is_jittered=True)),
        (RankUnfit("another model"), Retry(3.0)),
        (WorkerProtocolError("nonsense"), Retry(0.1, is_jittered=True)),
    ],
)
def test_how_soon_a_worker_is_asked_again(error: Exception, retry: Retry) -> None:
    one = session()
    one.capabilities_arrived(CAPABILITIES)
    assert one.attempt_ended(error, 0.0)[1] == retry


def test_pauses_grow_with_failures_in_a_row_and_start_over_with_success() -> None:
    one = session()
    pauses = [one.attempt_ended(LinkRefused("refused"), 0.0)[1].seconds for _ in range(5)]
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]
    join(one)
    one.queue(step(1, 1))
    one.take_frame(0.0)
    one.frame_arrived(result(1, 1), 0.0)
    assert one.attempt_ended(LinkLost("cut"), 0.0)[1].seconds == 0.1


def test_an_epoch_that_ends_at_once_is_a_failure_and_one_that_lasted_is_none() -> None:
    """A worker that can be opened and then answers wrongly is not opened ten times a second."""
    one = session()
    pauses = []
    for _ in range(5):
        join(one)
        pauses.append(one.attempt_ended(WorkerProtocolError("no such step"), 0.0)[1].seconds)
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]
    join(one, 0.0)
    assert one.attempt_ended(LinkLost("cut"), 60.0)[1].seconds == 0.1


def test_a_wrong_answer_to_an_open_is_said_once() -> None:
    one = session()
    for number in range(3):
        one.capabilities_arrived(CAPABILITIES)
        one.check()
        one.opening()
        with pytest.raises(WorkerProtocolError) as wrong:
            one.frame_arrived(opened(executed=5), 0.0)
        actions, _ = one.attempt_ended(wrong.value, 0.0)
        assert len(actions) == (number == 0)
        assert one.cause == "wrong answer: a new epoch begins with step 5 executed"


def test_the_watchdog_ends_an_epoch_once_and_interrupts_the_attempt() -> None:
    one = session()
    join(one)
    for seq in range(1, 5):
        one.queue(step(1, seq))
        one.take_frame(float(seq))
        one.frame_arrived(result(1, seq), float(seq))
    one.queue(step(1, 5))
    one.take_frame(5.0)
    assert one.watch(14.9) == []
    ended = one.watch(15.0)
    assert [type(action) for action in ended[-2:]] == [Lost, Interrupt]
    assert one.watch(16.0) == []
    assert not one.is_joined


def test_time_in_which_this_process_stood_still_counts_against_no_worker() -> None:
    one = session()
    join(one)
    for seq in range(1, 5):
        one.queue(step(1, seq))
        one.take_frame(0.0)
        one.frame_arrived(result(1, seq), 0.0)
    one.queue(step(1, 5))
    one.take_frame(0.0)
    one.stood_still(60.0)
    assert one.watch(69.9) == []
    assert one.watch(70.1) != []


def test_d54_progress_is_taken_once_in_order_and_later_steps_say_so() -> None:
    one = session()
    join(one)
    for seq in (1, 2, 2, 1):
        assert one.frame_arrived(WorkerProgress(1, seq), 0.0) == []
    one.queue(step(1, 1))
    frame = one.take_frame(0.0)
    assert frame is not None
    assert worker_service_pb2.RunStepsRequest.FromString(frame).step.processed_progress_seq == 2
    # After a lost stream the worker sends again what it does not know to be handled.
    one.attempt_ended(LinkLost("cut"), 0.0)
    one.capabilities_arrived(CAPABILITIES)
    one.check()
    one.opening()
    one.frame_arrived(opened(), 0.0)
    assert one.frame_arrived(WorkerProgress(1, 2), 0.0) == []
    assert one.frame_arrived(WorkerProgress(1, 3), 0.0) == []
    for epoch, seq in ((1, 5), (2, 4)):
        with pytest.raises(WorkerProtocolError, match="progress"):
            one.frame_arrived(WorkerProgress(epoch, seq), 0.0)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capabilities, config, setting",
    [
        ({"max_num_drafts": 16}, {"num_speculative_tokens": 32}, "--num-speculative-tokens is 32"),
        ({"features": frozenset({WorkerFeature.DRAFTS})}, {"num_speculative_tokens": 4}, "SAMPLED_DRAFTS.*set it to 0"),
        ({"max_num_rows": 63}, {}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 255}, {}, "--max-num-batched-tokens"),
        ({"block_size_multiple": 32}, {}, "--block-size"),
        ({"max_message_bytes": 1000}, {}, "--max-model-len"),
        ({"model": replace(CAPABILITIES.model, max_model_len=0)}, {}, "takes 0 tokens"),
        ({"model": replace(CAPABILITIES.model, vocab_size=0)}, {}, "vocabulary of 0"),
        ({"protocol_revision": 1}, {}, "revision 1, this scheduler revision 2"),
        ({"protocol_revision": 4}, {}, "revision 4, this scheduler revision 2"),
    ],
)
def test_f92_every_declared_limit_is_heeded_before_anything_is_opened(
    capabilities: dict[str, Any], config: dict[str, Any], setting: str
) -> None:
    one = session(**config)
    one.capabilities_arrived(replace(CAPABILITIES, **capabilities))
    with pytest.raises(RankUnfit, match=setting):
        one.check()
    assert one.epoch == 0


def test_f92_every_capability_is_read_by_someone() -> None:
    """A field that no code outside the codec reads is a limit that is not heeded."""
    from pathlib import Path

    root = Path(__file__).parents[3] / "scheduler_svc"
    text = "\n".join(path.read_text() for path in root.rglob("*.py") if path.name != "codec.py")
    unread = [name for name in WorkerCapabilities.__dataclass_fields__ if f"capabilities.{name}" not in text]
    assert unread == []


def test_f87_a_worker_under_two_addresses_is_refused_before_it_is_opened() -> None:
    register = RankRegister()
    first, second = session(register), session(register, "localhost:1")
    join(first)
    second.capabilities_arrived(CAPABILITIES)
    with pytest.raises(RankUnfit, match="the same worker process is rank a:1 already"):
        second.check()
    second.attempt_ended(RankUnfit("the same worker process is rank a:1 already"), 0.0)
    assert second.epoch == 0 and first.is_connected
    # When the first one's epoch is over, the second address may have the worker.
    first.close()
    join(second)


# --- anything may happen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_every_epoch_ends_once_and_no_result_is_handed_on_twice(seed: int) -> None:
    run = _RandomRun(random.Random(seed))
    for _ in range(120):
        run.event()
    run.finish()


class _RandomRun:
    """A session between a scheduler that queues steps and a worker that executes, fails, drains and is replaced."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.register = RankRegister()
        self.session = session(self.register)
        self.now = 0.0
        self.capabilities = CAPABILITIES
        # What the worker has received of the present epoch, and what it has answered.
        self.received: list[int] = []
        self.num_answered = 0
        self.next_seq = 1
        self.acked: list[int] = []
        self.joined: list[int] = []
        self.lost: list[int] = []

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Joined):
                assert len(self.joined) == len(self.lost)
                assert not self.joined or action.event.epoch > self.joined[-1]
                self.joined.append(action.event.epoch)
                self.received, self.num_answered, self.next_seq, self.acked = [], 0, 1, []
            elif isinstance(action, Lost):
                self.lost.append(action.epoch)
                assert self.lost == self.joined
            elif isinstance(action, Acked):
                assert action.event.epoch == self.joined[-1] and len(self.lost) < len(self.joined)
                self.acked.append(action.event.step_seq)
                assert self.acked == list(range(1, len(self.acked) + 1))
            elif isinstance(action, Interrupt):
                assert not self.session.is_joined
                self.session.attempt_interrupted()

    def event(self) -> None:
        self.now += self.rng.choice((0.0, 0.01, 0.3, 4.0))
        self.take(self.session.watch(self.now))
        kinds = ("connect", "queue", "send", "send", "answer", "answer", "end", "drain", "replace", "refuse")
        getattr(self, "_" + self.rng.choice(kinds))()
        assert self.session.is_joined == (len(self.joined) > len(self.lost))

    def _connect(self) -> None:
        if self.session.is_connected:
            return
        try:
            self.take(self.session.capabilities_arrived(self.capabilities))
            self.session.check()
            self.session.opening()
            if self.rng.random() < 0.2:
                raise self.rng.choice((LinkLost("cut"), LinkRejected("INVALID_ARGUMENT", "no room"), TimeoutError()))
            executed = len(self.received) if self.session.state is State.CUT else 0
            if self.session.state is State.CUT:
                self.num_answered = len(self.acked)
            self.take(self.session.frame_arrived(opened(self.capabilities, executed), self.now))
        except (LinkLost, LinkRejected, RankUnfit, TimeoutError) as error:
            self._ended(error)

    def _queue(self) -> None:
        # The core has at most so many steps without a result.
        if self.session.is_joined and self.next_seq - 1 - len(self.acked) < CONFIG.max_inflight_steps:
            self.take(self.session.queue(step(self.session.epoch, self.next_seq, len(self.acked))))
            self.next_seq += 1

    def _send(self) -> None:
        if (frame := self.session.take_frame(self.now)) is None:
            return
        message = worker_service_pb2.RunStepsRequest.FromString(frame).step
        assert message.epoch == self.session.epoch
        if message.step_seq <= len(self.received):
            return
        assert message.step_seq == len(self.received) + 1, "steps have no gap"
        self.received.append(message.step_seq)

    def _answer(self) -> None:
        if not self.session.is_connected or self.num_answered >= len(self.received):
            return
        # Frames are sent again after a new open; only those on the present stream are answered.
        if self.session._window._num_sent == 0:
            return
        self.num_answered += 1
        error = "failed" if self.rng.random() < 0.03 else None
        seq = self.num_answered + (self.rng.random() < 0.02)
        try:
            answer = result(self.session.epoch, seq, error=error)
            self.take(self.session.frame_arrived(answer, self.now))
        except (LinkRejected, WorkerProtocolError) as ended:
            self._ended(ended)

    def _end(self) -> None:
        if self.session.is_connected:
            self._ended(self.rng.choice((None, LinkLost("cut"), LinkRefused("refused"), LinkRejected("ABORTED", "x"))))

    def _ended(self, error: Exception | None) -> None:
        actions, pause = self.session.attempt_ended(error, self.now)
        self.take(actions)
        assert 0.0 < pause.seconds <= 5.0
        assert not self.session.is_connected and self.session.state is not State.OPENING
        if not self.session.is_joined:
            # Another address may have the worker now.
            self.register.claim(self.capabilities.worker_incarnation, "other:1")
            self.register.release(self.capabilities.worker_incarnation, "other:1")

    def _drain(self) -> None:
        if self.session.is_connected and self.rng.random() < 0.3:
            self.take(self.session.frame_arrived(WorkerDraining(5.0), self.now))

    def _replace(self) -> None:
        if not self.session.is_connected and self.rng.random() < 0.5:
            incarnation = self.capabilities.worker_incarnation + 1
            self.capabilities = replace(self.capabilities, worker_incarnation=incarnation)

    def _refuse(self) -> None:
        if self.rng.random() < 0.1:
            epoch = self.session.epoch - self.rng.randrange(2)
            self.take(self.session.epoch_refused(epoch, "the core refused an answer"))

    def finish(self) -> None:
        self.take(self.session.close())
        assert self.lost == self.joined and self.session.state is State.OVER
        assert self.session.queue(step(self.session.epoch, self.next_seq)) == []
        assert self.session.close() == []
