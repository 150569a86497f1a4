"""A rank reserved for a suspect (D31) among ranks of different sizes."""

from __future__ import annotations

from array import array

from scheduler_svc.core import invariants, reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import RankJoined, RankLost, RequestArrived, StepAcked
from scheduler_svc.core.scheduler import Scheduler


def run_alone_and_lose(scheduler: Scheduler, name: str, usable: int, *, epoch: int) -> None:
    """One fruitless epoch of a rank with everybody who waits."""
    scheduler.handle(RankJoined(name, epoch, usable + 1, 64, 1000))
    assert scheduler.schedule(name) is not None
    scheduler.handle(RankLost(name, "gone"))


def test_a_rank_that_can_never_hold_a_suspect_is_not_reserved_for_it() -> None:
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64))
    scheduler.handle(RankJoined("big", 1, 17, 64, 1000))
    # Needs 8 blocks.
    scheduler.handle(RequestArrived("suspect", 1, array("i", range(8)), max_tokens=25))
    assert scheduler.schedule("big") is not None
    scheduler.handle(RankLost("big", "gone"))
    run_alone_and_lose(scheduler, "big", 16, epoch=2)
    scheduler.handle(RankJoined("small", 3, 6, 64, 1000))
    scheduler.handle(RequestArrived("other", 2, array("i", range(50, 54)), max_tokens=3))
    # The suspect is put aside, the other one starts here.
    assert scheduler.schedule("small") is not None
    for step_seq in (1, 2):
        explanation = scheduler.explain("suspect")
        assert explanation is not None
        assert explanation.reason is reasons.NEVER_FITS_HERE
        scheduler.handle(StepAcked("small", 3, step_seq, [7]))
        scheduler.schedule("small")
        invariants.check(scheduler.state)
    scheduler.handle(StepAcked("small", 3, 3, [7]))
    # Empty now, and reserved for nobody: others still start.
    scheduler.handle(RequestArrived("third", 3, array("i", range(60, 64)), max_tokens=3))
    output = scheduler.schedule("small")
    assert output is not None
    assert [row.request_id for row in output.new_requests] == ["third"]
    invariants.check(scheduler.state)
