"""Tenants: no blocks in common, and limits that hold for each by itself."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig, TenantLimits
from scheduler_svc.core.events import RefusalReason
from scheduler_svc.core.resources.tenants import TENANT_LIMIT, Tenants
from tests.support.core_harness import Client, World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, watermark=0.0)
PROMPT = list(range(1, 13))


def world(*limits: TenantLimits, num_ranks: int = 1, **settings: Any) -> World:
    made = World(replace(CONFIG, tenants=limits, **settings), num_blocks=101)
    for index in range(1, num_ranks):
        made.join(f"r{index}", 101)
    return made


def refusal(client: Client) -> dict[str, str]:
    assert client.refused is not None and client.refused.reason is RefusalReason.TENANT_LIMIT
    return dict(client.refused.metadata)


# --- isolation ------------------------------------------------------------------------------------------------------


def test_f75_tenants_do_not_hit_each_others_blocks_and_each_hits_its_own() -> None:
    made = world()
    hits = {}
    for request_id, tenant, salt in (
        ("first", "a", ""),
        ("again", "a", ""),
        ("other tenant", "b", ""),
        ("none", "", ""),
        ("none again", "", ""),
        # What a client sends does not make it another tenant.
        ("salt like a tenant", "", "a"),
        ("tenant and salt", "a", "s"),
        ("the same", "a", "s"),
        ("other tenant, same salt", "b", "s"),
    ):
        client = made.submit(request_id, PROMPT, 2, tenant=tenant, cache_salt=salt)
        made.run()
        assert client.ended is not None
        hits[request_id] = client.ended.usage.num_cached_tokens
    assert {name for name, count in hits.items() if count} == {"again", "none again", "the same"}
    made.check_texts()


# --- running --------------------------------------------------------------------------------------------------------


def test_no_more_run_than_the_tenant_may_have_and_others_pass_by() -> None:
    made = world(TenantLimits("a", max_running=2), num_ranks=2)
    mine = [made.submit(f"a{index}", 5, 8, tenant="a") for index in range(5)]
    made.submit("b0", 5, 8, tenant="b")
    for _ in range(3):
        for rank in ("r0", "r1"):
            made.step(rank)
    running = [run.request.request_id for rank in made.scheduler.state.ranks.values() for run in rank.running]
    assert sorted(running) == ["a0", "a1", "b0"]
    explained = made.scheduler.explain("a2")
    assert explained is not None and explained.reason is TENANT_LIMIT
    made.run()
    assert all(client.ended is not None for client in mine)
    made.check_texts()


def test_a_preempted_request_gives_its_place_back() -> None:
    made = world(TenantLimits("a", max_running=1))
    made.submit("a0", 5, 8, tenant="a")
    made.step()
    made.reset(preempt_running=True)
    tenants = made.scheduler.state.resources.get(Tenants)
    assert not tenants._tenants["a"].running
    made.submit("a1", 5, 8, tenant="a")
    made.run()
    made.check_texts()


def test_the_places_of_a_lost_rank_are_free() -> None:
    made = world(TenantLimits("a", max_running=1))
    client = made.submit("a0", 5, 8, tenant="a")
    made.schedule()
    made.lose("r0")
    made.join("r0", 101)
    made.run()
    assert client.ended is not None


# --- waiting --------------------------------------------------------------------------------------------------------


def test_no_more_wait_than_the_tenant_may_have() -> None:
    made = world(TenantLimits("a", max_running=1, max_queued=2))
    made.submit("a0", 5, 8, tenant="a")
    made.step()
    made.submit("a1", 5, 8, tenant="a")
    made.submit("a2", 5, 8, tenant="a")
    refused = made.submit("a3", 5, 8, tenant="a")
    assert refusal(refused) == {"tenant": "a", "limit": "max_queued", "value": "2"}
    assert refused.refused is not None and refused.refused.retry_after_s == 1.0
    assert made.submit("b0", 5, 8, tenant="b").refused is None
    made.run()
    assert made.submit("a4", 5, 8, tenant="a").refused is None
    made.run()


# --- tokens a minute --------------------------------------------------------------------------------------------------


def test_tokens_a_minute_are_exact() -> None:
    made = world(TenantLimits("a", tokens_per_minute=60))
    made.submit("a0", 10, 20, tenant="a")
    made.submit("a1", 10, 20, tenant="a")
    refused = made.submit("a2", 1, 1, tenant="a")
    assert refusal(refused) == {"tenant": "a", "limit": "tokens_per_minute", "value": "60"}
    assert refused.refused is not None and refused.refused.retry_after_s == pytest.approx(2.0)
    # One token a second.
    made.tick(1.9)
    assert made.submit("a3", 1, 1, tenant="a").refused is not None
    made.tick(2.0)
    assert made.submit("a4", 1, 1, tenant="a").refused is None
    made.run()


def test_what_a_request_has_not_taken_comes_back_at_its_end() -> None:
    made = world(TenantLimits("a", tokens_per_minute=60))
    first = made.submit("a0", 10, 50, tenant="a")
    made.step()
    made.abort("a0")
    # 10 of the prompt, and what it had yielded.
    num_taken = 10 + len(first.tokens)
    assert made.submit("a1", 10, 51 - num_taken, tenant="a").refused is not None
    assert made.submit("a2", 10, 50 - num_taken, tenant="a").refused is None
    made.run()


def test_a_request_that_can_never_pass_is_told_so() -> None:
    made = world(TenantLimits("a", tokens_per_minute=30))
    refused = made.submit("a0", 10, 21, tenant="a")
    assert refusal(refused)["limit"] == "tokens_per_minute"
    assert refused.refused is not None and refused.refused.retry_after_s is None
    assert "max_tokens" in refused.refused.message
    # Without max_tokens, it may take all that the model holds.
    assert made.submit("a1", 10, 0, tenant="a").refused is not None


def test_requests_that_were_accepted_before_are_not_refused_but_count() -> None:
    made = world(TenantLimits("a", max_queued=100, tokens_per_minute=60))
    for index in range(3):
        again = made.submit(f"a{index}", 10, 20, tenant="a", output_tokens=array("i"), arrival=0.0)
        assert again.refused is None
    assert refusal(made.submit("a3", 1, 1, tenant="a"))["limit"] == "tokens_per_minute"
    made.run()
    made.tick(60.0)
    assert made.submit("a4", 1, 1, tenant="a").refused is None
    made.run()


# --- whose limits -----------------------------------------------------------------------------------------------------


def test_each_tenant_that_is_not_named_has_the_limits_of_everyone() -> None:
    made = world(TenantLimits("*", max_queued=1), TenantLimits("a", max_queued=2))
    for tenant, most in (("a", 2), ("b", 1), ("c", 1), ("", 1)):
        accepted = [made.submit(f"{tenant}{index}", 5, 3, tenant=tenant).refused is None for index in range(3)]
        assert accepted == [True] * most + [False] * (3 - most)
    made.run()


def test_tenants_that_are_idle_are_forgotten() -> None:
    made = world(TenantLimits("*", tokens_per_minute=600))
    tenants = made.scheduler.state.resources.get(Tenants)
    for index in range(50):
        made.submit(f"q{index}", 3, 2, tenant=f"t{index}")
        made.run()
        made.tick(float(60 * index))
    assert len(tenants._tenants) < 5


@pytest.mark.parametrize("wrong", [{"max_running": 0}, {"max_queued": 0}, {"tokens_per_minute": -1}])
def test_limits_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TenantLimits("a", **wrong)
