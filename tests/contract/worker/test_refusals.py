"""Rules 3 and 10: what does not fit is refused with a status and a reason, and the epoch is over. Never a guess."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from stepfence.v1 import sampling_pb2, step_pb2, worker_service_pb2
from tests.support.scheduler_double import Book, SchedulerDouble, column, new_request
from tests.support.worker_fixtures import NUM_ROWS, Target, generate, own_worker

_MALFORMED = grpc.StatusCode.INVALID_ARGUMENT
_REFUSED = grpc.StatusCode.FAILED_PRECONDITION

Breakage = Callable[[step_pb2.SchedulerOutput, Target], None]


def _set(**fields: object) -> Breakage:
    def breakage(step: step_pb2.SchedulerOutput, _: Target) -> None:
        for name, value in fields.items():
            setattr(step, name, value)

    return breakage


def _add(
    length: int = 4, row: int = 1, table: tuple[int, ...] = (40,), num_computed: int = 0, **fields: object
) -> Breakage:
    """Add a request that is right but for what is given; lengths in tokens of blocks of any size."""

    def breakage(step: step_pb2.SchedulerOutput, target: Target) -> None:
        request = new_request("x", row, target.prompt(length), table, num_computed=num_computed)
        for name, value in fields.items():
            if isinstance(value, sampling_pb2.ResolvedSampling):
                request.sampling.CopyFrom(value)
            else:
                setattr(request, name, value)
        step.new_requests.append(request)

    return breakage


def _add_twice(step: step_pb2.SchedulerOutput, target: Target) -> None:
    _add(row=1, table=(40,))(step, target)
    _add(row=2, table=(41,))(step, target)


def _beyond_vocabulary(step: step_pb2.SchedulerOutput, target: Target) -> None:
    _add(token_ids=column([target.capabilities.model.vocab_size] * 4))(step, target)


def _beyond_pool(step: step_pb2.SchedulerOutput, target: Target) -> None:
    _add(table=(2**31 - 1,))(step, target)


def _computed_in_part(step: step_pb2.SchedulerOutput, target: Target) -> None:
    _add(length=target.block_size + 2, table=(40, 41), num_computed=target.block_size - 1)(step, target)


def _more_than_fits(step: step_pb2.SchedulerOutput, target: Target) -> None:
    length = target.block_size + 1
    _add(length=length, table=(40,))(step, target)
    step.rows, step.num_tokens = column([1]), column([length])


def _too_many_drafts(step: step_pb2.SchedulerOutput, target: Target) -> None:
    count = target.capabilities.max_num_drafts + 1
    step.num_tokens, step.num_drafts = column([1 + count]), column([count])
    step.draft_token_ids = column([40] * count)


# Each is done to the step {row 0: 1 token} of a session in which row 0 decodes.
_CASES: dict[str, tuple[Breakage, grpc.StatusCode, str]] = {
    "gap": (_set(step_seq=9), _REFUSED, "STEP_GAP"),
    "other epoch": (_set(epoch=2), _REFUSED, "WRONG_EPOCH"),
    "fence jumps": (_set(fence_seq=9), _REFUSED, "FENCE_GAP"),
    "processed backwards": (_set(processed_step_seq=0), _REFUSED, "PROCESSED_BACKWARDS"),
    "processed itself": (_set(processed_step_seq=3), _MALFORMED, "MALFORMED_STEP"),
    "step 0": (_set(step_seq=0), _MALFORMED, "MALFORMED_STEP"),
    "half an integer": (_set(rows=b"\0\0\0"), _MALFORMED, "MALFORMED_STEP"),
    "columns of different length": (_set(rows=column([0, 1])), _MALFORMED, "MALFORMED_STEP"),
    "negative row": (_set(rows=column([-1])), _MALFORMED, "MALFORMED_STEP"),
    "no tokens": (_set(num_tokens=column([0])), _MALFORMED, "MALFORMED_STEP"),
    "row twice": (_set(rows=column([0, 0]), num_tokens=column([1, 1])), _MALFORMED, "MALFORMED_STEP"),
    "nobody in the row": (_set(rows=column([5])), _REFUSED, "UNKNOWN_ROW"),
    "row beyond the batch": (_set(rows=column([NUM_ROWS])), _REFUSED, "UNKNOWN_ROW"),
    "tokens that nobody knows": (_set(num_tokens=column([2])), _REFUSED, "BEYOND_KNOWN"),
    "append to nobody": (_set(appended_rows=column([5]), appended_blocks=column([3])), _REFUSED, "UNKNOWN_ROW"),
    "append the null block": (
        _set(appended_rows=column([0]), appended_blocks=column([0])),
        _MALFORMED,
        "MALFORMED_STEP",
    ),
    "append a block twice": (_set(appended_rows=column([0]), appended_blocks=column([1])), _REFUSED, "REPEATED_BLOCK"),
    "append beyond the pool": (
        _set(appended_rows=column([0]), appended_blocks=column([2**31 - 1])),
        _REFUSED,
        "UNKNOWN_BLOCK",
    ),
    "row taken": (_add(row=0), _REFUSED, "ROW_TAKEN"),
    "added beyond the batch": (_add(row=NUM_ROWS), _REFUSED, "UNKNOWN_ROW"),
    "added twice": (_add_twice, _MALFORMED, "MALFORMED_STEP"),
    "no id": (_add(request_id=""), _MALFORMED, "MALFORMED_STEP"),
    "endless id": (_add(request_id="x" * 5000), _MALFORMED, "MALFORMED_STEP"),
    "no tokens at all": (_add(token_ids=b""), _MALFORMED, "MALFORMED_STEP"),
    "negative token": (_add(token_ids=column([1, -2, 3, 4])), _MALFORMED, "MALFORMED_STEP"),
    "token beyond the vocabulary": (_beyond_vocabulary, _MALFORMED, "MALFORMED_STEP"),
    "prompt longer than the tokens": (_add(num_prompt_tokens=5), _MALFORMED, "MALFORMED_STEP"),
    "all computed": (_add(num_computed_tokens=4), _MALFORMED, "MALFORMED_STEP"),
    "computed in part of a block": (_computed_in_part, _MALFORMED, "MALFORMED_STEP"),
    "null block": (_add(table=(0,)), _MALFORMED, "MALFORMED_STEP"),
    "block twice in a table": (_add(table=(40, 40)), _REFUSED, "REPEATED_BLOCK"),
    "block beyond the pool": (_beyond_pool, _REFUSED, "UNKNOWN_BLOCK"),
    "table too small": (_more_than_fits, _REFUSED, "TABLE_TOO_SMALL"),
    "sampling left out": (_add(sampling=sampling_pb2.ResolvedSampling()), _MALFORMED, "MALFORMED_STEP"),
    "temperature is not a number": (
        _add(sampling=sampling_pb2.ResolvedSampling(temperature=float("nan"), top_p=1)),
        _MALFORMED,
        "MALFORMED_STEP",
    ),
    "min_p over 1": (_add(sampling=sampling_pb2.ResolvedSampling(min_p=1.5, top_p=1)), _MALFORMED, "MALFORMED_STEP"),
    "drafts do not add up": (_set(num_drafts=column([1])), _MALFORMED, "MALFORMED_STEP"),
    "drafts only": (
        _set(num_drafts=column([1]), draft_token_ids=column([40])),
        _REFUSED,
        "MALFORMED_DRAFTS",
    ),
    "more drafts than are verified": (_too_many_drafts, _REFUSED, "OVER_LIMIT"),
}


@pytest.mark.parametrize("case", _CASES)
async def test_rule_3_a_step_that_cannot_be_right_ends_the_epoch(
    case: str, worker: Target, scheduler: SchedulerDouble
) -> None:
    breakage, code, reason = _CASES[case]
    session, book = await worker.open(scheduler), Book()
    added = [new_request("a", 0, worker.prompt(6), worker.table(24))]
    book.handled(await session.run(book.step({0: 6}, new=added)))
    book.handled(await session.run(book.step({0: 1})))
    broken = book.step({0: 1})
    breakage(broken, worker)
    await session.send(broken)
    ended = await session.ended()
    assert (ended.code, ended.reason) == (code, reason), ended
    assert ended.message

    refused = await (await scheduler.try_open(worker.open_message(scheduler))).ended()
    assert (refused.code, refused.reason) == (_REFUSED, "EPOCH_OVER")
    assert len(await generate(worker, await worker.open(scheduler, 2), Book(2), worker.prompt(6), 2)) == 2


async def test_rule_3_a_frame_without_content_is_refused(worker: Target, scheduler: SchedulerDouble) -> None:
    session = await worker.open(scheduler)
    await session.send_frame(worker_service_pb2.RunStepsRequest())
    assert (await session.ended()).code is _MALFORMED


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("epoch", 0, "MALFORMED_OPEN"),
        ("protocol_revision", 0, "PROTOCOL_REVISION"),
        ("protocol_revision", 1, "PROTOCOL_REVISION"),
        ("protocol_revision", 999, "PROTOCOL_REVISION"),
        ("block_size", 0, "MALFORMED_OPEN"),
        ("num_rows", 0, "MALFORMED_OPEN"),
        ("max_num_batched_tokens", 0, "MALFORMED_OPEN"),
        ("max_model_len", 0, "MALFORMED_OPEN"),
        ("max_inflight_steps", 0, "MALFORMED_OPEN"),
        ("num_rows", 2**31 - 1, "OVER_LIMIT"),
        ("max_num_batched_tokens", 2**31 - 1, "OVER_LIMIT"),
        ("max_model_len", 2**31 - 1, "OVER_LIMIT"),
        ("max_inflight_steps", 2**31 - 1, "OVER_LIMIT"),
        ("num_rows", 2**32 - 1, "MALFORMED_OPEN"),
    ],
)
async def test_rule_10_an_open_beyond_the_declared_limits_is_refused_and_disturbs_nobody(
    field: str, value: int, reason: str, worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler), Book()
    changed: dict[str, int] = {"epoch": 2, field: value}
    message = worker.open_message(scheduler, changed.pop("epoch"), **changed)
    ended = await (await scheduler.try_open(message)).ended()
    assert (ended.code, ended.reason) == (_MALFORMED, reason)
    assert len(await generate(worker, session, book, worker.prompt(6), 2)) == 2


async def test_rule_10_a_block_size_that_is_no_multiple_of_the_unit_is_refused(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    unit = worker.capabilities.block_size_multiple
    too_large = 4 * unit * worker.capabilities.model.max_model_len
    for size in [too_large] if unit == 1 else [unit + 1, too_large]:
        ended = await (await scheduler.try_open(worker.open_message(scheduler, block_size=size))).ended()
        assert ended.code is _MALFORMED and ended.reason in ("BLOCK_SIZE", "OVER_LIMIT"), ended


async def test_rule_10_a_step_with_more_tokens_than_agreed_is_refused(
    worker: Target, scheduler: SchedulerDouble
) -> None:
    session, book = await worker.open(scheduler, max_num_batched_tokens=8), Book()
    await session.send(book.step({0: 9}, new=[new_request("a", 0, worker.prompt(9), worker.table(24))]))
    ended = await session.ended()
    assert (ended.code, ended.reason) == (_REFUSED, "OVER_LIMIT")


async def test_rule_10_a_sequence_longer_than_agreed_is_refused(worker: Target, scheduler: SchedulerDouble) -> None:
    size = 2 * worker.block_size
    session, book = await worker.open(scheduler, max_model_len=size), Book()
    prompt = worker.prompt(size - 1)
    outputs = await generate(worker, session, book, prompt, 1)
    added = [new_request("a", 0, prompt + outputs, worker.table(size), num_prompt=size - 1)]
    book.handled(await session.run(book.step({0: size}, new=added)))
    await session.send(book.step({0: 1}))
    assert (await session.ended()).reason in ("TABLE_TOO_SMALL", "TOO_LONG")


async def test_rule_10_more_steps_in_flight_than_agreed_are_refused(worker: Target, scheduler: SchedulerDouble) -> None:
    session, book = await worker.open(scheduler, max_inflight_steps=2), Book()
    added = [new_request("a", 0, worker.prompt(6), worker.table(24))]
    # None of them is ever said to be processed.
    await session.run(book.step({0: 6}, new=added))
    await session.run(book.step({0: 1}))
    await session.send(book.step({0: 1}))
    ended = await session.ended()
    assert (ended.code, ended.reason) == (_REFUSED, "WINDOW_FULL")


async def test_an_open_that_needs_features_without_end_is_refused_in_few_words() -> None:
    async with own_worker() as worker, SchedulerDouble(worker.target.address) as scheduler:
        message = worker.target.open_message(scheduler)
        message.required_features.extend(range(1000))  # type: ignore[arg-type]
        ended = await (await scheduler.try_open(message)).ended()
        assert (ended.code, ended.reason) == (_MALFORMED, "MALFORMED_OPEN")
        assert ended.message == "1000 features, at most 64"
