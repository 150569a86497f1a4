"""When prefills wait for decodes (D19): on a rank's own rhythm, counted from the group's last idle moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.throttle import Throttle
from tests.support.core_harness import World

CONFIG = SchedulerConfig(
    block_size=4, max_num_seqs=4, max_num_batched_tokens=8, prefill_schedule_interval=4, max_inflight_steps=1
)


@pytest.mark.parametrize("interval, steps", [(1, []), (2, [1, 3, 5, 7]), (4, [1, 2, 3, 5, 6, 7])])
def test_every_nth_step_is_aligned(interval: int, steps: list[int]) -> None:
    assert [n for n in range(8) if throttle(interval, n).is_between()] == steps


def throttle(interval: int, num_steps: int, *, capacity_bound: bool = False) -> Throttle:
    made = Throttle(interval)
    made.num_steps, made.capacity_bound = num_steps, capacity_bound
    return made


def test_deferring_needs_all_three() -> None:
    assert throttle(4, 1).defers_prefills(2)
    assert not throttle(4, 4).defers_prefills(2)
    assert not throttle(4, 1, capacity_bound=True).defers_prefills(2)
    assert not throttle(4, 1).defers_prefills(0)


def started(world: World, steps: int) -> list[list[str]]:
    result = []
    for _ in range(steps):
        output = world.step()
        result.append([] if output is None else [new.request_id for new in output.new_requests])
    return result


def test_a_prefill_waits_for_the_aligned_step() -> None:
    world = World(CONFIG)
    world.submit("decode", 4, 20)
    assert started(world, 1) == [["decode"]]
    world.submit("prefill", 4, 4)
    assert started(world, 1) == [[]]
    explanation = world.scheduler.explain("prefill")
    assert explanation is not None and explanation.reason is reasons.PREFILL_DEFERRED
    assert started(world, 3) == [[], [], ["prefill"]]
    world.run()
    world.check_texts()


def test_a_chunk_waits_as_well() -> None:
    world = World(replace(CONFIG, max_num_batched_tokens=6))
    world.submit("decode", 4, 30)
    world.step()
    for _ in range(3):
        world.step()
    world.submit("long", 12, 4)
    assert world.rows_of(world.step()) == [("decode", 1), ("long", 5)]
    for _ in range(3):
        assert world.rows_of(world.step()) == [("decode", 1)]
        explanation = world.scheduler.explain("long")
        assert explanation is not None and explanation.reason is reasons.PREFILL_DEFERRED
    assert world.rows_of(world.step()) == [("decode", 1), ("long", 5)]
    assert world.scheduler.totals.num_deferring_steps >= 3
    world.run()
    world.check_texts()


def test_only_steps_that_left_a_prompt_out_count_as_deferring() -> None:
    world = World(CONFIG)
    world.submit("decode", 4, 20)
    for _ in range(9):
        world.step()
    totals = world.scheduler.totals
    assert totals.num_deferring_steps == 0, "nobody was there to be left out"
    world.submit("prefill", 4, 4)
    num_steps = 0
    while world.request("prefill").run is None:
        world.step()
        num_steps += 1
    assert totals.num_deferring_steps == totals.skips[reasons.PREFILL_DEFERRED] == num_steps - 1 > 0
    world.run()


def test_the_rhythm_starts_anew_when_everybody_was_idle() -> None:
    world = World(CONFIG)
    world.submit("first", 4, 3)
    world.run()
    assert world.rank().throttle.num_steps == 0
    world.submit("decode", 4, 9)
    world.step()
    assert world.rank().throttle.num_steps == 1
    world.run()


def test_idle_means_all_ranks() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    world.submit("a", 4, 8)
    world.step("r1")
    world.submit("b", 4, 2)
    for _ in range(2):
        world.step("r0")
    world.step("r0")
    assert world.running("r0") == [] and world.rank("r0").throttle.num_steps == 2
    world.run()
    assert [world.rank(name).throttle.num_steps for name in ("r0", "r1")] == [0, 0]


def test_idle_by_abort_counts_too() -> None:
    world = World(CONFIG)
    world.submit("a", 4, 20)
    world.step()
    world.step()
    world.abort("a")
    world.run()
    assert world.rank().throttle.num_steps == 0
