"""The window of steps in flight, late results, and rows that come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import StepAcked, WorkerProtocolError
from scheduler_svc.core.inflight import InflightWindow, StepRecord
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def record(step_seq: int, fence_seq: int) -> StepRecord:
    return StepRecord(step_seq, fence_seq, [], [], [], 0, False, [])


def test_the_window_fills_drains_and_counts() -> None:
    window = InflightWindow(2)
    assert window.oldest is None and not window.is_full and len(window) == 0
    window.push(record(1, 1))
    window.push(record(2, 0))
    assert window.is_full and (window.newest_step, window.newest_fence) == (2, 1)
    assert window.acknowledge().step_seq == 1
    assert (window.acked_step, window.acked_fence, len(window)) == (1, 1, 1)
    window.acknowledge()
    assert (window.acked_step, window.acked_fence) == (2, 1)


def test_clearing_the_window_acknowledges_everything() -> None:
    window = InflightWindow(3)
    for step in (1, 2, 3):
        window.push(record(step, step))
    assert [r.step_seq for r in window.clear()] == [1, 2, 3]
    assert (len(window), window.acked_step, window.acked_fence) == (0, 3, 3)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_more_steps_are_in_flight_than_configured(depth: int) -> None:
    world = World(replace(CONFIG, max_inflight_steps=depth))
    world.submit("a", 5, 20)
    count = 0
    while world.schedule() is not None:
        count += 1
    assert count == depth == len(world.answers["r0"])
    world.ack()
    assert world.schedule() is not None and world.schedule() is None
    world.run()
    world.check_texts()


def test_results_must_come_in_order() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 20)
    world.schedule()
    world.schedule()
    with pytest.raises(WorkerProtocolError, match="expected step 1"):
        world.scheduler.handle(StepAcked("r0", 1, 2, [7]))
    world.ack()
    with pytest.raises(WorkerProtocolError, match="expected step 2"):
        world.scheduler.handle(StepAcked("r0", 1, 1, [7]))
    world.ack()
    with pytest.raises(WorkerProtocolError, match="expected step none"):
        world.scheduler.handle(StepAcked("r0", 1, 3, [7]))
    world.run()


def test_a_result_of_a_rank_or_epoch_that_is_not_is_nothing() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 20)
    world.schedule()
    for event in (StepAcked("r9", 1, 1, [7]), StepAcked("r0", 2, 1, [7]), StepAcked("r0", 0, 1, [7])):
        assert world.handle(event) == []
    world.ack()
    world.run()
    world.check_texts()


def test_in_flight_and_awaited_follow_the_rows() -> None:
    world = World(replace(CONFIG, max_inflight_steps=3, max_num_batched_tokens=4))
    world.submit("a", 6, 20)
    request = world.request("a")
    seen = []
    for _ in range(3):
        world.schedule()
        run = world.run_of("a")
        seen.append((run.settled, run.in_flight, request.awaited))
    assert seen == [(0, 4, 0), (0, 6, 1), (0, 7, 2)]
    after = []
    for _ in range(3):
        world.ack()
        after.append((run.settled, run.in_flight, request.awaited, request.num_tokens))
    assert after == [(4, 3, 2, 6), (6, 1, 1, 7), (7, 0, 0, 8)]
    world.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_is_free_again_when_the_step_that_dropped_it_is_answered(depth: int) -> None:
    world = World(replace(CONFIG, max_num_seqs=1, max_inflight_steps=depth))
    rows = []
    for index in range(12):
        world.submit(f"r{index}", 3, 1)
    while world.scheduler.num_live_requests:
        output = world.schedule()
        rows += [] if output is None else [new.row for new in output.new_requests]
        if output is None or len(world.answers["r0"]) == depth:
            world.ack()
    world.run()
    # The stub worker refuses a row that is not free yet; here, that they do come back.
    assert len(rows) == 12 and len(set(rows)) <= depth + 1


def test_admission_never_waits_for_a_row() -> None:
    """Everybody ends in every step, at full depth: there are rows enough."""
    world = World(replace(CONFIG, max_num_seqs=3, max_inflight_steps=4))
    for index in range(60):
        world.submit(f"r{index}", 2, 1)
    for output in iter(world.schedule, None):
        assert len(output.rows) in (0, 3)
    world.run()
    assert sum(1 for output in world.outputs if output.rows) == 20


def test_an_aborted_request_leaves_its_batch_at_once_and_its_result_is_dropped() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 20)
    b = world.submit("b", 5, 20)
    world.schedule()
    world.abort("a")
    effects = world.ack()
    assert [e for e in effects if getattr(e, "handles", None) == [b.handle]]
    world.run()
    world.check_texts()


def test_results_of_several_requests_come_in_row_order() -> None:
    world = World(CONFIG)
    clients = [world.submit(name, 4, 3) for name in "abc"]
    world.schedule()
    (effect,) = world.ack()
    assert getattr(effect, "handles", None) == [c.handle for c in clients]
    assert getattr(effect, "counts", 0) is None
    world.run()
