"""What operators may do: pause, resume, reset the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import PauseRequested, PauseState
from scheduler_svc.core.reasons import SkipReason
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)


def pause(world: World, state: PauseState) -> None:
    world.handle(PauseRequested(state))


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


def test_paused_for_new_ones_running_requests_finish() -> None:
    world = World(CONFIG)
    first = world.submit("first", 5, 4)
    world.step()
    pause(world, PauseState.PAUSED_NEW)
    second = world.submit("second", 5, 4)
    while world.turn():
        assert world.waiting == ["second"] and reason(world, "second") is reasons.PAUSED
    assert len(first.tokens) == 4 and second.tokens == []
    pause(world, PauseState.UNPAUSED)
    world.run()
    world.check_texts()


def test_paused_for_all_nothing_runs_but_ids_are_told() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 9)
    world.submit("b", 5, 9)
    world.step()
    while world.answers["r0"]:
        world.ack()
    pause(world, PauseState.PAUSED_ALL)
    assert world.schedule() is None and reason(world, "a") is reasons.PAUSED
    world.abort("a")
    output = world.schedule()
    assert output is not None and not output.rows and output.finished_request_ids == ("a",)
    world.ack()
    assert not world.turn()
    pause(world, PauseState.UNPAUSED)
    world.run()
    world.check_texts()


def test_results_come_in_during_a_pause() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 9)
    world.schedule()
    world.schedule()
    pause(world, PauseState.PAUSED_ALL)
    world.ack()
    world.ack()
    assert len(client.tokens) == 2 and world.schedule() is None
    assert reason(world, "a") is reasons.PAUSED
    pause(world, PauseState.UNPAUSED)
    world.run()
    world.check_texts()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_a_reset_at_any_depth_loses_nothing_and_repeats_nothing(depth: int, caching: bool) -> None:
    world = World(replace(CONFIG, max_inflight_steps=depth, enable_prefix_caching=caching, max_num_seqs=3))
    for index in range(5):
        world.submit(f"r{index}", 3 + index, 8)
    turns = 0
    while world.scheduler.num_live_requests:
        for _ in range(depth):
            world.schedule()
        if turns % 3 == 1:
            running = world.running()
            assert world.reset(preempt_running=True) is True
            assert len(world.rank().kv.pool.index) == 0
            assert world.running() == [] and world.waiting[: len(running)] == running, "in their order, at the front"
            in_flight = len(world.answers["r0"])
            for _ in range(in_flight):
                world.ack()
            assert world.reset() is True
        elif world.answers["r0"]:
            world.ack()
        turns += 1
        assert turns < 400
    world.run()
    world.check_texts()
    assert all(len(c.tokens) == 8 for c in world.clients)


def test_dropped_results_do_not_hold_up_others() -> None:
    """Rows of a reset request are in flight: it waits for them, whoever comes behind does not."""
    world = World(replace(CONFIG, max_inflight_steps=3))
    world.submit("a", 5, 6)
    world.schedule()
    world.schedule()
    assert world.reset(preempt_running=True) is True
    world.submit("b", 5, 6)
    assert world.rows_of(world.schedule()) == [("b", 5)]
    assert reason(world, "a") is reasons.RESULT_IN_FLIGHT
    world.ack()
    world.ack()
    output = world.schedule()
    # Everything was forgotten, and the token in flight with it.
    assert world.rows_of(output) == [("b", 1), ("a", 5)]
    world.run()
    world.check_texts()


def test_a_reset_that_preempts_forgets_what_parked_blocks_held() -> None:
    """Two steps in flight write into blocks that a request with the same prompt would have found."""
    world = World(CONFIG, num_blocks=9)
    world.submit("a", list(range(9)), 20)
    world.schedule()
    world.schedule()
    assert world.reset(preempt_running=True) is True
    assert world.rank().kv.pool.num_parked == 3
    same = world.submit("same", list(range(9)), 4)
    world.step()
    world.run()
    world.check_texts()
    assert same.ended is not None and same.ended.usage.num_cached_tokens == 0


def test_late_tokens_of_an_earlier_preemption_survive_a_reset() -> None:
    """Only what ran when the reset came is forgotten: b was preempted before, its token counts."""
    world = World(replace(CONFIG, enable_prefix_caching=False), num_blocks=5)
    world.submit("a", 8, 5)
    b = world.submit("b", 8, 5)
    world.schedule()
    world.schedule()
    assert world.waiting == ["b"]
    world.reset(preempt_running=True)
    assert world.waiting == ["a", "b"]
    world.ack()
    assert len(b.tokens) == 1 and world.clients[0].tokens == []
    world.run()
    world.check_texts()


def test_a_reset_with_nobody_there_succeeds() -> None:
    assert World(CONFIG, ranks={}).reset() is True
    assert World(CONFIG).reset() is True
