"""What a front end that is broken, or is none, may send a scheduler: the scheduler goes on, and others hear nothing of
it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from stepfence.v1 import admin_service_pb2, sampling_pb2
from stepfence.v1 import session_service_pb2 as pb
from tests.support.scheduler_process import running_scheduler
from tests.support.session_client import SessionClient, Stream
from tests.support.worker_double import WorkerDouble, complete

_PROMPT = [5, 6, 7]
_LONGEST = Duration(seconds=2**63 - 1, nanos=2**31 - 1)
_SHORTEST = Duration(seconds=-(2**63), nanos=-(2**31))


@pytest_asyncio.fixture
async def double() -> AsyncIterator[WorkerDouble]:
    one = WorkerDouble()
    await one.start()
    yield one
    await one.stop()


def _submit(**fields: Any) -> pb.Submit:
    sampling = sampling_pb2.ResolvedSampling(top_p=1.0, max_tokens=8)
    prompt = array("i", _PROMPT).tobytes()
    return pb.Submit(handle=1, request_id="rogue", prompt_token_ids=prompt, sampling=sampling, **fields)


async def _is_served(address: str) -> bool:
    async with SessionClient(address, "honest") as client:
        return (await client.submit(_PROMPT, 12).over()).tokens == complete(_PROMPT, 12)


@pytest.mark.parametrize(
    ("submit", "reason"),
    [
        (_submit(age=_LONGEST), ""),
        (_submit(age=_SHORTEST), ""),
        (_submit(age=_LONGEST, timeout=_LONGEST), ""),
        (_submit(timeout=_LONGEST), ""),
        (_submit(timeout=_SHORTEST), "DEADLINE_EXCEEDED"),
    ],
    ids=["oldest", "youngest", "oldest, with time", "most time", "least time"],
)
async def test_no_duration_ends_the_scheduler(double: WorkerDouble, submit: pb.Submit, reason: str) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address, "rogue") as client:
            stream = client.streams[1] = Stream(1, "rogue", _PROMPT)
            client.send(pb.AttachRequest(submits=[submit]))
            await stream.over()
            assert (stream.failure.reason if stream.failure else "") == reason
            assert not client.errors
        assert await _is_served(scheduler.address)
        await scheduler.all_free()


@pytest.mark.parametrize("deadline", [_LONGEST, _SHORTEST], ids=["longest", "shortest"])
async def test_a_drain_takes_any_deadline(double: WorkerDouble, deadline: Duration) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        await scheduler.admin.Drain(admin_service_pb2.DrainRequest(deadline=deadline))
        assert scheduler.exit_code is not None
        async with asyncio.timeout(30):
            assert await scheduler.exit_code == 0


async def test_a_front_end_that_needs_features_without_end_is_refused_in_few_words(
    double: WorkerDouble, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        features: Any = range(1000)
        hello = pb.Hello(front_end_id="rogue", protocol_revision=2, required_features=features)
        async with grpc.aio.insecure_channel(scheduler.address) as channel:
            attach: Any = channel.stream_stream(
                "/stepfence.v1.SessionService/Attach", pb.AttachRequest.SerializeToString, pb.AttachResponse.FromString
            )
            call = attach(iter([pb.AttachRequest(hello=hello)]))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "hello: 1000 features, at most 64"
        assert await _is_served(scheduler.address)
    assert all(len(str(vars(record))) < 4000 for record in caplog.records)
