"""Rules of the reference that no recorded scenario pins down."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from scheduler_svc.core import lifecycle, reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import (
    DraftsProposed,
    EndReason,
    GrammarReady,
    RankJoined,
    RequestArrived,
    StepAcked,
)
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Status
from scheduler_svc.core.resources.speculation import DRAFTS_EXCEED_STEP
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core_harness import World, expected_tokens

REFERENCE = SchedulerConfig.reference(
    block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, enable_prefix_caching=False
)


def bare(config: SchedulerConfig, usable: int) -> Scheduler:
    """A core without a worker that would refuse what the reference does at its limits."""
    scheduler = Scheduler(config)
    scheduler.handle(RankJoined("r0", 1, usable + 1, config.max_model_len, 1000))
    return scheduler


def arrive(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int = 9) -> None:
    scheduler.handle(RequestArrived(name, len(scheduler.state.requests), array("i", range(num_prompt)), max_tokens))


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


# --- lengths ------------------------------------------------------------------------------------------------------


def test_a_running_request_without_a_token_to_compute_does_not_end_the_pass() -> None:
    """A prompt of exactly max_model_len, in chunks, gets stuck before its last token (the default refuses it); whoever
    is behind it goes on."""
    world = World(replace(REFERENCE, max_model_len=16, max_num_batched_tokens=8, max_num_seqs=4))
    world.submit("stuck", 16, 4)
    for _ in range(2):
        world.step()
    world.submit("behind", 3, 6)
    assert world.rows_of(world.step()) == [("behind", 3)]
    assert reason(world, "stuck") is reasons.LENGTH_REACHED
    while world.scheduler.num_live_requests > 1:
        assert [row[0] for row in world.rows_of(world.step())] == ["behind"]
    world.check_texts()


def test_admission_does_not_cap_a_prompt_at_the_model_length() -> None:
    world = World(replace(REFERENCE, max_model_len=16))
    client = world.submit("a", 16, 4)
    assert world.rows_of(world.step()) == [("a", 16)]
    assert client.reason is EndReason.LENGTH and len(client.tokens) == 1


def test_the_model_length_caps_the_whole_sequence_gate_and_the_slots() -> None:
    config = replace(REFERENCE, max_model_len=16)
    scheduler = bare(config, 4)
    arrive(scheduler, "a", 20)
    output = scheduler.schedule("r0")
    assert output is not None and list(output.num_tokens) == [20] and len(output.new_requests[0].block_table) == 4

    scheduler = bare(replace(config, num_lookahead_slots=3), 4)
    arrive(scheduler, "a", 15)
    output = scheduler.schedule("r0")
    assert output is not None and len(output.new_requests[0].block_table) == 4
    scheduler.handle(StepAcked("r0", 1, 1, [7]))
    assert scheduler.state.requests == {}


def test_look_ahead_slots_are_allocated_with_every_row() -> None:
    world = World(replace(REFERENCE, num_lookahead_slots=3), num_blocks=9)
    world.submit("a", 5, 9)
    world.step()
    assert len(world.run_of("a").blocks) == 2
    world.step()
    assert len(world.run_of("a").blocks) == 3, "6 computed and 3 ahead"


@pytest.mark.parametrize("length, admitted", [(64, True), (11, True), (10, False)])
def test_padding_looks_at_the_model_length(length: int, admitted: bool) -> None:
    config = replace(REFERENCE, enable_prefix_caching=True, num_speculative_tokens=2, max_model_len=length).with_rules(
        results_first=True
    )
    scheduler = bare(config, 20)
    prompt = array("i", range(8))
    scheduler.handle(RequestArrived("warm", 0, prompt, 1))
    scheduler.handle(RequestArrived("decode", 1, array("i", [50, 51]), 5))
    scheduler.schedule("r0")
    scheduler.handle(StepAcked("r0", 1, 1, [900, 901]))
    scheduler.handle(RequestArrived("one", 2, prompt + array("i", [60]), 5))
    output = scheduler.schedule("r0")
    assert output is not None and list(output.num_tokens) == ([1, 3] if admitted else [1])
    if not admitted:
        explanation = scheduler.explain("one")
        assert explanation is not None and explanation.reason is DRAFTS_EXCEED_STEP


# --- gates and lanes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("length, admitted", [(16, True), (17, False)])
def test_the_watermark_holds_in_both_gates(whole: bool, length: int, admitted: bool) -> None:
    """int(0.3 * 11) = 3 of the 9 blocks that are free beside x."""
    world = World(replace(REFERENCE, watermark=0.3, scheduler_reserve_full_isl=whole), num_blocks=11)
    world.submit("x", 2, 9)
    world.step()
    world.submit("y", 7, 9)
    world.step()
    assert world.free() == 7
    world.submit("a", length, 1)
    assert (("a", length) in world.rows_of(world.step())) is admitted


@pytest.mark.parametrize("priority, order", [(1, ["blocked", "plain"]), (5, ["plain", "blocked"])])
def test_priority_compares_the_heads_of_both_lanes(priority: int, order: list[str]) -> None:
    world = World(replace(REFERENCE, policy=Policy.PRIORITY))
    world.submit("plain", 4, 4, priority=3)
    world.submit("blocked", 4, 4, priority=priority, awaits_grammar=True)
    world.handle(GrammarReady("blocked"))
    assert [row[0] for row in world.rows_of(world.step())] == order


def test_of_equals_in_both_lanes_the_earlier_comes_first_under_priority() -> None:
    world = World(replace(REFERENCE, policy=Policy.PRIORITY))
    world.submit("blocked", 4, 4, awaits_grammar=True, arrival=2.0)
    world.submit("plain", 4, 4, arrival=1.0)
    world.handle(GrammarReady("blocked"))
    assert [row[0] for row in world.rows_of(world.step())] == ["plain", "blocked"]


# --- fences and results -------------------------------------------------------------------------------------------


def test_the_fence_is_the_newest_step_not_the_requests_own() -> None:
    world = World(REFERENCE.with_rules(fence=Fence.ALWAYS))
    world.submit("a", 8, 1)
    world.schedule()
    world.submit("b", 7, 9)
    assert world.rows_of(world.schedule()) == [("b", 7)]
    world.abort("a")
    assert [free.fence for free in world.rank().kv.parked] == [2]
    world.ack()
    assert len(world.rank().kv.parked) == 1
    world.ack()
    assert len(world.rank().kv.parked) == 0


def test_a_request_resumed_with_a_sample_awaited_does_not_sample_again() -> None:
    """Reference, three steps in flight: the resumed row computes what is known; the awaited token makes it partial."""
    scheduler = bare(replace(REFERENCE, max_inflight_steps=3), 6)
    arrive(scheduler, "a", 8, 2)
    arrive(scheduler, "b", 8, 9)
    scheduler.schedule("r0")
    second = scheduler.schedule("r0")
    assert second is not None and list(second.num_tokens) == [1, 1]
    # a's last row is in flight; give b a reason to leave and come back at once.
    b = scheduler.state.requests["b"]
    assert b.run is not None
    lifecycle.preempt(scheduler.state, scheduler.state.ranks["r0"], b.run, beneficiary="", cause="blocks")
    scheduler.state.queue.prepend(b)
    third = scheduler.schedule("r0")
    assert third is not None and list(third.num_tokens) == [8]
    assert b.run.is_prefill_chunk and scheduler.state.ranks["r0"].window.records[-1].expected == [0]
    assert (b.awaited, b.computed) == (2, 8)
    scheduler.handle(StepAcked("r0", 1, 1, [7, 8]))
    assert (b.num_tokens, b.awaited, b.computed) == (9, 1, 8)
    scheduler.handle(StepAcked("r0", 1, 2, [7, 8]))
    assert (b.num_tokens, b.awaited, b.run.settled, b.run.in_flight) == (10, 0, 0, 8)
    scheduler.handle(StepAcked("r0", 1, 3, []))
    assert (b.run.settled, b.run.in_flight) == (8, 0)


def test_drafts_of_an_earlier_run_do_not_move_the_counters_of_this_one() -> None:
    scheduler = bare(
        replace(REFERENCE, num_speculative_tokens=3, max_inflight_steps=3).with_rules(results_first=True), 9
    )
    arrive(scheduler, "b", 6, 30)
    scheduler.schedule("r0")
    scheduler.handle(StepAcked("r0", 1, 1, [7]))
    scheduler.handle(DraftsProposed("r0", {"b": [1, 2, 3]}))
    scheduler.schedule("r0")
    b = scheduler.state.requests["b"]
    assert (b.computed, b.awaited, b.awaited_optional) == (10, 4, 3)
    assert b.run is not None
    lifecycle.preempt(scheduler.state, scheduler.state.ranks["r0"], b.run, beneficiary="", cause="blocks")
    scheduler.state.queue.prepend(b)
    scheduler.schedule("r0")
    assert (b.computed, b.awaited) == (7, 4)
    scheduler.handle(StepAcked("r0", 1, 2, [8, 9], [2]))
    assert (b.num_tokens, b.computed, b.awaited, b.awaited_optional) == (9, 7, 0, 0)


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["eos", "stop id", "length"])
def test_what_ends_it_first_is_what_is_told(ends_by: str) -> None:
    prompt = list(range(5))
    third = expected_tokens(prompt, 3)[-1]
    fields = {"eos": {"eos_token_ids": (third,)}, "stop id": {"stop_token_ids": (third,)}, "length": {}}[ends_by]
    world = World(REFERENCE)
    client = world.submit("a", prompt, 3, **fields)
    world.run()
    assert client.ended is not None and len(client.tokens) == 3
    told = (client.ended.reason, client.ended.stop_token_id)
    assert told == ((EndReason.LENGTH, None) if ends_by == "length" else (EndReason.STOP, third))


@pytest.mark.parametrize("min_tokens, tokens", [(0, 2), (2, 2), (3, 5), (5, 5)])
def test_min_tokens_counts_outputs(min_tokens: int, tokens: int) -> None:
    prompt = list(range(5))
    second = expected_tokens(prompt, 2)[-1]
    world = World(REFERENCE)
    client = world.submit("a", prompt, 5, min_tokens=min_tokens, stop_token_ids=(second,))
    world.run()
    assert len(client.tokens) == tokens


def test_min_tokens_holds_even_at_the_length_in_the_reference() -> None:
    """Length does not stop it either before min_tokens: the reference goes on to the next token."""
    scheduler = bare(REFERENCE, 9)
    scheduler.handle(RequestArrived("a", 0, array("i", range(4)), max_tokens=2, min_tokens=3))
    for step in (1, 2):
        scheduler.schedule("r0")
        scheduler.handle(StepAcked("r0", 1, step, [7]))
    assert scheduler.state.requests["a"].status is Status.RUNNING
