"""D57 on the scheduler's side: a front end comes back with the requests that an earlier stream had accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from stepfence.v1 import session_service_pb2 as pb
from tests.support.scheduler_process import RunningScheduler, running_scheduler
from tests.support.session_client import LENGTH, STOP, SessionClient
from tests.support.worker_double import WorkerDouble, complete

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
async def double() -> AsyncIterator[WorkerDouble]:
    double = WorkerDouble()
    await double.start()
    yield double
    await double.stop()


@pytest.fixture
async def scheduler(double: WorkerDouble) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        yield scheduler
        await scheduler.all_free()


async def test_d57_a_request_goes_on_with_the_outputs_it_brings(scheduler: RunningScheduler) -> None:
    whole = complete(PROMPT, 20)
    async with SessionClient(scheduler.address) as client:
        stream = client.submit(PROMPT, 20, output_token_ids=whole[:8], age_s=3.0)
        await stream.over()
        assert stream.reason == LENGTH and stream.end is not None
        assert stream.tokens == whole[8:]
        usage = stream.end.usage
        assert usage.num_completion_tokens == 20
        assert usage.num_recomputed_tokens == len(PROMPT) + 7
        # Its first admission lies on the other stream.
        assert usage.queued.ToNanoseconds() == 0
        assert stream.usage is not None and stream.usage.num_recomputed_tokens == usage.num_recomputed_tokens
        assert client.errors == []


async def test_d57_an_end_that_was_lost_is_said_again_at_once(scheduler: RunningScheduler) -> None:
    whole = complete(PROMPT, 8)
    async with SessionClient(scheduler.address) as client:
        ended = client.submit(PROMPT, 8, output_token_ids=whole, age_s=1.0)
        stopped = client.submit(PROMPT, 20, output_token_ids=whole, age_s=1.0, stop_token_ids=[whole[-1]])
        await ended.over()
        await stopped.over()
        assert (ended.tokens, stopped.tokens) == ([], [])
        assert (ended.reason, stopped.reason) == (LENGTH, STOP)
        assert stopped.end is not None and stopped.end.ok.stop_token_id == whole[-1]


async def test_d57_it_waits_for_the_first_worker(double: WorkerDouble) -> None:
    await double.stop()
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        again = client.submit(PROMPT, 6, age_s=1.0)
        new = client.submit(PROMPT, 6)
        await again.answered()
        await new.over()
        assert again.accepted is not None and new.failure is not None and new.failure.reason == "NO_WORKER"
        await double.restart()
        await again.over()
        assert again.tokens == complete(PROMPT, 6)


async def test_d57_a_newer_stream_of_a_front_end_ends_the_older_ones_requests_first(
    scheduler: RunningScheduler,
) -> None:
    async with SessionClient(scheduler.address, incarnation=7, attach_seq=1) as old:
        stream = old.submit(PROMPT, 2000, request_id="mine")
        await stream.until(3)
        async with SessionClient(scheduler.address, incarnation=7, attach_seq=2) as new:
            # The older stream may look alive for a while: a half-open connection.
            again = new.submit(PROMPT, 12, request_id="mine", output_token_ids=complete(PROMPT, 4), age_s=1.0)
            await again.over()
            assert again.failure is None and again.tokens == complete(PROMPT, 12)[4:]
            async with asyncio.timeout(20):
                await old.ended.wait()
            assert old.status is grpc.StatusCode.ABORTED
            late = SessionClient(scheduler.address, incarnation=7, attach_seq=1)
            async with late:
                assert late.status is grpc.StatusCode.FAILED_PRECONDITION


async def test_d57_other_front_ends_are_not_superseded(scheduler: RunningScheduler) -> None:
    async with (
        SessionClient(scheduler.address, incarnation=7, attach_seq=1) as one,
        SessionClient(scheduler.address, incarnation=8, attach_seq=9),
        SessionClient(scheduler.address),
        SessionClient(scheduler.address),
    ):
        stream = one.submit(PROMPT, 10)
        await stream.over()
        assert stream.reason == LENGTH
        assert len((await scheduler.status()).front_ends) == 4


async def test_d57_new_requests_wait_for_front_ends_that_come_back_after_a_start(double: WorkerDouble) -> None:
    async with running_scheduler(double.address, max_num_seqs=1) as scheduler:
        await scheduler.ready()
        double.answering.clear()
        async with (
            SessionClient(scheduler.address, incarnation=1, attach_seq=4) as first,
            SessionClient(scheduler.address, "b", incarnation=2, attach_seq=9) as second,
        ):
            # The first one has nothing to submit again, and a new request.
            first.send(pb.AttachRequest(resubmits_done=True))
            new = first.submit(PROMPT, 4)
            again = second.submit(PROMPT, 4, age_s=5.0, output_token_ids=complete(PROMPT, 2))
            await again.answered()
            assert new.accepted is None
            second.send(pb.AttachRequest(resubmits_done=True))
            await new.answered()
            double.answering.set()
            await again.over()
            await new.over()
            assert (new.reason, again.reason) == (LENGTH, LENGTH)
            assert again.tokens == complete(PROMPT, 4)[2:]


async def test_d57_a_front_end_that_never_says_so_holds_up_new_requests_for_two_seconds(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with (
            SessionClient(scheduler.address, incarnation=1, attach_seq=4),
            SessionClient(scheduler.address) as other,
        ):
            began = asyncio.get_running_loop().time()
            new = other.submit(PROMPT, 4)
            await new.over()
            assert new.reason == LENGTH
            assert asyncio.get_running_loop().time() - began > 0.5


@pytest.mark.parametrize("outputs, age_s", [([1, 2], None)])
async def test_d57_outputs_without_an_age_break_the_protocol(
    scheduler: RunningScheduler, outputs: list[int], age_s: float | None
) -> None:
    async with SessionClient(scheduler.address) as client:
        client.submit(PROMPT, 4, output_token_ids=outputs, age_s=age_s)
        async with asyncio.timeout(20):
            await client.ended.wait()
        assert client.status is grpc.StatusCode.INVALID_ARGUMENT
        assert "age" in client.details


async def test_d57_the_workers_of_an_older_scheduler_are_taken_by_the_newer_one_for_good(double: WorkerDouble) -> None:
    """Two schedulers that both think the worker is theirs: the one that started later has it, and keeps it."""
    async with running_scheduler(double.address) as older:
        await older.ready()
        await asyncio.sleep(0.01)
        async with running_scheduler(double.address) as newer:
            await newer.ready()
            terms = [opening.term for opening in double.opens]
            assert terms == sorted(terms) and len(set(terms)) == len(terms) > 1
