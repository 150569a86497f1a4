"""Rule 7: epochs count within one scheduler incarnation, the newest open wins, a lost stream goes on where it was."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.support.scheduler_double import Book, SchedulerDouble, StepSession, ids_of, new_request
from tests.support.worker_fixtures import Target, generate, own_worker


async def _begin(target: Target, session: StepSession, book: Book) -> list[int]:
    """Request "a" in row 0 with two outputs, nothing said to be processed."""
    added = [new_request("a", 0, target.prompt(6), target.table(24))]
    steps = book.step({0: 6}, new=added), book.step({0: 1})
    return [ids_of((await session.run(step)).sampled_token_ids)[0] for step in steps]


async def test_rule_7_a_lost_stream_goes_on_with_its_rows(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    cold = await generate(worker, session, book, worker.prompt(6), 4)
    assert await _begin(worker, session, book) == cold[:2]
    session.cut()
    again = await worker.open(scheduler)
    assert again.opened.executed_step_seq == book.step_seq
    outputs = [ids_of((await again.run(book.step({0: 1}))).sampled_token_ids)[0] for _ in range(1)]
    assert outputs == cold[2:3]


async def test_rule_7_replay_after_a_lost_stream_gets_answers_and_runs_nothing_twice(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    cold = await generate(worker, session, book, worker.prompt(6), 5)
    added = [new_request("a", 0, worker.prompt(6), worker.table(24))]
    steps = [book.step({0: 6}, new=added), book.step({0: 1}), book.step({0: 1})]
    for step in steps:
        await session.send(step)
    # Lost at a moment when any number of them may have been executed, or may not have arrived.
    first = await session.result()
    session.cut()
    again = await worker.open(scheduler)
    for step in steps[1:]:
        await again.send(step)
    results = [first] + [await again.result() for _ in steps[1:]]
    assert [result.step_seq for result in results] == [step.step_seq for step in steps]
    assert [ids_of(result.sampled_token_ids)[0] for result in results] == cold[:3]
    book.handled(results[-1])
    assert ids_of((await again.run(book.step({0: 1}))).sampled_token_ids) == cold[3:4]


async def test_rule_7_the_newest_open_wins_even_if_the_old_stream_seems_alive(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    """A half-open connection: the scheduler has given up a stream of which the worker has not heard the end."""
    session, book = await worker.open(scheduler), Book()
    cold = await generate(worker, session, book, worker.prompt(6), 3)
    await _begin(worker, session, book)
    async with SchedulerDouble(worker.address) as same_scheduler:
        same_scheduler.incarnation = scheduler.incarnation
        again = await worker.open(same_scheduler)
        assert (await session.ended()).code is grpc.StatusCode.ABORTED
        assert ids_of((await again.run(book.step({0: 1}))).sampled_token_ids) == cold[2:]


async def test_rule_7_a_later_epoch_starts_without_rows(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    await _begin(worker, session, book)
    later = await worker.open(scheduler, 3)
    assert later.opened.executed_step_seq == 0
    assert (await session.ended()).code is grpc.StatusCode.ABORTED
    assert (await later.run(Book(3).step())).num_rows_held == 0
    ended = await (await scheduler.try_open(worker.open_message(scheduler, 2))).ended()
    assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_TOO_SMALL")


async def test_rule_7_late_steps_of_an_older_epoch_are_refused(worker: Target, scheduler: SchedulerDouble) -> None:
    session = await worker.open(scheduler, 4)
    await session.send(Book(3).step())
    ended = await session.ended()
    assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_EPOCH")


@pytest.mark.parametrize("epoch", [1, 2, 3])
async def test_rule_7_another_scheduler_begins_afresh_whatever_its_epoch(
    epoch: int, worker: Target, scheduler: SchedulerDouble
) -> None:
    """A restarted scheduler may come with an epoch number that is smaller, equal or larger."""
    session, book = await worker.open(scheduler, 2), Book(2)
    await _begin(worker, session, book)
    async with SchedulerDouble(worker.address) as other:
        fresh = await worker.open(other, epoch)
        assert fresh.opened.executed_step_seq == 0
        assert (await session.ended()).code is grpc.StatusCode.ABORTED
        # Step 1 is executed, not answered from what the other scheduler's step 1 gave.
        result = await fresh.run(Book(epoch).step())
        assert result.num_rows_held == 0 and not result.sampled_token_ids


async def test_d57_an_older_scheduler_is_refused_while_a_newer_one_has_the_worker(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler, term=20), Book()
    await _begin(worker, session, book)
    async with SchedulerDouble(worker.address) as older:
        ended = await (await older.try_open(worker.open_message(older, term=10))).ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NEWER_SCHEDULER")
        # What is held stays as it is.
        assert len(ids_of((await session.run(book.step({0: 1}))).sampled_token_ids)) == 1
        session.cut()
        # And for a while after the end of its stream, so that it can come back.
        ended = await (await older.try_open(worker.open_message(older, term=10))).ended()
        assert ended.reason == "NEWER_SCHEDULER"
    again = await worker.open(scheduler, term=20)
    assert again.opened.executed_step_seq == book.step_seq
    async with SchedulerDouble(worker.address) as newer, SchedulerDouble(worker.address) as silent:
        assert (await worker.open(newer, term=21)).opened.executed_step_seq == 0
        assert (await again.ended()).code is grpc.StatusCode.ABORTED
        # One that gives no term is never refused for it.
        await worker.open(silent, term=0)


async def test_rule_7_an_epoch_keeps_its_geometry(worker: Target, scheduler: SchedulerDouble) -> None:
    await worker.open(scheduler)
    ended = await (await scheduler.try_open(worker.open_message(scheduler, num_rows=5))).ended()
    assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GEOMETRY_CHANGED")


@pytest.mark.own_worker
async def test_a_lost_schedulers_state_is_dropped_after_its_time() -> None:
    async with own_worker(keep_state_s=0.05) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await _begin(mine.target, session, book)
        session.cut()
        await asyncio.sleep(0.5)
        ended = await (await scheduler.try_open(mine.target.open_message(scheduler))).ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_OVER")
        assert len(await generate(mine.target, await mine.target.open(scheduler, 2), Book(2), [65, 66], 3)) == 3


@pytest.mark.own_worker
async def test_a_scheduler_that_is_back_in_time_finds_its_state() -> None:
    async with own_worker(keep_state_s=0.5) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await _begin(mine.target, session, book)
        session.cut()
        again = await mine.target.open(scheduler)
        # Longer than the time for which a lost scheduler's state is kept.
        await asyncio.sleep(1.0)
        assert (await again.run(book.step({0: 1}))).num_rows_held == 1


@pytest.mark.own_worker
async def test_a_stream_without_an_open_does_not_stay() -> None:
    async with own_worker(open_timeout_s=0.1) as mine, SchedulerDouble(mine.target.address) as scheduler:
        ended = await scheduler.stream().ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OPEN_EXPECTED")
