"""Rules 1 and 2: steps in order, one answer each, remembered until processed; and how a session begins."""

from __future__ import annotations

import hashlib

import grpc
import pytest

from stepfence.v1 import worker_service_pb2
from tests.support.scheduler_double import GREEDY, Book, SchedulerDouble, ids_of, new_request
from tests.support.worker_fixtures import Target, generate


async def test_a_session_opens_with_the_pool_and_the_workers_incarnation(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session = await worker.open(scheduler)
    assert session.opened.worker_incarnation == worker.capabilities.worker_incarnation
    assert session.opened.num_blocks >= 2
    assert session.opened.executed_step_seq == 0


async def test_capabilities_say_what_a_scheduler_must_know(worker: Target) -> None:
    known = worker.capabilities
    assert known.protocol_revision >= 2
    assert known.model.name and known.model.vocab_size and known.model.max_model_len
    assert all(token_id < known.model.vocab_size for token_id in known.model.eos_token_ids)
    assert known.block_size_multiple and known.max_num_rows and known.max_num_batched_tokens and known.max_message_bytes
    assert known.runner and known.device and known.dtype


async def test_the_tokenizer_comes_in_pieces_that_match_the_digest(worker: Target, scheduler: SchedulerDouble) -> None:
    digest, names = hashlib.sha256(), list[str]()
    call = scheduler.stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest())
    if not worker.capabilities.model.tokenizer_digest:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        return
    async for response in call:
        chunk = response.chunk
        assert len(chunk.data) <= 1024 * 1024
        if not names or names[-1] != chunk.file_name:
            names.append(chunk.file_name)
            digest.update(chunk.file_name.encode())
        digest.update(chunk.data)
    assert len(set(names)) == len(names) and all("/" not in name for name in names)
    assert digest.hexdigest() == worker.capabilities.model.tokenizer_digest


async def test_the_first_frame_must_be_open(worker: Target, scheduler: SchedulerDouble) -> None:
    session = scheduler.stream()
    await session.send(Book().step())
    ended = await session.ended()
    assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OPEN_EXPECTED")


async def test_a_second_open_on_a_stream_is_refused(worker: Target, scheduler: SchedulerDouble) -> None:
    session = await worker.open(scheduler)
    await session.send_frame(worker_service_pb2.RunStepsRequest(open=worker.open_message(scheduler, 2)))
    assert (await session.ended()).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_rule_1_every_step_is_answered_once_and_in_order(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(9)
    steps = [book.step({0: 9}, new=[new_request("a", 0, prompt, worker.table(32))]), book.step({0: 1}), book.step()]
    for step in steps:
        await session.send(step)
    results = [await session.result() for _ in steps]
    assert [result.step_seq for result in results] == [1, 2, 3]
    assert [len(ids_of(result.sampled_token_ids)) for result in results] == [1, 1, 0]
    assert [result.num_rows_held for result in results] == [1, 1, 1]
    assert all(result.epoch == 1 and not result.HasField("error") for result in results)


async def test_rule_1_a_step_sent_before_the_last_answer_feeds_on_its_token(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    """The trace of the contract at depth 3 gives the tokens of one step at a time."""
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(9)
    alone = await generate(worker, session, book, prompt, 6)
    added = [new_request("a", 0, prompt, worker.table(32))]
    for step in (book.step({0: 9}, new=added), book.step({0: 1}), book.step({0: 1})):
        await session.send(step)
    outputs = []
    for sent in range(3, 9):
        result = await session.result()
        book.handled(result)
        outputs += ids_of(result.sampled_token_ids)
        if sent < 6:
            await session.send(book.step({0: 1}))
    assert outputs == alone


async def test_rule_1_results_come_in_the_order_of_rows_and_partial_prefills_have_none(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    prompts = {row: worker.prompt(8, salt=row) for row in (0, 1, 2)}
    cold = {row: (await generate(worker, session, book, prompts[row], 1))[0] for row in prompts}
    size = worker.num_blocks(32)
    new = [new_request(f"r{row}", row, prompts[row], worker.table(32, 1 + row * size)) for row in prompts]
    first = await session.run(book.step({2: 8, 0: 5, 1: 8}, new=new))
    assert ids_of(first.sampled_token_ids) == [cold[2], cold[1]]
    book.handled(first)
    second = await session.run(book.step({0: 3}))
    assert ids_of(second.sampled_token_ids) == [cold[0]]


async def test_rule_2_a_repeated_step_gets_the_same_answer_and_runs_once(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(6)
    alone = await generate(worker, session, book, prompt, 3)
    first = book.step({0: 6}, new=[new_request("a", 0, prompt, worker.table(32))])
    second = book.step({0: 1})
    answers = [await session.run(step) for step in (first, second)]
    again = [await session.run(step) for step in (first, second, second)]
    assert again == [answers[0], answers[1], answers[1]]
    book.handled(answers[1])
    third = await session.run(book.step({0: 1}))
    assert [ids_of(result.sampled_token_ids)[0] for result in (*answers, third)] == alone


async def test_rule_2_every_repetition_of_a_step_on_its_way_is_answered(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    step = book.step({0: 6}, new=[new_request("a", 0, worker.prompt(6), worker.table(32))])
    for _ in range(3):
        await session.send(step)
    first, second, third = [await session.result() for _ in range(3)]
    assert first == second == third


async def test_rule_2_an_answer_is_forgotten_once_it_is_processed(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    first = book.step()
    book.handled(await session.run(first))
    await session.run(book.step())
    await session.send(first)
    ended = await session.ended()
    assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ANSWER_FORGOTTEN")


async def test_a_scheduler_that_says_no_more_gets_its_answers_and_a_clean_end(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    added = [new_request("a", 0, worker.prompt(6), worker.table(32), sampling=GREEDY)]
    await session.send(book.step({0: 6}, new=added))
    await session.send(book.step({0: 1}))
    await session.finish()
    assert [(await session.result()).step_seq for _ in range(2)] == [1, 2]
    assert (await session.ended()).code is grpc.StatusCode.OK
