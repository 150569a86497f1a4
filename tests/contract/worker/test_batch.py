"""Rules 4 and 11: what happens within a step; and that a request's tokens depend on nothing but the request (D33)."""

from __future__ import annotations

from stepfence.v1 import sampling_pb2
from tests.support.scheduler_double import Book, SchedulerDouble, ids_of, new_request
from tests.support.worker_fixtures import Target, generate


async def test_rule_4_unknown_ids_are_dropped_without_a_word(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    result = await session.run(book.step(finished=["nobody"], preempted=["no one"]))
    assert not result.HasField("error") and result.num_rows_held == 0


async def test_rule_4_a_row_and_its_blocks_may_change_hands_within_one_step(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    prompts = worker.prompt(7), worker.prompt(9, salt=1)
    cold = await generate(worker, session, book, prompts[1], 3)
    first = await session.run(book.step({0: 7}, new=[new_request("a", 0, prompts[0], worker.table(16))]))
    book.handled(first)
    added = [new_request("b", 0, prompts[1], worker.table(16))]
    second = await session.run(book.step({0: 9}, finished=["a"], new=added))
    assert second.num_rows_held == 1
    outputs = ids_of(second.sampled_token_ids)
    for _ in range(2):
        outputs += ids_of((await session.run(book.step({0: 1}))).sampled_token_ids)
    assert outputs == cold


async def test_rule_4_a_new_request_replaces_one_of_the_same_id(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(8)
    cold = await generate(worker, session, book, prompt, 4)
    first = await session.run(book.step({3: 8}, new=[new_request("a", 3, prompt, worker.table(16))]))
    book.handled(first)
    # Resumed in another row, with its first output, nothing computed.
    tokens = prompt + ids_of(first.sampled_token_ids)
    again = new_request("a", 5, tokens, worker.table(16, 20), num_prompt=8)
    second = await session.run(book.step({5: 9}, new=[again]))
    assert second.num_rows_held == 1
    outputs = ids_of(first.sampled_token_ids) + ids_of(second.sampled_token_ids)
    for _ in range(2):
        outputs += ids_of((await session.run(book.step({5: 1}))).sampled_token_ids)
    assert outputs == cold


async def test_rule_4_blocks_are_appended_before_the_row_computes(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    size = worker.block_size
    prompt = worker.prompt(size)
    cold = await generate(worker, session, book, prompt, 3)
    first = await session.run(book.step({0: size}, new=[new_request("a", 0, prompt, [9])]))
    outputs = ids_of(first.sampled_token_ids)
    book.handled(first)
    second = await session.run(book.step({0: 1}, appended=[(0, 4)]))
    outputs += ids_of(second.sampled_token_ids)
    outputs += ids_of((await session.run(book.step({0: 1}))).sampled_token_ids)
    assert outputs == cold


async def test_rule_4_a_preempted_request_goes_on_as_if_nothing_had_happened(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(10)
    for sampling in (
        sampling_pb2.ResolvedSampling(temperature=0.0, top_p=1.0),
        sampling_pb2.ResolvedSampling(temperature=0.8, top_p=0.9, top_k=20, seed=4711),
    ):
        cold = await generate(worker, session, book, prompt, 6, sampling=sampling)
        begun = await generate(worker, session, book, prompt, 3, request_id="a", sampling=sampling)
        # In chunks, elsewhere, beside another request.
        tokens = prompt + begun
        new = [
            new_request("a", 4, tokens, worker.table(32, 10), num_prompt=10, sampling=sampling),
            new_request("b", 2, worker.prompt(5, salt=3), worker.table(32, 10 + worker.num_blocks(32))),
        ]
        book.handled(await session.run(book.step({2: 5, 4: 6}, new=new)))
        outputs = list(begun)
        for step in ({2: 1, 4: 7}, {4: 1, 2: 1}, {4: 1}):
            result = await session.run(book.step(step))
            book.handled(result)
            sampled = dict(zip(step, ids_of(result.sampled_token_ids), strict=True))
            outputs.append(sampled[4])
        assert outputs == cold
        book.handled(await session.run(book.step(finished=["a", "b"])))


async def test_rule_11_a_row_may_read_blocks_that_the_same_step_computes(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    """F13: two equal prefixes admitted together; the second lists the first one's blocks as computed."""
    session, book = await worker.open(scheduler), Book()
    size = worker.block_size
    shared = worker.prompt(size)
    prompts = shared + worker.prompt(3, salt=1), shared + worker.prompt(2, salt=2)
    cold = [await generate(worker, session, book, prompt, 3) for prompt in prompts]
    new = [
        new_request("a", 0, prompts[0], [1, 2, 3]),
        new_request("b", 1, prompts[1], [1, 5, 6], num_computed=size),
    ]
    result = await session.run(book.step({1: 2, 0: size + 3}, new=new))
    outputs = [ids_of(result.sampled_token_ids)]
    for _ in range(2):
        outputs.append(ids_of((await session.run(book.step({1: 1, 0: 1}))).sampled_token_ids))
    assert [column[1] for column in outputs] == cold[0]
    assert [column[0] for column in outputs] == cold[1]


async def test_drafts_change_the_speed_and_never_the_text(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(8)
    cold = await generate(worker, session, book, prompt, 8)
    if not worker.capabilities.max_num_drafts:
        return
    wrong = (cold[2] + 1) % worker.capabilities.model.vocab_size
    first = await session.run(book.step({0: 8}, new=[new_request("a", 0, prompt, worker.table(32))]))
    # A right draft and a wrong one: the right one, and what should have been in place of the wrong one.
    second = await session.run(book.step({0: 3}, drafts={0: [cold[1], wrong]}))
    assert ids_of(second.sampled_token_ids) == cold[1:3]
    assert ids_of(second.sampled_counts) == [2]
    book.handled(second)
    third = await session.run(book.step({0: 2}, drafts={0: [cold[3]]}))
    assert ids_of(third.sampled_token_ids) == cold[3:5]
    fourth = await session.run(book.step({0: 1}))
    outputs = [token for result in (first, second, third, fourth) for token in ids_of(result.sampled_token_ids)]
    assert outputs == cold[:6]


async def test_drafts_may_follow_before_the_last_ones_are_judged(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(8)
    cold = await generate(worker, session, book, prompt, 6)
    if not worker.capabilities.max_num_drafts:
        return
    wrong = [(token + 1) % worker.capabilities.model.vocab_size for token in cold]
    first = await session.run(book.step({0: 8}, new=[new_request("a", 0, prompt, worker.table(32))]))
    book.handled(first)
    for step in (
        book.step({0: 2}, drafts={0: [wrong[1]]}),
        book.step({0: 2}, drafts={0: [wrong[2]]}),
        book.step({0: 1}),
    ):
        await session.send(step)
    outputs = ids_of(first.sampled_token_ids)
    for _ in range(3):
        result = await session.result()
        assert not result.HasField("error"), result
        outputs += ids_of(result.sampled_token_ids)
    assert outputs == cold[: len(outputs)] and len(outputs) == 4


async def test_min_tokens_keeps_the_end_away(worker: Target, scheduler: SchedulerDouble) -> None:
    """F24: what would be sampled is masked as long as the output index is below min_tokens, after a preemption too."""
    session, book = await worker.open(scheduler), Book()
    prompt = worker.prompt(8)
    cold = await generate(worker, session, book, prompt, 4)
    masked = sampling_pb2.ResolvedSampling(top_p=1.0, min_tokens=2, stop_token_ids=[cold[0]])
    begun = await generate(worker, session, book, prompt, 1, request_id="a", sampling=masked)
    assert begun[0] != cold[0]
    resumed = new_request("a", 0, prompt + begun, worker.table(32), num_prompt=8, sampling=masked)
    result = await session.run(book.step({0: 9}, new=[resumed]))
    assert cold[0] not in ids_of(result.sampled_token_ids)
