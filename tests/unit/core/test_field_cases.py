"""Faults that people met in systems like this one, small, under their numbers, driven with the verifying worker.

Those that concern the core: F01 to F43, as far as built, and the core's part of some later ones. Elsewhere: streams,
sockets, health, text (contract, e2e and front-end tests). Not built yet: KV loads, adapters, images, n > 1, displacing.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import replace
from itertools import pairwise, product

import pytest

from scheduler_svc.core import invariants, reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import DrainStarted, EndReason, RefusalReason, StepAcked, TextEnded, WorkerProtocolError
from scheduler_svc.core.kv.prefix_index import HashChain
from scheduler_svc.core.rules import Fence
from tests.support.core_harness import Client, World, expected_tokens, hashed_token

DEFAULT = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
REFERENCE = SchedulerConfig.reference(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
BOTH = pytest.mark.parametrize("base", [DEFAULT, REFERENCE], ids=["default", "reference"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])


def usage_preemptions(client: Client) -> int:
    assert client.ended is not None
    return client.ended.usage.num_preemptions


def cached(client: Client) -> int:
    assert client.ended is not None
    return client.ended.usage.num_cached_tokens


# --- A: expected in week one --------------------------------------------------------------------------------------


@BOTH
@DEPTHS
def test_f01_resuming_recomputes_prompt_and_outputs(base: SchedulerConfig, depth: int) -> None:
    world = World(replace(base, enable_prefix_caching=False, max_inflight_steps=depth), num_blocks=7)
    r1, r2 = world.submit("r1", 8, 10), world.submit("r2", 8, 10)
    world.run()
    world.check_texts()
    assert (usage_preemptions(r1), usage_preemptions(r2)) == (0, 1)
    resumed = [new for output in world.outputs for new in output.new_requests][-1]
    # Sampled before the preemption, known or late: all of it is computed again.
    assert resumed.request_id == "r2" and len(resumed.token_ids) == 13
    assert resumed.num_computed_tokens == 0 and resumed.num_prompt_tokens == 8


def test_f02_a_lone_request_cannot_outgrow_the_pool() -> None:
    config = replace(DEFAULT, block_size=16)
    world = World(config, num_blocks=5)
    over = world.submit("over", 40, 60)
    assert over.refused is not None and over.refused.reason is RefusalReason.EXCEEDS_KV_CAPACITY
    exact, unset, small = world.submit("exact", 40, 25), world.submit("unset", 40, 0), world.submit("small", 8, 4)
    world.run()
    assert [len(c.tokens) for c in (exact, unset, small)] == [25, 25, 4]
    assert unset.accepted is not None and unset.accepted.max_tokens == 25
    assert usage_preemptions(exact) == 0, "the oldest never preempts itself"


@pytest.mark.parametrize("spec", [0, 3])
@pytest.mark.parametrize("chunked", [True, False])
def test_f03_a_prompt_larger_than_the_pool_is_refused_at_once(spec: int, chunked: bool) -> None:
    config = SchedulerConfig(
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=32 if chunked else 128,
        max_model_len=128,
        enable_chunked_prefill=chunked,
        num_speculative_tokens=spec,
    )
    world = World(config, num_blocks=5)
    refused, fits = world.submit("r1", 80, 1), world.submit("r2", 8, 8)
    assert refused.refused is not None and refused.refused.reason is RefusalReason.EXCEEDS_KV_CAPACITY
    assert refused.refused.metadata == {"needed_tokens": "80", "available_tokens": "64"}
    assert "80" in refused.refused.message and "64" in refused.refused.message
    full = world.submit("full", 64, 1)
    assert full.accepted
    world.run()
    assert (len(fits.tokens), len(full.tokens)) == (8, 1)


@BOTH
@pytest.mark.parametrize("length", [4, 8, 12])
def test_f05_a_cached_prompt_leaves_a_token_to_compute(base: SchedulerConfig, length: int) -> None:
    world = World(base)
    prompt = list(range(length))
    first = world.submit("first", prompt, 6)
    world.run()
    second = world.submit("second", prompt, 6)
    world.run()
    longer = world.submit("longer", [*prompt, *first.tokens], 2)
    world.run()
    world.check_texts()
    assert second.tokens == first.tokens and cached(second) == length - 4
    assert cached(longer) == (length + 5) // 4 * 4


@BOTH
def test_f05_a_resumed_request_whose_length_is_a_block_multiple(base: SchedulerConfig) -> None:
    world = World(base)
    world.submit("a", 6, 8)
    for _ in range(2):
        world.step()
    assert world.request("a").num_tokens == 8
    world.reset(preempt_running=True)
    world.run()
    world.check_texts()


@BOTH
def test_f06_a_victim_with_a_row_gives_everything_back(base: SchedulerConfig) -> None:
    world = World(replace(base, policy=Policy.PRIORITY, enable_prefix_caching=False), num_blocks=5)
    low, high = world.submit("low", 5, 6, priority=5), None
    world.step()
    high = world.submit("high", 8, 6, priority=0)
    world.step()
    assert world.running() == ["low", "high"] and world.free() == 0
    output = world.step()
    assert world.rows_of(output) == [("high", 1)] and output is not None and output.total_num_tokens == 1
    assert world.waiting == ["low"] and not len(world.rank().kv.parked), "a row never sent needs no fence"
    world.run()
    world.check_texts()
    assert (usage_preemptions(low), usage_preemptions(high)) == (1, 0)


@BOTH
def test_f09_nobody_preempted_comes_back_in_the_same_step(base: SchedulerConfig) -> None:
    world = World(replace(base, enable_prefix_caching=False), num_blocks=8)
    for name, length in (("a", 8), ("b", 8), ("c", 12)):
        world.submit(name, length, 10)
        world.turn()
    world.run()
    for output in world.outputs:
        admitted = {new.request_id for new in output.new_requests}
        assert not (output.preempted_request_ids and admitted), "a step that preempts admits nobody"
    assert world.preemptions
    world.check_texts()


@BOTH
def test_f11_aborts_before_the_first_step_and_after_a_preemption(base: SchedulerConfig) -> None:
    world = World(replace(base, max_num_seqs=2, enable_prefix_caching=False), num_blocks=7)
    first, second = world.submit("a", 8, 12), world.submit("b", 8, 12)
    waiting = world.submit("waiting", 8, 4)
    world.abort("waiting")
    world.step()
    at_once = world.submit("at once", 4, 4)
    world.abort("at once")
    while not world.preemptions:
        world.step()
    world.abort("b")
    world.abort("b")
    world.abort("nobody")
    world.run()
    assert [c.reason for c in (waiting, at_once, second)] == [EndReason.ABORTED] * 3
    assert first.reason is EndReason.LENGTH and world.scheduler.totals.num_aborted == 3
    world.check_texts()


@BOTH
@pytest.mark.parametrize("later", [False, True])
def test_f13_a_prefix_computed_by_a_step_in_flight_may_be_read(base: SchedulerConfig, later: bool) -> None:
    """In the same step, or in the next one: the worker writes before it reads (contract rule 11)."""
    world = World(base)
    prefix = list(range(8))
    world.submit("r1", [*prefix, 50], 4)
    if later:
        world.schedule()
    world.submit("r2", [*prefix, 60], 4)
    output = world.schedule()
    assert output is not None and output.new_requests[-1].num_computed_tokens == 8
    world.run()
    world.check_texts()


def test_f14_nothing_is_hit_that_was_never_computed() -> None:
    """Its step failed, or it was aborted before one was sent."""
    world = World(DEFAULT)
    prompt = list(range(9))
    world.submit("r1", prompt, 4)
    world.schedule()
    world.lose("r0")
    world.abort("r1")
    world.join("r0", 64)
    r2 = world.submit("r2", prompt, 4)
    world.run()
    assert cached(r2) == 0
    world = World(DEFAULT)
    world.submit("r1", prompt, 4)
    world.abort("r1")
    r2 = world.submit("r2", prompt, 4)
    world.run()
    assert cached(r2) == 0
    r3 = world.submit("r3", prompt, 4)
    world.run()
    assert cached(r3) == 8, "the copy that was computed is hit"


@BOTH
def test_f15_a_block_with_new_content_loses_its_block_hash(base: SchedulerConfig) -> None:
    world = World(base, num_blocks=3)
    a, b = list(range(8)), list(range(20, 28))
    for name, prompt in (("a", a), ("b", b), ("a again", a)):
        client = world.submit(name, prompt, 1)
        world.run()
        assert cached(client) == 0, name
    last_token, parent = [*a[:7], 99], [99, *a[1:]]
    for name, prompt in (("last token", last_token), ("parent", parent)):
        client = world.submit(name, [*prompt], 1)
        world.run()
        assert cached(client) == (4 if name == "last token" else 0)
    world.check_texts()


@BOTH
def test_f15_a_block_hash_stands_for_every_token_and_for_everything_before(base: SchedulerConfig) -> None:
    world = World(base, num_blocks=20)
    first, second, other, end = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13]
    for name, prompt in (("a", first + second), ("b", other + other)):
        world.submit(name, prompt + end, 1)
        world.run()
    for name, prompt, hit in (
        ("same", first + second, 8),
        ("last token of the second", [*first, 5, 6, 7, 99], 4),
        ("first token of the second", [*first, 99, 6, 7, 8], 4),
        ("another block before it", other + second, 4),
        ("last token of the first", [1, 2, 3, 99, *second], 0),
    ):
        client = world.submit(name, prompt + end, 1)
        world.run()
        assert cached(client) == hit, name


@BOTH
def test_f18_a_duplicate_id_is_refused_and_an_old_result_never_lands_in_a_new_request(base: SchedulerConfig) -> None:
    world = World(base)
    first = world.submit("same", 5, 6)
    duplicate = world.submit("same", 6, 6)
    assert duplicate.refused is not None and duplicate.refused.reason is RefusalReason.DUPLICATE_REQUEST_ID
    world.schedule()
    world.schedule()
    world.abort("same")
    again = world.submit("same", 7, 6)
    world.ack()
    world.ack()
    assert first.tokens == [] and again.tokens == []
    world.run()
    world.check_texts()
    third = world.submit("same", 7, 3)
    world.run()
    assert (len(again.tokens), len(third.tokens)) == (6, 3)


@BOTH
def test_f19_blocks_are_free_two_steps_after_a_cancel(base: SchedulerConfig) -> None:
    world = World(base)
    world.submit("gone", 8, 100)
    other = world.submit("other", 4, 12)
    for _ in range(4):
        world.turn()
    used = world.rank().kv.num_usable - world.free()
    world.abort("gone")
    for _ in range(2):
        world.turn()
    assert world.running() == ["other"] and world.rank().kv.num_usable - world.free() < used
    assert world.rank().kv.num_usable - world.free() == len(world.run_of("other").blocks)
    world.run()
    assert len(other.tokens) == 12


@BOTH
def test_f21_admission_looks_at_the_whole_sequence(base: SchedulerConfig) -> None:
    config = replace(base, block_size=16, max_model_len=256, enable_prefix_caching=False)
    world = World(config, num_blocks=45)
    for name in "abcd":
        world.submit(name, 144, 12)
    while len(world.running()) < 4 or any(run.is_prefill_chunk for run in world.rank().running):
        world.turn()
    late = world.submit("late", 144, 4)
    while not late.tokens:
        assert "late" not in world.running() or len(world.running()) < 5
        world.turn()
    world.run()
    world.check_texts()
    assert world.scheduler.totals.num_recomputed_tokens == 0 and not world.preemptions


@DEPTHS
def test_f22_half_finished_work_does_not_ping_pong(depth: int) -> None:
    config = SchedulerConfig(
        block_size=16, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, max_inflight_steps=depth
    )
    world = World(config, num_blocks=125)
    clients = [world.submit(f"r{i}", 16, 400) for i in range(8)]
    world.run(max_turns=2000)
    assert all(len(c.tokens) == 400 for c in clients)
    assert max(map(usage_preemptions, clients)) <= 3
    totals = world.scheduler.totals
    assert totals.num_computed_tokens <= 1.5 * (totals.num_computed_tokens - totals.num_recomputed_tokens)
    before = len(world.outputs)
    calm = [world.submit(f"calm {i}", 16, 50) for i in range(4)]
    world.run()
    assert all(usage_preemptions(c) == 0 for c in calm)
    assert sum(1 for o in world.outputs[before:] if o.rows) == 50, "one step a token once the load is gone"


@BOTH
@DEPTHS
@pytest.mark.parametrize(
    "prompt, max_tokens, tokens",
    [(112, 16, 16), (113, 15, 15), (127, 1, 1), (127, 8, 1), (1, 127, 127), (8, 0, 120), (120, 8, 8), (20, 5, 5)],
)
def test_f23_limits_are_exact(base: SchedulerConfig, depth: int, prompt: int, max_tokens: int, tokens: int) -> None:
    world = World(replace(base, max_num_batched_tokens=128, max_inflight_steps=depth))
    client = world.submit("a", [i % 7 for i in range(prompt)], max_tokens)
    world.run()
    assert len(client.tokens) == tokens and client.reason is EndReason.LENGTH
    assert sum(1 for o in world.outputs if o.rows) == tokens, "no row whose output nobody could use"
    world.check_texts()


def test_f23_a_prompt_that_leaves_no_room_is_refused() -> None:
    client = World(DEFAULT).submit("a", 128, 1)
    assert client.refused is not None and client.refused.reason is RefusalReason.PROMPT_TOO_LONG
    assert client.refused.metadata["max_model_len"] == "128"


@BOTH
@pytest.mark.parametrize("disturb", [False, True])
@pytest.mark.parametrize("eos", [9, 8])
def test_f24_no_stop_before_min_tokens_and_at_once_after(base: SchedulerConfig, disturb: bool, eos: int) -> None:
    """The worker wants EOS always and masks it below min_tokens, by the index of the output, not by counting steps.
    Every EOS id stops."""
    world = World(base, sampler=lambda prefix, index: eos if index >= 4 else 100 + index)
    client = world.submit("a", 5, 20, min_tokens=4, eos_token_ids=(9, 8))
    if disturb:
        while len(client.tokens) < 3:
            world.turn()
        world.lose("r0")
        world.join("r0", 64)
    world.run()
    assert client.tokens == [100, 101, 102, 103, eos] and client.reason is EndReason.STOP


@BOTH
@pytest.mark.parametrize("stop", [9, 7])
def test_f24_a_stop_id_below_min_tokens_stops_nothing(base: SchedulerConfig, stop: int) -> None:
    world = World(base, sampler=lambda prefix, index: stop)
    client = world.submit("a", 5, 20, min_tokens=4, stop_token_ids=(9, 7))
    world.run()
    assert client.tokens == [stop] * 4


# --- B: preemption, policy, steps in flight -----------------------------------------------------------------------


def test_f25_and_f26_a_waiting_request_never_displaces_a_running_one() -> None:
    """The documented rule of today, for better priority as for equal ones."""
    config = replace(DEFAULT, policy=Policy.PRIORITY, max_num_seqs=1)
    world = World(config)
    low = world.submit("low", 5, 20, priority=9)
    world.turn()
    high, equal = world.submit("high", 5, 4, priority=0), world.submit("equal", 5, 4, priority=0)
    world.run()
    assert [e.request_id for c in (low, high, equal) if (e := c.ended)] == ["low", "high", "equal"]
    assert not world.preemptions
    order = [new.request_id for output in world.outputs for new in output.new_requests]
    assert order == ["low", "high", "equal"]


def test_f27_place_of_a_preempted_request_among_equals() -> None:
    """Documented: priority, then time of arrival; having run before changes nothing."""
    config = replace(DEFAULT, policy=Policy.PRIORITY, enable_prefix_caching=False, max_inflight_steps=1)
    world = World(config, num_blocks=5)
    world.submit("a", 7, 8, priority=1, arrival=5.0)
    world.submit("b", 7, 8, priority=1, arrival=6.0)
    world.step()
    world.submit("earlier", 7, 4, priority=1, arrival=1.0)
    world.submit("later", 7, 4, priority=1, arrival=7.0)
    while not world.preemptions:
        world.step()
    assert world.waiting == ["earlier", "b", "later"]
    world.run()
    world.check_texts()


@BOTH
def test_f30_a_late_token_is_delivered_once_and_recomputed(base: SchedulerConfig) -> None:
    world = World(replace(base, enable_prefix_caching=False), num_blocks=5)
    world.submit("r1", 8, 6)
    r2 = world.submit("r2", 8, 6)
    world.schedule()
    world.schedule()
    assert world.waiting == ["r2"] and r2.tokens == []
    before = world.scheduler.totals.num_computed_tokens
    world.ack()
    run = world.run_of("r2")
    assert r2.tokens == expected_tokens(r2.prompt, 1) and (run.settled, run.in_flight) == (0, 0)
    assert world.scheduler.totals.num_computed_tokens == before
    world.run()
    world.check_texts()
    assert len(r2.tokens) == 6
    assert r2.ended is not None and r2.ended.usage.num_recomputed_tokens == 8


@pytest.mark.parametrize("base, depth", [*product([DEFAULT], [1, 2, 3, 4]), *product([REFERENCE], [1, 2])])
def test_f32_every_lap_nets_a_token(base: SchedulerConfig, depth: int) -> None:
    """The reference resumes with results of the earlier run still to come; from three steps in flight on a lap can then
    net none. That is what `resume_settled` is for."""
    world = World(replace(base, enable_prefix_caching=False, max_inflight_steps=depth, max_num_seqs=4), num_blocks=14)
    clients = [world.submit(f"r{i}", 4 + i, 30) for i in range(6)]
    world.run()
    world.check_texts()
    assert all(len(c.tokens) == 30 for c in clients)
    seen: dict[str, int] = {}
    for new in (new for output in world.outputs for new in output.new_requests):
        assert len(new.token_ids) > seen.get(new.request_id, 0), f"{new.request_id} came back without a new token"
        seen[new.request_id] = len(new.token_ids)
    assert world.preemptions


@BOTH
@DEPTHS
@pytest.mark.parametrize("at", range(1, 6))
def test_f33_a_reset_amid_decoding_leaves_the_counts_exact(base: SchedulerConfig, depth: int, at: int) -> None:
    world = World(replace(base, max_inflight_steps=depth))
    client = world.submit("a", 5, 9)
    while len(client.tokens) < at:
        world.turn()
    while world.schedule() is not None:
        pass
    world.reset(preempt_running=True)
    assert world.request("a").awaited == 0
    kept = len(client.tokens)
    world.run()
    assert len(client.tokens) == 9 and client.reason is EndReason.LENGTH
    world.check_texts()
    resumed = [i for i, o in enumerate(world.outputs) if o.new_requests][-1]
    assert sum(1 for o in world.outputs[resumed:] if o.rows) == 9 - kept, "one step a token, none idle"


@DEPTHS
def test_f34_one_victim_is_enough_while_its_blocks_are_on_their_way_back(depth: int) -> None:
    world = World(replace(DEFAULT, enable_prefix_caching=False, max_inflight_steps=depth), num_blocks=9)
    for name, length in (("r1", 8), ("r2", 5), ("r3", 5), ("r4", 5)):
        world.submit(name, length, 8)
    world.schedule()
    if depth == 1:
        world.ack()
    assert world.free() == 0 and len(world.running()) == 4
    world.schedule()
    assert [p.victim for p in world.preemptions] == ["r4"]
    if depth > 1:
        assert world.rank().kv.pool.num_parked == 2 and "r1" not in dict(world.rows_of(world.outputs[-1]))
        world.ack()
        world.schedule()
        assert world.rows_of(world.outputs[-1])[0] == ("r1", 1), "it goes on as soon as the result is in"
    world.run()
    world.check_texts()
    # Each preemption gained blocks for somebody who then went on.
    assert len(world.preemptions) <= 4


def test_f34_no_preemption_at_all_when_enough_is_returning() -> None:
    world = World(replace(DEFAULT, enable_prefix_caching=False), num_blocks=7)
    world.submit("a", 8, 8)
    world.submit("b", 8, 8)
    world.submit("c", 5, 8)
    world.schedule()
    world.abort("b")
    assert world.free() == 0 and world.rank().kv.pool.num_parked == 2
    output = world.schedule()
    assert world.rows_of(output) == [("c", 1)] and not world.preemptions
    explanation = world.scheduler.explain("a")
    assert explanation is not None and explanation.reason is reasons.WAITING_FOR_FENCE
    world.ack()
    assert world.rows_of(world.schedule()) == [("a", 1), ("c", 1)]
    world.run()
    world.check_texts()


def test_f36_fences_open_without_new_traffic() -> None:
    world = World(DEFAULT)
    prompt = list(range(40, 45))
    stop = expected_tokens(prompt, 2)[-1]
    client = world.submit("a", prompt, 9, stop_token_ids=(stop,))
    world.schedule()
    world.schedule()
    world.ack()
    world.schedule()
    world.ack()
    assert client.reason is EndReason.STOP and world.rank().kv.pool.num_parked == 2
    world.ack()
    assert world.free() == world.rank().kv.num_usable, "the last acknowledgement is enough"
    world.run()


def test_f36_the_end_of_an_epoch_opens_every_fence() -> None:
    world = World(DEFAULT)
    world.submit("a", 5, 9)
    world.submit("b", 5, 9)
    world.schedule()
    world.schedule()
    world.abort("a")
    assert world.rank().kv.pool.num_parked
    world.lose("r0")
    world.join("r0", 64)
    assert world.free() == 63
    world.run()
    world.check_texts()


@BOTH
def test_f37_a_reset_tells_the_truth(base: SchedulerConfig) -> None:
    world = World(base)
    prompt = list(range(9))
    world.submit("a", prompt, 9)
    world.schedule()
    assert world.reset() is False and "r0" in world.resets[-1].message
    world.abort("a")
    pool = world.rank().kv.pool
    assert (pool.num_parked > 0) is (base is DEFAULT)
    assert len(pool.index) > 0
    assert world.reset() is True, "what is only fenced belongs to nobody"
    assert len(pool.index) == 0
    world.ack()
    assert len(pool.index) == 0, "blocks come back unknown"
    again = world.submit("again", prompt, 2)
    world.run()
    assert cached(again) == 0


def test_f37_a_reset_is_for_every_rank_or_none() -> None:
    world = World(DEFAULT, ranks={"r0": 20, "r1": 20})
    prompt = list(range(9))
    world.submit("warm", prompt, 1)
    for _ in range(3):
        world.step("r0")
    world.submit("busy", 9, 9)
    world.step("r1")
    assert world.reset() is False and world.resets[-1].message.endswith("r1")
    assert len(world.rank("r0").kv.pool.index) == 2, "nothing was forgotten anywhere"
    world.run()
    assert world.reset() is True
    assert len(world.rank("r0").kv.pool.index) == len(world.rank("r1").kv.pool.index) == 0


def test_f39_an_empty_answer_for_a_row_with_drafts_is_progress_next_time() -> None:
    config = SchedulerConfig(block_size=4, max_num_seqs=2, num_speculative_tokens=3).with_rules(refuse_empty_rows=False)
    world = World(config, sampler=lambda prefix, index: (11, 12, 13)[index % 3])
    client = world.submit("a", 4, 20)
    output = None
    while output is None or output.num_drafts is None:
        output = world.schedule()
        if output is not None and output.num_drafts is None:
            world.ack()
    worker, request, before = world.workers["r0"].rows[output.rows[0]], world.request("a"), len(client.tokens)
    lost = len(world.answers["r0"].pop().sampled)
    del worker.tokens[-lost:], worker.prefixes[-lost:]
    worker.computed = len(worker.tokens) - 1
    world.handle(StepAcked("r0", 1, output.step_seq, [], [0]))
    world.workers["r0"].acknowledged(output.step_seq)
    assert (request.awaited, request.awaited_optional, world.run_of("a").in_flight) == (0, 0, 0)
    assert request.computed == request.num_tokens - 1
    world.step()
    assert len(client.tokens) > before
    world.run()
    assert client.tokens == [(11, 12, 13)[i % 3] for i in range(20)]


@pytest.mark.parametrize("drafts", [0, 2])
def test_f39_a_full_row_without_a_token_is_a_wrong_answer(drafts: int) -> None:
    """Where the core serves: it would otherwise be computed again for ever, or leave a hole in the text."""
    config = SchedulerConfig(block_size=4, max_num_seqs=2, num_speculative_tokens=drafts)
    world = World(config)
    world.submit("a", 4, 20)
    output = world.schedule()
    assert output is not None
    before = world.request("a").computed
    with pytest.raises(WorkerProtocolError, match="token counts"):
        world.scheduler.handle(StepAcked("r0", 1, output.step_seq, [], [0]))
    assert world.request("a").computed == before, "nothing changed"
    world.ack()
    world.run()
    world.check_texts()


def test_f39_a_block_that_somebody_found_stays_known_although_its_row_yielded_nothing() -> None:
    """a's row fills its second block, b begins with the same eight tokens and finds it in the same step."""
    config = SchedulerConfig(block_size=4, max_num_seqs=4, num_speculative_tokens=1).with_rules(refuse_empty_rows=False)
    world = World(config, sampler=lambda prefix, index: 2)
    prompt = [1, 2, 3, 1, 2, 3, 1]
    world.submit("a", prompt, 20)
    world.step()
    world.submit("b", [*prompt, 2, 9], 5)
    output = world.schedule()
    assert output is not None and world.rows_of(output) == [("a", 2), ("b", 1)]
    assert world.run_of("b").blocks[:2] == world.run_of("a").blocks[:2]
    world.scheduler.handle(StepAcked("r0", 1, output.step_seq, [2], [0, 1]))
    invariants.check(world.scheduler.state)
    assert world.request("a").computed == 7


@pytest.mark.parametrize("room", range(5))
def test_f40_drafts_at_the_length_cap_are_clipped(room: int) -> None:
    config = SchedulerConfig.reference(
        block_size=4, max_num_seqs=2, max_model_len=16, num_speculative_tokens=3
    ).with_rules(results_first=True)
    world = World(config)
    client = world.submit("a", 15 - room, 99)
    world.step()
    while client.ended is None:
        world.draft({"a": [1, 2, 3]})
        world.step()
    assert len(client.tokens) == 1 + room and client.reason is EndReason.LENGTH
    world.run()


@BOTH
def test_f42_unlike_lengths_preempt_nobody_while_blocks_are_free(base: SchedulerConfig) -> None:
    world = World(base, num_blocks=100)
    world.submit("long", 100, 20)
    world.submit("short", 30, 20)
    world.run()
    world.check_texts()
    assert not world.preemptions


# --- throttle, workers, output ------------------------------------------------------------------------------------


def test_f52_the_throttle_truth_table() -> None:
    for throttle, bound, decodes in product([False, True], [False, True], [False, True]):
        world = World(replace(REFERENCE, max_num_batched_tokens=8, enable_prefix_caching=False))
        world.submit("first", 8 if decodes else 30, 9)
        world.step()
        world.rank().throttle.capacity_bound = bound
        world.submit("prefill", 4, 9)
        output = world.step(throttle=throttle)
        ids = [request_id for request_id, _ in world.rows_of(output)]
        deferred = throttle and not bound and decodes
        assert ids, "never an empty step"
        assert ("prefill" in ids) is (decodes and not deferred), (throttle, bound, decodes)


def test_f52_the_throttle_works_on_a_single_rank() -> None:
    config = SchedulerConfig(
        block_size=4, max_num_seqs=8, max_num_batched_tokens=64, prefill_schedule_interval=4, max_inflight_steps=1
    )
    world = World(config)
    world.submit("a", 4, 30)
    world.step()
    started = []
    for index in range(6):
        world.submit(f"p{index}", 4, 9)
        for _ in range(3):
            output = world.step()
            started += [(len(world.outputs) - 1, new.request_id) for new in output.new_requests] if output else []
    assert {step % 4 for step, _ in started} == {0} and len(started) >= 4
    world.run()
    assert world.scheduler.totals.num_deferring_steps > 0 and world.rank().throttle.num_steps == 0
    world.check_texts()


@BOTH
def test_f56_long_prompts_do_not_starve_a_decode(base: SchedulerConfig) -> None:
    world = World(replace(base, block_size=16, max_model_len=8192, max_num_batched_tokens=512), num_blocks=1200)
    decode = world.submit("decode", 4, 40)
    world.turn()
    for index in range(3):
        world.submit(f"long {index}", 5000, 2)
    for _ in range(30):
        before = len(decode.tokens)
        world.turn()
        assert len(decode.tokens) == before + 1, "a token with every step"
    world.run()


@BOTH
def test_f65_a_worker_that_restarts_empty(base: SchedulerConfig) -> None:
    """Three requests at outputs 9, 5 and 0, two steps not answered."""
    world = World(base)
    nine = world.submit("nine", 7, 20)
    while len(nine.tokens) < 4:
        world.step()
    five = world.submit("five", list(range(9)), 20)
    while len(five.tokens) < 5:
        world.step()
    zero = world.submit("zero", list(five.prompt), 20)
    world.schedule()
    world.schedule()
    stale = list(world.answers["r0"])
    assert (len(stale), len(nine.tokens), len(five.tokens), len(zero.tokens)) == (2, 9, 5, 0)
    world.lose("r0")
    assert world.waiting == ["nine", "five", "zero"]
    world.join("r0", 64)
    for answer in stale:
        assert world.handle(StepAcked("r0", 1, answer.step_seq, answer.sampled, answer.counts)) == []
    again = world.schedule()
    assert again is not None and again.new_requests[0].num_computed_tokens == 0
    world.run()
    world.check_texts()
    assert [len(c.tokens) for c in (nine, five, zero)] == [20, 20, 20]
    assert cached(zero) == 8, "the hit of the first admission; the new worker had nothing"


def test_f65_a_wrong_answer_changes_nothing() -> None:
    """Contract rule 9: it is for the shell to end the epoch; the state is as if no answer had come."""
    world = World(DEFAULT)
    client = world.submit("a", 5, 4)
    output = world.schedule()
    assert output is not None
    for step_seq, sampled in ((2, [5]), (1, []), (1, [5, 6]), (1, [-1]), (1, [50_000])):
        with pytest.raises(WorkerProtocolError):
            world.scheduler.handle(StepAcked("r0", 1, step_seq, sampled))
        world.check()
    world.run()
    assert client.tokens == expected_tokens(client.prompt, 4)


def test_f68_a_failure_is_no_success_and_says_what_it_cost() -> None:
    world = World(DEFAULT)
    client = world.submit("poison", 5, 20)
    while len(client.tokens) < 7:
        world.turn()
    for _ in range(3):
        world.lose("r0")
        world.join("r0", 64)
        world.schedule()
    assert client.reason is EndReason.WORKER_FAULT and client.ended is not None
    assert client.ended.usage.num_completion_tokens == 7 and client.ended.message
    world.run()


@BOTH
def test_f70_a_text_that_ended_is_billed_to_its_end_only(base: SchedulerConfig) -> None:
    world = World(base)
    client = world.submit("a", 5, 20)
    while len(client.tokens) < 6:
        world.turn()
    world.handle(TextEnded("a", 4))
    assert client.reason is EndReason.STOP and client.ended is not None
    assert client.ended.usage.num_completion_tokens == 4
    world.run()


@BOTH
def test_f74_cached_tokens_are_the_hit_of_the_first_admission(base: SchedulerConfig) -> None:
    world = World(replace(base, max_num_seqs=2), num_blocks=13)
    shared = list(range(8))
    world.submit("warm", [*shared, 1], 1)
    world.run()
    world.submit("a", 12, 24)
    b = world.submit("b", [*shared, 5, 6], 24)
    while not any(p.victim == "b" for p in world.preemptions):
        world.turn()
    stats = []
    while b.ended is None:
        world.turn()
        kv = world.rank().kv.stats
        stats.append((kv.num_queries, kv.num_hits, kv.num_preempted_queries, kv.num_preempted_hits))
    assert all(one <= other for s, t in pairwise(stats) for one, other in zip(s, t, strict=True))
    assert stats[-1][2] > 0 and usage_preemptions(b) >= 1
    assert cached(b) == 8
    world.run()
    world.check_texts()


@BOTH
def test_f75_salts_part_tenants_and_only_them(base: SchedulerConfig) -> None:
    world = World(base)
    prompt = list(range(9))
    hits = []
    for index, salt in enumerate(["A", "A", "B", "", "", "A", "B"]):
        client = world.submit(f"r{index}", prompt, 1, cache_salt=salt)
        world.run()
        hits.append(cached(client))
    assert hits == [0, 8, 0, 0, 8, 8, 8]
    assert cached_with_salt_in_prompt(world) == 0


def cached_with_salt_in_prompt(world: World) -> int:
    """Sending what a salt is made of as tokens is no way into another tenant's cache."""
    client = world.submit("thief", [*b"salt:1:A", *range(9)], 1)
    world.run()
    return cached(client)


def test_f78_block_hashes_are_the_same_in_every_process() -> None:
    script = (
        "from array import array; from scheduler_svc.core.kv.prefix_index import HashChain;"
        "chain = HashChain(4, 'tenant', enabled=True); tokens = array('i', range(12));"
        "print([chain.block_hash(i, tokens).hex() for i in range(3)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }  # fmt: skip
    chain = HashChain(4, "tenant", enabled=True)
    hashes = [chain.block_hash(i, array("i", range(12))) for i in range(3)]
    assert outputs == {f"{[d.hex() for d in hashes]}\n"}
    assert all(len(d) == 32 for d in hashes) and len(set(hashes)) == 3


@BOTH
@pytest.mark.parametrize("at", range(8))
def test_f79_text_and_what_seeds_need_survive_an_eviction_at_any_output(base: SchedulerConfig, at: int) -> None:
    """The core's part: the worker gets the same parameters and the same index of the next output every time."""
    world = World(base)
    client = world.submit("seeded", 5, 8, sampling=b"seed 42")
    world.submit("neighbour", 6, 12)
    while len(client.tokens) < at:
        world.turn()
    world.lose("r0")
    world.join("r0", 64)
    world.run()
    world.check_texts()
    entries = [new for o in world.outputs for new in o.new_requests if new.request_id == "seeded"]
    assert {(new.sampling, new.num_prompt_tokens) for new in entries} == {(b"seed 42", 5)}
    assert len(entries[-1].token_ids) - 5 == at


@BOTH
def test_f83_a_drain_finishes_what_was_accepted_and_takes_nothing_new(base: SchedulerConfig) -> None:
    world = World(replace(base, max_num_seqs=3))
    clients = [world.submit(f"s{i}", 5, 6) for i in range(5)]
    world.turn()
    world.handle(DrainStarted())
    late = world.submit("late", 5, 6)
    assert late.refused is not None and late.refused.reason is RefusalReason.DRAINING
    world.run()
    assert all(len(c.tokens) == 6 for c in clients)


# --- the harness itself -------------------------------------------------------------------------------------------


@BOTH
def test_a_cold_run_is_what_the_expected_text_says(base: SchedulerConfig) -> None:
    world = World(base)
    client = world.submit("alone", 11, 9)
    world.run()
    assert client.tokens == expected_tokens(client.prompt, 9)


def test_the_stub_worker_sees_a_wrong_table() -> None:
    world = World(DEFAULT)
    world.submit("a", 9, 9)
    world.submit("b", 9, 9)
    world.step()
    rows = list(world.workers["r0"].rows.values())
    rows[0].blocks[0], rows[1].blocks[0] = rows[1].blocks[0], rows[0].blocks[0]
    with pytest.raises(AssertionError, match="slot of position 0"):
        world.step()


def test_the_scripted_text_depends_on_every_token_of_the_prefix() -> None:
    prompt = list(range(20))
    texts = {tuple(expected_tokens([*prompt[:i], 99, *prompt[i + 1 :]], 3)) for i in range(20)}
    assert len(texts) == 20 and hashed_token(1, 0) == hashed_token(1, 5)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_f91_the_block_that_the_last_token_fills_is_cached(depth: int, num_drafts: int) -> None:
    """Prompt and outputs without the last token are 8 tokens: two blocks, which a request that continues them finds."""
    config = SchedulerConfig(block_size=4, max_num_seqs=2, max_inflight_steps=depth, num_speculative_tokens=num_drafts)
    # A text that repeats, so that drafts are proposed and accepted.
    world = World(config, sampler=lambda prefix, index: 11 + index % 2)
    first = world.submit("first", [11, 12, 11, 12, 11, 12], 3)
    world.run()
    after = world.submit("after", [*first.prompt, *first.tokens, 99], 1)
    world.run()
    assert after.ended is not None and after.ended.usage.num_cached_tokens == 8
    world.check_texts()


def test_f91_tokens_behind_a_stop_fill_no_block() -> None:
    """Drafts behind the token that stops the request are accepted by the worker, but are no part of the request."""
    config = SchedulerConfig(block_size=4, max_num_seqs=2, num_speculative_tokens=3)
    world = World(config, sampler=lambda prefix, index: (11, 12, 13)[index % 3])
    first = world.submit("first", [12, 13, 11, 12, 13, 11, 12, 13], 30, stop_token_ids=(12,), min_tokens=2)
    world.run()
    assert first.reason is EndReason.STOP and first.tokens == [11, 12]
    assert len(world.rank().kv.pool.index) == 2
    assert any(output.num_drafts is not None for output in world.outputs)


def test_f91_with_results_first_full_blocks_are_cached_when_they_are_scheduled() -> None:
    world = World(REFERENCE.with_rules(results_first=True))
    first = world.submit("first", 6, 3)
    world.run()
    after = world.submit("after", [*first.prompt, *first.tokens, 99], 1)
    world.run()
    assert after.ended is not None and after.ended.usage.num_cached_tokens == 8


@pytest.mark.parametrize("preempt_running", [False, True])
def test_f131_a_reset_over_blocks_that_wait_for_their_fence(preempt_running: bool) -> None:
    for rules, succeeds in ((REFERENCE.rules, False), (SchedulerConfig().rules, True)):
        world = World(replace(REFERENCE, rules=rules).with_rules(fence=Fence.ALWAYS))
        world.submit("a", 5, 9)
        world.schedule()
        if not preempt_running:
            world.abort("a")
        assert world.reset(preempt_running=preempt_running) is succeeds
        assert world.rank().kv.pool.num_parked == 2
        world.ack()
        assert world.reset() is True
        world.run()
        world.check_texts()
