"""Every non-decision has a reason (R4), and it is the present one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import Policy, SchedulerConfig, TenantLimits
from scheduler_svc.core.events import PauseRequested, PauseState, RankDraining
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.resources import ALL_REASONS
from scheduler_svc.core.resources.grammar import GRAMMAR_NOT_READY
from scheduler_svc.core.resources.speculation import DRAFTS_EXCEED_STEP
from scheduler_svc.core.resources.tenants import TENANT_LIMIT
from tests.support.core_harness import World
from tests.support.loader import Loader

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
PLAIN = replace(CONFIG, enable_prefix_caching=False)


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None and explanation.request_id == request_id
    assert explanation.status == world.request(request_id).status.value
    return explanation.reason


# Each builds a world in which `it` is left out for the reason it is named after.


def last_token_in_flight() -> World:
    world = World(CONFIG)
    world.submit("it", 5, 1)
    world.submit("other", 5, 9)
    world.schedule()
    world.schedule()
    return world


def awaiting_result() -> World:
    world = World(replace(CONFIG, num_speculative_tokens=2))
    world.submit("it", 5, 9)
    world.schedule()
    world.submit("other", 5, 9)
    world.schedule()
    return world


def length_reached() -> World:
    world = World(SchedulerConfig.reference(block_size=4, max_model_len=16, max_num_batched_tokens=12, max_num_seqs=4))
    world.submit("it", 16, 4)
    world.step()
    world.step()
    world.submit("other", 5, 9)
    world.schedule()
    return world


def prefill_deferred() -> World:
    world = World(CONFIG)
    world.submit("other", 5, 9)
    world.step()
    world.submit("it", 9, 9)
    world.schedule(throttle=True)
    return world


def chunk_deferred() -> World:
    world = World(CONFIG)
    world.submit("other", 5, 9)
    world.step()
    world.submit("it", 40, 9)
    world.step()
    world.schedule(throttle=True)
    return world


def waiting_for_fence() -> World:
    world = World(replace(PLAIN, max_num_batched_tokens=32), num_blocks=7)
    world.submit("it", 8, 8)
    world.submit("gone", 8, 8)
    world.submit("other", 5, 8)
    world.schedule()
    world.abort("gone")
    world.schedule()
    return world


def no_budget_for_a_waiting_one() -> World:
    world = World(CONFIG)
    world.submit("other", 16, 9)
    world.submit("it", 4, 9)
    world.schedule()
    return world


def preempted() -> World:
    world = World(PLAIN, num_blocks=5)
    world.submit("other", 8, 8)
    world.submit("it", 8, 8)
    world.step()
    world.schedule()
    return world


def behind_preemption() -> World:
    config = replace(PLAIN, policy=Policy.PRIORITY, max_inflight_steps=1)
    world = World(config, num_blocks=4)
    world.submit("low", 3, 9, priority=5)
    world.step()
    world.submit("it", 5, 7, priority=0)
    world.step()
    world.schedule()
    assert world.waiting == ["low"]
    return world


def sequence_limit() -> World:
    world = World(replace(CONFIG, max_num_seqs=1))
    world.submit("other", 4, 9)
    world.submit("it", 4, 9)
    world.schedule()
    return world


def no_blocks() -> World:
    world = World(PLAIN, num_blocks=5)
    world.submit("other", 9, 8)
    world.submit("it", 8, 8)
    world.schedule()
    return world


def step_too_large() -> World:
    world = World(CONFIG, ranks={})
    world.join("r0", 20, max_step_bytes=1)
    world.submit("other", 5, 9)
    world.submit("it", 5, 9)
    world.schedule()
    return world


def prompt_exceeds_step() -> World:
    world = World(replace(CONFIG, enable_chunked_prefill=False, max_model_len=16))
    world.submit("other", 9, 4)
    world.submit("it", 8, 4)
    world.schedule()
    return world


def drafts_exceed_step() -> World:
    config = SchedulerConfig.reference(
        block_size=4, max_num_seqs=3, max_num_batched_tokens=9, num_speculative_tokens=2,
        max_num_scheduled_tokens=3,
    ).with_rules(results_first=True)  # fmt: skip
    world = World(config)
    world.submit("warm", 9, 1)
    while world.scheduler.num_live_requests:
        world.step()
    world.submit("other", 2, 9)
    world.step()
    world.submit("it", [*world.clients[0].prompt[:8], 1], 9)
    world.schedule()
    return world


def step_preempts() -> World:
    """The head of the queue is somebody else than the victim."""
    world = World(replace(PLAIN, policy=Policy.PRIORITY), num_blocks=5)
    world.submit("a", 8, 8, priority=1)
    world.submit("b", 8, 8, priority=2)
    world.step()
    world.submit("it", 2, 8, priority=0)
    world.schedule()
    assert world.waiting == ["it", "b"]
    return world


def fence_awaited() -> World:
    world = World(PLAIN, num_blocks=5)
    world.submit("a", 8, 8)
    world.submit("gone", 8, 8)
    world.schedule()
    world.abort("gone")
    world.submit("it", 2, 8)
    world.schedule()
    return world


def result_in_flight() -> World:
    world = World(PLAIN)
    world.submit("it", 5, 8)
    world.schedule()
    world.reset(preempt_running=True)
    world.schedule()
    return world


def passed_over() -> World:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    world.submit("warm", 9, 1)
    for _ in range(3):
        world.step("r1")
    world.submit("it", world.clients[0].prompt, 9)
    world.schedule("r0")
    return world


def held_elsewhere() -> World:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20}, resources=[Loader(4, of_all=True)])
    world.submit("it", 5, 9)
    world.schedule("r0")
    world.schedule("r1")
    return world


def feature_missing_here() -> World:
    world = World(ranks={"r0": 20})
    world.join("r1", 20, features=("ADAPTERS",))
    world.submit("it", 3, features=("ADAPTERS",))
    world.schedule("r0")
    return world


def never_fits_here() -> World:
    world = World(CONFIG, ranks={"r0": 4, "r1": 20})
    world.submit("it", 20, 9)
    world.schedule("r0")
    return world


def quarantined() -> World:
    """Two workers failed under it, and the two that are left compute others; the first one is kept for it."""
    world = World(CONFIG, ranks={"r0": 20, "r1": 20, "r2": 20})
    world.submit("it", 5, 9)
    world.schedule("r0")
    world.lose("r0")
    world.join("r0", 20)
    world.schedule("r0")
    for rank in ("r1", "r2"):
        world.submit(f"on {rank}", 5, 9)
        world.schedule(rank)
    world.lose("r0")
    for rank in ("r1", "r2"):
        world.ack(rank)
        world.schedule(rank)
    return world


def rank_quarantined() -> World:
    world = World(CONFIG)
    world.submit("suspect", 5, 9)
    for _ in range(2):
        world.schedule()
        world.lose("r0")
        world.join("r0", 20)
    world.submit("it", 5, 9)
    world.schedule()
    return world


def grammar_not_ready() -> World:
    world = World(CONFIG)
    world.submit("it", 5, 9, awaits_grammar=True)
    world.schedule()
    return world


def tenant_limit() -> World:
    world = World(replace(CONFIG, tenants=(TenantLimits("a", max_running=1),)))
    world.submit("first", 5, 9, tenant="a")
    world.step()
    world.submit("it", 5, 9, tenant="a")
    world.schedule()
    return world


def paused() -> World:
    world = World(CONFIG)
    world.handle(PauseRequested(PauseState.PAUSED_NEW))
    world.submit("it", 5, 9)
    world.schedule()
    return world


def paused_running() -> World:
    world = World(CONFIG)
    world.submit("it", 5, 9)
    world.step()
    world.handle(PauseRequested(PauseState.PAUSED_ALL))
    world.schedule()
    return world


def rank_draining() -> World:
    world = World(CONFIG)
    world.handle(RankDraining("r0"))
    world.submit("it", 5, 9)
    world.schedule()
    return world


def window_full() -> World:
    world = World(replace(CONFIG, max_inflight_steps=1))
    world.submit("other", 5, 9)
    world.schedule()
    world.submit("it", 5, 9)
    world.schedule()
    return world


def no_rank() -> World:
    world = World(CONFIG)
    world.submit("it", 5, 9)
    world.schedule()
    world.lose("r0")
    return world


def not_examined() -> World:
    world = World(CONFIG)
    world.submit("it", 5, 9)
    return world


CASES: list[tuple[Callable[[], World], SkipReason]] = [
    (last_token_in_flight, reasons.LAST_TOKEN_IN_FLIGHT),
    (awaiting_result, reasons.AWAITING_RESULT),
    (length_reached, reasons.LENGTH_REACHED),
    (prefill_deferred, reasons.PREFILL_DEFERRED),
    (chunk_deferred, reasons.PREFILL_DEFERRED),
    (waiting_for_fence, reasons.WAITING_FOR_FENCE),
    (no_budget_for_a_waiting_one, reasons.NO_BUDGET),
    (preempted, reasons.PREEMPTED),
    (behind_preemption, reasons.BEHIND_PREEMPTION),
    (sequence_limit, reasons.SEQUENCE_LIMIT),
    (no_blocks, reasons.NO_BLOCKS),
    (step_too_large, reasons.STEP_TOO_LARGE),
    (prompt_exceeds_step, reasons.PROMPT_EXCEEDS_STEP),
    (drafts_exceed_step, DRAFTS_EXCEED_STEP),
    (step_preempts, reasons.STEP_PREEMPTS),
    (fence_awaited, reasons.FENCE_AWAITED),
    (result_in_flight, reasons.RESULT_IN_FLIGHT),
    (passed_over, reasons.PASSED_OVER),
    (held_elsewhere, reasons.HELD_ELSEWHERE),
    (feature_missing_here, reasons.FEATURE_MISSING_HERE),
    (never_fits_here, reasons.NEVER_FITS_HERE),
    (quarantined, reasons.QUARANTINED),
    (rank_quarantined, reasons.RANK_QUARANTINED),
    (grammar_not_ready, GRAMMAR_NOT_READY),
    (tenant_limit, TENANT_LIMIT),
    (paused, reasons.PAUSED),
    (paused_running, reasons.PAUSED),
    (rank_draining, reasons.RANK_DRAINING),
    (window_full, reasons.WINDOW_FULL),
    (no_rank, reasons.NO_RANK),
    (not_examined, reasons.NOT_EXAMINED),
]


@pytest.mark.parametrize("build, expected", CASES, ids=[build.__name__ for build, _ in CASES])
def test_reasons(build: Callable[[], World], expected: SkipReason) -> None:
    assert reason(build(), "it") is expected


def test_every_reason_is_reached() -> None:
    """BEHIND, and a running request without budget, have tests of their own below."""
    assert {expected for _, expected in CASES} == set(ALL_REASONS) - {reasons.BEHIND}


def test_who_runs_is_named_with_its_step() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 9)
    world.step()
    world.schedule()
    explanation = world.scheduler.explain("a")
    assert explanation is not None
    assert (explanation.reason, explanation.rank, explanation.detail) == (None, "r0", "in step 2 of r0")
    assert world.scheduler.explain("nobody") is None


def test_a_step_without_tokens_is_not_the_one_it_is_in() -> None:
    world = World(replace(CONFIG, max_inflight_steps=3))
    world.submit("a", 5, 1)
    world.submit("b", 5, 9)
    world.schedule()
    world.abort("b")
    output = world.schedule()
    assert output is not None and not output.rows
    explanation = world.scheduler.explain("a")
    assert explanation is not None and explanation.detail == "in step 1 of r0"


def test_running_requests_behind_the_budget() -> None:
    world = World(replace(CONFIG, max_num_seqs=2))
    world.submit("first", 40, 9)
    world.step()
    world.step()
    # 8 of 40 are left, so the second gets a chunk in the same step.
    world.submit("second", 20, 9)
    world.step()
    world.scheduler.state.config = replace(world.config, max_num_scheduled_tokens=1)
    world.schedule()
    assert (reason(world, "first"), reason(world, "second")) == (None, reasons.NO_BUDGET)


def test_whoever_stands_behind_is_told_behind_whom_and_why() -> None:
    world = no_blocks()
    world.submit("later", 2, 2)
    explanation = world.scheduler.explain("later")
    assert explanation is not None and explanation.reason is reasons.BEHIND
    assert explanation.detail == "behind it, which waits: too few KV blocks are free"


def test_a_head_that_is_overtaken_by_a_victim_stands_behind_it() -> None:
    """Its own reason is of an earlier pass: the present one is who came back before it."""
    world = World(PLAIN, num_blocks=7)
    world.submit("a", 8, 12)
    world.submit("b", 8, 12)
    world.schedule()
    world.submit("c", 12, 2)
    world.schedule()
    assert reason(world, "c") is reasons.NO_BLOCKS
    while not world.preemptions:
        world.turn()
    assert world.waiting == ["b", "c"] and reason(world, "b") is reasons.PREEMPTED
    assert reason(world, "c") is reasons.BEHIND
    world.turn()
    world.turn()
    assert world.waiting == ["b", "c"]
    assert (reason(world, "b"), reason(world, "c")) == (reasons.NO_BLOCKS, reasons.BEHIND)
    world.run()
    world.check_texts()


def test_of_two_victims_the_second_stands_behind_the_first_from_the_next_step_on() -> None:
    config = replace(PLAIN, scheduler_reserve_full_isl=False, long_prefill_token_threshold=8, max_inflight_steps=1)
    world = World(config, num_blocks=5)
    world.submit("a", 12, 2)
    world.submit("b", 4, 4)
    world.submit("c", 4, 4)
    world.step()
    world.step()
    world.step()
    assert world.waiting == ["c"] or world.waiting == ["b", "c"]
    for request_id in world.waiting[1:]:
        assert reason(world, request_id) is reasons.BEHIND
    world.run()
    world.check_texts()


def test_a_draining_rank_does_not_make_reasons_stale() -> None:
    world = World(PLAIN, ranks={"r0": 5, "r1": 5})
    world.submit("other", 9, 8)
    world.submit("it", 8, 8)
    world.handle(RankDraining("r1"))
    world.schedule("r0")
    world.schedule("r1")
    assert reason(world, "it") is reasons.NO_BLOCKS


def test_who_stopped_the_pass_and_ended_is_not_named_any_more() -> None:
    world = no_blocks()
    world.submit("later", 2, 2)
    world.abort("it")
    assert reason(world, "later") is reasons.NOT_EXAMINED
    world.schedule()
    assert reason(world, "later") is None
