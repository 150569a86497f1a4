"""D50: peers whose revisions differ by one work together, features are declared and required, and what is refused says
what to do. There are doubles of revision 2 without features, and of revision 3 with unknown features and
fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stepfence.v1 import session_service_pb2 as session_pb
from stepfence.v1 import session_service_pb2_grpc, worker_service_pb2
from tests.contract.frontend.harness import complete, front_end, read_refusal, text_request, until
from tests.support.scheduler_double import GREEDY, Book, SchedulerDouble, new_request
from tests.support.scheduler_process import running_scheduler, state_of
from tests.support.session_client import SessionClient
from tests.support.session_double import SessionDouble
from tests.support.worker_double import Capabilities, WorkerDouble
from tests.support.worker_double import complete as continuation
from tests.support.worker_fixtures import own_worker

# A field and features of revisions that do not exist yet: number 2047, and two numbers of enums.
_UNKNOWN_FIELD = b"\xfa\x7f\x03new"
_UNKNOWN = (7777, 4_000_000)
PROMPT = [5, 6, 7, 8, 9]


# --- scheduler and worker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capabilities",
    [
        Capabilities(protocol_revision=2, features=(), max_num_drafts=0),
        Capabilities(protocol_revision=3, features=_UNKNOWN, unknown_field=_UNKNOWN_FIELD),
    ],
    ids=["revision 2 without features", "revision 3 with unknown ones"],
)
async def test_d50_a_scheduler_works_with_workers_of_its_neighbours_revision(capabilities: Capabilities) -> None:
    double = WorkerDouble(capabilities)
    await double.start()
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            stream = client.submit(PROMPT, 6)
            await stream.over()
            assert stream.tokens == continuation(PROMPT, 6)
        assert list((await scheduler.rank(double.address)).features) == []
    assert double.breaches == []
    await double.stop()


@pytest.mark.parametrize("revision", [0, 1, 4])
async def test_d50_a_worker_of_another_revision_is_refused_with_both(revision: int) -> None:
    double = WorkerDouble(Capabilities(protocol_revision=revision))
    await double.start()
    async with running_scheduler(double.address) as scheduler, asyncio.timeout(20):
        while "protocol revision" not in (rank := await scheduler.rank(double.address)).cause:
            await asyncio.sleep(0.01)
        assert f"revision {revision}, this scheduler revision 2" in rank.cause
        assert state_of(rank) == "connecting"
        assert double.opens == []
    await double.stop()


async def test_d50_a_scheduler_with_drafts_requires_what_its_steps_use() -> None:
    double = WorkerDouble()
    await double.start()
    async with running_scheduler(double.address, num_speculative_tokens=4) as scheduler:
        await scheduler.ready()
        (opening,) = double.opens
        assert list(opening.required_features) == [
            worker_service_pb2.WORKER_FEATURE_DRAFTS,
            worker_service_pb2.WORKER_FEATURE_SAMPLED_DRAFTS,
        ]
    await double.stop()
    greedy_only = WorkerDouble(Capabilities(features=(worker_service_pb2.WORKER_FEATURE_DRAFTS,)))
    await greedy_only.start()
    async with running_scheduler(greedy_only.address, num_speculative_tokens=4) as scheduler, asyncio.timeout(20):
        while "SAMPLED_DRAFTS" not in (await scheduler.rank(greedy_only.address)).cause:
            await asyncio.sleep(0.01)
        assert greedy_only.opens == []
    await greedy_only.stop()


@pytest.mark.parametrize("required", [_UNKNOWN, (worker_service_pb2.WORKER_FEATURE_DRAFTS, 7777)])
async def test_d50_a_worker_refuses_an_open_that_needs_what_it_does_not_have(required: tuple[int, ...]) -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        session, book = await mine.target.open(scheduler), Book()
        await session.run(book.step({0: 3}, new=[_request(mine)]))
        message = mine.target.open_message(scheduler, epoch=2)
        message.required_features.extend(required)  # type: ignore[arg-type]
        ended = await (await scheduler.try_open(message)).ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_NOT_SUPPORTED")
        assert "feature 7777" in ended.message
        # What is held stays as it is.
        assert await session.run(book.step({0: 1})) is not None


@pytest.mark.parametrize("revision, fits", [(0, False), (1, False), (2, True), (3, True), (4, False)])
async def test_d50_a_worker_works_with_schedulers_of_its_neighbours_revision(revision: int, fits: bool) -> None:
    async with own_worker() as mine, SchedulerDouble(mine.target.address) as scheduler:
        message = mine.target.open_message(scheduler, protocol_revision=revision)
        message.MergeFromString(_UNKNOWN_FIELD)
        if fits:
            assert (await scheduler.open(message)) is not None
            return
        ended = await (await scheduler.try_open(message)).ended()
        assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_REVISION")
        assert f"revision {revision}, this worker revision 2" in ended.message


def _request(mine: Any) -> Any:
    return new_request("r", 0, mine.target.prompt(3), mine.target.table(8), sampling=GREEDY)


# --- front end and scheduler ----------------------------------------------------------------------------------------


async def _attach(address: str, hello: session_pb.Hello) -> session_pb.AttachResponse:
    """The first frame down, or what ends the stream instead."""

    async def frames() -> AsyncIterator[session_pb.AttachRequest]:
        yield session_pb.AttachRequest(hello=hello)
        await asyncio.sleep(60)

    async with grpc.aio.insecure_channel(address) as channel:
        call = session_service_pb2_grpc.SessionServiceStub(channel).Attach(frames())
        async with asyncio.timeout(20):
            first: session_pb.AttachResponse = await anext(aiter(call))
        call.cancel()
        return first


async def test_d50_a_scheduler_serves_front_ends_of_its_neighbours_revision() -> None:
    async with running_scheduler("127.0.0.1:1") as scheduler:
        for revision in (2, 3):
            hello = session_pb.Hello(front_end_id="f", protocol_revision=revision)
            hello.MergeFromString(_UNKNOWN_FIELD)
            attached = (await _attach(scheduler.address, hello)).attached
            assert attached.protocol_revision == 2
            assert list(attached.features) == [session_pb.SESSION_FEATURE_RESUBMIT, session_pb.SESSION_FEATURE_TENANTS]
    async with running_scheduler("127.0.0.1:1", policy="priority") as scheduler:
        attached = (await _attach(scheduler.address, session_pb.Hello(protocol_revision=2))).attached
        assert set(attached.features) == {
            session_pb.SESSION_FEATURE_PRIORITY,
            session_pb.SESSION_FEATURE_RESUBMIT,
            session_pb.SESSION_FEATURE_TENANTS,
        }


@pytest.mark.parametrize(
    "hello, reason, said",
    [
        (session_pb.Hello(protocol_revision=1), "PROTOCOL_REVISION", "revision 1, this scheduler revision 2"),
        (session_pb.Hello(protocol_revision=4), "PROTOCOL_REVISION", "revision 4, this scheduler revision 2"),
        (
            session_pb.Hello(protocol_revision=2, required_features=[session_pb.SESSION_FEATURE_PRIORITY]),
            "FEATURE_NOT_SUPPORTED",
            "SESSION_FEATURE_PRIORITY",
        ),
        (
            session_pb.Hello(protocol_revision=2, required_features=[7777]),  # type: ignore[list-item]
            "FEATURE_NOT_SUPPORTED",
            "feature 7777",
        ),
    ],
)
async def test_d50_a_front_end_that_cannot_be_served_is_refused_with_the_reason(
    hello: session_pb.Hello, reason: str, said: str
) -> None:
    async with running_scheduler("127.0.0.1:1") as scheduler:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _attach(scheduler.address, hello)
        refusal = read_refusal(caught.value)
        assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", reason)
        assert said in refusal.message


async def test_d50_a_front_end_works_with_schedulers_of_its_neighbours_revision() -> None:
    for revision in (2, 3):
        async with SessionDouble(features=_UNKNOWN, revision=revision) as double, front_end(double) as under_test:
            double.play = lambda submit: [b"ok"]
            answer = await under_test.stub.Complete(complete(text_request()), timeout=30)
            assert answer.text == "ok"


@pytest.mark.parametrize("revision", [0, 1, 4])
async def test_d50_a_scheduler_of_another_revision_is_named_as_what_keeps_a_front_end_from_being_ready(
    revision: int,
) -> None:
    async with SessionDouble(revision=revision) as double, front_end(double, ready=False) as under_test:
        said = f"revision {revision}, this front end revision 2"
        await until(lambda: said in (under_test.process.front_end.not_ready_cause or ""))
