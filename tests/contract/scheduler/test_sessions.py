"""SessionService as front ends see it, over real gRPC: accepted and refused, ends, losses, limits, and broken
frames."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_status import rpc_status

from scheduler_svc.core.step_bytes import MAX_STOP_TOKEN_IDS
from scheduler_svc.session import FrontEndSession
from scheduler_svc.workers import client as worker_client
from stepfence.v1 import admin_service_pb2
from stepfence.v1 import session_service_pb2 as pb
from tests.support.scheduler_process import RunningScheduler, running_scheduler, until
from tests.support.session_client import LENGTH, STOP, SessionClient, Stream
from tests.support.wire import number_field
from tests.support.worker_double import TOKENIZER, Capabilities, WorkerDouble, complete

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


# --- the ordinary course
# -------------------------------------------------------------------------------------------------


async def test_64_streams_with_cancels_complete_and_nothing_stays_behind(scheduler: RunningScheduler) -> None:
    rng = random.Random(64)
    async with SessionClient(scheduler.address, "a") as one, SessionClient(scheduler.address, "b") as two:
        streams = []
        for index in range(64):
            client = (one, two)[index % 2]
            num_tokens = rng.randrange(5, 60)
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
            streams.append((client, client.submit(prompt, num_tokens), num_tokens))
        cancelled = rng.sample(streams, 7)
        for client, stream, num_tokens in cancelled:
            await stream.until(rng.randrange(num_tokens))
            client.cancel(stream)
        for each in streams:
            _, stream, num_tokens = each
            await stream.over()
            assert stream.tokens == complete(stream.prompt, num_tokens)[: len(stream.tokens)]
            assert each in cancelled or (stream.reason == LENGTH and len(stream.tokens) == num_tokens)
        assert one.errors == two.errors == []
        async with asyncio.timeout(20):
            while any(front_end.num_live_streams for front_end in (await scheduler.status()).front_ends):
                await asyncio.sleep(0.01)
        status = await scheduler.status()
        assert {front_end.front_end_id for front_end in status.front_ends} == {"a", "b"}
        assert not any(front_end.num_live_requests for front_end in status.front_ends)
        assert status.num_running == status.num_waiting == status.num_skipped == 0


async def test_usage_says_what_a_request_cost(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address) as client:
        first = await client.submit(PROMPT * 4, 10).over()
        second = await client.submit(PROMPT * 4, 10).over()
    assert first.end is not None and second.end is not None
    assert (first.end.usage.num_prompt_tokens, first.end.usage.num_completion_tokens) == (20, 10)
    assert first.end.usage.num_cached_tokens == 0
    assert second.end.usage.num_cached_tokens == 16


async def test_a_text_end_stops_a_request_and_bills_up_to_there(
    scheduler: RunningScheduler, double: WorkerDouble
) -> None:
    double.delay_s = 0.001
    async with SessionClient(scheduler.address) as client:
        stream = client.submit(PROMPT, 500)
        await stream.until(6)
        client.end_text(stream, 4)
        await stream.over()
        assert stream.reason == STOP
        assert stream.end is not None and stream.end.usage.num_completion_tokens == 4
        assert not stream.end.ok.HasField("stop_token_id")
        assert client.errors == []


async def test_max_tokens_is_clipped_and_said(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address) as client:
        stream = await client.submit(PROMPT, 0).answered()
        assert stream.accepted is not None and 0 < stream.accepted.max_tokens <= 511 * 4
        client.cancel(stream)
        await stream.over()


async def test_a_handle_is_free_again_after_the_end(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address) as client:
        for round_ in range(5):
            stream = await client.submit([round_ + 1], 3, handle=9).over()
            assert stream.tokens == complete([round_ + 1], 3)
        refused = await client.submit([], 3, handle=9).over()
        assert refused.failure is not None
        again = await client.submit([1], 3, handle=9).over()
        assert again.tokens == complete([1], 3)
        assert client.errors == []


# --- refusals
# -------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "INVALID_ARGUMENT", "EMPTY_PROMPT"),
    ({"prompt": [1] * 4096}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    ({"prompt": [1] * 2000, "max_tokens": 1000}, "INVALID_ARGUMENT", "EXCEEDS_KV_CAPACITY"),
    ({"prompt": [260]}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"prompt": [-1]}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"priority": 1}, "INVALID_ARGUMENT", "PRIORITY_NOT_SUPPORTED"),
    ({"temperature": 101.0}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"temperature": -0.1}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"temperature": float("nan")}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"top_p": 0.0}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"top_p": 1.5}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"top_k": -1}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"min_p": 2.0}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"min_tokens": 6}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"stop_token_ids": [260]}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"eos_token_ids": [1 << 31]}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
    ({"request_id": "x" * 257}, "INVALID_ARGUMENT", "INVALID_PARAMETER"),
]


@pytest.mark.parametrize(("changes", "code", "reason"), REFUSED)
async def test_a_bad_request_is_refused_and_the_stream_goes_on(
    scheduler: RunningScheduler, changes: dict[str, Any], code: str, reason: str
) -> None:
    async with SessionClient(scheduler.address) as client:
        stream = await client.submit(**{"prompt": PROMPT, "max_tokens": 5, **changes}).over()
        assert stream.refused is not None
        assert (stream.refused.code, stream.refused.reason) == (code_pb2.Code.Value(code), reason)
        assert stream.refused.message
        good = await client.submit(PROMPT, 5).over()
        assert good.tokens == complete(PROMPT, 5)


async def test_f18_a_live_id_is_refused_and_its_cancel_does_not_reach_the_owner(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address, "a") as one, SessionClient(scheduler.address, "b") as two:
        owner = one.submit(PROMPT, 200, request_id="x")
        await owner.until(1)
        thief = two.submit(PROMPT, 5, request_id="x")
        two.cancel(thief)
        await thief.over()
        assert thief.refused is not None and thief.refused.reason == "DUPLICATE_REQUEST_ID"
        assert thief.refused.code == code_pb2.ALREADY_EXISTS
        await owner.over()
        assert owner.tokens == complete(PROMPT, 200)


async def test_a_full_queue_refuses_with_a_time_to_come_back(double: WorkerDouble) -> None:
    double.answering.clear()
    async with running_scheduler(double.address, max_num_seqs=1, max_queued_requests=3) as scheduler:
        await scheduler.ready()
        async with SessionClient(scheduler.address) as client:
            streams = [client.submit(PROMPT, 5) for _ in range(12)]
            for stream in streams:
                await stream.answered()
            refused = [stream.refused for stream in streams if stream.refused is not None]
            assert refused
            for failure in refused:
                assert (failure.code, failure.reason) == (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL")
                assert failure.retry_after.ToMilliseconds() > 0
            double.answering.set()
            for stream in streams:
                if stream.refused is None:
                    await stream.over()
                    assert stream.tokens == complete(PROMPT, 5)


async def test_d30_before_any_worker_new_requests_get_no_worker(double: WorkerDouble) -> None:
    await double.stop()
    async with running_scheduler(double.address) as scheduler:
        assert await scheduler.health("") == 1
        assert await scheduler.health() == 2
        async with SessionClient(scheduler.address) as client:
            stream = await client.submit(PROMPT, 5).over()
            assert stream.refused is not None
            assert (stream.refused.code, stream.refused.reason) == (code_pb2.UNAVAILABLE, "NO_WORKER")
            await double.start(double.port)
            await scheduler.ready()
            again = await client.submit(PROMPT, 5).over()
            assert again.tokens == complete(PROMPT, 5)


async def test_d30_while_no_worker_lives_requests_wait_for_the_grace_only(double: WorkerDouble) -> None:
    async with running_scheduler(double.address, no_worker_grace_s=3.0) as scheduler:
        await scheduler.ready()
        await double.stop()
        await scheduler.rank_is(double.address, "lost")
        await until(lambda: not scheduler.core.rank_names)
        async with SessionClient(scheduler.address) as client:
            waits = await client.submit(PROMPT, 5).answered()
            assert waits.accepted is not None
            short = await client.submit(PROMPT, 5, timeout_s=0.2).over()
            assert short.failure is not None and short.failure.code == code_pb2.DEADLINE_EXCEEDED
            async with asyncio.timeout(20):
                while True:
                    late = await client.submit(PROMPT, 5, timeout_s=0.1).over()
                    if late.refused is not None:
                        break
            assert (late.refused.code, late.refused.reason) == (code_pb2.UNAVAILABLE, "NO_WORKER")
            double.incarnation += 1
            double.session = None
            await double.start(double.port)
            await waits.over()
            assert waits.tokens == complete(PROMPT, 5)


# --- ends from outside
# ----------------------------------------------------------------------------------------------------


async def test_a_deadline_ends_a_queued_and_a_running_request(
    scheduler: RunningScheduler, double: WorkerDouble
) -> None:
    double.delay_s = 0.01
    async with SessionClient(scheduler.address) as client:
        running = client.submit(PROMPT, 1000, timeout_s=0.3)
        dead = client.submit(PROMPT, 1000, timeout_s=-1)
        for stream in (running, dead):
            await stream.over()
            assert stream.failure is not None
            assert (stream.failure.code, stream.failure.reason) == (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert dead.tokens == []
        assert running.end is not None and running.end.usage.num_completion_tokens == len(running.tokens) > 0


@pytest.mark.parametrize(
    ("reason", "code", "said"),
    [
        (pb.CANCEL_REASON_CLIENT_GONE, code_pb2.CANCELLED, "CLIENT_GONE"),
        (pb.CANCEL_REASON_ABORTED, code_pb2.CANCELLED, "ABORTED"),
        (pb.CANCEL_REASON_SLOW_READER, code_pb2.RESOURCE_EXHAUSTED, "SLOW_READER"),
    ],
)
async def test_a_cancel_ends_with_the_reason_and_the_usage_so_far(
    scheduler: RunningScheduler, reason: int, code: int, said: str
) -> None:
    async with SessionClient(scheduler.address) as client:
        stream = client.submit(PROMPT, 1000)
        await stream.until(2)
        client.cancel(stream, reason)
        await stream.over()
        assert stream.failure is not None and (stream.failure.code, stream.failure.reason) == (code, said)
        assert stream.end is not None and stream.end.usage.num_completion_tokens == len(stream.tokens)
        # Of a request that is over, and of one that never was: ignored.
        client.cancel(stream, reason)
        client.send(pb.AttachRequest(cancels=[pb.Cancel(handle=4711, reason=pb.CANCEL_REASON_ABORTED)]))
        client.send(pb.AttachRequest(text_ended=[pb.TextEnded(handle=4711, num_tokens=1)]))
        assert (await client.submit(PROMPT, 2).over()).tokens == complete(PROMPT, 2)


async def test_f11_a_cancel_in_the_frame_of_its_submit(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address) as client:
        stream = client.submit(PROMPT, 1000)
        client.cancel(stream)
        await stream.over()
        assert stream.accepted is not None
        assert stream.failure is not None and stream.failure.code == code_pb2.CANCELLED


async def test_f19_a_lost_front_end_frees_all_it_had(scheduler: RunningScheduler, double: WorkerDouble) -> None:
    double.delay_s = 0.002
    async with SessionClient(scheduler.address, "stays") as stays:
        other = stays.submit(PROMPT, 300)
        async with SessionClient(scheduler.address, "goes") as goes:
            streams = [goes.submit([index, index + 1], 2000) for index in range(20)]
            for stream in streams:
                await stream.until(1)
        await until(lambda: scheduler.core.num_live_requests <= 1)
        await other.over()
        assert other.tokens == complete(PROMPT, 300)
        assert [front_end.front_end_id for front_end in (await scheduler.status()).front_ends] == ["stays"]
    await scheduler.all_free()
    async with asyncio.timeout(20):
        while (await scheduler.rank(double.address)).num_rows_held:
            await asyncio.sleep(0.01)


async def test_a_front_end_that_half_closes_has_left(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address, heartbeat_s=None) as client:
        stream = client.submit(PROMPT, 1000)
        await stream.until(1)
        client._outgoing.put_nowait(None)
        async with asyncio.timeout(20):
            await client.ended.wait()
        assert client.status is grpc.StatusCode.OK
    await scheduler.all_free()


async def test_a_silent_front_end_is_given_up(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler:
        scheduler.service.hub.silence_s = 0.3
        await scheduler.ready()
        async with SessionClient(scheduler.address, heartbeat_s=None) as client:
            client.submit(PROMPT, 1000)
            async with asyncio.timeout(20):
                await client.ended.wait()
            assert client.status is grpc.StatusCode.DEADLINE_EXCEEDED
        await scheduler.all_free()


@pytest.mark.parametrize("half_closes", [False, True])
async def test_f132_what_is_answered_is_written_before_the_end(
    scheduler: RunningScheduler, monkeypatch: pytest.MonkeyPatch, half_closes: bool
) -> None:
    """The writer is held back until the stream is to end: by a frame that breaks the contract, or by the front end."""
    may_write = asyncio.Event()
    may_write.set()
    next_frame = FrontEndSession.next_frame

    async def late(session: FrontEndSession) -> pb.AttachResponse | None:
        # Nothing is taken before it may be written.
        await until(lambda: may_write.is_set() and (session._outgoing or session.is_gone or session.end))
        return await next_frame(session)

    monkeypatch.setattr(FrontEndSession, "next_frame", late)
    async with SessionClient(scheduler.address, heartbeat_s=None) as client:
        (session,) = scheduler.service.hub.sessions
        await until(lambda: not session._outgoing)
        may_write.clear()
        refused = client.submit([], 5)
        await until(lambda: len(session._outgoing) >= 1)
        if half_closes:
            client.half_close()
        else:
            client.send(pb.AttachRequest(hello=pb.Hello(front_end_id="again", protocol_revision=2)))
        await until(lambda: session.is_gone)
        may_write.set()
        async with asyncio.timeout(20):
            await client.ended.wait()
        assert refused.refused is not None
        assert client.status is (grpc.StatusCode.OK if half_closes else grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_front_end_that_does_not_read_is_ended_and_stops_nobody(double: WorkerDouble) -> None:
    """F19: what waits for it is bounded."""
    async with running_scheduler(double.address) as scheduler:
        await scheduler.ready()
        scheduler.service.hub._max_outgoing_bytes = 100_000
        async with SessionClient(scheduler.address, "fast") as fast, SessionClient(scheduler.address, "slow") as slow:
            slow.reading.clear()
            owner = fast.submit(PROMPT, 1500, request_id="z" * 250)
            await owner.until(1)
            # Each is refused with some 400 bytes that nobody fetches: 20 MB in all.
            for part in range(50):
                frame = pb.AttachRequest()
                for index in range(1000):
                    frame.submits.append(_submit(handle=1000 * part + index + 1, request_id="z" * 250).submits[0])
                slow.send(frame)
            stream = fast.submit(PROMPT, 50)
            await until(lambda: [each.front_end_id for each in scheduler.service.hub.sessions] == ["fast"], 60)
            await stream.over()
            await owner.over()
            assert stream.tokens == complete(PROMPT, 50)
            assert owner.tokens == complete(PROMPT, 1500)
            slow.streams.update({handle: Stream(handle, "", []) for handle in range(1, 50_001)})
            slow.reading.set()
            async with asyncio.timeout(20):
                await slow.ended.wait()
            # gRPC's client reports INTERNAL when one of its own writes is under way while the server ends the call.
            assert slow.status in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL), slow.details
        await scheduler.all_free()


# --- frames that no front end may send
# --------------------------------------------------------------------------------------


def _submit(**fields: Any) -> pb.AttachRequest:
    submit = pb.Submit(handle=1, request_id="r", prompt_token_ids=b"\1\0\0\0")
    submit.sampling.top_p = 1.0
    for name, value in fields.items():
        setattr(submit, name, value)
    return pb.AttachRequest(submits=[submit])


def _without_sampling() -> pb.AttachRequest:
    return pb.AttachRequest(submits=[pb.Submit(handle=1, request_id="r", prompt_token_ids=b"\1\0\0\0")])


VIOLATIONS: dict[str, list[pb.AttachRequest]] = {
    "hello a second time": [pb.AttachRequest(hello=pb.Hello(protocol_revision=2))],
    "no sampling": [_without_sampling()],
    "a handle that fits no column": [_submit(handle=1 << 31)],
    "a broken prompt column": [_submit(prompt_token_ids=b"\1\0\0")],
    "a handle in use": [_submit(), _submit(request_id="other")],
    "a cancel without reason": [pb.AttachRequest(cancels=[pb.Cancel(handle=1)])],
    "f118: too many cancels": [pb.AttachRequest(cancels=[pb.Cancel(handle=1, reason=pb.CANCEL_REASON_ABORTED)] * 1025)],
    "f118: too many text ends": [pb.AttachRequest(text_ended=[pb.TextEnded(handle=1, num_tokens=1)] * 1025)],
    "f118: so many that they are not decoded": [pb.AttachRequest(cancels=[pb.Cancel()] * 500_000)],
    "a text end of nothing": [pb.AttachRequest(text_ended=[pb.TextEnded(handle=1)])],
}


@pytest.mark.parametrize("kind", VIOLATIONS)
async def test_a_frame_against_the_rules_ends_the_stream(
    scheduler: RunningScheduler, double: WorkerDouble, kind: str
) -> None:
    double.answering.clear()
    async with SessionClient(scheduler.address) as client:
        for frame in VIOLATIONS[kind]:
            for submit in frame.submits:
                client.streams[submit.handle] = client.submit([1], 5, handle=77)
            client.send(frame)
        async with asyncio.timeout(20):
            await client.ended.wait()
        assert client.status is grpc.StatusCode.INVALID_ARGUMENT
        assert client.details
    double.answering.set()


async def test_f118_so_many_submits_in_a_frame_end_the_stream(scheduler: RunningScheduler) -> None:
    async with SessionClient(scheduler.address) as client:
        client.send(pb.AttachRequest(submits=_submit().submits[:1] * 1025))
        async with asyncio.timeout(20):
            await client.ended.wait()
        assert client.status is grpc.StatusCode.INVALID_ARGUMENT
        assert "1025 submits" in client.details


@pytest.mark.parametrize("first", [pb.AttachRequest(), _submit()])
async def test_the_first_frame_must_be_a_hello(scheduler: RunningScheduler, first: pb.AttachRequest) -> None:
    async def frames() -> AsyncIterator[pb.AttachRequest]:
        yield first
        await asyncio.sleep(60)

    async with SessionClient(scheduler.address) as client:
        call = client.stub.Attach(frames())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_f62_front_ends_hear_whether_a_worker_is_up_and_why_not() -> None:
    double = WorkerDouble()
    address = await double.start()
    try:
        async with running_scheduler(address) as scheduler, SessionClient(scheduler.address) as client:
            await scheduler.ready()
            await until(lambda: client.readiness and client.readiness[-1] == (True, ""))
            await double.stop()
            await until(lambda: not client.readiness[-1][0])
            assert f"{address} lost" in client.readiness[-1][1]
            # Also those who come now.
            async with SessionClient(scheduler.address, "late") as late:
                await until(lambda: late.readiness)
                assert late.readiness == client.readiness[-1:]
            await double.start(double.port)
            await until(lambda: client.readiness[-1][0])
            assert client.errors == []
    finally:
        await double.stop()


async def test_undecodable_bytes_end_one_call_and_nothing_else(
    scheduler: RunningScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the front end's fault, and said to be: a frame against the rules, no error of this process."""
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        attach: Any = channel.stream_stream("/stepfence.v1.SessionService/Attach")  # type: ignore[call-arg]
        call = attach()
        await call.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a stepfence.v1.AttachRequest" in (error.value.details() or "")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    async with SessionClient(scheduler.address) as client:
        assert (await client.submit(PROMPT, 3).over()).tokens == complete(PROMPT, 3)


# --- the model
# ---------------------------------------------------------------------------------------------------------------


async def test_d41_model_and_tokenizer_come_as_the_worker_gave_them(
    scheduler: RunningScheduler, double: WorkerDouble
) -> None:
    async with SessionClient(scheduler.address) as client:
        model = (await client.stub.GetModel(pb.SessionServiceGetModelRequest())).model
        assert (model.name, model.vocab_size, list(model.eos_token_ids)) == ("double", 260, [257])
        files: dict[str, bytes] = {}
        async for response in client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest()):
            files[response.chunk.file_name] = files.get(response.chunk.file_name, b"") + response.chunk.data
        assert files == dict(TOKENIZER)
        assert [change.model.name for change in client.model_changes] == ["double"]
        # Also while no worker is there.
        await double.stop()
        await scheduler.rank_is(double.address, "lost")
        assert (await client.stub.GetModel(pb.SessionServiceGetModelRequest())).model == model
        again = [response async for response in client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest())]
        assert b"".join(each.chunk.data for each in again) == b"".join(data for _, data in TOKENIZER)


async def _tokenizer_refusal(client: SessionClient) -> tuple[grpc.StatusCode, str, str]:
    """Status, reason and message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest()).read()
    call: Any = error.value
    status = rpc_status.from_call(call)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return error.value.code(), info.reason, error.value.details() or ""


async def test_a_tokenizer_over_the_limit_is_fetched_once_and_said_to_be_too_large(
    double: WorkerDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_client, "_MAX_TOKENIZER_BYTES", 1000)
    monkeypatch.setattr(worker_client, "_TOKENIZER_RETRY_S", 0.01)
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        await scheduler.ready()
        for _ in range(2):
            code, reason, message = await _tokenizer_refusal(client)
            assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_TOO_LARGE")
            assert "more than 1000 bytes" in message
        # Neither again nor by the next epoch; and requests are served.
        assert (await client.submit(PROMPT, 3).over()).tokens == complete(PROMPT, 3)
        double.cut_streams()
        await double.stop()
        await scheduler.rank_is(double.address, "lost")
        await double.start(double.port)
        await scheduler.rank_is(double.address, "up")
        assert (await client.submit(PROMPT, 3).over()).tokens == complete(PROMPT, 3)
        assert double.num_tokenizer_calls == 1
    (record,) = [record for record in caplog.records if "tokenizer" in record.message]
    assert record.message.startswith("the model's tokenizer is too large, so clients can only send token ids")


async def test_a_worker_that_gives_no_tokenizer_is_asked_less_and_less_often_and_logged_once(
    double: WorkerDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds >= worker_client._TOKENIZER_RETRY_S:
            pauses.append(seconds)
            seconds = 0.0
        await sleep(seconds)

    monkeypatch.setattr(worker_client, "_TOKENIZER_RETRY_S", 100.0)
    monkeypatch.setattr(worker_client, "_MAX_TOKENIZER_RETRY_S", 700.0)
    monkeypatch.setattr(asyncio, "sleep", noted)
    double.tokenizer_code = grpc.StatusCode.INTERNAL
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        await scheduler.ready()
        await until(lambda: len(pauses) >= 6)
        assert pauses[:5] == [100.0, 200.0, 400.0, 700.0, 700.0]
        double.tokenizer_code = None
        responses = [each async for each in client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest())]
        assert b"".join(each.chunk.data for each in responses) == b"".join(data for _, data in TOKENIZER)
    assert len([record for record in caplog.records if record.message == "no tokenizer from rank"]) == 1


async def test_without_a_worker_there_is_no_model(double: WorkerDouble) -> None:
    await double.stop()
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.stub.GetModel(pb.SessionServiceGetModelRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        call: Any = error.value
        status = rpc_status.from_call(call)
        info = error_details_pb2.ErrorInfo()
        assert status is not None and status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("NO_WORKER", "stepfence")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest()).read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert client.model_changes == []
        await double.start(double.port)
        await until(lambda: client.model_changes)


async def test_a_model_without_tokenizer_says_so() -> None:
    double = WorkerDouble(Capabilities(tokenizer_digest=""))
    await double.start()
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        await scheduler.ready()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.stub.GetTokenizer(pb.SessionServiceGetTokenizerRequest()).read()
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    await double.stop()


async def test_another_model_may_come_when_nothing_stands_behind_the_first(double: WorkerDouble) -> None:
    async with running_scheduler(double.address) as scheduler, SessionClient(scheduler.address) as client:
        await scheduler.ready()
        await double.stop()
        await until(lambda: not scheduler.core.rank_names)
        double.capabilities = Capabilities(model="newer", tokenizer_digest="other")
        double.incarnation += 1
        double.session = None
        await double.start(double.port)
        await until(lambda: len(client.model_changes) == 2)
        assert client.model_changes[-1].model.name == "newer"


# --- administration
# -----------------------------------------------------------------------------------------------------------


async def test_f37_a_reset_of_the_prefix_cache_is_truthful(scheduler: RunningScheduler, double: WorkerDouble) -> None:
    double.delay_s = 0.002
    request = admin_service_pb2.ResetPrefixCacheRequest
    async with SessionClient(scheduler.address) as client:
        await client.submit(PROMPT * 8, 3).over()
        await scheduler.all_free()
        assert (await scheduler.admin.ResetPrefixCache(request())).success
        cold = await client.submit(PROMPT * 8, 200).over()
        assert cold.end is not None and cold.end.usage.num_cached_tokens == 0
        runs = client.submit(PROMPT * 8, 200)
        await runs.until(3)
        answer = await scheduler.admin.ResetPrefixCache(request())
        assert not answer.success and answer.message
        await runs.over()
        assert runs.tokens == complete(PROMPT * 8, 200)


async def test_a_reset_that_preempts_changes_no_text(scheduler: RunningScheduler, double: WorkerDouble) -> None:
    double.delay_s = 0.002
    request = admin_service_pb2.ResetPrefixCacheRequest(preempt_running=True)
    async with SessionClient(scheduler.address) as client:
        streams = [client.submit([index] * 10, 100) for index in range(6)]
        await streams[-1].until(5)
        await scheduler.admin.ResetPrefixCache(request)
        for stream in streams:
            await stream.over()
            assert stream.tokens == complete(stream.prompt, 100)
        assert client.errors == []


@pytest.mark.parametrize("field", ["stop_token_ids", "eos_token_ids"])
async def test_f118_a_request_with_many_stop_ids_is_refused_alone_and_one_with_millions_with_its_stream(
    scheduler: RunningScheduler, double: WorkerDouble, field: str
) -> None:
    async with SessionClient(scheduler.address) as client:
        submit = _submit(handle=7)
        getattr(submit.submits[0].sampling, field).extend([1] * 4_000)
        client.streams[7] = Stream(7, "r", [1])
        client.send(submit)
        await until(lambda: client.streams[7].refused is not None)
        refused = client.streams[7].refused
        assert refused is not None
        assert refused.reason == "INVALID_PARAMETER"
        assert client.errors == []
        getattr(submit.submits[0].sampling, field).extend([1] * 2_000_000)
        client.send(submit)
        await client.ended.wait()
        assert client.status is grpc.StatusCode.INVALID_ARGUMENT
        assert f"submits.sampling.{field}: a list of numbers has at most 4096 bytes here" in client.details


@pytest.mark.parametrize("method", ["GetStatus", "Drain", "AuditKv", "ResetPrefixCache"])
async def test_f118_operators_messages_are_counted_before_they_are_decoded(
    scheduler: RunningScheduler, method: str
) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        call: Any = channel.unary_unary(f"/stepfence.v1.AdminService/{method}")  # type: ignore[call-arg]
        for data, text in ((number_field(15, 1) * 1_000_000, "16384 fields"), (b"\xff", "not a stepfence.v1.")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(data, timeout=30)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in (error.value.details() or "")
        status: Any = channel.unary_unary("/stepfence.v1.AdminService/GetStatus")  # type: ignore[call-arg]
        assert await status(b"", timeout=30)
