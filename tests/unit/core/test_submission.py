"""May it ever run, and within which limits? (D11)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import EndReason, RefusalReason, Tick
from tests.support.core_harness import VOCAB_SIZE, Client, World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def refused(client: Client) -> RefusalReason:
    assert client.refused is not None and client.accepted is None and client.refused.message
    return client.refused.reason


def limits(world: World, prompt: int, max_tokens: int, **fields: Any) -> tuple[int, int]:
    """Tokens granted, and positions it may ever compute."""
    client = world.submit("a", prompt, max_tokens, **fields)
    assert client.accepted is not None
    request = world.request("a")
    assert request.limit == prompt + client.accepted.max_tokens
    return client.accepted.max_tokens, request.row_limit


# usable blocks of 4 tokens, prompt, max_tokens asked for (0: none given) -> granted, or why not.
FEASIBILITY: list[tuple[int, int, int, int | RefusalReason]] = [
    (20, 10, 5, 5),
    (20, 10, 54, 54),
    (20, 10, 55, 54),  # the model's length clips
    (20, 63, 1, 1),
    (20, 63, 9, 1),
    (20, 64, 1, RefusalReason.PROMPT_TOO_LONG),
    (20, 99, 1, RefusalReason.PROMPT_TOO_LONG),
    (20, 10, 0, 54),  # none given: as many as fit
    (3, 10, 3, 3),  # 10 + 3 - 1 slots are exactly 3 blocks
    (3, 10, 4, RefusalReason.EXCEEDS_KV_CAPACITY),
    (3, 12, 1, 1),  # the only output needs no slot
    (3, 13, 1, RefusalReason.EXCEEDS_KV_CAPACITY),
    (3, 10, 0, 3),
    (3, 12, 0, 1),
    (3, 13, 0, RefusalReason.EXCEEDS_KV_CAPACITY),
    (3, 10, 1000, RefusalReason.EXCEEDS_KV_CAPACITY),  # clipping to the model's length is not enough
    (16, 10, 1000, 54),  # here it is
]


@pytest.mark.parametrize("usable, prompt, max_tokens, granted", FEASIBILITY)
def test_what_fits_runs_to_its_last_token_and_the_rest_is_refused(
    usable: int, prompt: int, max_tokens: int, granted: int | RefusalReason
) -> None:
    world = World(CONFIG, num_blocks=usable + 1)
    client = world.submit("a", prompt, max_tokens)
    if isinstance(granted, RefusalReason):
        assert refused(client) is granted
        assert world.scheduler.num_live_requests == 0 and world.scheduler.totals.num_refused == 1
        return
    assert client.accepted is not None and client.accepted.max_tokens == granted
    world.run()
    assert len(client.tokens) == granted and client.reason is EndReason.LENGTH
    assert not world.preemptions
    world.check_texts()


def test_a_refusal_for_want_of_memory_names_both_numbers() -> None:
    client = World(CONFIG, num_blocks=4).submit("a", 10, 5)
    assert client.refused is not None
    assert client.refused.metadata == {"needed_tokens": "14", "available_tokens": "12"}


@pytest.mark.parametrize(
    "max_tokens, min_tokens, outcome",
    [(5, 5, 5), (5, 6, RefusalReason.INVALID_PARAMETER), (0, 6, 6), (60, 60, 54), (0, 9999, 54)],
)
def test_min_tokens_is_clipped_with_max_tokens(max_tokens: int, min_tokens: int, outcome: int | RefusalReason) -> None:
    world = World(CONFIG)
    client = world.submit("a", 10, max_tokens, min_tokens=min_tokens)
    if isinstance(outcome, RefusalReason):
        assert refused(client) is outcome
    else:
        assert world.request("a").min_length == 10 + outcome


def test_the_last_token_needs_no_slot() -> None:
    assert limits(World(CONFIG), 10, 5) == (5, 14)


def test_the_largest_rank_decides_what_fits() -> None:
    world = World(CONFIG, ranks={"small": 3, "large": 9})
    assert limits(world, 20, 13) == (13, 32)
    world.abort("a")
    assert refused(world.submit("b", 20, 14)) is RefusalReason.EXCEEDS_KV_CAPACITY
    world.lose("large")
    assert refused(world.submit("c", 20, 13)) is RefusalReason.EXCEEDS_KV_CAPACITY
    world.lose("small")
    assert world.submit("d", 5, 4).accepted, "judged by the last one that lived"
    assert refused(world.submit("e", 5, 5)) is RefusalReason.EXCEEDS_KV_CAPACITY


def test_the_models_length_is_the_smaller_one() -> None:
    world = World(CONFIG, ranks={})
    world.join("r0", 40, max_model_len=32)
    assert world.scheduler.state.max_model_len == 32
    assert refused(world.submit("a", 32, 1)) is RefusalReason.PROMPT_TOO_LONG
    world = World(replace(CONFIG, max_model_len=16), ranks={})
    world.join("r0", 40, max_model_len=32)
    assert world.scheduler.state.max_model_len == 16


@pytest.mark.parametrize(
    "prompt, max_tokens, fields, reason",
    [
        ([], 1, {}, RefusalReason.EMPTY_PROMPT),
        ([1], -1, {}, RefusalReason.INVALID_PARAMETER),
        ([1], 1, {"min_tokens": -1}, RefusalReason.INVALID_PARAMETER),
        ([-1], 1, {}, RefusalReason.INVALID_PARAMETER),
        ([5, VOCAB_SIZE], 1, {}, RefusalReason.INVALID_PARAMETER),
        ([1], 1, {"priority": 1}, RefusalReason.PRIORITY_NOT_SUPPORTED),
        ([1], 1, {"priority": -1}, RefusalReason.PRIORITY_NOT_SUPPORTED),
    ],
)
def test_bad_parameters(prompt: list[int], max_tokens: int, fields: dict[str, Any], reason: RefusalReason) -> None:
    world = World(CONFIG)
    assert refused(world.submit("a", prompt, max_tokens, **fields)) is reason
    assert world.submit("b", [0, VOCAB_SIZE - 1], 1).accepted


def test_priority_is_welcome_where_it_means_something() -> None:
    world = World(replace(CONFIG, policy=Policy.PRIORITY))
    assert world.submit("a", 3, 1, priority=-7).accepted


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(replace(CONFIG, max_queued_requests=3))
    for index in range(3):
        assert world.submit(f"q{index}", 5, 4).accepted
    late = world.submit("late", 5, 4)
    assert refused(late) is RefusalReason.QUEUE_FULL and late.refused is not None
    assert late.refused.retry_after_s == 1.0, "nothing ended yet: no pace to judge by"
    assert late.refused.metadata["max_queued_requests"] == "3"
    world.step()
    assert world.submit("room", 5, 4).accepted
    world.run()


def test_the_time_to_come_back_follows_the_pace_of_ends() -> None:
    world = World(replace(CONFIG, max_queued_requests=16, max_num_seqs=1))
    for index in range(5):
        world.handle(Tick(float(index)))
        world.submit(f"done {index}", 2, 1)
        world.run()
    for index in range(16):
        world.submit(f"q{index}", 5, 4)
    late = world.submit("late", 5, 4)
    assert late.refused is not None
    # 5 ends in 4 s; 16 / 8 + 1 = 3 of them make room.
    assert late.refused.retry_after_s == pytest.approx(3 / (5 / 4))
    world.handle(Tick(100_000.0))
    late = world.submit("later", 5, 4)
    assert late.refused is not None and late.refused.retry_after_s == 60.0


def test_the_queue_is_bounded_in_prompt_tokens_too() -> None:
    world = World(replace(CONFIG, max_queued_tokens=20))
    assert world.submit("a", 12, 4).accepted
    assert world.submit("b", 8, 4).accepted
    late = world.submit("c", 1, 4)
    assert refused(late) is RefusalReason.QUEUE_FULL and late.refused is not None
    assert "20 prompt tokens" in late.refused.message
    world.step()
    assert world.submit("d", 20, 4).accepted, "who runs is not queued"
    world.run()


def test_a_prompt_longer_than_the_queue_may_wait_alone() -> None:
    """Refused, it would be told to come back, for ever."""
    world = World(replace(CONFIG, max_queued_tokens=10))
    assert world.submit("long", 11, 4).accepted
    assert refused(world.submit("next", 1, 4)) is RefusalReason.QUEUE_FULL
    world.run()


def test_a_preempted_request_is_not_refused_by_a_full_queue() -> None:
    world = World(replace(CONFIG, max_queued_requests=1, enable_prefix_caching=False), num_blocks=6)
    world.submit("a", 8, 6)
    world.step()
    world.submit("b", 8, 6)
    world.step()
    world.submit("waiting", 4, 2)
    world.run()
    assert world.preemptions and all(len(c.tokens) == c.max_tokens for c in world.clients)
    world.check_texts()


def test_the_reference_accepts_what_it_is_given() -> None:
    config = SchedulerConfig.reference(block_size=4, max_model_len=16, max_num_seqs=4)
    world = World(config, num_blocks=3)
    client = world.submit("a", 12, 99)
    assert client.accepted is not None and client.accepted.max_tokens == 99
    assert world.schedule() is None, "and lets it wait for ever"
    assert refused(world.submit("a", 3, 1)) is RefusalReason.DUPLICATE_REQUEST_ID
