"""Deadlines of ended requests wake nobody and do not pile up; a step must hold a whole prompt that is not cut."""

from __future__ import annotations

from array import array

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import AbortCause, RankJoined, RequestAborted, RequestArrived
from scheduler_svc.core.scheduler import Scheduler


def start() -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64))
    scheduler.handle(RankJoined("r", 1, 17, 64, 1000))
    return scheduler


def test_the_deadline_of_an_ended_request_wakes_nobody() -> None:
    scheduler = start()
    for handle, deadline in ((1, 5.0), (2, 9.0)):
        scheduler.handle(RequestArrived(f"r{handle}", handle, array("i", [1, 2]), max_tokens=2, deadline=deadline))
    assert scheduler.next_deadline() == 5.0
    scheduler.handle(RequestAborted("r1", AbortCause.ABORTED))
    assert scheduler.next_deadline() == 9.0


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    scheduler = start()
    for handle in range(10_000):
        scheduler.handle(RequestArrived("r", handle, array("i", [1, 2]), max_tokens=2, deadline=1e6 + handle))
        scheduler.handle(RequestAborted("r", AbortCause.ABORTED))
    assert scheduler.next_deadline() is None
    assert len(scheduler.state.deadlines) < 200


def test_without_chunks_a_step_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ValueError, match="without chunked prefill"):
        SchedulerConfig(
            enable_chunked_prefill=False, max_num_batched_tokens=2048, max_num_scheduled_tokens=512, max_model_len=1024
        )
