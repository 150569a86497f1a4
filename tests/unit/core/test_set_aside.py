"""Runs that are set aside while their KV is loaded, and blocks that outlive their run. A resource for tests does it,
since no feature of today does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import AbortCause, RankDraining
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Run, RunEnd, Status
from scheduler_svc.core.resources.base import Resource
from tests.support.core_harness import Slot, World, extend_prefix
from tests.support.loader import LOADING, UNKNOWN, Loader

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


def loading(most: int = 8, *, config: SchedulerConfig = CONFIG, num_blocks: int = 20) -> tuple[World, Loader]:
    loader = Loader(most)
    return World(config, num_blocks=num_blocks, resources=[loader]), loader


def fill(world: World, request_id: str, num_tokens: int) -> None:
    """Put the KV of a request's first tokens where its table says, as a load does."""
    run = world.run_of(request_id)
    worker = world.workers[run.rank.name]
    prefix = 0
    for position, token in enumerate(run.request.tokens[:num_tokens]):
        prefix = extend_prefix(prefix, token)
        slot = run.blocks[position // 4] * 4 + position % 4
        worker.slots[slot] = Slot(position, token, prefix, 0)


def end_load(world: World, loader: Loader, request_id: str, num_valid: int) -> None:
    run = world.run_of(request_id)
    fill(world, request_id, run.settled + num_valid)
    loader.end(world.rank(run.rank.name), run, num_valid)
    world.check()


def test_a_request_waits_with_its_blocks_until_its_tokens_are_there() -> None:
    world, loader = loading()
    client = world.submit("load", 10, 4)
    assert world.schedule() is not None, "the step that starts the load"
    run, request = world.run_of("load"), world.request("load")
    assert (run.settled, run.in_flight, len(run.blocks), run.is_set_aside) == (0, 8, 2, True)
    assert request.status is Status.BLOCKED and world.skipped == ["load"] and reason(world, "load") is LOADING
    world.ack()
    assert world.schedule() is None
    end_load(world, loader, "load", 8)
    output = world.schedule()
    assert world.rows_of(output) == [("load", 2)] and world.run_of("load") is run
    assert output is not None and output.new_requests[0].num_computed_tokens == 8
    assert request.account.num_cached_tokens == 0, "loaded is not cached"
    world.run()
    world.check_texts()
    assert len(client.tokens) == 4


def test_others_start_while_it_loads() -> None:
    world, _ = loading()
    world.submit("load", 10, 4)
    world.submit("other", 5, 3)
    assert world.rows_of(world.schedule()) == [("other", 5)]
    assert world.rank().set_aside and world.skipped == ["load"]


def test_a_prompt_loaded_whole_leaves_one_token_to_compute() -> None:
    world, loader = loading(99)
    world.submit("load", 8, 4)
    world.step()
    end_load(world, loader, "load", 8)
    assert world.rows_of(world.step()) == [("load", 1)]
    world.run()
    world.check_texts()


def test_what_a_load_brought_is_found_by_others_once_it_runs() -> None:
    world, loader = loading()
    prompt = list(range(10))
    world.submit("load", prompt, 2)
    world.step()
    assert world.rank().kv.find_hits(world.request("load")) == [], "nothing is cached while it is on its way"
    end_load(world, loader, "load", 8)
    world.step()
    other = world.submit("other", prompt, 2)
    world.run()
    assert other.ended is not None and other.ended.usage.num_cached_tokens == 8
    world.check_texts()


def test_local_hits_are_not_loaded_again() -> None:
    world, loader = loading()
    prompt = list(range(10))
    world.submit("first", prompt[:6], 1)
    world.run()
    client = world.submit("load", prompt, 2)
    world.schedule()
    run = world.run_of("load")
    assert (run.settled, run.in_flight) == (4, 4)
    world.ack()
    end_load(world, loader, "load", 4)
    world.run()
    assert client.ended is not None and client.ended.usage.num_cached_tokens == 4
    world.check_texts()


@pytest.mark.parametrize("num_valid", [0, 3, 4])
def test_a_load_that_fails_is_computed_from_where_it_failed(num_valid: int) -> None:
    world, loader = loading()
    world.submit("load", 10, 4)
    world.step()
    run = world.run_of("load")
    end_load(world, loader, "load", num_valid)
    assert world.rows_of(world.step()) == [("load", 10 - num_valid)]
    assert (world.run_of("load") is run) is (num_valid > 0), "a run that got nothing is given up"
    world.run()
    world.check_texts()


def test_what_is_not_known_yet_puts_aside_and_takes_nothing() -> None:
    world, loader = loading()
    loader.unknown.add("load")
    world.submit("load", 10, 4)
    world.submit("other", 5, 3)
    assert world.rows_of(world.step()) == [("other", 5)]
    assert reason(world, "load") is UNKNOWN and not world.rank().set_aside and world.request("load").run is None
    loader.unknown.clear()
    world.step()
    assert world.rank().set_aside
    world.check()


def test_a_load_needs_blocks_for_its_tokens() -> None:
    world, _ = loading(num_blocks=6, config=replace(CONFIG, scheduler_reserve_full_isl=False))
    world.submit("other", 16, 3)
    world.step()
    world.submit("load", 12, 4)
    world.schedule()
    assert reason(world, "load") is reasons.NO_BLOCKS and not world.rank().set_aside


def test_a_margin_is_left_free() -> None:
    world, loader = loading(num_blocks=6)
    loader.free_blocks = 3
    world.submit("a", 9, 4)
    assert world.schedule() is None and reason(world, "a") is reasons.NO_BLOCKS
    loader.free_blocks = 2
    assert world.rows_of(world.schedule()) == [("a", 9)]


def test_f46_a_loaded_request_does_not_wait_behind_a_head_that_needs_its_blocks() -> None:
    """The urgent request comes first in the queue and needs more blocks than the loaded one leaves free."""
    loader = Loader(8)
    config = replace(CONFIG, policy=Policy.PRIORITY)
    world = World(config, num_blocks=6, resources=[loader])
    world.submit("load", 10, 4, priority=1)
    world.step()
    world.submit("urgent", 16, 4, priority=0)
    world.step()
    assert reason(world, "urgent") is reasons.NO_BLOCKS
    end_load(world, loader, "load", 8)
    assert world.rows_of(world.step()) == [("load", 2)]
    world.run()
    world.check_texts()


def test_another_rank_leaves_it_alone() -> None:
    loader = Loader(8)
    world = World(CONFIG, ranks={"r0": 20, "r1": 20}, resources=[loader])
    world.submit("load", 10, 4)
    world.schedule("r0")
    assert world.schedule("r1") is None and reason(world, "load") is reasons.HELD_ELSEWHERE
    end_load(world, loader, "load", 8)
    assert world.schedule("r1") is None
    assert world.rows_of(world.schedule("r0")) == [("load", 2)]
    world.run()
    world.check_texts()


# --- blocks that outlive their run --------------------------------------------------------------------------------


def test_an_abort_while_it_loads_leaves_its_blocks_held_until_the_load_is_over() -> None:
    world, loader = loading()
    client = world.submit("load", 10, 4)
    world.step()
    run = world.run_of("load")
    world.abort("load", AbortCause.ABORTED)
    assert client.ended is not None and not world.scheduler.num_live_requests
    assert (len(world.rank().kv.holds), world.free()) == (1, 17)
    (facts,) = world.scheduler.audit()
    assert (facts.held, facts.violations) == (2, ())
    assert world.schedule() is None, "the worker never had it: there is no end to announce"
    # The same id again, while its old load still writes: it gets other blocks and a load of its own.
    again = world.submit("load", 10, 4)
    world.step()
    assert not set(world.run_of("load").blocks) & set(loader.hold_of(world.rank(), run).blocks)
    end_load(world, loader, "load", 8)
    loader.end(world.rank(), run, 8)
    world.check()
    assert not world.rank().kv.holds
    world.run()
    world.check_texts()
    assert len(again.tokens) == 4


def test_a_finished_load_that_is_abandoned_holds_nothing() -> None:
    world, loader = loading()
    world.submit("load", 10, 4)
    world.step()
    end_load(world, loader, "load", 8)
    world.abort("load")
    assert not world.rank().kv.holds and not loader.loads and world.free() == 19


def test_a_lost_rank_takes_the_load_with_it_and_the_request_stays_where_it_stands() -> None:
    world, loader = loading()
    world.submit("load", 10, 4)
    world.submit("other", 5, 3)
    world.step()
    world.lose("r0")
    request = world.request("load")
    assert request.status is Status.WAITING and request.account.num_preemptions == 0
    assert world.skipped == ["load"] and world.waiting == ["other"] and not loader.loads
    world.join("r0", 20)
    world.schedule()
    assert world.run_of("load").is_set_aside
    end_load(world, loader, "load", 8)
    world.run()
    world.check_texts()


def test_a_draining_rank_gives_up_its_loads_to_the_others() -> None:
    loader = Loader(8)
    world = World(CONFIG, ranks={"r0": 20, "r1": 20}, resources=[loader])
    world.submit("load", 10, 4)
    world.step("r0")
    run = world.run_of("load")
    world.handle(RankDraining("r0"))
    assert world.request("load").status is Status.WAITING and len(world.rank("r0").kv.holds) == 1
    world.step("r1")
    assert world.run_of("load").rank is world.rank("r1")
    loader.end(world.rank("r0"), run, 8)
    assert not world.rank("r0").kv.holds and world.free("r0") == 19
    end_load(world, loader, "load", 8)
    world.run()
    world.check_texts()


def test_a_reset_is_refused_while_a_load_writes() -> None:
    world, loader = loading()
    world.submit("load", 10, 4)
    world.step()
    run = world.run_of("load")
    assert world.reset() is False
    assert world.reset(preempt_running=True) is False, "the load goes on although the request has given it up"
    assert world.request("load").status is Status.WAITING
    loader.end(world.rank(), run, 8)
    assert world.reset() is True
    world.step()
    end_load(world, loader, "load", 8)
    assert world.reset(preempt_running=True) is True, "a finished load is given up for good"
    assert world.free() == 19
    world.step()
    end_load(world, loader, "load", 8)
    world.run()
    world.check_texts()


def test_a_preempted_request_may_load_what_it_had() -> None:
    config = replace(CONFIG, enable_prefix_caching=False, max_inflight_steps=1)
    world, loader = loading(config=config, num_blocks=9)
    world.submit("a", 12, 16)
    world.submit("load", 8, 16)
    world.step()
    end_load(world, loader, "load", 8)
    while not world.preemptions:
        world.step()
    assert world.preemptions[0].victim == "load"
    request = world.request("load")
    for _ in range(60):
        if request.run is not None and request.run.is_set_aside:
            break
        world.step()
    assert request.status is Status.BLOCKED and request.account.preempted_at is not None
    end_load(world, loader, "load", world.run_of("load").in_flight)
    world.run()
    world.check_texts()


def test_a_load_that_never_ends_holds_up_nobody() -> None:
    world, _ = loading()
    world.submit("load", 10, 4)
    others = [world.submit(f"o{index}", 5 + index, 6) for index in range(5)]
    for _ in range(60):
        world.step()
    assert all(len(other.tokens) == 6 for other in others)
    assert reason(world, "load") is LOADING
    world.check_texts()


class _Saver(Resource):
    """Keeps the blocks of every run that ends, as one that saves them elsewhere does."""

    def keeps(self, run: Run, how: RunEnd) -> bool:
        return how is not RunEnd.RANK_LOST


def test_blocks_that_a_resource_lets_go_of_are_free_behind_the_fence() -> None:
    """A step in flight may still write to them."""
    world = World(CONFIG, num_blocks=20, resources=[_Saver()])
    world.submit("a", 10, 6)
    world.schedule()
    world.schedule()
    world.abort("a")
    rank = world.rank()
    (hold,) = rank.kv.holds.values()
    assert len(hold.blocks) == 3 and world.free() == 16
    rank.let_go(hold)
    world.check()
    assert not rank.kv.holds and world.free() == 16, "the second step is in flight"
    world.ack()
    assert world.free() == 16
    world.ack()
    assert world.free() == 19
