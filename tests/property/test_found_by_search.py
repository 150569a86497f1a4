"""Faults that the simulation and the small worlds found in the core, as the shortest event sequences that show them."""

from __future__ import annotations

from array import array

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import AbortCause, RankDraining, RankJoined, RequestAborted, RequestArrived, StepAcked
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.scheduler import Scheduler


def scheduler_with(*ranks: str, num_blocks: int = 17, **settings: object) -> Scheduler:
    config = SchedulerConfig(block_size=4, max_model_len=64, **settings)  # type: ignore[arg-type]
    scheduler = Scheduler(config)
    for name in ranks:
        scheduler.handle(RankJoined(name, 1, num_blocks, 64, 100))
    return scheduler


def arrive(scheduler: Scheduler, request_id: str, prompt_len: int = 5, max_tokens: int = 8) -> None:
    handle = scheduler.state.next_sequence + 1
    prompt = array("i", [handle] * prompt_len)
    scheduler.handle(RequestArrived(request_id, handle, prompt, max_tokens=max_tokens))


def plan(scheduler: Scheduler, rank: str) -> SchedulerOutput:
    output = scheduler.schedule(rank)
    assert output is not None
    return output


def acknowledge(scheduler: Scheduler, rank: str) -> None:
    record = scheduler.state.ranks[rank].window.oldest
    assert record is not None
    scheduler.handle(StepAcked(rank, 1, record.step_seq, [7] * record.num_sampling))


def reason_of(scheduler: Scheduler, request_id: str) -> SkipReason | None:
    explanation = scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


def test_who_arrives_while_one_rank_drains_and_the_windows_of_the_others_are_full_is_told_so() -> None:
    scheduler = scheduler_with("a", "b", max_inflight_steps=1)
    scheduler.handle(RankDraining("a"))
    arrive(scheduler, "runs")
    plan(scheduler, "b")
    arrive(scheduler, "waits")
    assert scheduler.schedule("a") is None and scheduler.schedule("b") is None
    assert reason_of(scheduler, "waits") is reasons.WINDOW_FULL


def test_nobody_stands_behind_a_request_that_is_gone() -> None:
    scheduler = scheduler_with("a", max_num_seqs=1, max_inflight_steps=1)
    arrive(scheduler, "runs")
    arrive(scheduler, "head")
    arrive(scheduler, "behind")
    plan(scheduler, "a")
    assert reason_of(scheduler, "behind") is reasons.BEHIND
    scheduler.handle(RequestAborted("head", AbortCause.ABORTED))
    assert reason_of(scheduler, "behind") is reasons.WINDOW_FULL


def test_steps_are_counted_from_an_idle_moment_that_an_abort_makes() -> None:
    scheduler = scheduler_with("a", prefill_schedule_interval=4)
    arrive(scheduler, "first")
    plan(scheduler, "a")
    acknowledge(scheduler, "a")
    scheduler.handle(RequestAborted("first", AbortCause.ABORTED))
    assert scheduler.state.ranks["a"].throttle.num_steps == 0
