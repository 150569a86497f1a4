"""Whom a shortage of blocks preempts."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies import make_policy
from scheduler_svc.core.policies.fcfs import FcfsPolicy
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request, Run
from tests.support.core_harness import World
from tests.unit.core.test_queues import request


def running(*entries: tuple[str, int, float, int]) -> list[Request]:
    """Requests by name, priority, arrival and number of times the scheduler preempted them."""
    requests = []
    for name, priority, arrival, preemptions in entries:
        r = request(name, priority=priority, arrival=arrival)
        r.account.num_shortage_preemptions = preemptions
        requests.append(r)
    return requests


def victim(requests: list[Request], needy: int, policy: Policy, cap: int | None) -> str:
    config = SchedulerConfig(policy=policy, max_preemptions=cap)
    rank = RankState("r", 1, 8, 100, config, deferring=True)
    runs = [rank.admit(request, 0.0) for request in requests]
    return make_policy(config).victim(StepPlan(rank, 0), runs[needy]).request.request_id


def test_fcfs_takes_the_last_admitted() -> None:
    requests = running(("a", 0, 9.0, 0), ("b", 0, 1.0, 0), ("c", 0, 5.0, 0))
    assert [victim(requests, needy, Policy.FCFS, None) for needy in range(3)] == ["c", "c", "c"]


def test_priority_takes_the_worst_and_of_equals_the_first_in_running() -> None:
    requests = running(("a", 1, 5.0, 0), ("b", 2, 5.0, 0), ("c", 2, 7.0, 0), ("d", 0, 9.0, 0))
    assert victim(requests, 0, Policy.PRIORITY, None) == "c"
    equal = running(("a", 1, 5.0, 0), ("b", 1, 5.0, 0), ("c", 1, 5.0, 0))
    assert victim(equal, 2, Policy.PRIORITY, None) == "a"


@pytest.mark.parametrize("policy", list(Policy))
def test_who_was_preempted_often_enough_is_spared(policy: Policy) -> None:
    requests = running(("a", 0, 0.0, 0), ("b", 0, 1.0, 0), ("c", 0, 2.0, 3))
    assert victim(requests, 0, policy, 3) == "b"
    assert victim(requests, 0, policy, 4) == "c"
    assert victim(requests, 0, policy, None) == "c"


@pytest.mark.parametrize("policy", list(Policy))
def test_the_needy_request_does_not_count_as_another_victim(policy: Policy) -> None:
    """Sparing c at the price of the one that needs the blocks would gain nothing."""
    requests = running(("a", 0, 0.0, 0), ("b", 0, 1.0, 3), ("c", 0, 2.0, 3))
    assert victim(requests, 0, policy, 3) == "c"
    requests = running(("a", 0, 0.0, 3), ("b", 0, 1.0, 0), ("c", 0, 2.0, 3))
    assert victim(requests, 1, policy, 3) == "c"


@pytest.mark.parametrize("policy", list(Policy))
def test_when_all_are_at_the_cap_the_ordinary_order_decides(policy: Policy) -> None:
    requests = running(("a", 0, 0.0, 3), ("b", 0, 1.0, 4), ("c", 0, 2.0, 3))
    assert victim(requests, 0, policy, 3) == "c"


@pytest.mark.parametrize("policy", list(Policy))
def test_a_needy_request_that_is_the_worst_goes_itself(policy: Policy) -> None:
    requests = running(("a", 0, 0.0, 0), ("b", 0, 1.0, 0))
    assert victim(requests, 1, policy, 3) == "b"


def test_a_cap_of_zero_spares_nobody_more_than_another() -> None:
    requests = running(("a", 0, 0.0, 0), ("b", 0, 1.0, 0))
    assert victim(requests, 0, Policy.FCFS, 0) == "b"


class Recording(FcfsPolicy):
    """Keeps out a request and notes what it hears."""

    def __init__(self) -> None:
        super().__init__(None)
        self.kept_out = ""
        self.heard: list[str] = []

    def running_order(self, rank: RankState) -> list[Run]:
        return list(reversed(rank.running))

    def gate(self, plan: StepPlan, request: Request) -> SkipReason | None:
        return OVER_SHARE if request.request_id == self.kept_out else None

    def charge(self, plan: StepPlan) -> None:
        self.heard.append(f"{sum(plan.num_tokens)} tokens")

    def on_finish(self, request: Request) -> None:
        self.heard.append(f"{request.request_id} ended")

    def tick(self, now: float) -> None:
        self.heard.append(f"{now} s")

    def next_deadline(self) -> float | None:
        return 7.0


OVER_SHARE = SkipReason("OVER_SHARE", "its tenant has more than its share", puts_aside=True)


def test_a_policy_is_asked_and_told_what_it_may_decide_by() -> None:
    world = World(SchedulerConfig(block_size=4, max_inflight_steps=1))
    policy = Recording()
    world.scheduler.state.policy, world.scheduler.state.queue = policy, policy.queue
    assert world.scheduler.next_deadline() == 7.0
    for name, length in (("a", 5), ("kept out", 6), ("c", 3)):
        world.submit(name, length, 2)
    policy.kept_out = "kept out"
    assert world.rows_of(world.step()) == [("a", 5), ("c", 3)]
    explanation = world.scheduler.explain("kept out")
    assert explanation is not None and explanation.reason is OVER_SHARE
    assert world.rows_of(world.step()) == [("c", 1), ("a", 1)], "running requests are served in the policy's order"
    policy.kept_out = ""
    world.abort("kept out")
    assert world.schedule() is not None, "the ends are announced"
    world.tick(1.0)
    assert policy.heard == ["8 tokens", "2 tokens", "c ended", "a ended", "kept out ended", "0 tokens", "1.0 s"]


def test_losing_workers_and_resets_weigh_differently() -> None:
    """Neither a lost worker nor a reset counts towards the cap; a reset is somebody's choice and a preemption."""
    world = World(SchedulerConfig(block_size=4))
    world.submit("a", 5, 9)
    world.step()
    world.lose("r0")
    world.join("r0", 20)
    world.step()
    assert (world.request("a").account.num_preemptions, world.request("a").account.num_shortage_preemptions) == (1, 0)
    world.reset(preempt_running=True)
    assert (world.request("a").account.num_preemptions, world.request("a").account.num_shortage_preemptions) == (2, 0)
    assert world.scheduler.totals.num_preemptions == 1
    assert world.scheduler.totals.num_requeued_after_worker_loss == 1
    world.run()


def test_a_spared_victim_with_a_row_before_the_needy_one_is_withdrawn_properly() -> None:
    """FCFS: c is at its cap, so b, which has its row already, goes for the sake of c."""
    config = SchedulerConfig(block_size=4, max_preemptions=1, enable_prefix_caching=False, max_inflight_steps=1)
    world = World(config, num_blocks=7)
    for name, length in (("a", 5), ("b", 5), ("c", 7)):
        world.submit(name, length, 9)
    world.step()
    world.request("c").account.num_shortage_preemptions = 1
    assert world.free() == 0
    world.step()
    output = world.step()
    assert [p.victim for p in world.preemptions] == ["b"]
    assert world.rows_of(output) == [("a", 1), ("c", 1)]
    world.run()
    world.check_texts()


def test_every_preemption_is_told_with_its_cost_and_gain() -> None:
    world = World(SchedulerConfig(block_size=4, enable_prefix_caching=False), num_blocks=5)
    world.submit("a", 8, 5)
    world.submit("b", 8, 5)
    world.step()
    world.schedule()
    (fact,) = world.preemptions
    assert (fact.rank, fact.victim, fact.beneficiary, fact.cause) == ("r0", "b", "a", "blocks")
    assert (fact.num_blocks_gained, fact.num_tokens_to_recompute, fact.num_preemptions_before) == (2, 8, 0)
    world.run()


def test_shared_blocks_are_no_gain() -> None:
    world = World(SchedulerConfig(block_size=4), num_blocks=6)
    prompt = list(range(8))
    world.submit("a", prompt, 9)
    world.submit("b", [*prompt, 50], 3)
    world.step()
    assert world.run_of("b").blocks[:2] == world.run_of("a").blocks[:2]
    world.reset(preempt_running=True)
    # b leaves first, a after it: then nothing is shared any more.
    assert [(p.victim, p.num_blocks_gained) for p in world.preemptions] == [("b", 1), ("a", 2)]
    world.run()
    world.check_texts()
