"""D57 in the core: requests that an earlier scheduler had accepted come again with what they have yielded."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import DrainStarted, EndReason, RefusalReason
from scheduler_svc.core.request import Status
from tests.support.core_harness import Client, World, expected_tokens


def config(**fields: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"block_size": 4, **fields})


def again(world: World, name: str, prompt: int, outputs: int | list[int], max_tokens: int = 8, **fields: Any) -> Client:
    """Submit a request again with the first outputs of its own text, or with these."""
    handle = len(world.clients) + 1
    tokens = [handle * 100 + i for i in range(prompt)]
    text = expected_tokens(tokens, outputs, sampler=world.sampler) if isinstance(outputs, int) else outputs
    fields = {"arrival": 0.0, **fields}
    return world.submit(name, prompt, max_tokens, output_tokens=array("i", text), **fields)


def test_it_goes_on_where_it_was_and_yields_only_what_is_new() -> None:
    world = World(config())
    client = again(world, "a", 10, 3)
    output = world.schedule()
    assert output is not None
    (row,) = output.new_requests
    assert (len(row.token_ids), row.num_prompt_tokens, row.num_computed_tokens) == (13, 10, 0)
    assert world.rows_of(output) == [("a", 13)]
    world.run()
    world.check_texts()
    assert client.ended is not None and len(client.tokens) == 8
    assert client.ended.usage.num_completion_tokens == 8


def test_what_is_computed_again_has_its_own_cause() -> None:
    world = World(config())
    client = again(world, "a", 10, 3)
    world.run()
    assert client.ended is not None
    # The last token had not been computed before.
    assert client.ended.usage.num_recomputed_tokens == 12
    assert world.scheduler.totals.recomputed_by_cause == {"scheduler_lost": 12}
    assert client.ended.usage.num_preemptions == 0


def test_one_without_outputs_begins_and_counts_nothing_as_computed_again() -> None:
    world = World(config())
    client = again(world, "a", 10, 0)
    world.run()
    assert client.ended is not None and client.ended.usage.num_recomputed_tokens == 0
    world.check_texts()


@pytest.mark.parametrize("max_tokens, stops, reason", [(3, (), EndReason.LENGTH), (8, "last", EndReason.STOP)])
def test_the_end_that_was_lost_is_found_in_the_outputs(max_tokens: int, stops: Any, reason: EndReason) -> None:
    world = World(config())
    text = expected_tokens([100 + i for i in range(10)], 3, sampler=world.sampler)
    stop_ids = (text[-1],) if stops else ()
    client = again(world, "a", 10, text, max_tokens, stop_token_ids=stop_ids)
    assert client.ended is not None and client.ended.reason is reason
    assert client.ended.stop_token_id == (text[-1] if stops else None)
    assert client.ended.usage.num_completion_tokens == 3
    assert not world.scheduler.state.requests and not len(world.scheduler.state.queue)
    assert world.schedule() is None


def test_min_tokens_holds_over_both_lives() -> None:
    world = World(config())
    text = expected_tokens([100 + i for i in range(10)], 3, sampler=world.sampler)
    client = again(world, "a", 10, text, 8, stop_token_ids=(text[-1],), min_tokens=5)
    assert client.ended is None


def test_no_limit_of_the_queue_and_no_drain_refuses_it() -> None:
    world = World(config(max_queued_requests=1, max_queued_tokens=10))
    world.submit("new", 10, 4)
    assert world.submit("refused", 10, 4).refused is not None
    world.handle(DrainStarted())
    client = again(world, "again", 10, 2)
    assert client.refused is None
    world.run()
    assert client.ended is not None and client.ended.reason is EndReason.LENGTH


def test_it_waits_where_no_worker_has_joined_yet() -> None:
    world = World(config(), ranks={})
    assert world.submit("new", 4, 4).refused is not None
    client = again(world, "again", 10, 2)
    assert client.accepted is not None
    world.join("r0", 64)
    world.run()
    assert client.ended is not None and client.ended.reason is EndReason.LENGTH
    world.check_texts()


def test_an_id_that_is_live_is_refused() -> None:
    world = World(config())
    world.submit("a", 10, 4)
    client = again(world, "a", 10, 2)
    assert client.refused is not None and client.refused.reason is RefusalReason.DUPLICATE_REQUEST_ID


def test_outputs_of_another_vocabulary_are_refused() -> None:
    world = World(config())
    client = again(world, "a", 10, [1 << 20])
    assert client.refused is not None and client.refused.reason is RefusalReason.INVALID_PARAMETER
    assert "another model" in client.refused.message


def test_one_that_no_living_worker_can_hold_waits_as_an_accepted_one_and_ends_after_the_grace() -> None:
    world = World(config(no_worker_grace_s=5.0), ranks={"r0": 4})
    client = again(world, "a", 10, 2, 40)
    assert client.accepted is not None
    world.tick(4.9)
    assert client.ended is None
    world.tick(5.1)
    assert client.ended is not None and client.ended.reason is EndReason.NO_WORKER


def test_the_queue_is_in_the_order_of_age_whoever_comes_back_first() -> None:
    world = World(config(max_num_seqs=1))
    world.tick(10.0)
    for name, arrival in (("new", 10.0), ("b", 3.0), ("d", 7.0), ("a", 1.0), ("c", 5.0)):
        if name == "new":
            world.submit(name, 4, 2, arrival=arrival)
        else:
            again(world, name, 4, 1, 4, arrival=arrival)
    assert [request.request_id for request in world.scheduler.state.queue.waiting] == ["a", "b", "c", "d", "new"]
    world.run()
    world.check_texts()


def test_priority_goes_before_age() -> None:
    world = World(config(policy=Policy.PRIORITY))
    again(world, "old", 4, 1, 4, arrival=-5.0, priority=1)
    again(world, "urgent", 4, 1, 4, arrival=-1.0, priority=0)
    again(world, "older", 4, 1, 4, arrival=-9.0, priority=1)
    assert [request.request_id for request in world.scheduler.state.queue.waiting] == ["urgent", "older", "old"]


def test_its_wait_counts_from_its_first_arrival_and_stands_still_until_it_is_admitted() -> None:
    world = World(config())
    world.tick(20.0)
    fresh = again(world, "fresh", 4, 0, 2, arrival=12.0)
    begun = again(world, "begun", 4, 1, 2, arrival=12.0)
    world.tick(23.0)
    world.run()
    assert fresh.ended is not None and begun.ended is not None
    assert (fresh.ended.usage.queued_s, fresh.ended.usage.preempted_s) == (11.0, 0.0)
    assert (begun.ended.usage.queued_s, begun.ended.usage.preempted_s) == (0.0, 3.0)


def test_the_length_of_the_model_is_learned_from_the_first_worker() -> None:
    """Requests come back before any worker; the lengths that they were accepted with may not fit any more."""
    world = World(config(max_model_len=1000), ranks={})
    fits = again(world, "fits", 10, 2, 8)
    shortened = again(world, "shortened", 10, 2, 500)
    full = again(world, "full", 10, 6, 500)
    too_long = again(world, "too long", 40, 0, 500)
    world.join("r0", 64, max_model_len=16)
    assert full.ended is not None and full.ended.reason is EndReason.LENGTH
    assert too_long.ended is not None and too_long.ended.reason is EndReason.NO_WORKER
    world.run()
    assert fits.ended is not None and len(fits.tokens) == 6
    assert shortened.ended is not None and shortened.ended.reason is EndReason.LENGTH
    assert len(shortened.tokens) == 6


def test_a_cost_that_changes_is_said_at_once() -> None:
    world = World(config(), ranks={"r0": 6})
    first = world.submit("a", 8, 8)
    second = world.submit("b", 8, 8)
    assert first.usage is None
    world.step()
    assert first.usage is not None and first.usage.num_preemptions == 0
    while not world.preemptions:
        world.step()
    assert second.usage is not None and second.usage.num_preemptions == 1
    world.run()
    for client in (first, second):
        assert client.usage is not None and client.ended is not None
        told, last = client.usage, client.ended.usage
        assert (told.num_preemptions, told.num_recomputed_tokens) == (last.num_preemptions, last.num_recomputed_tokens)
        assert (told.num_cached_tokens, told.queued_s) == (last.num_cached_tokens, last.queued_s)


def test_it_is_preempted_and_resumed_as_any_other() -> None:
    world = World(config(), ranks={"r0": 8})
    clients = [again(world, name, 8, 4, 12, arrival=float(index)) for index, name in enumerate("abc")]
    world.run()
    world.check_texts()
    assert world.preemptions
    assert all(client.ended is not None and len(client.tokens) == 12 for client in clients)
    assert all(request.status is not Status.RUNNING for request in world.scheduler.state.requests.values())


@pytest.mark.parametrize("min_tokens, kept", [(0, 2), (2, 2), (3, 4), (5, 6)])
def test_outputs_behind_the_one_that_ends_it_are_no_part_of_it(min_tokens: int, kept: int) -> None:
    world = World(config())
    client = again(world, "a", 10, [5, 7, 5, 7, 5, 7, 5], 7, stop_token_ids=(7,), min_tokens=min_tokens)
    assert client.ended is not None and client.ended.reason is EndReason.STOP
    assert client.ended.usage.num_completion_tokens == kept
    assert client.ended.stop_token_id == 7
