"""Random worlds (docs/simulation.md), as many as every test run plays; and that they would find something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count, islice

import pytest

from scheduler_svc.core import running, settlement
from scheduler_svc.core.events import StepAcked, WorkerProtocolError
from scheduler_svc.core.kv.manager import KvManager
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies.base import SchedulingPolicy
from scheduler_svc.core.policies.fcfs import FcfsPolicy
from scheduler_svc.core.policies.priority import PriorityPolicy
from scheduler_svc.core.request import Run
from scheduler_svc.core.state import CoreState
from scheduler_svc.simulation.core_simulation import SimulationFailure, World, not_reached, play, simulate, world_digest

# Worlds in which each planted fault must be found.
NUM_WORLDS = 60


@pytest.mark.timeout(600)
def test_random_worlds_break_no_rule_and_reach_what_they_must() -> None:
    reached = simulate(100_000, seed=1, checked_share=0.15)
    print(f"{reached['steps']} steps in {reached['worlds']} worlds")
    assert not_reached(reached) == []
    assert reached["steps checked after every event"] > 5_000


def ignore_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    free = KvManager.free

    def free_now(self: KvManager, run: Run, *, acked_fence: int, newest_fence: int, reason: str) -> None:
        free(self, run, acked_fence=newest_fence, newest_fence=newest_fence, reason=reason)

    monkeypatch.setattr(KvManager, "free", free_now)


def apply_late_results(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge = settlement.acknowledge

    def acknowledge_any(state: CoreState, event: StepAcked) -> None:
        rank = state.ranks.get(event.rank)
        if rank is not None and rank.window.oldest is not None:
            event = replace(event, epoch=rank.epoch, step_seq=rank.window.oldest.step_seq)
        acknowledge(state, event)

    monkeypatch.setattr(settlement, "acknowledge", acknowledge_any)


def forget_hashes_of_the_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvManager, "uncache_blocks", lambda self, run, num_cached: None)


def preempt_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: SchedulingPolicy, running: Iterable[Run]) -> Run:
        return next(iter(running))

    for policy in (FcfsPolicy, PriorityPolicy):
        monkeypatch.setattr(policy, "worst", first)


def drop_tokens_of_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(run: Run, row: list[int], expected: int, ends: list[object]) -> bool:
        run.request.awaited -= expected
        return False

    monkeypatch.setattr(settlement, "_append_late", drop)


def never_wait_for_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = running._make_room

    def make_room_in_vain(*arguments: object) -> bool:
        plan = arguments[2]
        assert isinstance(plan, StepPlan)
        made: bool = make_room(*arguments)  # type: ignore[arg-type]
        plan._fence_needs.clear()
        return made

    monkeypatch.setattr(running, "_make_room", make_room_in_vain)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "plant",
    [ignore_the_fence, apply_late_results, preempt_the_first, drop_tokens_of_earlier_runs, never_wait_for_a_fence],
    ids=lambda plant: plant.__name__,
)
def test_random_worlds_find_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationFailure) as failure:
        for seed in range(1, NUM_WORLDS):
            play(seed, is_checked=True, num_events=300)
    # A rule that is broken or an answer that does not fit, and not a mistake in the fault itself.
    assert isinstance(failure.value.__cause__, AssertionError | WorkerProtocolError)


@pytest.mark.timeout(600)
def test_crowded_worlds_find_hashes_that_are_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is withdrawn had tokens in the same step, before somebody more urgent behind: rare elsewhere."""
    forget_hashes_of_the_withdrawn(monkeypatch)
    crowded = (seed for seed in count(1) if World.draw(seed).is_crowded)
    with pytest.raises(SimulationFailure):
        for seed in islice(crowded, NUM_WORLDS):
            play(seed, is_checked=True, num_events=600)


@pytest.mark.parametrize("seed", [3, 11, 23])
def test_a_world_says_the_same_in_every_process(seed: int) -> None:
    script = f"from scheduler_svc.simulation.core_simulation import world_digest; print(world_digest({seed}, 400))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "4711")
    }
    assert digests == {world_digest(seed, 400)}
