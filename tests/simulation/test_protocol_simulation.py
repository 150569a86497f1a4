"""Random deployments under random trouble: the part of them that every test run plays; and that they would find
something."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.kv.manager import KvManager
from scheduler_svc.core.request import Run
from scheduler_svc.frontend.live_requests import LiveRequest
from scheduler_svc.frontend.session_client import SessionClient
from scheduler_svc.session import FrontEndSession
from scheduler_svc.workers.actions import Action
from scheduler_svc.workers.codec import StepResult
from scheduler_svc.workers.session import WorkerSession
from tests.simulation.search import worlds
from tests.simulation.world import TROUBLES, SimulationFailure, run_world
from worker_svc import codec
from worker_svc.epoch import Epoch
from worker_svc.executor import Executor
from worker_svc.service import WorkerService
from worker_svc.step import Step, StepAnswer

# What every test run plays.
FIRST_SEED = 1
NUM_STEPS = 12_000


@pytest.mark.timeout(600)
def test_worlds_full_of_trouble_lose_no_request_and_leave_nothing() -> None:
    counts: Counter[str] = Counter()
    num_steps = num_worlds = 0
    for report in worlds(FIRST_SEED, NUM_STEPS, check_all=True):
        counts.update(report.counts)
        num_steps += report.num_steps
        num_worlds += 1
    print(f"{num_steps} steps in {num_worlds} worlds: {dict(counts)}")
    # That nothing failed means something only if everything happened.
    assert [kind for kind in TROUBLES if not counts[kind]] == []
    assert counts["completed"] > 500
    assert counts["steps sent again"] > 10
    assert counts["epochs"] > 2 * num_worlds


def test_a_world_without_trouble_completes_every_request_that_nobody_ends() -> None:
    report = run_world(7, troubles=())
    failed = {name for name in report.counts if name.startswith("failed")}
    assert failed <= {
        "failed NO_WORKER",
        "failed SCHEDULER_UNAVAILABLE",
        "failed DUPLICATE_REQUEST_ID",
        "failed ABORTED",
        "failed DEADLINE_EXCEEDED",
        "failed QUEUE_FULL",
    }
    assert report.counts["completed"] > 20 and report.counts["steps sent again"] == 0


def test_one_seed_is_one_history_in_every_process() -> None:
    here = run_world(3)
    assert here.num_steps > 50
    assert run_world(3).digest == here.digest
    assert run_world(4).digest != here.digest
    code = "from tests.simulation.world import run_world; print(run_world(3, check_every=5).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    there = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300)
    assert there.stdout.strip() == here.digest


# --- planted faults: each must be found in the same worlds -----------------------------------------------------------


def ignore_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    free = KvManager.free

    def free_now(self: KvManager, run: Run, *, acked_fence: int, newest_fence: int, reason: str) -> None:
        free(self, run, acked_fence=newest_fence, newest_fence=newest_fence, reason=reason)

    monkeypatch.setattr(KvManager, "free", free_now)


def execute_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Epoch.accept

    def accept_again(self: Epoch, step: Step) -> bool:
        return accept(self, step) or True

    monkeypatch.setattr(Epoch, "accept", accept_again)


def apply_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's outbox survives its epoch: what it finished of one that is over goes out before the next answer. And
    the scheduler takes whatever result comes as the one of its oldest step."""
    outbox: list[StepAnswer] = []
    on_answer, take_result = WorkerService._on_answer, WorkerSession._result

    def collect(self: Executor, item: Any) -> None:
        answer = StepAnswer(item.step.epoch, item.step.step_seq, item.launched.collect())
        self._post(lambda: self._on_answer(item.epoch, answer))

    def on_late_answer(self: WorkerService, epoch: Epoch, answer: StepAnswer) -> None:
        if epoch is not self._epoch:
            outbox.append(answer)
        elif self._stream is not None:
            for late in outbox:
                self._stream.push(codec.encode_answer(late))
            outbox.clear()
        on_answer(self, epoch, answer)

    def take_any(self: WorkerSession, result: StepResult, now: float) -> list[Action]:
        if self._window._num_sent:
            result = replace(result, epoch=self.epoch, step_seq=self._window._frames[0].step_seq)
        return take_result(self, result, now)

    monkeypatch.setattr(Executor, "_collect", collect)
    monkeypatch.setattr(WorkerService, "_on_answer", on_late_answer)
    monkeypatch.setattr(WorkerSession, "_result", take_any)


def forget_answers_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    remember = Epoch.remember

    def remember_one(self: Epoch, answer: StepAnswer) -> None:
        self._answers.clear()
        remember(self, answer)

    monkeypatch.setattr(Epoch, "remember", remember_one)


def keep_requests_of_lost_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: FrontEndSession) -> None:
        self._is_gone = True
        self._hub.forget(self)

    monkeypatch.setattr(FrontEndSession, "lost", forget)


def forget_what_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scheduler is not sent the outputs: it begins again, and every token comes twice."""

    def pass_on(self: LiveRequest, token_ids: Any) -> None:
        if self.sink is not None:
            self.sink.tokens(token_ids)

    monkeypatch.setattr(LiveRequest, "tokens", pass_on)


def leave_streams_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end does not tell its calls that the scheduler is lost."""
    lose = SessionClient._lose

    def lose_in_silence(self: SessionClient, because: str, level: int = logging.WARNING) -> None:
        self._live.clear()
        lose(self, because, level)

    monkeypatch.setattr(SessionClient, "_lose", lose_in_silence)


PLANTED = [
    ignore_the_fence,
    execute_replays,
    apply_late_results,
    forget_answers_too_early,
    keep_requests_of_lost_front_ends,
    forget_what_was_received,
    leave_streams_hanging,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.timeout(600)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationFailure) as found:
        for _ in worlds(FIRST_SEED, NUM_STEPS, check_all=False):
            pass
    print(str(found.value).splitlines()[0])
