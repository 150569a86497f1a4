"""A draining rank: nothing is admitted, what another rank can hold moves there, the rest finishes."""

from __future__ import annotations

from array import array

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    Effect,
    EndReason,
    Event,
    RankDraining,
    RankJoined,
    RankLost,
    RequestArrived,
    RequestEnded,
    StepAcked,
    TokensProduced,
)
from scheduler_svc.core.scheduler import Scheduler


def start(**ranks: int) -> Scheduler:
    """A scheduler with ranks of so many usable blocks of 4 tokens."""
    config = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(config)
    for name, usable in ranks.items():
        scheduler.handle(RankJoined(name, 1, usable + 1, 64, 1000))
    return scheduler


def arrive(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int) -> None:
    scheduler.handle(RequestArrived(name, len(name), array("i", range(num_prompt)), max_tokens=max_tokens))


def handle(scheduler: Scheduler, event: Event) -> list[Effect]:
    effects = scheduler.handle(event)
    invariants.check(scheduler.state)
    return effects


def answer(scheduler: Scheduler, rank: str) -> list[Effect]:
    """The rank's answer to its oldest step in flight; every token is 7."""
    record = scheduler.state.ranks[rank].window.oldest
    assert record is not None
    return handle(scheduler, StepAcked(rank, 1, record.step_seq, [7] * record.num_sampling))


def test_running_requests_move_to_a_rank_that_can_hold_them_and_keep_their_late_tokens() -> None:
    scheduler = start(a=8, b=8)
    arrive(scheduler, "r", 6, 4)
    assert scheduler.schedule("a") is not None
    handle(scheduler, RankDraining("a"))
    assert scheduler.rank_view("a").num_running == 0  # type: ignore[union-attr]
    # Not resumed before the result of its row on a is in.
    assert scheduler.schedule("b") is None
    effects = answer(scheduler, "a")
    assert [e.tokens for e in effects if isinstance(e, TokensProduced)] == [[7]]
    dropped = scheduler.schedule("a")
    assert dropped is not None
    assert dropped.preempted_request_ids == ("r",)
    assert dropped.total_num_tokens == 0
    resumed = scheduler.schedule("b")
    assert resumed is not None
    assert list(resumed.new_requests[0].token_ids) == [0, 1, 2, 3, 4, 5, 7]
    assert scheduler.totals.num_preemptions == 0


def test_a_request_no_other_rank_can_hold_finishes_where_it_runs() -> None:
    scheduler = start(a=8, b=2)
    arrive(scheduler, "big", 12, 2)
    assert scheduler.schedule("a") is not None
    handle(scheduler, RankDraining("a"))
    arrive(scheduler, "next", 5, 1)
    assert scheduler.schedule("a") is not None
    answer(scheduler, "a")
    ended = [e for e in answer(scheduler, "a") if isinstance(e, RequestEnded)]
    assert [(e.request_id, e.reason) for e in ended] == [("big", EndReason.LENGTH)]
    output = scheduler.schedule("b")
    assert output is not None
    assert [new.request_id for new in output.new_requests] == ["next"]


def test_an_orderly_leave_makes_nobody_a_suspect() -> None:
    scheduler = start(a=8)
    arrive(scheduler, "r", 6, 4)
    for epoch in (1, 2, 3, 4):
        if epoch > 1:
            handle(scheduler, RankJoined("a", epoch, 9, 64, 1000))
        assert scheduler.schedule("a") is not None
        handle(scheduler, RankLost("a", "drained", graceful=True))
    assert scheduler.num_live_requests == 1
    assert scheduler.totals.num_requeued_after_worker_loss == 4
