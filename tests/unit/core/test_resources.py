"""Resources are asked at the right moments, in their order, and take back exactly what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from scheduler_svc.core import reasons, rows
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import EndReason, RequestArrived
from scheduler_svc.core.kv.prefix_index import Identity
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import FIRST_RESOURCE_BIT, Run, RunEnd
from scheduler_svc.core.resources import ALL_REASONS, KINDS, Resources, make_resources
from scheduler_svc.core.resources.base import Resource
from scheduler_svc.core.resources.draining import Draining
from scheduler_svc.core.resources.grammar import Grammar
from scheduler_svc.core.resources.quarantine import Quarantine
from scheduler_svc.core.resources.speculation import Speculation
from scheduler_svc.core.resources.tenants import Isolation
from tests.support.core_harness import World
from tests.support.quota import QUOTA_SPENT, Quota

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=6, max_num_batched_tokens=32, max_inflight_steps=2)


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


# --- the container ------------------------------------------------------------------------------------------------


def test_a_feature_that_is_off_is_not_asked() -> None:
    plain = make_resources(SchedulerConfig())
    assert [type(resource) for resource in plain] == [Grammar, Quarantine, Draining, Isolation]
    assert not (plain.wants or plain.clips or plain.claims.opens or plain.claims.withdraws or plain.claims.builds)
    drafts = make_resources(SchedulerConfig(num_speculative_tokens=2))
    assert [type(resource) for resource in drafts] == [Grammar, Speculation, Quarantine, Draining, Isolation]
    assert len(drafts.wants) == len(drafts.claims.withdraws) == 1
    assert Resources([Resource()]).gates == ()


def test_every_resource_has_a_bit_of_its_own_and_what_is_taken_last_is_withdrawn_first() -> None:
    first, second = Quota(1), Quota(2)
    resources = Resources([first, second])
    assert (first.bit, second.bit) == (FIRST_RESOURCE_BIT, 2 * FIRST_RESOURCE_BIT)
    assert resources.claims.takes == (first.take, second.take)
    assert resources.claims.withdraws == (second.withdraw, first.withdraw)
    assert resources.find(Quota) is first and resources.find(Speculation) is None


def test_reasons_have_names_of_their_own() -> None:
    names = [one.name for one in ALL_REASONS]
    assert len(set(names)) == len(names) > len(reasons.ALL)
    assert {one for kind in KINDS for one in kind.reasons} <= set(ALL_REASONS)


class Adapters(Resource):
    """The adapter of a request is the first letter of its id; one whose id ends with "!" has an image in its prompt."""

    def identity(self, event: RequestArrived) -> Identity:
        spans = ((4, 2, b"image"),) if event.request_id.endswith("!") else ()
        return Identity(((b"adapter", event.request_id[:1].encode()),), spans)


def test_requests_share_blocks_only_if_their_kv_depends_on_the_same() -> None:
    world = World(CONFIG, resources=[Adapters(), Quota(9)])
    prompt = list(range(13))
    hits = {}
    for name in ("a1", "a2", "b1", "a3!", "a4!"):
        client = world.submit(name, prompt, 1)
        world.run()
        assert client.ended is not None
        hits[name] = client.ended.usage.num_cached_tokens
    assert hits == {"a1": 0, "a2": 12, "b1": 0, "a3!": 4, "a4!": 12}


# --- a step -------------------------------------------------------------------------------------------------------


def test_a_running_request_without_its_share_is_passed_over_and_the_pass_goes_on() -> None:
    quota = Quota(1)
    world = World(CONFIG, resources=[quota])
    for name in ("q1", "a"):
        world.submit(name, 3, 9)
    world.step()
    quota.units = 2
    world.submit("q2", 3, 6)
    world.step()
    quota.units = 1
    assert world.rows_of(world.step()) == [("q1", 1), ("a", 1)]
    assert reason(world, "q2") is QUOTA_SPENT
    world.run()
    world.check_texts()
    assert quota.arrived == ["q1", "a", "q2"] and sorted(quota.finished) == ["a", "q1", "q2"]
    assert quota.ends.count(("q1", RunEnd.FINISHED)) == 1


def test_a_waiting_request_without_its_share_stops_the_pass() -> None:
    world = World(CONFIG, resources=[Quota(1)])
    for name in ("q1", "q2", "a"):
        world.submit(name, 3, 6)
    assert world.rows_of(world.schedule()) == [("q1", 3)]
    assert (reason(world, "q2"), reason(world, "a")) == (QUOTA_SPENT, reasons.BEHIND)
    world.run()
    world.check_texts()


def test_a_resource_may_shorten_a_row() -> None:
    world = World(CONFIG, resources=[Quota(5, most=2)])
    client = world.submit("q1", 7, 3)
    assert [world.rows_of(world.step()) for _ in range(4)] == [[("q1", n)] for n in (2, 2, 2, 1)]
    world.run()
    world.check_texts()
    assert client.reason is EndReason.LENGTH


def test_a_victim_gives_its_share_back() -> None:
    """FCFS: qc was preempted often enough, so qb, which has its row and its unit already, goes for the sake of qc."""
    quota = Quota(2)
    config = replace(CONFIG, max_preemptions=1, enable_prefix_caching=False, max_inflight_steps=1)
    world = World(config, num_blocks=7, resources=[quota])
    for name, length in (("a", 5), ("qb", 5), ("qc", 7)):
        world.submit(name, length, 9)
    world.step()
    world.request("qc").account.num_shortage_preemptions = 1
    world.step()
    output = world.step()
    assert [p.victim for p in world.preemptions] == ["qb"] and ("qb", RunEnd.PREEMPTED) in quota.ends
    assert world.rows_of(output) == [("a", 1), ("qc", 1)]
    assert quota.left == 1 and list(quota.taken) == [world.run_of("qc")]
    world.run()
    world.check_texts()


def test_runs_of_a_lost_rank_end_with_it() -> None:
    quota = Quota(2)
    world = World(CONFIG, resources=[quota])
    world.submit("q1", 3, 6)
    world.schedule()
    world.lose("r0")
    assert quota.ends == [("q1", RunEnd.RANK_LOST)]


# --- withdraw is the inverse of take ------------------------------------------------------------------------------


def look(world: World, plan: StepPlan, run: Run) -> object:
    """What a row may change."""
    state = world.scheduler.state
    return (
        [resource.snapshot(plan.rank) for resource in state.resources],
        (plan.tokens_left, list(plan.runs), list(plan.num_tokens), dict(plan.may_yield), dict(plan.grown)),
        (run.special, run.num_cached, run.cache_at),
        sorted(plan.rank.kv.pool.index.entries()),
    )


def take_and_withdraw(world: World) -> int:
    """Give each running request a row in a plan of its own and take it back: nothing has changed. Returns how many rows
    changed something while they stood."""
    state = world.scheduler.state
    num_changes = 0
    for rank in state.ranks.values():
        for run in list(rank.running):
            plan = StepPlan(rank, 32, longest=state.max_model_len, claims=state.resources.claims)
            start, known = run.computed, run.request.num_tokens + run.request.awaited
            n = rows.size_row(state, plan, run.request, start, known, admitting=False)
            if isinstance(n, SkipReason) or min(start + n, run.request.num_tokens) > run.capacity:
                continue
            before = look(world, plan, run)
            plan.withdraw(run)
            assert look(world, plan, run) == before, "it took nothing yet"
            plan.take(run, start, n)
            num_changes += look(world, plan, run)[0] != before[0]  # type: ignore[index]
            for _ in range(2):
                plan.withdraw(run)
                assert look(world, plan, run) == before
    return num_changes


def repetitive(prefix: int, index: int) -> int:
    return 10 + index % 3


def worlds() -> Iterator[tuple[str, Callable[[], World]]]:
    tight = replace(CONFIG, max_num_batched_tokens=9, long_prefill_token_threshold=4)
    drafts = replace(tight, num_speculative_tokens=3)
    yield "drafts", lambda: World(drafts, num_blocks=14, sampler=repetitive)
    outside = SchedulerConfig.reference(
        block_size=4, max_num_seqs=6, max_num_batched_tokens=16, num_speculative_tokens=2, max_model_len=64
    ).with_rules(results_first=True)
    yield "drafts from outside", lambda: World(outside, num_blocks=14)
    yield "quota", lambda: World(tight, num_blocks=14, resources=[Quota(2, most=3)])
    yield "drafts and quota", lambda: World(drafts, num_blocks=14, sampler=repetitive, resources=[Quota(2, most=3)])


def play(world: World) -> int:
    """A world with chunks, drafts and preemptions; at every step each row is taken and withdrawn once."""
    num_changes = 0
    for index in range(8):
        world.submit(f"{'q' if index % 2 else 'a'}{index}", 4 + 2 * index, 12)
    for turn in range(400):
        if not world.scheduler.num_live_requests:
            break
        if not world.config.rules.proposes_drafts and turn % 3 == 0:
            running = [run for run in world.rank().running if not run.request.awaited]
            world.draft({run.request.request_id: [10, 11] for run in running})
        num_changes += take_and_withdraw(world)
        world.step()
    return num_changes


@pytest.mark.parametrize("build", [build for _, build in worlds()], ids=[name for name, _ in worlds()])
def test_what_is_taken_and_withdrawn_leaves_no_trace(build: Callable[[], World]) -> None:
    world = build()
    assert play(world) > 5
    world.run()
    world.check_texts()


class ForgetfulQuota(Quota):
    def withdraw(self, plan: StepPlan, run: Run) -> None:
        """Forgets to give the unit back."""
        self.taken.pop(run, None)


class ForgetfulSpeculation(Speculation):
    def withdraw(self, plan: StepPlan, run: Run) -> None:
        """Forgets the drafts that the row had taken."""
        if self._rows.pop(run, None) is not None:
            del plan.may_yield[run]


class GreedyQuota(Quota):
    def snapshot(self, rank: RankState) -> object:
        """Says more than withdraw restores."""
        return super().snapshot(rank), len(self.arrived)

    def withdraw(self, plan: StepPlan, run: Run) -> None:
        super().withdraw(plan, run)
        self.arrived.append("a trace")


@pytest.mark.parametrize("forgetful", [ForgetfulQuota(2), GreedyQuota(2), ForgetfulSpeculation])
def test_a_resource_that_forgets_is_found(forgetful: Resource | type[Speculation]) -> None:
    if isinstance(forgetful, Resource):
        world = World(CONFIG, num_blocks=14, resources=[forgetful])
    else:
        world = World(replace(CONFIG, num_speculative_tokens=3), num_blocks=14, sampler=repetitive)
        world.scheduler.state.resources = Resources([forgetful(world.config)])
    with pytest.raises(AssertionError):
        play(world)
