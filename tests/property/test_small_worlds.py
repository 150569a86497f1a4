"""Every state of every small world: progress, termination and all invariants (docs/simulation.md has the bounds and the
numbers of states)."""

from __future__ import annotations

from time import perf_counter

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.rules import Fence, SchedulingRules
from tests.property.small_world_search import Arrival, Count, Search, SmallWorld, SmallWorldViolation

PROMPTS = range(1, 5)
BLOCK_SIZE = 2


def world(
    *,
    policy: Policy,
    num_usable: int,
    depth: int,
    max_requests: int = 3,
    max_tokens: int = 4,
    max_faults: int = 0,
    prompts: range = PROMPTS,
    max_loaded: int = 0,
    **settings: object,
) -> SmallWorld:
    """Room for `max_requests` of every kind; steps of four tokens, so that prompts are computed in chunks when others
    run."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        max_model_len=9,
        policy=policy,
        max_inflight_steps=depth,
        **settings,  # type: ignore[arg-type]
    )
    priorities = (0, 1) if policy is Policy.PRIORITY else (0,)
    kinds = [
        Arrival(num_prompt, num_tokens, priority)
        for num_prompt in prompts
        for num_tokens in range(1, max_tokens + 1)
        for priority in priorities
        # Others are refused.
        if num_prompt + num_tokens - 1 <= num_usable * BLOCK_SIZE
    ]
    return SmallWorld(config, num_usable + 1, tuple(kinds), max_requests, max_faults, max_loaded)


def explore(worlds: list[SmallWorld], capsys: pytest.CaptureFixture[str]) -> Count:
    """Search them all; the counts are shown whatever pytest captures."""
    total, started = Count(), perf_counter()
    for one in worlds:
        total.add(Search(one).run())
    with capsys.disabled():
        print(
            f"\n{perf_counter() - started:.0f} s: {total.states:,} states, {total.transitions:,} moves, "
            f"{total.idle_states:,} idle states, {len(worlds)} worlds"
        )
    return total


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", Policy)
def test_two_requests_of_any_kind_always_end(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests, prompts and max_tokens 1 to 4, any pool that can hold one of them, two steps in flight."""
    worlds = [world(policy=policy, num_usable=n, depth=2, max_requests=2) for n in range(1, 7)]
    assert explore(worlds, capsys).states > 10_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", Policy)
def test_three_small_requests_always_end(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """Three requests, prompts 1 to 3, max_tokens 1 and 2, two steps in flight; pools of 2 to 4 blocks under FCFS, of 3
    under priority."""
    pools = (2, 3, 4) if policy is Policy.FCFS else (3,)
    worlds = [world(policy=policy, num_usable=n, depth=2, max_tokens=2, prompts=range(1, 4)) for n in pools]
    assert explore(worlds, capsys).states > 10_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", Policy)
def test_two_requests_always_end_although_the_rank_is_lost(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests, prompts 1 to 3, max_tokens 1 and 2, two faults (rank lost, or reset while requests run)."""
    fewest = range(1, 4) if policy is Policy.FCFS else range(2, 4)
    worlds = [world(policy=policy, num_usable=3, depth=2, max_requests=2, max_faults=2, max_tokens=2, prompts=fewest)]
    assert explore(worlds, capsys).states > 10_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", Policy)
def test_two_requests_whose_kv_is_loaded_always_end(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests whose first two tokens are loaded (a load may fail, or end after its request), prompts 3 and 4,
    max_tokens 1 and 2, three blocks; under FCFS one fault."""
    max_faults = 1 if policy is Policy.FCFS else 0
    worlds = [
        world(
            policy=policy, num_usable=3, depth=2, max_requests=2, max_faults=max_faults, max_tokens=2,
            prompts=range(3, 5), max_loaded=2,
        )
    ]  # fmt: skip
    assert explore(worlds, capsys).states > 5_000


def test_a_copy_of_a_state_with_loads_lives_on_its_own() -> None:
    search = Search(
        world(policy=Policy.FCFS, num_usable=3, depth=2, max_requests=2, max_faults=1, max_tokens=2, max_loaded=2)
    )
    search.demand_independent_copies = True
    search.max_states = 1_500
    search.run()
    assert search.count.states == 1_500


def test_a_copy_of_a_state_lives_on_its_own() -> None:
    """Every move out of every state of a world with faults leaves the state as it was."""
    search = Search(world(policy=Policy.PRIORITY, num_usable=3, depth=2, max_requests=2, max_faults=2, max_tokens=2))
    search.demand_independent_copies = True
    search.max_states = 1_500
    search.run()
    assert search.count.states == 1_500


def test_a_search_finds_a_way_back_to_where_it_was() -> None:
    """Prompts admitted before they fit, and a victim that is the first among equals: two requests take each other's
    place for ever. The service never makes equals, and keeps such prompts out."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=3,
        max_num_batched_tokens=4,
        max_model_len=9,
        max_inflight_steps=3,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
        rules=SchedulingRules(waits_for_fence=False),
        max_preemptions=None,
    )
    with pytest.raises(SmallWorldViolation, match="lead back"):
        Search(SmallWorld(config, 5, (Arrival(4, 4), Arrival(3, 4)), 3)).run()


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("num_usable", range(1, 7))
@pytest.mark.parametrize("policy", Policy)
def test_three_requests_of_any_kind_always_end(
    policy: Policy, num_usable: int, caching: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The full bounds: three requests, prompts and max_tokens 1 to 4. A window of two contains one of one: to plan
    ahead is a move like any other."""
    full = world(policy=policy, num_usable=num_usable, depth=2, enable_prefix_caching=caching)
    assert explore([full], capsys).idle_states > 0


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("policy", Policy)
def test_three_requests_always_end_with_the_settings_of_the_reference(
    policy: Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = [
        world(
            policy=policy,
            num_usable=num_usable,
            depth=2,
            max_tokens=3,
            rules=SchedulingRules(fence=Fence.TRANSFERS, waits_for_fence=False),
            max_preemptions=None,
        )
        for num_usable in (2, 3, 4)
    ]
    assert explore(worlds, capsys).idle_states > 0
