"""D50: a request runs only on ranks that have what it needs."""

from __future__ import annotations

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import EndReason, RankDraining, RefusalReason
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_model_len=64)
NEEDED = ("ADAPTERS",)


def two_ranks(num_blocks: int = 20) -> World:
    """ "plain" has nothing, "able" has what is needed and more."""
    world = World(CONFIG, ranks={"plain": 20})
    world.join("able", num_blocks, features=("ADAPTERS", "IMAGES"))
    return world


def test_a_request_waits_for_the_rank_that_has_the_feature_and_holds_up_no_other() -> None:
    world = two_ranks()
    client = world.submit("special", 5, 3, features=NEEDED)
    world.submit("any", 5, 3)
    world.schedule("plain")
    assert world.running("plain") == ["any"] and world.skipped == ["special"]
    world.schedule("able")
    assert world.running("able") == ["special"]
    world.run()
    assert client.reason is EndReason.LENGTH


def test_a_request_of_which_no_living_rank_has_all_features_is_refused_by_name() -> None:
    world = two_ranks()
    client = world.submit("special", 5, 3, features=("ADAPTERS", "SOUND"))
    assert client.refused is not None and client.refused.reason is RefusalReason.FEATURE_NOT_SUPPORTED
    assert "SOUND" in client.refused.message and client.refused.metadata == {"features": "ADAPTERS, SOUND"}


def test_a_preempted_request_resumes_only_where_the_feature_is() -> None:
    world = two_ranks()
    client = world.submit("special", 5, 6, features=NEEDED)
    world.step("able")
    world.lose("able")
    assert world.schedule("plain") is None
    world.join("again", 20, features=NEEDED)
    world.schedule("plain")
    world.schedule("again")
    assert world.running("again") == ["special"]
    world.run()
    assert client.reason is EndReason.LENGTH


def test_an_accepted_request_whose_feature_no_rank_has_any_more_waits_and_then_fails() -> None:
    world = two_ranks()
    client = world.submit("special", 5, 6, features=NEEDED)
    world.step("able")
    world.lose("able")
    world.tick(29.0)
    explanation = world.scheduler.explain("special")
    assert client.ended is None and explanation is not None
    world.schedule("plain")
    assert world.request("special").account.skip_reason is reasons.FEATURE_MISSING_HERE
    world.tick(30.0)
    assert client.reason is EndReason.NO_WORKER


def test_a_draining_rank_keeps_what_only_it_can_run() -> None:
    world = two_ranks()
    client = world.submit("special", 5, 6, features=NEEDED)
    world.step("able")
    world.handle(RankDraining("able"))
    assert world.running("able") == ["special"], "no rank that stays has the feature"
    world.run()
    assert client.reason is EndReason.LENGTH


def test_the_pool_that_counts_is_that_of_ranks_with_the_feature() -> None:
    world = two_ranks(num_blocks=5)
    client = world.submit("special", 5, 30, features=NEEDED)
    assert client.refused is not None and client.refused.reason is RefusalReason.EXCEEDS_KV_CAPACITY
    assert client.refused.metadata["available_tokens"] == "16"


def test_while_no_rank_is_up_such_a_request_waits_for_the_next_one() -> None:
    world = two_ranks()
    world.lose("able")
    world.lose("plain")
    client = world.submit("special", 5, 3, features=NEEDED)
    world.join("plain", 20)
    assert client.refused is None and client.ended is None
    world.join("able", 20, features=NEEDED)
    world.run()
    assert client.reason is EndReason.LENGTH


def test_a_cached_prefix_on_a_rank_without_the_feature_is_no_reason_to_wait() -> None:
    world = two_ranks()
    prompt = list(range(12))
    world.submit("warm", prompt, 2)
    world.step("plain")
    world.run()
    world.submit("special", [*prompt, 50], 3, features=NEEDED)
    world.schedule("able")
    assert world.running("able") == ["special"]
