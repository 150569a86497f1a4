"""The traps of the reference's semantics (section 21), one test each, under its number. Block size 4 everywhere; the
reference configuration unless a test says otherwise; what the default does differently stands beside it.

Not here, because the core has no such things yet: 18 (images withdrawn with a victim), 40 to 43 (KV loads) and the
part of 15 about them, 53 (pacing of pipeline stages), 54 (shared leading blocks, which nobody is told).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import (
    EndReason,
    GrammarReady,
    PauseRequested,
    PauseState,
    RefusalReason,
    StepAcked,
    Tick,
    WorkerProtocolError,
)
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.request import Status
from scheduler_svc.core.resources.speculation import Speculation
from scheduler_svc.core.rules import Fence
from scheduler_svc.simulation import scenario
from tests.support.core_harness import World, expected_tokens

REFERENCE = SchedulerConfig.reference(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
DEFAULT = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
PLAIN = replace(REFERENCE, enable_prefix_caching=False)
PRIORITY = replace(PLAIN, policy=Policy.PRIORITY)
DRAFTS = replace(REFERENCE, num_speculative_tokens=2, enable_prefix_caching=False).with_rules(results_first=True)


def world(config: SchedulerConfig, usable: int) -> World:
    return World(config, num_blocks=usable + 1)


def rows(w: World, output: SchedulerOutput | None) -> list[tuple[str, int]]:
    return w.rows_of(output)


def preempted(output: SchedulerOutput | None) -> list[str]:
    return [] if output is None else sorted(output.preempted_request_ids)


# --- the throttle -------------------------------------------------------------------------------------------------


def test_trap_01_the_capacity_flag_switches_the_throttle_off() -> None:
    w = world(replace(REFERENCE, max_num_seqs=2), 20)
    w.submit("a", 3, 1)
    w.submit("b", 3, 9)
    w.submit("c", 3, 9)
    w.step()
    assert w.rank().throttle.capacity_bound
    assert rows(w, w.step(throttle=True)) == [("b", 1), ("c", 3)]
    assert not w.rank().throttle.capacity_bound
    w.submit("d", 3, 9)
    w.abort("b")
    assert rows(w, w.step(throttle=True)) == [("c", 1)], "everybody was admitted last time: now prefills wait"


def test_trap_02_a_preempting_step_leaves_the_flag_alone() -> None:
    w = world(PLAIN, 4)
    for name in "ab":
        w.submit(name, 8, 9)
    w.step()
    assert preempted(w.step()) == ["b"] and w.waiting == ["b"]
    assert not w.rank().throttle.capacity_bound
    w.step()
    assert w.rank().throttle.capacity_bound


def test_trap_03_one_token_passes_the_throttle() -> None:
    cached = list(range(8))
    w = world(REFERENCE, 20)
    w.submit("warm", [*cached, 1], 1)
    w.step()
    w.submit("decode", 3, 20)
    w.step()
    w.submit("nine", [*cached, 90], 9)
    assert rows(w, w.step(throttle=True)) == [("decode", 1), ("nine", 1)]
    w.submit("ten", [*cached, 91, 92], 9)
    w.submit("nine too", [*cached, 93], 9)
    assert rows(w, w.step(throttle=True)) == [("decode", 1), ("nine", 1)], "and whoever stands behind stays out"
    assert w.waiting == ["ten", "nine too"]


def test_trap_04_a_last_chunk_in_flight_counts_as_a_decode() -> None:
    w = world(replace(PLAIN, max_num_batched_tokens=8), 20)
    w.submit("a", 8, 9)
    w.schedule()
    w.submit("b", 4, 9)
    assert rows(w, w.schedule(throttle=True)) == [("a", 1)]
    w = world(replace(PLAIN, max_num_batched_tokens=8), 20)
    w.submit("a", 12, 9)
    w.schedule()
    assert rows(w, w.schedule(throttle=True)) == [("a", 4)], "with chunks only, nothing is deferred"


# --- victims ------------------------------------------------------------------------------------------------------


def test_trap_05_self_preemption_ends_the_step() -> None:
    w = world(PRIORITY, 3)
    w.submit("low", 3, 9, priority=5)
    w.step()
    w.submit("hi", 5, 9, priority=0)
    w.step()
    assert w.running() == ["low", "hi"] and w.free() == 0
    output = w.step()
    assert output is not None and output.total_num_tokens == 0 and preempted(output) == ["low"]
    assert w.running() == ["hi"]
    assert rows(w, w.step()) == [("hi", 1)]


def test_trap_06_taking_a_victim_back_passes_nobody_over_and_returns_its_tokens() -> None:
    w = world(PRIORITY, 3)
    for name, length, priority in (("low", 1, 9), ("hi", 3, 0), ("mid", 1, 5)):
        w.submit(name, length, 9, priority=priority)
        w.step()
    assert w.running() == ["low", "hi", "mid"] and w.free() == 0
    output = w.step()
    assert rows(w, output) == [("hi", 1), ("mid", 1)] and preempted(output) == ["low"]

    w = world(replace(DRAFTS, policy=Policy.PRIORITY, max_num_batched_tokens=6), 4)
    for name, length, priority in (("low", 3, 9), ("hi", 1, 0), ("mid", 1, 5)):
        w.submit(name, length, 9, priority=priority)
        w.step()
    w.draft({"low": [1, 2], "hi": [1, 2]})
    output = w.step()
    assert rows(w, output) == [("hi", 3), ("mid", 1)], "low's three tokens are there for mid"
    assert output is not None and list(output.num_drafts or ()) == [2, 0]


def test_trap_07_a_victim_without_a_row_returns_no_tokens() -> None:
    w = world(replace(PLAIN, max_num_seqs=3, max_num_batched_tokens=12), 4)
    w.submit("a", 8, 9)
    for name in "bc":
        w.submit(name, 2, 9)
    w.step()
    w.scheduler.state.config = replace(w.config, max_num_scheduled_tokens=2)
    output = w.step()
    assert rows(w, output) == [("a", 1), ("b", 1)] and preempted(output) == ["c"]
    assert output is not None and output.total_num_tokens == 2


def test_trap_08_of_equal_victims_the_first_in_running_goes_even_if_it_has_a_row() -> None:
    w = world(PRIORITY, 4)
    for name, length in (("a", 5), ("b", 3), ("c", 3)):
        w.submit(name, length, 9, arrival=0.0)
    w.step()
    w.step()
    assert w.free() == 0
    output = w.step()
    assert rows(w, output) == [("b", 1), ("c", 1)] and preempted(output) == ["a"]


def test_trap_09_two_victims_keep_their_order() -> None:
    config = replace(PLAIN, scheduler_reserve_full_isl=False, long_prefill_token_threshold=8)
    w = world(config, 4)
    w.submit("a", 20, 9)
    w.submit("b", 4, 9)
    w.submit("c", 4, 9)
    w.step()
    assert w.free() == 0
    output = w.step()
    assert rows(w, output) == [("a", 8)] and w.waiting == ["b", "c"]
    assert [p.victim for p in w.preemptions] == ["c", "b"]


@pytest.mark.parametrize("policy, order", [(Policy.PRIORITY, ["n", "b"]), (Policy.FCFS, ["b", "n"])])
def test_trap_10_a_preempted_request_is_first_in_fcfs_and_in_its_place_under_priority(
    policy: Policy, order: list[str]
) -> None:
    w = world(replace(PLAIN, policy=policy), 4)
    w.submit("a", 8, 9, priority=0)
    w.submit("b", 8, 9, priority=5)
    w.step()
    w.submit("n", 8, 9, priority=1)
    assert preempted(w.step()) == ["b"]
    assert w.waiting == order


def test_trap_11_and_12_a_preempting_step_admits_nobody_and_the_victim_stands_in_front() -> None:
    w = world(PLAIN, 6)
    w.submit("a", 8, 6)
    w.submit("b", 16, 6)
    w.step()
    w.submit("c", 3, 6)
    output = w.step()
    assert preempted(output) == ["b"] and rows(w, output) == [("a", 1)]
    assert w.free() == 3 and w.waiting == ["b", "c"], "three blocks are free and c needs one"
    for _ in range(3):
        assert rows(w, w.step()) == [("a", 1)], "b needs five: c waits behind it"
    while w.running() == ["a"]:
        w.step()
    w.run()
    w.check_texts()


# --- gates and prefix cache ---------------------------------------------------------------------------------------


def test_trap_13_what_needs_exactly_the_free_blocks_is_admitted() -> None:
    w = world(PLAIN, 2)
    w.submit("a", 8, 1)
    assert rows(w, w.step()) == [("a", 8)]
    w.submit("b", 9, 1)
    w.step()
    assert w.waiting == ["b"] and w.running() == []


@pytest.mark.parametrize("whole", [True, False])
def test_trap_14_a_free_hit_uses_up_a_free_block(whole: bool) -> None:
    cached = list(range(8))
    w = world(replace(REFERENCE, scheduler_reserve_full_isl=whole), 5)
    w.submit("warm", [*cached, 1], 1)
    w.step()
    w.submit("x", 5, 9)
    w.step()
    assert w.rank().kv.pool.free_order() == [5, 2, 1]
    w.submit("four", [*cached, *range(50, 58)], 9)
    w.step()
    assert w.waiting == ["four"], "two hits and two new blocks, of three free ones"
    w.abort("four")
    w.submit("three", [*cached, *range(50, 54)], 9)
    assert rows(w, w.step()) == [("x", 1), ("three", 4)]


def test_trap_15_the_last_token_is_always_computed() -> None:
    w = world(REFERENCE, 20)
    prompt = list(range(8))
    for name in ("first", "second"):
        w.submit(name, prompt, 1)
    output = w.step()
    assert [(n.request_id, n.num_computed_tokens) for n in output.new_requests] == [("first", 0), ("second", 4)]  # type: ignore[union-attr]
    assert rows(w, output)[1] == ("second", 4)
    w.check_texts()


def test_trap_16_blocks_are_cached_when_scheduled() -> None:
    w = world(REFERENCE, 20)
    prompt = list(range(10))
    w.submit("a", prompt, 4)
    w.submit("b", prompt, 4)
    assert rows(w, w.step()) == [("a", 10), ("b", 2)]
    w.run()
    w.check_texts()


def test_trap_17_hashes_of_a_withdrawn_row_are_forgotten() -> None:
    """The row that is taken back would have filled two blocks and begun a third: hi takes only that one, so the two
    keep whatever block hash they are left with."""
    config = replace(
        REFERENCE, policy=Policy.PRIORITY, scheduler_reserve_full_isl=False, long_prefill_token_threshold=7
    )
    w = world(config, 7)
    low = w.submit("low", 22, 4, priority=9)
    w.step()
    w.submit("hi", 4, 4, priority=0)
    assert rows(w, w.step()) == [("low", 7), ("hi", 4)]
    assert w.free() == 2
    output = w.step()
    assert preempted(output) == ["low"] and rows(w, output) == [("hi", 1)]
    hits = w.rank().kv.find_hits(w.request("low"))
    assert len(hits) == 3, "the fourth and fifth were to be computed in the step that took them back"
    w.submit("same", low.prompt, 4, priority=1)
    w.run()
    w.check_texts()


def test_trap_19_freed_blocks_are_queued_by_block_hash() -> None:
    w = world(REFERENCE, 7)
    w.submit("a", 9, 1)
    w.step()
    assert w.rank().kv.pool.free_order() == [3, 4, 5, 6, 7, 2, 1]


# --- fences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fence, waits_for_fence, victims, rows_of_step",
    [
        (Fence.ALWAYS, False, ["b", "c"], [("a", 1)]),
        (Fence.TRANSFERS, False, ["c"], [("a", 1), ("b", 1)]),
        (Fence.ALWAYS, True, ["c"], [("a", 1)]),
    ],
)
def test_trap_20_a_shortage_behind_a_fence_preempts_once(
    fence: Fence, waits_for_fence: bool, victims: list[str], rows_of_step: list[tuple[str, int]]
) -> None:
    """The reference takes victim after victim although their blocks come back later; the default waits."""
    w = world(PLAIN.with_rules(fence=fence, waits_for_fence=waits_for_fence), 5)
    w.submit("a", 8, 9)
    w.submit("b", 4, 9)
    w.submit("c", 4, 9)
    w.schedule()
    assert w.free() == 1
    output = w.schedule()
    assert preempted(output) == victims and rows(w, output) == rows_of_step
    w.run()
    w.check_texts()


def test_trap_21_the_fence_is_the_newest_step() -> None:
    w = world(replace(PLAIN, max_inflight_steps=3).with_rules(fence=Fence.ALWAYS), 5)
    w.submit("a", 8, 9)
    w.schedule()
    w.schedule()
    w.abort("a")
    assert [free.fence for free in w.rank().kv.parked] == [2]
    w.ack()
    assert (w.free(), len(w.rank().kv.parked)) == (2, 1)
    w.ack()
    assert (w.free(), len(w.rank().kv.parked)) == (5, 0)


def test_trap_21_the_fence_is_the_newest_step_not_the_last_of_its_own() -> None:
    w = world(replace(PLAIN, max_inflight_steps=3).with_rules(fence=Fence.ALWAYS), 8)
    w.submit("a", 8, 1)
    w.submit("b", 4, 9)
    assert rows(w, w.schedule()) == [("a", 8), ("b", 4)]
    assert rows(w, w.schedule()) == [("b", 1)], "a's only token is on its way"
    w.abort("a")
    assert [free.fence for free in w.rank().kv.parked] == [2]
    w.run()


def test_trap_22_a_step_without_tokens_moves_no_fence() -> None:
    w = world(replace(DEFAULT, max_inflight_steps=4), 8)
    w.submit("a", 4, 9)
    w.submit("b", 4, 9)
    first = w.schedule()
    w.abort("a")
    w.handle(PauseRequested(PauseState.PAUSED_ALL))
    empty = w.schedule()
    w.handle(PauseRequested(PauseState.UNPAUSED))
    third = w.schedule()
    assert first is not None and empty is not None and third is not None
    assert [(o.step_seq, o.fence_seq) for o in (first, empty, third)] == [(1, 1), (2, 1), (3, 2)]
    assert list(empty.finished_request_ids) == ["a"] and not empty.rows
    w.ack()
    assert w.rank().window.acked_fence == 1 and not len(w.rank().kv.parked)
    w.ack()
    assert w.rank().window.acked_fence == 1
    w.run()


def test_trap_23_an_end_by_length_frees_at_once() -> None:
    w = world(DEFAULT, 10)
    w.submit("a", 4, 2)
    w.submit("b", 4, 9)
    w.schedule()
    w.schedule()
    w.ack()
    w.schedule()
    w.ack()
    assert w.running() == ["b"] and len(w.answers["r0"]) == 1
    assert not len(w.rank().kv.parked) and w.free() == 8


# --- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("base", [REFERENCE, DEFAULT])
def test_trap_24_max_tokens_never_runs_over(base: SchedulerConfig, depth: int) -> None:
    w = world(replace(base, max_inflight_steps=depth), 10)
    client = w.submit("a", 5, 4)
    w.run()
    assert sum(1 for o in w.outputs if o.rows) == 4 and len(client.tokens) == 4


def preempted_with_a_token_in_flight(config: SchedulerConfig) -> World:
    w = world(config, 4)
    w.submit("a", 8, 9)
    w.submit("b", 8, 9)
    w.schedule()
    w.schedule()
    assert preempted(w.outputs[-1]) == ["b"]
    return w


def test_trap_25_the_token_of_a_preempted_request_is_kept() -> None:
    w = preempted_with_a_token_in_flight(PLAIN)
    w.ack()
    b = w.request("b")
    assert (b.num_tokens, b.status, b.computed, b.awaited) == (9, Status.PREEMPTED, 0, 0)
    w.run()
    w.check_texts()


def test_trap_25_but_dropped_after_a_reset() -> None:
    w = world(PLAIN, 8)
    client = w.submit("a", 8, 3)
    w.schedule()
    w.reset(preempt_running=True)
    w.ack()
    assert client.tokens == [] and w.request("a").num_tokens == 8
    w.run()
    w.check_texts()
    assert len(client.tokens) == 3


@pytest.mark.parametrize("base", [PLAIN, replace(DEFAULT, enable_prefix_caching=False)])
def test_trap_26_a_preempted_request_can_stop(base: SchedulerConfig) -> None:
    w = world(base, 4)
    w.submit("a", 8, 6)
    prompt = list(range(300, 308))
    stop = expected_tokens(prompt, 1)[0]
    b = w.submit("b", prompt, 9, stop_token_ids=(stop,))
    w.schedule()
    w.schedule()
    assert w.waiting == ["b"]
    w.ack()
    assert w.waiting == [] and b.reason is EndReason.STOP and b.tokens == [stop]
    output = w.schedule()
    assert output is not None and "b" in output.finished_request_ids
    w.run()


# --- drafts -------------------------------------------------------------------------------------------------------


def test_trap_27_drafts_that_were_cut_are_lost() -> None:
    w = world(replace(DRAFTS, max_num_batched_tokens=3), 8)
    w.submit("a", 2, 9)
    w.step()
    w.draft({"a": [5, 6, 7]})
    output = w.step()
    assert rows(w, output) == [("a", 3)] and output is not None and list(output.draft_token_ids) == [5, 6]
    assert rows(w, w.step()) == [("a", 1)]


def test_trap_27_drafts_do_not_survive_a_preemption() -> None:
    w = world(DRAFTS, 4)
    w.submit("a", 8, 9)
    w.submit("b", 7, 9)
    w.step()
    w.draft({"b": [5, 6]})
    assert preempted(w.step()) == ["b"]
    speculation = w.scheduler.state.resources.find(Speculation)
    assert speculation is not None and w.request("b") not in speculation.drafts


def test_trap_28_only_verified_tokens_are_cached() -> None:
    w = world(replace(DRAFTS, enable_prefix_caching=True), 8)
    w.submit("a", 6, 9)
    w.step()
    w.draft({"a": [5, 6]})
    w.step()
    assert w.request("a").computed == 7 and w.run_of("a").num_cached == 1
    w.step()
    assert w.run_of("a").num_cached == 2
    w.run()
    w.check_texts()


def test_trap_29_the_threshold_cuts_rows_with_drafts_too() -> None:
    w = world(replace(DRAFTS, long_prefill_token_threshold=2), 8)
    w.submit("a", 2, 9)
    w.step()
    w.draft({"a": [5, 6]})
    output = w.step()
    assert rows(w, output) == [("a", 2)] and output is not None and list(output.draft_token_ids) == [5]


def padded(budget: int, *, decode: bool = True, cached: int = 8) -> tuple[World, SchedulerOutput | None]:
    """A one-token admission (8 of 9 tokens cached) beside a decode."""
    w = world(replace(DRAFTS, enable_prefix_caching=True, max_num_batched_tokens=budget), 20)
    prompt = list(range(cached))
    w.submit("warm", [*prompt, 1], 1)
    while w.scheduler.num_live_requests:
        w.step()
    if decode:
        w.submit("decode", 2, 20)
        w.step()
    w.submit("one", [*prompt, 90], 9)
    return w, w.schedule()


def test_trap_30_a_one_token_admission_is_padded_to_the_width_of_decodes() -> None:
    w, output = padded(16)
    assert rows(w, output) == [("decode", 1), ("one", 3)]
    assert output is not None and list(output.draft_token_ids) == [-1, -1]
    assert w.request("one").computed == 11
    w.ack()
    assert w.request("one").computed == 9 and w.request("one").num_output_tokens == 1
    w, output = padded(3)
    assert rows(w, output) == [("decode", 1)], "what does not fit padded is not admitted at all"


def test_trap_30_no_padding_beside_chunks_or_alone() -> None:
    w, output = padded(16, decode=False)
    assert rows(w, output) == [("one", 1)]
    w = world(replace(DRAFTS, enable_prefix_caching=True, max_num_batched_tokens=9), 20)
    w.submit("warm", [*range(8), 1], 1)
    w.step()
    w.submit("chunk", 16, 9)
    w.step()
    w.submit("one", [*range(8), 90], 9)
    assert rows(w, w.step()) == [("chunk", 7), ("one", 1)]


# --- steps --------------------------------------------------------------------------------------------------------


def test_trap_31_a_partial_prefill_has_no_token() -> None:
    w = world(replace(PLAIN, max_num_batched_tokens=4, max_num_seqs=4), 8)
    w.submit("a", 6, 2)
    output = w.schedule()
    assert rows(w, output) == [("a", 4)] and output is not None
    with pytest.raises(WorkerProtocolError):
        w.scheduler.handle(StepAcked("r0", 1, output.step_seq, [7]))
    with pytest.raises(WorkerProtocolError):
        w.scheduler.handle(StepAcked("r0", 1, output.step_seq, [7], [1]))
    assert w.ack() == []
    assert rows(w, w.step()) == [("a", 2)]


def test_trap_32_a_preempted_decode_resumes_as_a_prefill_of_all_its_tokens() -> None:
    w = world(PLAIN, 5)
    w.submit("a", 7, 5)
    w.submit("b", 9, 9)
    w.step()
    w.step()
    assert preempted(w.step()) == ["b"] and w.request("b").num_output_tokens == 2
    while "b" not in w.running():
        output = w.step()
    assert output is not None and rows(w, output) == [("b", 11)]
    new = output.new_requests[0]
    assert (len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens) == (11, 9, 0)
    w.run()
    w.check_texts()


def test_trap_33_computed_in_a_step_is_the_state_before_it() -> None:
    w = world(DEFAULT, 8)
    w.submit("warm", list(range(9)), 1)
    w.step()
    w.submit("a", [*range(8), 50, 51], 4)
    output = w.schedule()
    assert output is not None and output.new_requests[0].num_computed_tokens == 8
    request = w.request("a")
    assert request.computed == 10
    w.abort("a")
    w.run()
    assert w.free() == 8


def test_trap_34_an_id_can_be_finished_and_new_in_one_step() -> None:
    w = world(DEFAULT, 8)
    w.submit("a", 4, 9)
    w.schedule()
    w.abort("a")
    again = w.submit("a", 5, 3)
    output = w.schedule()
    assert output is not None and output.finished_request_ids == ("a",)
    assert [new.request_id for new in output.new_requests] == ["a"] and output.new_requests[0].row != 0
    w.run()
    w.check_texts()
    assert len(again.tokens) == 3


def test_trap_35_an_id_can_be_preempted_and_new_in_one_step() -> None:
    w = world(REFERENCE, 8)
    w.submit("a", 4, 5)
    w.step()
    assert w.reset(preempt_running=True)
    output = w.step()
    assert output is not None and output.preempted_request_ids == ("a",)
    assert [new.request_id for new in output.new_requests] == ["a"]
    w.run()
    w.check_texts()


def test_trap_36_ids_that_were_never_sent() -> None:
    """vLLM 0.25.1 announces the end of a request that no worker ever had; the runner of scenarios does that for it."""
    for config in (REFERENCE, DEFAULT):
        w = world(config, 8)
        w.submit("a", 4, 5)
        w.abort("a")
        assert w.schedule() is None
    ops = [{"op": "add", "id": "a", "prompt_len": 4}, {"op": "abort", "ids": ["a"]}, {"op": "run", "max_steps": 9}]
    result = scenario.run_scenario({"name": "unsent", "ops": ops}, check_invariants=True)
    assert [record["schedule"]["finished"] for record in result["records"] if "schedule" in record] == [["a"]]


# --- watermark, whole sequences, lanes ----------------------------------------------------------------------------


def test_trap_37_the_watermark_does_not_hold_up_the_first_request() -> None:
    w = world(replace(PLAIN, watermark=0.5), 10)
    w.submit("big", 40, 1)
    assert rows(w, w.step()) == [("big", 40)]


def test_trap_38_the_watermark_counts_the_null_block() -> None:
    """int(0.28 * 11) = 3 of 10 usable blocks stay free while something runs; without the null block it would be 2."""
    for length, admitted in ((24, True), (25, False)):
        w = world(replace(PLAIN, watermark=0.28), 10)
        w.submit("a", 2, 9)
        w.step()
        w.submit("b", length, 1)
        assert (("b", length) in rows(w, w.step())) is admitted


def test_trap_39_the_whole_sequence_must_fit() -> None:
    """Two free blocks and a prompt of four: the first chunk alone would fit."""
    for whole, expected in ((True, [("x", 1)]), (False, [("x", 1), ("a", 7)])):
        w = world(replace(PLAIN, max_num_batched_tokens=8, scheduler_reserve_full_isl=whole), 4)
        w.submit("x", 7, 9)
        w.step()
        assert w.free() == 2
        w.submit("a", 13, 1)
        assert rows(w, w.step()) == expected


def test_trap_44_a_skipped_request_that_does_not_fit_holds_up_the_waiting_ones() -> None:
    w = world(PLAIN, 4)
    w.submit("x", 8, 9)
    w.step()
    w.submit("big", 12, 1, awaits_grammar=True)
    w.submit("little", 2, 1)
    assert w.skipped == ["big"] and w.waiting == ["little"]
    w.handle(GrammarReady("big"))
    w.step()
    assert w.running() == ["x"] and w.request("big").status is Status.WAITING
    assert (w.skipped, w.waiting) == (["big"], ["little"])


def test_trap_45_the_capacity_flag_does_not_count_skipped_requests() -> None:
    w = world(PLAIN, 8)
    w.submit("x", 4, 9)
    w.submit("blocked", 4, 1, awaits_grammar=True)
    w.step()
    assert w.skipped == ["blocked"] and not w.rank().throttle.capacity_bound


def test_trap_46_only_running_requests_take_a_sequence_slot() -> None:
    w = world(replace(PLAIN, max_num_seqs=1), 8)
    w.submit("blocked", 4, 1, awaits_grammar=True)
    w.submit("a", 4, 1)
    assert rows(w, w.step()) == [("a", 4)]


def test_trap_47_a_victim_under_a_pause_waits_until_it_ends() -> None:
    w = world(PLAIN, 4)
    w.submit("a", 8, 5)
    w.submit("b", 8, 5)
    w.step()
    w.handle(PauseRequested(PauseState.PAUSED_NEW))
    assert preempted(w.step()) == ["b"]
    while w.running():
        w.step()
    assert w.step() is None or w.waiting == ["b"]
    w.handle(PauseRequested(PauseState.UNPAUSED))
    w.run()
    w.check_texts()


# --- limits and ends ----------------------------------------------------------------------------------------------


def test_trap_48_min_tokens_is_clipped_and_a_prompt_of_full_length_refused() -> None:
    w = world(replace(DEFAULT, max_model_len=16), 20)
    client = w.submit("a", 10, 12, min_tokens=12)
    refused = w.submit("b", 16, 1)
    w.run()
    assert len(client.tokens) == 6 and client.reason is EndReason.LENGTH
    assert refused.refused is not None and refused.refused.reason is RefusalReason.PROMPT_TOO_LONG


def test_trap_49_a_request_larger_than_the_pool_is_refused() -> None:
    w = world(replace(DEFAULT, max_model_len=16), 3)
    exact, over = w.submit("exact", 8, 5), w.submit("over", 8, 6)
    assert exact.accepted and over.refused is not None
    assert over.refused.reason is RefusalReason.EXCEEDS_KV_CAPACITY
    assert over.refused.metadata == {"needed_tokens": "13", "available_tokens": "12"}
    w.run()
    assert len(exact.tokens) == 5


@pytest.mark.parametrize("base", [REFERENCE, DEFAULT])
def test_trap_50_a_stop_id_on_the_last_allowed_token_is_a_stop(base: SchedulerConfig) -> None:
    w = world(base, 8)
    prompt = list(range(5))
    stop = expected_tokens(prompt, 3)[-1]
    client = w.submit("a", prompt, 3, stop_token_ids=(stop,))
    w.run()
    assert client.reason is EndReason.STOP and client.ended is not None and client.ended.stop_token_id == stop


def test_trap_51_no_token_follows_an_abort() -> None:
    w = world(DEFAULT, 8)
    client = w.submit("a", 5, 5)
    w.schedule()
    w.abort("a")
    w.ack()
    assert client.tokens == [] and client.reason is EndReason.ABORTED
    w.run()


def test_trap_52_time_in_the_queue_ends_with_the_first_admission() -> None:
    w = world(replace(DEFAULT, enable_prefix_caching=False), 4)
    w.submit("a", 8, 6)
    b = w.submit("b", 8, 6)
    w.handle(Tick(2.0))
    w.schedule()
    w.handle(Tick(5.0))
    while "b" in w.running():
        w.turn()
    w.handle(Tick(9.0))
    w.run()
    assert b.ended is not None
    usage = b.ended.usage
    assert (usage.queued_s, usage.preempted_s, usage.num_preemptions) == (2.0, 4.0, 1)
