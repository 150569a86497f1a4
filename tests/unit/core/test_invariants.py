"""The check that everything else leans on: a state that is damaged in one place is noticed, and said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import CHUNK
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def busy() -> World:
    """Two that run with steps in flight, one that waits, one block parked."""
    world = World(CONFIG, num_blocks=12)
    world.submit("gone", 3, 9)
    for name in "ab":
        world.submit(name, 9, 9)
    world.schedule()
    world.schedule()
    world.abort("gone")
    world.submit("waits", 20, 9)
    invariants.check(world.scheduler.state)
    return world


def _lose_a_free_block(world: World) -> None:
    world.rank().kv.pool.take(1)


def _reference_twice(world: World) -> None:
    world.rank().kv.pool.refs[world.run_of("a").blocks[0]] += 1


def _share_a_row(world: World) -> None:
    world.run_of("a").row = world.run_of("b").row


def _lose_a_row(world: World) -> None:
    world.rank().free_rows.pop()


def _run_and_wait(world: World) -> None:
    world.scheduler.state.queue.append(world.request("a"))


def _forget_what_is_parked(world: World) -> None:
    world.rank().kv.pool.num_parked -= 1


def _count_a_prefill_too_many(world: World) -> None:
    world.rank().prefills[world.run_of("a")] = None


def _take_a_decode_for_a_chunk(world: World) -> None:
    world.run_of("a").mark(CHUNK)


def _lose_a_token_of_a_plain_run(world: World) -> None:
    world.request("a").awaited += 1


def _overlook_the_end_of_a_table(world: World) -> None:
    world.run_of("a").plain_until += 1


def _lose_tokens_in_flight(world: World) -> None:
    world.run_of("a").in_flight -= 1


def _swap_blocks(world: World) -> None:
    a, b = world.run_of("a"), world.run_of("b")
    a.blocks[0], b.blocks[0] = b.blocks[0], a.blocks[0]


def _forget_a_live_request(world: World) -> None:
    del world.scheduler.state.requests["waits"]


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_free_block, _reference_twice, _share_a_row, _lose_a_row, _run_and_wait, _forget_what_is_parked,
        _count_a_prefill_too_many, _take_a_decode_for_a_chunk, _lose_a_token_of_a_plain_run,
        _overlook_the_end_of_a_table, _lose_tokens_in_flight, _swap_blocks, _forget_a_live_request,
    ],
    ids=lambda damage: damage.__name__.strip("_").replace("_", " "),
)  # fmt: skip
def test_damage_is_noticed(damage: Callable[[World], None]) -> None:
    world = busy()
    damage(world)
    with pytest.raises(invariants.InvariantViolation):
        invariants.check(world.scheduler.state)
