"""D51: one row fails, its request ends, the epoch goes on, and nothing that the row wrote is used again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core import lifecycle
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import EndReason, RequestPreempted, RowFailed, StepAcked, WorkerProtocolError
from tests.support.core_harness import World
from tests.support.loader import Loader

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, max_inflight_steps=2)
PROMPT = list(range(20, 44))


def fail(world: World, *request_ids: str, rank: str = "r0") -> list[object]:
    """Deliver the oldest answer with the rows of these requests failed."""
    answer = world.answers[rank].popleft()
    record = world.rank(rank).window.oldest
    assert record is not None
    counts, sampled, failed = [], list(answer.sampled), []
    kept: list[int] = []
    given = answer.counts or [min(expected, 1) for expected in record.expected]
    for run, count in zip(record.runs, given, strict=True):
        row, sampled = sampled[:count], sampled[count:]
        if run.request.request_id in request_ids:
            failed.append(RowFailed(run.row, "not finite"))
            row = []
        kept += row
        counts.append(len(row))
    effects = world.handle(StepAcked(rank, world.epochs[rank], answer.step_seq, kept, counts, tuple(failed)))
    world.workers[rank].acknowledged(answer.step_seq)
    return list(effects)


def test_d51_the_request_ends_and_its_neighbours_go_on() -> None:
    world = World(CONFIG)
    bad = world.submit("bad", 3, 9)
    good = world.submit("good", 4, 9)
    world.step()
    world.schedule()
    fail(world, "bad")
    assert bad.ended is not None and bad.reason is EndReason.MODEL_OUTPUT_INVALID
    assert "not finite" in bad.ended.message
    assert world.scheduler.totals.num_row_errors == 1 and world.scheduler.totals.num_failed == 1
    world.run()
    assert good.reason is EndReason.LENGTH and world.epochs["r0"] == 1
    world.check_texts()
    world.check_idle()


def test_d51_a_request_that_has_hit_the_poisoned_first_block_is_computed_again_without_it() -> None:
    """What is not finite arises in chunk 1 of 3 and is noticed at the first token; meanwhile a second request has found
    the first blocks."""
    world = World(CONFIG)
    bad = world.submit("bad", PROMPT, 5)
    world.schedule()
    world.schedule()
    second = world.submit("second", PROMPT[:16] + [7, 8, 9], 5)
    while world.rank().window.oldest is not None and "second" not in world.running():
        world.ack()
        world.schedule()
    assert world.request("second").account.num_cached_tokens
    while (step := world.rank().window.oldest) is None or not any(step.expected):
        world.ack()
        world.schedule()
    index = world.rank().kv.pool.index
    shared = set(world.run_of("second").blocks) & set(world.run_of("bad").blocks)
    assert shared and all(index.hash_of(block) for block in shared)
    effects = fail(world, "bad")
    assert bad.reason is EndReason.MODEL_OUTPUT_INVALID
    (preempted,) = [effect for effect in effects if isinstance(effect, RequestPreempted)]
    assert (preempted.victim, preempted.cause) == ("second", "row_error")
    assert len(index) == 0, "all that either of them has written"
    while world.request("second").run is None or world.request("second").run.ended:  # type: ignore[union-attr]
        assert world.turn()
    assert world.scheduler.totals.recomputed_by_cause.get("row_error") is not None
    world.run()
    assert second.reason is EndReason.LENGTH
    world.check_texts()
    world.check_idle()


def test_d51_what_was_computed_on_top_of_shared_blocks_is_not_trusted_either() -> None:
    """b has found blocks of a, and c blocks of both."""
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    world.submit("a", PROMPT[:9], 20)
    world.step()
    world.submit("b", PROMPT[:17], 20)
    world.step()
    world.submit("c", PROMPT[:21], 20)
    world.step()
    bystander = world.submit("d", 11, 20)
    world.step()
    world.schedule()
    effects = fail(world, "a")
    victims = {effect.victim for effect in effects if isinstance(effect, RequestPreempted)}
    assert victims == {"b", "c"}
    assert world.running() == ["d"]
    index = world.rank().kv.pool.index
    kept = {block for _, blocks in index.entries() for block in blocks}
    run = world.run_of("d")
    assert kept == set(run.blocks[: run.num_cached]), "what b and c have computed on top has left the index too"
    world.run()
    assert bystander.ended is not None and bystander.ended.usage.num_preemptions == 0
    world.check_texts()


@pytest.mark.parametrize("gone", ["aborted", "preempted"])
def test_d51_what_a_run_has_computed_on_top_leaves_the_index_although_it_has_ended(gone: str) -> None:
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    world.submit("bad", PROMPT[:9], 20)
    world.step()
    other = world.submit("other", PROMPT[:21], 20)
    world.step()
    world.schedule()
    if gone == "aborted":
        world.abort("other")
    else:
        lifecycle.recompute(world.scheduler.state, world.rank(), world.run_of("other"), cause="reset")
    assert len(world.rank().kv.pool.index) >= 5
    fail(world, "bad")
    assert len(world.rank().kv.pool.index) == 0
    world.run()
    assert other.reason is (EndReason.ABORTED if gone == "aborted" else EndReason.LENGTH)
    world.check_texts()


def test_d51_blocks_of_a_run_that_has_ended_meanwhile_leave_the_index_too() -> None:
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    bad = world.submit("bad", PROMPT[:9], 9)
    world.schedule()
    index = world.rank().kv.pool.index
    assert len(index) == 2
    world.abort("bad")
    assert len(index) == 2, "its blocks may be found by others"
    fail(world, "bad")
    assert len(index) == 0
    assert bad.reason is EndReason.ABORTED
    world.run()
    world.check_idle()


def test_d51_a_row_of_a_partial_prefill_may_fail() -> None:
    world = World(CONFIG)
    bad = world.submit("bad", PROMPT, 5)
    world.schedule()
    fail(world, "bad")
    assert bad.reason is EndReason.MODEL_OUTPUT_INVALID
    assert len(world.rank().kv.pool.index) == 0
    world.run()
    world.check_idle()


@pytest.mark.parametrize(
    "counts, errors",
    [
        (None, (0,)),
        ([1, 1], (5,)),
        ([0, 1], (0, 0)),
        ([1, 1], (0,)),
        ([0, 0], (0,)),
    ],
    ids=["no counts", "unknown row", "twice", "yields all the same", "another one yields nothing"],
)
def test_d51_row_errors_that_do_not_fit_are_a_wrong_answer(counts: list[int] | None, errors: tuple[int, ...]) -> None:
    world = World(CONFIG)
    world.submit("a", 3, 9)
    world.submit("b", 3, 9)
    world.schedule()
    record = world.rank().window.oldest
    assert record is not None
    rows = [run.row for run in record.runs] + [0, 0, 0, 99]
    sampled = [7] * (2 if counts is None else sum(counts))
    failed = tuple(RowFailed(rows[index], "") for index in errors)
    with pytest.raises(WorkerProtocolError):
        world.scheduler.handle(StepAcked("r0", 1, record.step_seq, sampled, counts, failed))
    assert world.rank().window.oldest is record


def test_d51_a_request_that_is_set_aside_on_top_of_such_blocks_gives_them_up() -> None:
    """Its blocks are kept for the load, which goes on; then everything is loaded again."""
    loader = Loader(16)
    world = World(replace(CONFIG, max_num_batched_tokens=64), resources=[loader])
    world.submit("bad", PROMPT[:9], 9)
    world.schedule()
    client = world.submit("load", PROMPT, 5)
    world.schedule()
    run = world.run_of("load")
    assert run.is_set_aside and (run.settled, run.in_flight) == (8, 8)
    fail(world, "bad")
    assert run.ended and not world.rank().set_aside and [hold.run for hold in world.rank().kv.holds.values()] == [run]
    assert len(world.rank().kv.pool.index) == 0
    loader.end(world.rank(), run, 8)
    world.ack()
    world.schedule()
    again = world.run_of("load")
    assert again is not run and again.settled == 0
    loader.end(world.rank(), again, 0)
    world.run()
    assert client.reason is EndReason.LENGTH
    world.check_texts()
    world.check_idle()


def test_d51_what_uses_blocks_of_a_run_that_has_ended_meanwhile_is_computed_again() -> None:
    """The table of such a run is empty: its blocks are found by their hashes."""
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    world.submit("bad", PROMPT[:9], 9)
    world.schedule()
    other = world.submit("other", PROMPT[:13], 9)
    world.schedule()
    assert world.request("other").account.num_cached_tokens == 8
    world.abort("bad")
    effects = fail(world, "bad")
    assert [effect.victim for effect in effects if isinstance(effect, RequestPreempted)] == ["other"]
    world.run()
    assert other.reason is EndReason.LENGTH
    world.check_texts()


@pytest.mark.parametrize("depth, num_in_flight", [(1, 1), (2, 1), (2, 2)])
def test_d51_a_row_that_fails_because_it_has_read_a_failed_row_is_computed_again(
    depth: int, num_in_flight: int
) -> None:
    """Both fail in one result. Only the first of them is at fault, whatever else is in flight."""
    world = World(replace(CONFIG, max_num_batched_tokens=64, max_inflight_steps=depth))
    bad = world.submit("bad", PROMPT[:9], 9)
    other = world.submit("other", [*PROMPT[:9], 1, 2, 3], 9)
    for _ in range(num_in_flight):
        world.schedule()
    fail(world, "bad", "other")
    world.run()
    assert (bad.reason, other.reason) == (EndReason.MODEL_OUTPUT_INVALID, EndReason.LENGTH)
    world.check_texts()


def test_d51_blocks_of_a_neighbour_that_ends_in_the_same_result_are_not_found_later() -> None:
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    world.submit("bad", PROMPT[:9], 9)
    world.submit("short", [*PROMPT[:9], 1, 2, 3, 4], 1)
    world.schedule()
    fail(world, "bad")
    assert len(world.rank().kv.pool.index) == 0


def test_d51_a_row_that_fails_after_its_run_was_given_up_takes_its_blocks_along() -> None:
    """A reset that is refused has preempted the run, and its blocks are still cached. Its request goes on."""
    world = World(replace(CONFIG, max_num_batched_tokens=64))
    client = world.submit("a", PROMPT[:9], 5)
    world.schedule()
    lifecycle.recompute(world.scheduler.state, world.rank(), world.run_of("a"), cause="reset")
    assert len(world.rank().kv.pool.index) == 2
    fail(world, "a")
    assert len(world.rank().kv.pool.index) == 0
    world.run()
    assert client.reason is EndReason.LENGTH
    world.check_texts()
