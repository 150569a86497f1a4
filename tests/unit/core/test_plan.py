"""The plan of a step: what withdraw gives back, what waiting for a fence claims, and what building commits."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.core import reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)


def running_world(*lengths: int, num_blocks: int = 30) -> World:
    world = World(CONFIG, num_blocks=num_blocks)
    for index, length in enumerate(lengths):
        world.submit("abcdef"[index], length, 20)
    world.step()
    return world


def test_withdraw_gives_back_tokens_blocks_entry_and_hashes() -> None:
    world = running_world(8, 6)
    a, b = world.run_of("a"), world.run_of("b")
    plan = StepPlan(world.rank(), 10)
    cached = b.num_cached
    for run in (a, b):
        plan.runs.append(run)
        plan.num_tokens.append(3)
        plan.grow(run, 1)
        plan.tokens_left -= 3
    b.request.tokens.extend([1, 2, 3])
    b.request.num_tokens += 3
    index_before = len(world.rank().kv.pool.index)
    plan.cache(b, 8)
    assert b.num_cached == cached + 1 and len(world.rank().kv.pool.index) == index_before + 1
    plan.withdraw(b)
    assert (plan.tokens_left, plan.runs, plan.num_tokens) == (7, [a], [3])
    assert list(plan.grown) == [a]
    assert b.num_cached == cached and b.cache_at == 8
    assert len(world.rank().kv.pool.index) == index_before


def test_withdraw_of_one_without_a_row_changes_no_budget() -> None:
    world = running_world(8, 6, 5)
    plan = StepPlan(world.rank(), 10)
    plan.runs.append(world.run_of("a"))
    plan.num_tokens.append(4)
    plan.tokens_left = 6
    plan.withdraw(world.run_of("c"))
    assert (plan.tokens_left, len(plan.runs)) == (6, 1)


def test_withdraw_gives_back_claims_on_returning_blocks() -> None:
    """A victim that itself waits for a fence must not keep blocks reserved."""
    world = running_world(8, 6, num_blocks=10)
    pool = world.rank().kv.pool
    parked = pool.take(2)
    pool.park(parked)
    plan = StepPlan(world.rank(), 10)
    free = pool.num_free
    plan.wait_for_fence(world.run_of("a"), free + 1)
    assert (plan.num_free_blocks, plan.num_returning_blocks, plan.awaits_fence) == (0, 1, True)
    plan.wait_for_fence(world.run_of("b"), 1)
    assert (plan.num_free_blocks, plan.num_returning_blocks) == (0, 0)
    plan.withdraw(world.run_of("a"))
    assert (plan.num_free_blocks, plan.num_returning_blocks, plan.awaits_fence) == (free, 1, True)
    plan.withdraw(world.run_of("b"))
    assert (plan.num_free_blocks, plan.num_returning_blocks, plan.awaits_fence) == (free, 2, False)


def test_caching_twice_in_a_step_is_taken_back_to_the_start() -> None:
    world = running_world(2)
    a = world.run_of("a")
    a.blocks += world.rank().kv.pool.take(2)
    a.request.tokens.extend(range(9))
    a.request.num_tokens += 9
    plan = StepPlan(world.rank(), 10)
    plan.cache(a, 4)
    plan.cache(a, 9)
    assert a.num_cached == 2
    plan.withdraw(a)
    assert a.num_cached == 0 and len(world.rank().kv.pool.index) == 0


def test_a_draft_with_nothing_to_say_is_no_step() -> None:
    world = running_world(4)
    window = world.rank().window
    before = (window.newest_step, window.newest_fence, len(window))
    assert StepPlan(world.rank(), 10).build(world.scheduler.totals) is None
    assert (window.newest_step, window.newest_fence, len(window)) == before


def test_new_requests_come_before_resumed_ones_in_a_step() -> None:
    world = World(CONFIG, num_blocks=30)
    world.submit("old", 5, 9)
    world.step()
    world.step()
    world.reset(preempt_running=True)
    while world.answers["r0"]:
        world.ack()
    world.submit("new", 5, 9)
    output = world.schedule()
    assert output is not None
    assert [new.request_id for new in output.new_requests] == ["new", "old"]
    assert [request_id for request_id, _ in world.rows_of(output)] == ["old", "new"]
    world.run()
    world.check_texts()


def test_a_step_tells_which_blocks_wait_for_their_fence() -> None:
    world = running_world(5, 6)
    world.schedule()
    world.abort("a")
    output = world.schedule()
    assert output is not None
    (free,) = output.deferred_frees
    assert (free.request_id, free.fence_seq, free.reason, len(free.block_ids)) == ("a", 2, "aborted", 2)
    assert output.finished_request_ids == ("a",) and output.processed_step_seq == 1
    world.ack()
    assert world.schedule() is not None and world.outputs[-1].deferred_frees == (), "told once"
    world.run()


def waiting_for_two(*, usable: int) -> World:
    """a's second chunk needs two blocks; gone has left one that returns with step 1."""
    config = replace(
        CONFIG, enable_prefix_caching=False, long_prefill_token_threshold=8, scheduler_reserve_full_isl=False
    )
    world = World(config, num_blocks=usable + 1)
    world.submit("a", 17, 4)
    world.submit("gone", 4, 4)
    world.submit("b", 4, 4)
    world.schedule()
    world.abort("gone")
    assert (world.free(), world.rank().kv.pool.num_parked) == (usable - 4, 1)
    return world


def test_free_and_returning_blocks_are_kept_for_the_one_in_front() -> None:
    world = waiting_for_two(usable=5)
    output = world.schedule()
    assert world.rows_of(output) == [] and [p.victim for p in world.preemptions] == ["b"]
    explanation = world.scheduler.explain("a")
    assert explanation is not None
    assert world.request("a").account.skip_reason is reasons.WAITING_FOR_FENCE and world.free() == 1
    world.ack()
    assert world.rows_of(world.schedule()) == [("a", 8)]
    world.run()
    world.check_texts()


def test_nobody_waits_or_goes_when_the_free_blocks_are_enough() -> None:
    world = waiting_for_two(usable=7)
    assert world.rows_of(world.schedule()) == [("a", 8), ("b", 1)] and not world.preemptions
    world.run()
    world.check_texts()


def test_nobody_is_admitted_while_someone_waits_for_a_fence() -> None:
    """a needs one block, two return with step 1: there would be room for little as well, but not in this step."""
    world = World(replace(CONFIG, enable_prefix_caching=False), num_blocks=5)
    world.submit("a", 8, 5)
    world.submit("gone", 8, 5)
    world.schedule()
    world.abort("gone")
    world.submit("little", 2, 2)
    output = world.schedule()
    assert world.rows_of(output) == [] and world.waiting == ["little"]
    assert world.request("little").account.skip_reason is reasons.FENCE_AWAITED
    world.ack()
    assert world.rows_of(world.schedule()) == [("a", 1), ("little", 2)]
    world.run()
    world.check_texts()


def test_a_victim_that_waited_for_a_fence_leaves_its_claim_to_the_one_who_needed_it() -> None:
    """Priority: low, first in running, waits for a returning block; high needs one as well. low goes, and high waits
    for what returns."""
    world = World(replace(CONFIG, policy=Policy.PRIORITY, enable_prefix_caching=False), num_blocks=7)
    world.submit("low", 11, 4, priority=9)
    world.step()
    world.submit("high", 8, 4, priority=0)
    world.submit("gone", 4, 4, priority=1)
    world.schedule()
    assert (world.running(), world.free()) == (["low", "high", "gone"], 0)
    world.abort("gone")
    output = world.schedule()
    assert world.rows_of(output) == [] and [p.victim for p in world.preemptions] == ["low"]
    assert world.request("high").account.skip_reason is reasons.WAITING_FOR_FENCE
    world.ack()
    assert world.rows_of(world.schedule())[0] == ("high", 1)
    world.run()
    world.check_texts()
