"""Whatever arrives on the wire, the worker answers or refuses, and is there for the next one."""

from __future__ import annotations

import contextlib
import random

import grpc

from stepfence.v1 import step_pb2, worker_service_pb2
from tests.support.scheduler_double import Book, SchedulerDouble, column, new_request
from tests.support.worker_fixtures import NUM_ROWS, Target, generate

_NUM_STREAMS = 60
_METHOD = "/stepfence.v1.WorkerService/RunSteps"
_KNOWN_ENDS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    # gRPC's own, for bytes that are no message.
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


def _noise(draw: random.Random, largest: int) -> bytes:
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randrange(9))
    return column(draw.choice([draw.randrange(-1, largest), 0, 1, 2**31 - 1]) for _ in range(draw.randrange(4)))


def _mutate(step: step_pb2.SchedulerOutput, draw: random.Random, target: Target) -> None:
    """Change one thing, or a few."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        name = draw.choice([field.name for field in step.DESCRIPTOR.fields])
        value = getattr(step, name)
        if isinstance(value, bytes):
            setattr(step, name, _noise(draw, NUM_ROWS + 2))
        elif isinstance(value, int):
            setattr(step, name, draw.choice([0, 1, value + 1, 2**64 - 1]))
        elif name.endswith("request_ids"):
            value.append(draw.choice(["a", "", "\0", "é\n🙂" * 90]))
        elif name == "new_requests":
            request = new_request("\r\n🙂" * draw.randrange(200), draw.randrange(NUM_ROWS), [1, 2, 3], [7])
            request.token_ids = _noise(draw, target.capabilities.model.vocab_size)
            request.block_table = _noise(draw, 50)
            request.num_computed_tokens = draw.choice([0, 1, 4, 2**32 - 1])
            request.sampling.temperature = draw.choice([0.0, -1.0, float("inf"), 1.0])
            value.append(request)


def _as_it_is(data: bytes) -> bytes:
    return data


async def test_mutated_steps_never_stop_the_worker(worker: Target, scheduler: SchedulerDouble) -> None:
    draw = random.Random(20_261_130)
    cold = await generate(worker, await worker.open(scheduler), Book(), worker.prompt(6), 3)
    for epoch in range(2, _NUM_STREAMS + 2):
        session, book = await worker.open(scheduler, epoch), Book(epoch)
        await session.run(book.step({0: 6}, new=[new_request("a", 0, worker.prompt(6), worker.table(24))]))
        step = book.step({0: 1})
        _mutate(step, draw, worker)
        await session.send(step)
        await session.finish()
        assert (await session.ended()).code in _KNOWN_ENDS
    last = await worker.open(scheduler, _NUM_STREAMS + 2)
    assert await generate(worker, last, Book(_NUM_STREAMS + 2), worker.prompt(6), 3) == cold
    assert (await scheduler.capabilities()).worker_incarnation == worker.capabilities.worker_incarnation


async def test_rule_3_a_frame_that_is_no_message_ends_the_epoch(worker: Target, scheduler: SchedulerDouble) -> None:
    opening = worker_service_pb2.RunStepsRequest(open=worker.open_message(scheduler)).SerializeToString()
    call = scheduler.channel.stream_stream(_METHOD, _as_it_is, _as_it_is)(iter([opening, b"\xff"]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    refused = await (await scheduler.try_open(worker.open_message(scheduler))).ended()
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_OVER")


async def test_bytes_that_are_no_message_never_stop_the_worker(worker: Target, scheduler: SchedulerDouble) -> None:
    draw = random.Random(4711)
    message = worker.open_message(scheduler, 1)
    good = worker_service_pb2.RunStepsRequest(open=message).SerializeToString()
    for number in range(_NUM_STREAMS):
        frames = [draw.randbytes(draw.randrange(40)), good[: draw.randrange(len(good))], good]
        sent = draw.sample(frames, draw.randrange(1, 4))
        call = scheduler.channel.stream_stream(_METHOD, _as_it_is, _as_it_is)(iter(sent))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() in _KNOWN_ENDS, f"stream {number}: {sent}"
    assert (await scheduler.capabilities()).worker_incarnation == worker.capabilities.worker_incarnation
