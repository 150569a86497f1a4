"""Drafts: proposed by the scheduler's n-gram proposer, verified in rows of 1 + k, gone when not used at once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import EndReason, StepAcked, WorkerProtocolError
from scheduler_svc.core.resources.ngram import NgramProposer
from scheduler_svc.core.resources.speculation import Speculation
from tests.support.core_harness import World, expected_tokens, hashed_token

INTERNAL = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=32, num_speculative_tokens=3)
OUTSIDE = SchedulerConfig.reference(
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_speculative_tokens=3,
    max_model_len=64,
).with_rules(results_first=True)


def drafts_of(world: World, request_id: str) -> list[int]:
    """Drafts that wait for its next row."""
    speculation = world.scheduler.state.resources.find(Speculation)
    assert speculation is not None
    return speculation.drafts.get(world.request(request_id), [])


def repetitive(prefix: int, index: int) -> int:
    """A model that often repeats itself, so that n-grams are found and drafts are right now and then."""
    return hashed_token(prefix, index) % 3


def periodic(prefix: int, index: int) -> int:
    return (11, 12, 13)[index % 3]


# --- the proposer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, drafts",
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 9, 8, 7, 6, 1, 2], [9, 8, 7]),
        ([1, 2, 9, 5, 1, 2, 8, 5, 1, 2], [8, 5, 1]),  # the newest occurrence
        ([3, 1, 2, 9, 4, 4, 1, 2, 7, 7, 3, 1, 2], [9, 4, 4]),  # a longer pattern beats a newer one
        ([5, 6, 7, 5, 6], [7, 5, 6]),
        ([1, 1], []),
    ],
)
def test_the_proposer_continues_what_it_has_seen(tokens: list[int], drafts: list[int]) -> None:
    assert NgramProposer(3).propose(array("i", tokens)) == drafts


def test_the_proposer_matches_whole_tokens_only() -> None:
    """Bytes that look alike across two tokens are no match."""
    tokens = array("i", [0x01000000, 0x00000001, 7, 256, 1, 8, 0x00010000, 0x00000100])
    assert NgramProposer(2).propose(tokens) == []


def test_the_proposer_looks_back_so_far_and_no_further() -> None:
    tokens = array("i", [1, 2, 3, *range(10, 30), 1, 2])
    assert NgramProposer(1).propose(tokens) == [3]
    assert NgramProposer(1, window=20).propose(tokens) == []


def test_the_proposer_against_a_plain_search() -> None:
    rng = random.Random(7)

    def plain(tokens: list[int], k: int) -> list[int]:
        for n in range(4, 1, -1):
            for at in range(len(tokens) - n - 1, -1, -1):
                if n < len(tokens) and tokens[at : at + n] == tokens[-n:]:
                    return tokens[at + n : at + n + k]
        return []

    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        assert NgramProposer(3).propose(array("i", tokens)) == plain(tokens, 3)


# --- internal drafts ----------------------------------------------------------------------------------------------


def test_drafts_ride_along_and_save_steps() -> None:
    world = World(INTERNAL, sampler=periodic)
    client = world.submit("a", 4, 24)
    world.run()
    assert client.tokens == [11, 12, 13] * 8
    drafted = [output for output in world.outputs if output.num_drafts is not None]
    assert drafted and len(world.outputs) < 16
    assert all(n == 1 + d for o in drafted for n, d in zip(o.num_tokens, o.num_drafts or (), strict=True))


def scripts() -> Iterator[tuple[str, SchedulerConfig, int]]:
    yield "roomy", INTERNAL, 60
    for policy in Policy:
        config = SchedulerConfig(
            block_size=4, max_num_seqs=4, max_num_batched_tokens=9, num_speculative_tokens=3,
            policy=policy, long_prefill_token_threshold=6,
        )  # fmt: skip
        yield f"tight {policy.value}", config, 12
    config = SchedulerConfig(
        block_size=2, max_num_seqs=4, max_num_batched_tokens=5, num_speculative_tokens=2,
        enable_prefix_caching=False, max_inflight_steps=1,
    )  # fmt: skip
    yield "tiny budget", config, 20


@pytest.mark.parametrize("name, config, num_blocks", list(scripts()))
def test_outputs_are_those_without_drafts(name: str, config: SchedulerConfig, num_blocks: int) -> None:
    """Budget cuts, chunks, preemption and acceptance: texts stay what they are, limits hold exactly."""
    world = World(config, num_blocks=num_blocks, sampler=repetitive)
    for index in range(8):
        world.submit(f"q{index}", 3 + index, 14, stop_token_ids=(2,) if index % 4 == 3 else ())
        world.turn()
    world.run()
    world.check_texts()
    assert any(output.num_drafts is not None for output in world.outputs)
    assert all(len(c.tokens) == 14 or c.reason is EndReason.STOP for c in world.clients)
    if name.startswith("tight"):
        assert world.preemptions


def test_drafts_never_need_more_slots_than_the_request_may_have() -> None:
    """5 usable blocks of 4 hold prompt 9 + 12 - 1 = 20 slots exactly; rows with drafts are cut to that."""
    world = World(INTERNAL, num_blocks=6, sampler=periodic)
    client = world.submit("a", 9, 12)
    assert client.accepted and world.config.num_speculative_tokens == 3
    most = 0
    while client.ended is None:
        world.schedule()
        most = max(most, world.request("a").computed)
        world.ack()
    assert most <= 20 and len(client.tokens) == 12 and not world.preemptions


def test_one_result_at_a_time_when_drafts_follow_the_last_known_token() -> None:
    world = World(INTERNAL, sampler=periodic)
    world.submit("a", 4, 24)
    world.step()
    assert world.schedule() is not None
    assert world.schedule() is None, "the next row continues tokens that are not known yet"
    assert world.request("a").needs_result_first


def test_preemption_clears_drafts() -> None:
    world = World(INTERNAL, num_blocks=8, sampler=periodic)
    world.submit("a", 8, 16)
    world.submit("b", 8, 16)
    while not world.preemptions:
        world.turn()
    assert world.waiting == ["b"] and drafts_of(world, "b") == []
    world.run()
    world.check_texts()


# --- drafts from outside (reference) ------------------------------------------------------------------------------


def reference_world() -> World:
    world = World(OUTSIDE)
    world.submit("a", 7, 12)
    world.step()
    return world


def test_accepted_and_rejected_drafts_move_the_counters() -> None:
    world = reference_world()
    right = expected_tokens(world.clients[0].prompt, 4)
    world.draft({"a": [right[1], right[2], 0]})
    output = world.schedule()
    assert world.rows_of(output) == [("a", 4)] and output is not None
    assert list(output.draft_token_ids) == [right[1], right[2], 0]
    request = world.request("a")
    assert (request.computed, request.awaited, request.awaited_optional) == (11, 4, 3)
    world.ack()
    assert (request.computed, request.awaited, request.awaited_optional) == (10, 0, 0)
    assert world.clients[0].tokens == right


def test_an_empty_answer_counts_as_all_rejected_and_takes_back_what_was_cached() -> None:
    """Token 8 fills the second block; the row that would have computed it yields nothing, so nobody may hit it."""
    world = reference_world()
    world.draft({"a": [1, 2, 3]})
    output = world.schedule()
    assert output is not None
    request, run = world.request("a"), world.run_of("a")
    assert run.num_cached == 2
    world.answers["r0"].clear()
    row = world.workers["r0"].rows[output.rows[0]]
    row.tokens.pop()
    row.prefixes.pop()
    row.computed = 7
    world.handle(StepAcked("r0", 1, output.step_seq, [], [0]))
    world.workers["r0"].acknowledged(output.step_seq)
    assert (run.computed, run.num_cached, request.awaited) == (7, 1, 0)
    assert world.rows_of(world.step()) == [("a", 1)]
    assert run.num_cached == 2
    world.run()
    world.check_texts()


def test_counts_that_do_not_fit_change_nothing() -> None:
    world = reference_world()
    world.draft({"a": [1, 2, 3]})
    output = world.schedule()
    assert output is not None
    request = world.request("a")
    before = (request.computed, request.awaited, request.num_tokens)
    for sampled, counts in (([5] * 5, [5]), ([5], [2]), ([5, 5], None), ([5], [1, 0]), ([5], [-1])):
        with pytest.raises(WorkerProtocolError):
            world.scheduler.handle(StepAcked("r0", 1, output.step_seq, sampled, counts))
        assert (request.computed, request.awaited, request.num_tokens) == before
    world.ack()


def test_a_request_skipped_before_its_row_keeps_its_drafts() -> None:
    """Only a row takes drafts; a step that has no token left for it leaves them."""
    world = World(replace(OUTSIDE, max_num_batched_tokens=4))
    for name in "ab":
        world.submit(name, 2, 9)
    world.step()
    world.draft({"a": [1, 2, 3], "b": [4, 5]})
    assert world.rows_of(world.step()) == [("a", 4)]
    assert drafts_of(world, "b") == [4, 5] and drafts_of(world, "a") == []
