"""Deadlines, graces and the times in usage: the core knows only the time it is told."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import AbortCause, EndReason, Tick
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)


def test_a_deadline_in_the_queue_ends_it_unscheduled() -> None:
    world = World(CONFIG)
    world.submit("runs", 5, 20)
    world.step()
    client = world.submit("waits", 5, 4, deadline=3.0)
    assert world.scheduler.next_deadline() == 3.0
    world.tick(2.999)
    assert client.ended is None
    world.tick(3.0)
    assert client.ended is not None
    assert (client.reason, client.ended.cause) == (EndReason.ABORTED, AbortCause.DEADLINE)
    assert (client.ended.usage.queued_s, client.tokens) == (3.0, [])
    assert world.scheduler.next_deadline() is None
    world.run()
    assert all(new.request_id != "waits" for o in world.outputs for new in o.new_requests)


def test_a_deadline_that_has_passed_on_arrival_is_never_scheduled() -> None:
    world = World(CONFIG)
    world.tick(5.0)
    client = world.submit("late", 5, 4, deadline=5.0)
    assert client.accepted is not None and client.ended is not None
    assert client.ended.cause is AbortCause.DEADLINE
    assert world.schedule() is None
    world.run()


def test_a_deadline_while_running_frees_blocks_and_tells_the_worker() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 20, deadline=3.0)
    world.schedule()
    world.tick(5.0)
    assert client.ended is not None and client.ended.cause is AbortCause.DEADLINE
    assert world.rank().kv.pool.num_parked == 2
    output = world.schedule()
    assert output is not None and output.finished_request_ids == ("a",)
    world.run()


def test_deadlines_pass_in_their_order_and_once() -> None:
    world = World(CONFIG)
    for name, deadline in (("late", 9.0), ("soon", 1.0), ("never", None), ("also soon", 1.0)):
        world.submit(name, 5, 4, deadline=deadline)
    world.tick(1.0)
    assert [c.reason for c in world.clients] == [None, EndReason.ABORTED, None, EndReason.ABORTED]
    world.tick(1.0)
    world.tick(50.0)
    assert world.clients[0].reason is EndReason.ABORTED
    world.run()
    assert world.clients[2].reason is EndReason.LENGTH


def test_the_deadline_of_an_ended_request_does_not_touch_its_id() -> None:
    world = World(CONFIG)
    world.submit("same", 5, 1, deadline=5.0)
    world.run()
    again = world.submit("same", 5, 9)
    world.step()
    world.tick(6.0)
    assert again.ended is None
    world.run()
    assert len(again.tokens) == 9


def test_a_deadline_holds_while_no_rank_lives() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 9, deadline=10.0)
    world.step()
    world.lose("r0")
    world.tick(10.0)
    assert client.ended is not None and client.ended.cause is AbortCause.DEADLINE
    assert client.ended.usage.num_completion_tokens == len(client.tokens) == 1


def test_time_never_runs_backwards() -> None:
    world = World(CONFIG)
    world.tick(5.0)
    world.tick(5.0)
    with pytest.raises(AssertionError, match="backwards"):
        world.scheduler.handle(Tick(4.9))


def test_usage_counts_the_queue_and_every_time_off_the_rank() -> None:
    world = World(CONFIG)
    world.tick(1.0)
    client = world.submit("a", 5, 6)
    world.tick(4.0)
    world.schedule()
    world.tick(6.0)
    world.lose("r0")
    world.tick(10.0)
    world.join("r0", 30)
    world.schedule()
    world.tick(20.0)
    world.ack()
    world.reset(preempt_running=True)
    world.tick(21.5)
    world.schedule()
    world.run()
    assert client.ended is not None
    usage = client.ended.usage
    # Off the rank from 4.0, when the step went out that was never answered, and from 20.0.
    assert (usage.queued_s, usage.preempted_s, usage.num_preemptions) == (3.0, 6.0 + 1.5, 2)
    assert usage.num_completion_tokens == 6 and usage.num_prompt_tokens == 5


def test_a_lost_rank_has_stood_still_since_its_last_result() -> None:
    """The watchdog took from 3.0 to 13.0 to give the rank up. Whoever was admitted meanwhile lost less."""
    world = World(SchedulerConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64))
    early = world.submit("early", 5, 6)
    world.schedule()
    world.tick(3.0)
    world.ack()
    world.schedule()
    late = world.submit("late", 5, 6)
    world.tick(5.0)
    world.schedule()
    world.tick(13.0)
    world.lose("r0")
    world.tick(14.0)
    world.join("r0", 30)
    world.schedule()
    world.run()
    assert early.ended is not None and late.ended is not None
    assert (early.ended.usage.queued_s, early.ended.usage.preempted_s) == (0.0, 11.0)
    assert (late.ended.usage.queued_s, late.ended.usage.preempted_s) == (2.0, 9.0)


def test_a_rank_that_had_nothing_to_do_did_not_stand_still() -> None:
    world = World(CONFIG)
    world.submit("before", 5, 1)
    world.run()
    world.tick(100.0)
    client = world.submit("a", 5, 6)
    world.schedule()
    world.tick(101.0)
    world.lose("r0")
    world.tick(103.0)
    world.join("r0", 30)
    world.schedule()
    world.run()
    assert client.ended is not None and client.ended.usage.preempted_s == 3.0


def test_usage_of_one_that_ends_while_preempted() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 6)
    world.step()
    world.lose("r0")
    world.tick(7.0)
    world.abort("a", AbortCause.CLIENT_GONE)
    assert client.ended is not None
    assert client.ended.usage.preempted_s == 7.0 and client.ended.cause is AbortCause.CLIENT_GONE


def test_recomputed_tokens_are_those_computed_before() -> None:
    """5 prompt tokens and 2 outputs were computed, 2 more dispatched: a resume computes all of it again, and its newest
    token for the first time."""
    world = World(SchedulerConfig(block_size=4, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=4))
    client = world.submit("a", 5, 9)
    for _ in range(3):
        world.step()
    assert (world.request("a").computed, world.request("a").num_tokens) == (7, 8)
    world.lose("r0")
    world.join("r0", 30)
    assert world.rows_of(world.step()) == [("a", 8)]
    assert world.request("a").account.num_recomputed_tokens == 7
    world.run()
    assert client.ended is not None and client.ended.usage.num_recomputed_tokens == 7
    totals = world.scheduler.totals
    assert (totals.num_recomputed_tokens, totals.num_computed_tokens) == (7, 5 + 2 + 8 + 5)
    assert (totals.num_prompt_tokens, totals.num_output_tokens) == (5, 9)


def test_hits_are_not_recomputed() -> None:
    world = World(SchedulerConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=4))
    client = world.submit("a", 9, 9)
    world.step()
    world.step()
    world.reset(preempt_running=True)
    world.run()
    assert client.ended is not None
    assert client.ended.usage.num_recomputed_tokens == 10, "a reset forgets everything"
    world = World(SchedulerConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=4), num_blocks=10)
    world.submit("first", 9, 9)
    victim = world.submit("victim", 9, 9)
    world.run()
    world.check_texts()
    assert victim.ended is not None and victim.ended.usage.num_preemptions == 1
    assert victim.ended.usage.num_recomputed_tokens == 4, "of its 16 tokens three blocks were hit again"
