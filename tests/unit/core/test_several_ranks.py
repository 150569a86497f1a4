"""One queue, several ranks that pull from it (D15); ranks that come, drain and go (D30)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import EndReason, RankDraining, RefusalReason, StepAcked
from scheduler_svc.core.reasons import SkipReason
from tests.support.core_harness import World, expected_tokens

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=32, no_worker_grace_s=30.0)


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


def warm(world: World, rank: str, prompt: list[int]) -> None:
    """Leave the prompt's blocks in the prefix cache of one rank."""
    world.submit(f"warm {rank}", prompt, 1)
    for _ in range(3):
        world.step(rank)


def test_ranks_take_turns_from_one_queue() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    for name in "abcd":
        world.submit(name, 5, 6)
    world.schedule("r1")
    world.schedule("r0")
    assert (world.running("r1"), world.running("r0")) == (["a", "b"], ["c", "d"])
    world.run()
    world.check_texts()


def test_a_rank_leaves_a_request_to_the_one_with_the_longer_cached_prefix() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    prompt = list(range(12))
    warm(world, "r1", prompt)
    world.submit("a", [*prompt, 50], 3)
    world.submit("b", 5, 3)
    world.schedule("r0")
    assert world.running("r0") == ["b"], "passing over a continues the pass"
    assert reason(world, "a") is reasons.PASSED_OVER
    output = world.schedule("r1")
    assert output is not None and output.new_requests[0].num_computed_tokens == 12
    world.run()
    world.check_texts()


def test_a_request_is_passed_over_twice_at_most() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    prompt = list(range(12))
    warm(world, "r1", prompt)
    world.submit("a", [*prompt, 50], 3)
    assert [world.schedule("r0"), world.schedule("r0")] == [None, None]
    assert world.running("r0") == []
    world.schedule("r0")
    assert world.running("r0") == ["a"]


def test_an_admission_gives_the_passes_back() -> None:
    """Whoever is preempted may be left to a rank with a longer prefix as often as a new request."""
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    prompt = list(range(12))
    warm(world, "r1", prompt)
    world.submit("a", [*prompt, 50], 9)
    assert [world.schedule("r0"), world.schedule("r0")] == [None, None]
    world.step("r0")
    assert world.running("r0") == ["a"]
    world.lose("r0")
    world.join("r0", 20)
    assert world.schedule("r0") is None and reason(world, "a") is reasons.PASSED_OVER
    world.run()
    world.check_texts()


def test_equal_prefixes_pass_nobody_over() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    prompt = list(range(12))
    for rank in ("r0", "r1"):
        warm(world, rank, prompt)
    # The second warming took the prefix of the first, so warm r1 for itself before comparing.
    world.submit("a", [*prompt, 50], 3)
    here, there = (len(world.rank(r).kv.find_hits(world.request("a"))) for r in ("r0", "r1"))
    first = "r0" if here >= there else "r1"
    world.schedule(first)
    assert world.running(first) == ["a"]


def test_nobody_is_left_to_a_rank_that_cannot_take_it() -> None:
    """A full window, a full batch, a draining rank: there is no waiting for those."""
    prompt = list(range(12))

    def warmed() -> World:
        world = World(CONFIG, ranks={"r0": 20, "r1": 20})
        warm(world, "r1", prompt)
        return world

    draining = warmed()
    draining.handle(RankDraining("r1"))
    full_batch = warmed()
    for name in ("x", "y"):
        full_batch.submit(name, 4, 9)
    full_batch.step("r1")
    full_window = warmed()
    full_window.submit("x", 4, 9)
    full_window.schedule("r1")
    full_window.schedule("r1")
    assert full_window.rank("r1").window.is_full
    for world in (draining, full_batch, full_window):
        world.submit("a", [*prompt, 50], 3)
        world.schedule("r0")
        assert world.running("r0") == ["a"]


def test_a_rank_too_small_for_it_is_no_reason_to_wait() -> None:
    """The small rank has the prefix cached, but can never hold the whole: the next step of the large one runs it."""
    world = World(CONFIG, ranks={"small": 5, "large": 20})
    prompt = list(range(12))
    warm(world, "small", prompt)
    client = world.submit("a", [*prompt, 50], 12)
    assert world.schedule("small") is None
    assert reason(world, "a") is reasons.NEVER_FITS_HERE
    assert world.schedule("large") is not None
    world.run()
    assert client.tokens == expected_tokens(client.prompt, 12)


def test_what_never_fits_here_does_not_hold_up_those_behind_it() -> None:
    world = World(CONFIG, ranks={"small": 4, "large": 20})
    world.submit("big", 20, 12)
    world.submit("little", 3, 3)
    world.schedule("small")
    assert world.running("small") == ["little"] and world.skipped == ["big"]
    world.schedule("large")
    assert world.running("large") == ["big"]
    world.run()
    world.check_texts()


def test_after_the_large_rank_died_its_request_waits_and_fails_while_others_run() -> None:
    """D30: nobody alive can hold it. It neither creeps into the small rank nor stands in the way."""
    world = World(CONFIG, ranks={"small": 4, "large": 20})
    big = world.submit("big", 4, 40)
    world.step("large")
    world.lose("large")
    little = world.submit("little", 3, 4)
    for _ in range(8):
        world.turn()
    assert little.reason is EndReason.LENGTH and big.ended is None
    assert reason(world, "big") is reasons.NEVER_FITS_HERE
    world.tick(29.0)
    assert big.ended is None
    assert world.scheduler.next_deadline() == 30.0
    world.tick(30.0)
    assert big.ended is not None and big.reason is EndReason.NO_WORKER and len(big.tokens) == 1
    world.run()


def test_a_large_rank_that_comes_back_in_time_takes_it_up_again() -> None:
    world = World(CONFIG, ranks={"small": 4, "large": 20})
    big = world.submit("big", 4, 40)
    world.step("large")
    world.lose("large")
    world.tick(29.0)
    world.join("large", 20)
    world.tick(60.0)
    world.run()
    assert big.tokens == expected_tokens(big.prompt, 40)
    assert big.ended is not None and big.ended.usage.num_preemptions == 1


def test_requests_wait_while_no_rank_lives_and_new_ones_until_the_grace_is_over() -> None:
    world = World(CONFIG)
    first = world.submit("first", 5, 4)
    world.schedule()
    world.lose("r0")
    assert reason(world, "first") is reasons.NO_RANK
    world.tick(29.9)
    assert world.submit("in time", 5, 4).accepted
    world.tick(30.0)
    late = world.submit("late", 5, 4)
    assert late.refused is not None and late.refused.reason is RefusalReason.NO_WORKER
    assert "30 s" in late.refused.message
    world.tick(500.0)
    assert first.ended is None, "an accepted request waits as long as it takes"
    world.join("r0", 20)
    world.run()
    world.check_texts()


def test_before_any_rank_joined_nothing_is_accepted() -> None:
    world = World(CONFIG, ranks={})
    client = world.submit("a", 5, 4)
    assert client.refused is not None and client.refused.reason is RefusalReason.NO_WORKER


def test_orphans_go_to_the_head_of_the_queue_in_their_order() -> None:
    world = World(SchedulerConfig(block_size=4, max_num_seqs=3), ranks={"r0": 20, "r1": 20})
    for name in "abc":
        world.submit(name, 5, 6)
    world.step("r0")
    for name in "de":
        world.submit(name, 5, 6)
    world.lose("r0")
    assert world.waiting == list("abcde")
    world.step("r1")
    assert world.running("r1") == ["a", "b", "c"]
    world.run()
    world.check_texts()


def test_a_draining_rank_hands_over_and_admits_nobody() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    for name in "ab":
        world.submit(name, 5, 6)
    world.step("r0")
    world.handle(RankDraining("r0"))
    assert (world.running("r0"), world.waiting) == ([], ["a", "b"])
    assert [p.cause for p in world.preemptions] == ["rank_draining"] * 2
    world.submit("c", 5, 6)
    output = world.schedule("r0")
    assert output is not None and not output.rows and set(output.preempted_request_ids) == {"a", "b"}
    world.schedule("r1")
    assert world.running("r1") == ["a", "b"] and world.running("r0") == []
    world.run()
    world.check_texts()
    assert all(r.account.num_shortage_preemptions == 0 for r in world.scheduler.state.requests.values())


def test_a_moved_request_waits_for_its_late_results() -> None:
    """Rows of it are in flight on the draining rank: they come first, and count."""
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    client = world.submit("a", 5, 6)
    world.schedule("r0")
    world.schedule("r0")
    world.handle(RankDraining("r0"))
    assert world.schedule("r1") is None and reason(world, "a") is reasons.RESULT_IN_FLIGHT
    world.ack("r0")
    assert world.schedule("r1") is None
    world.ack("r0")
    assert len(client.tokens) == 2
    output = world.schedule("r1")
    assert output is not None and world.rows_of(output) == [("a", 7)]
    world.run()
    world.check_texts()


def test_what_only_the_draining_rank_can_hold_finishes_there() -> None:
    world = World(CONFIG, ranks={"small": 4, "large": 20})
    world.submit("big", 4, 40)
    world.submit("little", 4, 4)
    world.step("large")
    assert world.running("large") == ["big", "little"]
    world.handle(RankDraining("large"))
    assert (world.running("large"), world.waiting) == (["big"], ["little"])
    world.run()
    world.check_texts()


def test_the_only_rank_draining_finishes_what_runs_and_says_why_others_wait() -> None:
    world = World(CONFIG)
    running = world.submit("a", 5, 4)
    world.step()
    world.submit("b", 5, 4)
    world.handle(RankDraining("r0"))
    for _ in range(6):
        world.turn()
    assert running.reason is EndReason.LENGTH
    assert reason(world, "b") is reasons.RANK_DRAINING


@pytest.mark.parametrize("others", [{}, {"small": 4}], ids=["alone", "beside a small one"])
def test_whom_a_draining_rank_preempts_it_takes_back(others: dict[str, int]) -> None:
    """Only it can hold both, one after the other: nobody is left to a worker that may never come."""
    world = World(replace(CONFIG, enable_prefix_caching=False), ranks={"large": 10, **others})
    clients = [world.submit(name, 12, 20) for name in "ab"]
    world.step("large")
    assert world.running("large") == ["a", "b"]
    world.submit("later", 4, 30)
    world.handle(RankDraining("large"))
    while any(client.ended is None for client in clients):
        assert world.turn(), [str(world.scheduler.explain(name)) for name in "ab"]
        if world.waiting == ["b", "later"]:
            assert reason(world, "b") not in (reasons.RANK_DRAINING, reasons.NOT_EXAMINED)
    assert [p.cause for p in world.preemptions] == ["blocks"], "b had to go once"
    assert all(client.reason is EndReason.LENGTH for client in clients)
    assert reason(world, "later") in (reasons.RANK_DRAINING, reasons.NEVER_FITS_HERE), "it never ran there"
    world.check_texts()


def test_a_reset_on_a_draining_rank_strands_nobody() -> None:
    world = World(CONFIG, ranks={"r0": 20})
    client = world.submit("a", 5, 9)
    world.step()
    world.handle(RankDraining("r0"))
    assert world.reset(preempt_running=True) is True
    world.run()
    assert len(client.tokens) == 9
    world.check_texts()


def test_a_returning_request_goes_to_a_rank_that_can_hold_it_now() -> None:
    world = World(CONFIG, ranks={"r0": 20})
    client = world.submit("a", 5, 9)
    world.step()
    world.handle(RankDraining("r0"))
    world.join("r1", 20)
    world.reset(preempt_running=True)
    while world.answers["r0"]:
        world.ack("r0")
    output = world.schedule("r0")
    assert output is not None and not output.rows
    assert world.rows_of(world.schedule("r1")) != []
    world.run()
    assert len(client.tokens) == 9


def test_late_results_of_an_ended_epoch_are_ignored() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 4)
    world.schedule()
    old = world.answers["r0"]
    world.lose("r0")
    world.join("r0", 20)
    answer = old.popleft()
    assert world.handle(StepAcked("r0", 1, answer.step_seq, answer.sampled)) == []
    assert client.tokens == [] and world.request("a").num_output_tokens == 0
    world.run()
    world.check_texts()


def test_the_prefix_index_dies_with_its_rank() -> None:
    world = World(CONFIG)
    prompt = list(range(12))
    warm(world, "r0", prompt)
    world.lose("r0")
    world.join("r0", 20)
    client = world.submit("a", [*prompt, 1], 3)
    world.run()
    assert client.ended is not None and client.ended.usage.num_cached_tokens == 0
    world.check_texts()


def test_priorities_hold_across_ranks() -> None:
    world = World(SchedulerConfig(block_size=4, max_num_seqs=1, policy=Policy.PRIORITY), ranks={"r0": 20, "r1": 20})
    for name, priority in (("low", 5), ("mid", 3), ("high", 1)):
        world.submit(name, 5, 4, priority=priority)
    world.schedule("r1")
    world.schedule("r0")
    assert (world.running("r1"), world.running("r0")) == (["high"], ["mid"])
    world.run()
    world.check_texts()
