"""Rules 5, 8 and 9 on a worker that fails on purpose; loading, draining and a poisoned device."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from stepfence.v1 import step_pb2, worker_service_pb2
from tests.support.scheduler_double import Book, SchedulerDouble, ids_of, new_request
from tests.support.worker_fixtures import OwnWorker, Target, generate, own_worker, script
from worker_svc.runner.scripted import VOCAB_SIZE, ScriptedRunner, complete
from worker_svc.sampling import Sampling
from worker_svc.server import WorkerServer
from worker_svc.service import WorkerService

pytestmark = pytest.mark.own_worker


def _admission(book: Book, target: Target, length: int = 6) -> step_pb2.SchedulerOutput:
    return book.step({0: length}, new=[new_request("a", 0, target.prompt(length), target.table(24))])


async def test_rule_8_a_failed_step_is_answered_and_ends_the_epoch() -> None:
    faults = script({"kind": "fail", "at_step": 2})
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        steps = [_admission(book, mine.target), book.step({0: 1}), book.step({0: 1})]
        for step in steps:
            await session.send(step)
        good, failed = await session.result(), await session.result()
        assert not good.HasField("error")
        assert (failed.step_seq, failed.error.kind) == (2, step_pb2.STEP_ERROR_KIND_EXECUTION)
        assert failed.error.message and not failed.sampled_token_ids
        # Step 3 is neither executed nor answered; the stream ends OK, so that no status overtakes the answer.
        assert await session.read() is None and (await session.ended()).code is grpc.StatusCode.OK
        refused = await (await scheduler.try_open(mine.target.open_message(scheduler))).ended()
        assert refused.reason == "EPOCH_OVER"
        fresh = await mine.target.open(scheduler, 2)
        assert await generate(mine.target, fresh, Book(2), [65, 66, 67], 4) == complete([65, 66, 67], 4, Sampling())


async def test_rule_8_a_poisoned_device_answers_and_then_the_process_must_go() -> None:
    faults = script({"kind": "device", "at_step": 2})
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(_admission(book, mine.target))
        assert not mine.service.failed.done()
        failed = await session.run(book.step({0: 1}))
        assert failed.error.kind == step_pb2.STEP_ERROR_KIND_DEVICE
        assert "device fails in step 2" in await asyncio.wait_for(mine.service.failed, 30)


async def test_rule_8_a_poisoned_device_ends_the_process_even_if_nobody_asks() -> None:
    faults = script({"kind": "device", "at_step": 1}, delay_ms=0)
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session = await mine.target.open(scheduler)
        await session.send(_admission(Book(), mine.target))
        session.cut()
        await asyncio.wait_for(mine.service.failed, 30)


async def test_rule_5_blocks_given_out_before_their_fence_are_noticed() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(_admission(book, mine.target))
        # Step 1 used blocks 1 to 6; its answer is not processed yet.
        stolen = new_request("b", 1, [70, 71, 72], [2])
        failed = await session.run(book.step({1: 3}, finished=["a"], new=[stolen]))
        assert failed.error.kind == step_pb2.STEP_ERROR_KIND_EXECUTION
        assert "block 2" in failed.error.message and "fence" in failed.error.message


async def test_rule_5_blocks_given_out_after_their_fence_are_fine() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        book.handled(await session.run(_admission(book, mine.target)))
        again = new_request("b", 1, [70, 71, 72], [2])
        result = await session.run(book.step({1: 3}, finished=["a"], new=[again]))
        assert ids_of(result.sampled_token_ids) == complete([70, 71, 72], 1, Sampling())


async def test_f14_a_hit_on_blocks_that_hold_something_else_is_noticed() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        book.handled(await session.run(_admission(book, mine.target)))
        other = mine.target.prompt(6, salt=1)
        failed = await session.run(book.step({1: 2}, new=[new_request("b", 1, other, [1, 20], num_computed=4)]))
        assert "row 1 (b): position 0" in failed.error.message and "block 1" in failed.error.message


@pytest.mark.parametrize("kind", ["missing_row", "out_of_range", "repeated_result", "wrong_step_seq"])
async def test_rule_9_wrong_answers_can_be_had_for_tests_of_schedulers(kind: str) -> None:
    faults = script({"kind": kind, "at_step": 2})
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(_admission(book, mine.target))
        await session.send(book.step({0: 1}))
        result = await session.result()
        if kind == "missing_row":
            assert not result.sampled_token_ids
        elif kind == "out_of_range":
            assert ids_of(result.sampled_token_ids) == [VOCAB_SIZE]
        elif kind == "repeated_result":
            assert await session.result() == result
        else:
            assert result.step_seq == 3


async def test_a_stalled_step_keeps_the_next_epoch_waiting_and_no_longer() -> None:
    faults = script({"kind": "stall", "at_step": 1})
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session = await mine.target.open(scheduler)
        await session.send(_admission(Book(), mine.target))
        later = await scheduler.try_open(mine.target.open_message(scheduler, 2))
        assert (await session.ended()).code is grpc.StatusCode.ABORTED
        # The event loop is not held up by the runner.
        assert (await scheduler.capabilities()).worker_incarnation == mine.service.incarnation
        mine.runner.release()
        opened = await later.read()
        assert opened is not None and opened.opened.executed_step_seq == 0


async def test_a_withheld_answer_never_comes_and_the_next_ones_wait_behind_it() -> None:
    faults = script({"kind": "withheld_result", "at_step": 1})
    async with own_worker(faults) as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.send(book.step())
        await session.send(book.step())
        reading = asyncio.create_task(session.read())
        done, _ = await asyncio.wait([reading], timeout=0.3)
        assert not done
        reading.cancel()


async def test_a_worker_that_loads_says_so_and_becomes_ready() -> None:
    runner = ScriptedRunner(script(load_delay_s=60.0))
    server = WorkerServer(WorkerService(runner.load))
    address = await server.listen("127.0.0.1:0")
    loading = asyncio.create_task(server.load())
    try:
        async with SchedulerDouble(address) as scheduler:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await scheduler.capabilities()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            refused = await (await scheduler.try_open(worker_service_pb2.Open(epoch=1))).ended()
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
            runner.release()
            await asyncio.wait_for(loading, 30)
            assert (await scheduler.capabilities()).model.name == "scripted"
    finally:
        await server.stop()


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    runner = ScriptedRunner(script(load_error="no such file"))
    server = WorkerServer(WorkerService(runner.load))
    await server.listen("127.0.0.1:0")
    with pytest.raises(RuntimeError, match="no such file"):
        await server.load()
    await server.stop()


async def _drain(mine: OwnWorker, deadline_s: float) -> asyncio.Task[bool]:
    task = asyncio.create_task(mine.server.drain(deadline_s))
    while not mine.service.is_draining:
        await asyncio.sleep(0)
    return task


async def test_f83_a_draining_worker_says_so_and_finishes_what_it_has() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        book.handled(await session.run(_admission(book, mine.target)))
        draining = await _drain(mine, 60)
        frame = await session.read()
        assert (
            frame is not None
            and frame.WhichOneof("frame") == "draining"
            and frame.draining.deadline.ToNanoseconds() > 0
        )
        refused = await (await scheduler.try_open(mine.target.open_message(scheduler))).ended()
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        for _ in range(3):
            book.handled(await session.run(book.step({0: 1})))
        assert not draining.done()
        await session.run(book.step(finished=["a"]))
        assert await asyncio.wait_for(draining, 30) is True
        ended = await session.ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_f83_a_drain_ends_when_the_scheduler_closes_its_stream() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(_admission(book, mine.target))
        draining = await _drain(mine, 60)
        await session.finish()
        assert await asyncio.wait_for(draining, 30) is True


async def test_f83_a_drain_that_takes_too_long_is_told_apart() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(_admission(book, mine.target))
        assert await mine.server.drain(0.2) is False
        assert (await session.ended()).code is grpc.StatusCode.UNAVAILABLE


async def test_f24_a_worker_that_wants_to_end_at_every_step_is_held_back_by_min_tokens() -> None:
    always = script(eos_always=True)
    async with own_worker(always) as mine, SchedulerDouble(mine.target.address) as scheduler:
        sampling = step_pb2.NewRequest().sampling
        sampling.top_p, sampling.min_tokens = 1.0, 4
        sampling.eos_token_ids.append(257)
        session = await mine.target.open(scheduler)
        outputs = await generate(mine.target, session, Book(), [65, 66], 6, sampling=sampling)
        assert 257 not in outputs[:4] and outputs[4:] == [257, 257]


async def test_the_byte_tokenizer_describes_itself() -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        chunks = [response.chunk async for response in scheduler.stub.GetTokenizer(_ask_for_tokenizer())]
        assert {chunk.file_name for chunk in chunks} == {"byte_tokenizer.json"}
        described = json.loads(b"".join(chunk.data for chunk in chunks))
        assert described["vocab_size"] == mine.target.capabilities.model.vocab_size == 260
        assert described["eos_token_id"] == mine.target.capabilities.model.eos_token_ids[0]


def _ask_for_tokenizer() -> worker_service_pb2.GetTokenizerRequest:
    return worker_service_pb2.GetTokenizerRequest()
