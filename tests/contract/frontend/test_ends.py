"""How calls end when they do not end well: clients that leave, deadlines, aborts, lost schedulers, slow readers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from scheduler_svc.frontend.limits import Limits
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc, usage_pb2
from stepfence.v1 import session_service_pb2 as session_pb
from tests.contract.frontend.harness import (
    EOF,
    FrontEndUnderTest,
    complete,
    front_end,
    read_refusal,
    read_stream,
    refusal,
    served,
    text_request,
    until,
    until_taken,
)
from tests.support.session_double import DEADLINE_EXCEEDED, INTERNAL, SessionDouble

GONE = session_pb.CANCEL_REASON_CLIENT_GONE


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("moment", ["submitted", "accepted", "first token", "many tokens", "text ended"])
async def test_f19_a_client_that_leaves_at_any_moment_ends_its_request(moment: str, unary: bool) -> None:
    async with served() as under_test:
        double = under_test.double
        prompt = text_request()
        prompt.sampling.stop.append("END")
        call = under_test.stub.Complete(complete(prompt)) if unary else under_test.stub.Generate(prompt)
        request = await double.next_request()
        if moment != "submitted":
            request.accept()
        if moment in ("first token", "many tokens"):
            request.send_tokens(b"a", *([b"b"] * 50 if moment == "many tokens" else []))
        if moment == "text ended":
            double.answers_text_ended = False
            request.send_tokens(b"aEND")
            await request.text_ended()
        if not unary and moment != "submitted":
            await call.read()
        call.cancel()
        assert await request.cancelled() == GONE
        await under_test.until_nothing_is_left()


class HeldTokenizing:
    """Prompts wait in front of the tokenizer until they are let go."""

    def __init__(self, under_test: FrontEndUnderTest) -> None:
        self.num_waiting = 0
        self.let_go = asyncio.Event()
        under_test.process.front_end._tokenized = self._tokenized  # type: ignore[method-assign]

    async def _tokenized(self, num_bytes: int, work: Any) -> Any:
        self.num_waiting += 1
        await self.let_go.wait()
        return work()


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_never_submitted() -> None:
    async with served() as under_test:
        held = HeldTokenizing(under_test)
        call = under_test.stub.Generate(text_request())
        await until(lambda: held.num_waiting == 1)
        call.cancel()
        await until(lambda: under_test.process.front_end.num_streams == 0)
        held.let_go.set()
        await under_test.until_nothing_is_left()
        assert under_test.double.requests == []


async def test_f18_two_equal_ids_that_are_tokenized_at_once_are_one_request() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"ok"]
        held = HeldTokenizing(under_test)
        calls = [under_test.stub.Complete(complete(text_request(request_id="same")), timeout=30) for _ in range(2)]
        await until(lambda: held.num_waiting == 2)
        held.let_go.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        (refused,) = [read_refusal(end) for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert refused.reason == "DUPLICATE_REQUEST_ID"
        assert sum(len(frame.submits) for frame in under_test.double.frames_up) == 1
        await under_test.until_nothing_is_left()


async def test_f83_a_prompt_that_is_tokenized_when_the_drain_begins_is_new_work() -> None:
    async with served() as under_test:
        held = HeldTokenizing(under_test)
        call = under_test.stub.Complete(complete(text_request()), timeout=30)
        await until(lambda: held.num_waiting == 1)
        under_test.process.stop()
        await under_test.until_health(2)
        held.let_go.set()
        assert (await refusal(call)).reason == "DRAINING"
        assert under_test.double.requests == []


@pytest.mark.parametrize("unary", [False, True])
async def test_f19_the_deadline_comes_back_with_the_usage_so_far(unary: bool) -> None:
    async with served() as under_test:
        prompt = text_request("four")
        call = (
            under_test.stub.Complete(complete(prompt), timeout=30)
            if unary
            else under_test.stub.Generate(prompt, timeout=30)
        )
        request = await under_test.double.next_request()
        assert 0 < request.submit.timeout.ToNanoseconds() < 29.96e9
        request.accept()
        request.send_tokens(b"abc")
        request.fail(DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        answer = await refusal(call)
        assert (answer.code, answer.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        assert answer.usage is not None
        assert (answer.usage.num_prompt_tokens, answer.usage.num_completion_tokens) == (4, 3)
        await under_test.until_nothing_is_left()


async def test_a_deadline_that_passes_here_frees_the_request() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=0.3)
        request = await under_test.double.next_request()
        request.accept()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await request.cancelled()
        await under_test.until_nothing_is_left()


async def test_abort_ends_the_call_of_any_client_with_the_usage_so_far() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        request_id = (await call.read()).accepted.request_id
        async with grpc.aio.insecure_channel(under_test.address) as other:
            abort: Any = other.unary_unary(
                "/stepfence.v1.GenerationService/Abort",
                request_serializer=pb.AbortRequest.SerializeToString,
                response_deserializer=pb.AbortResponse.FromString,
            )
            await abort(pb.AbortRequest(request_id=request_id), timeout=30)
        assert await request.cancelled() == session_pb.CANCEL_REASON_ABORTED
        answer = await refusal(call)
        assert (answer.code, answer.reason) == ("CANCELLED", "ABORTED")
        assert answer.usage is not None
        assert answer.usage.num_completion_tokens == 2
        await under_test.until_nothing_is_left()


async def test_aborting_what_is_not_live_is_not_found() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"x"]
        done = await under_test.stub.Complete(complete(text_request()), timeout=30)
        for request_id in (done.request_id, "gen-" + "0" * 32):
            answer = await refusal(under_test.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=30))
            assert (answer.code, answer.reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")


@pytest.mark.parametrize("request_id", ["", "never", "done"])
async def test_an_operator_may_abort_any_id_and_hears_which_are_not_live(request_id: str) -> None:
    secret = ClusterSecret("the-secret-of-this-test")
    async with served(secret=secret) as under_test:
        under_test.double.play = lambda submit: [b"x"]
        await under_test.stub.Complete(complete(text_request(request_id="done")), timeout=30)
        abort = under_test.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=30, metadata=secret.metadata)
        answer = await refusal(abort)
        assert (answer.code, answer.reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")


@pytest.mark.parametrize("unary", [False, True])
async def test_f68_a_failure_amid_the_stream_is_no_success(unary: bool) -> None:
    async with served() as under_test:
        call = (
            under_test.stub.Complete(complete(text_request()), timeout=30)
            if unary
            else under_test.stub.Generate(text_request(), timeout=30)
        )
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(*[b"x"] * 7)
        request.fail(INTERNAL, "WORKER_FAULT", "it fails wherever it runs")
        answer = await refusal(call)
        assert (answer.code, answer.reason, answer.message) == ("INTERNAL", "WORKER_FAULT", "it fails wherever it runs")
        assert answer.usage is not None
        assert (answer.usage.num_completion_tokens, answer.usage.num_preemptions) == (7, 2)


async def test_what_was_held_back_is_not_delivered_when_the_request_fails() -> None:
    async with served() as under_test:
        prompt = text_request()
        prompt.sampling.stop.append("STOP")
        call = under_test.stub.Generate(prompt, timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(b"abST")
        request.fail(INTERNAL, "WORKER_FAULT")
        text = ""
        with pytest.raises(grpc.aio.AioRpcError):
            async for event in call:
                text += event.delta.text
        assert text == "ab"


async def test_a_scheduler_that_comes_back_is_found_again() -> None:
    double = SessionDouble()
    double.play = lambda submit: [b"ok"]
    async with served(double, scheduler_grace_s=0.2) as under_test:
        session = under_test.process.front_end._session
        await double.stop()
        await until(lambda: not session.attached and session._paused_since is None)
        await under_test.until_health(2)
        for call in (
            under_test.stub.Complete(complete(text_request()), timeout=30),
            under_test.stub.GetModel(pb.GetModelRequest(), timeout=30),
        ):
            answer = await refusal(call)
            assert (answer.code, answer.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")
        await double.start()
        await under_test.until_health(1)
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"
        first, second = double.hellos
        assert first.front_end_id == second.front_end_id != ""


async def test_a_scheduler_that_breaks_the_contract_is_left_and_tried_again() -> None:
    double = SessionDouble()
    async with served(double) as under_test:
        for tokens in (
            session_pb.TokenColumns(handles=b"abc"),
            session_pb.TokenColumns(handles=b"\1\0\0\0", token_ids=b""),
            session_pb.TokenColumns(handles=b"\1\0\0\0", counts=b"\xff\xff\xff\xff", token_ids=b""),
        ):
            call = under_test.stub.Generate(text_request(), timeout=30)
            (await double.next_request()).accept()
            double.send(session_pb.AttachResponse(tokens=tokens))
            assert (await refusal(call)).reason == "SCHEDULER_UNAVAILABLE"
            await under_test.until_health(1)
        call = under_test.stub.Generate(text_request(), timeout=30)
        request = await double.next_request()
        request.accept()
        double.send(session_pb.AttachResponse(ended=[session_pb.RequestEnded(handle=request.handle)]))
        assert (await refusal(call)).reason == "SCHEDULER_UNAVAILABLE"


async def test_words_about_unknown_handles_are_ignored() -> None:
    async with served() as under_test:
        double = under_test.double
        double.send_tokens({12345: list(b"x")})
        double.send(session_pb.AttachResponse(accepted=[session_pb.SubmitAccepted(handle=12345)]))
        ok = session_pb.EndedOk(reason=usage_pb2.FINISH_REASON_STOP)
        double.send(session_pb.AttachResponse(ended=[session_pb.RequestEnded(handle=12345, ok=ok)]))
        double.play = lambda submit: [b"ok"]
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"


async def test_a_draining_scheduler_takes_nothing_new_and_finishes_what_it_has() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        under_test.double.send(session_pb.AttachResponse(draining=True))
        await under_test.until_health(2)
        answer = await refusal(under_test.stub.Complete(complete(text_request()), timeout=30))
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "DRAINING")
        request.send_tokens(b"ok")
        request.end_length()
        assert (await read_stream(call)).text == "ok"


async def test_f19_a_slow_reader_is_bounded_and_blocks_nobody() -> None:
    limits = Limits(max_undelivered_bytes=1 << 17)
    # A client that takes little in advance.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    async with (
        served(limits=limits) as under_test,
        grpc.aio.insecure_channel(under_test.address, options=options) as channel,
    ):
        double = under_test.double
        stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        slow = stub.Generate(text_request(), timeout=60)
        request = await double.next_request()
        request.accept()
        assert (await slow.read()).WhichOneof("event") == "accepted"
        frame = bytes(range(97, 123)) * 80
        # gRPC itself takes a part, too.
        while request.cancel_reason is None:
            request.send_tokens(frame)
            await until_taken(under_test)
        assert await request.cancelled() == session_pb.CANCEL_REASON_SLOW_READER
        double.play = lambda submit: [b"ok"]
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"
        received = ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (event := await slow.read()) is not EOF:
                received += event.delta.text
        answer = read_refusal(caught.value)
        assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "SLOW_READER")
        assert answer.usage is not None
        # A prefix of the text, without holes.
        whole = frame.decode() * (len(received) // len(frame) + 1)
        assert whole.startswith(received)
        await under_test.until_nothing_is_left()


async def test_a_reader_that_catches_up_gets_everything() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=60)
        request = await under_test.double.next_request()
        request.accept()
        await call.read()
        expected = ""
        for number in range(3000):
            text = f"{number} "
            expected += text
            request.send_tokens(text.encode())
        request.end_length()
        await until(lambda: under_test.process.front_end.num_live == 0)
        received, num_deltas = "", 0
        while (event := await call.read()) is not EOF:
            received += event.delta.text
            num_deltas += event.HasField("delta")
        assert received == expected
        assert num_deltas <= 3000


async def test_64_streams_with_random_cancels_leave_nothing() -> None:
    rng = random.Random(7)
    async with served() as under_test:
        double = under_test.double
        texts = {f"r{number}": bytes(rng.choices(range(97, 123), k=rng.randint(1, 120))) for number in range(64)}
        double.play = lambda submit: [bytes([byte]) for byte in texts[submit.request_id]]
        doomed = set(rng.sample(sorted(texts), 12))

        async def client(request_id: str) -> None:
            await asyncio.sleep(rng.random() * 0.05)
            call = under_test.stub.Generate(text_request(request_id=request_id), timeout=60)
            if request_id in doomed:
                for _ in range(rng.randint(0, 20)):
                    if await call.read() is EOF:
                        break
                call.cancel()
                return
            streamed = await read_stream(call)
            assert streamed.text.encode() == texts[request_id]

        await asyncio.gather(*(client(request_id) for request_id in texts))
        await under_test.until_nothing_is_left()
        # The scheduler is answer that no stream is open any more.
        await until(lambda: double.frames_up[-1].num_live_streams == 0)


async def test_open_streams_are_reported_at_least_once_a_second() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        (await under_test.double.next_request()).accept()
        await call.read()
        num_frames = len(under_test.double.frames_up)
        await until(lambda: len(under_test.double.frames_up) >= num_frames + 2)
        assert under_test.double.frames_up[-1].num_live_streams == 1
        call.cancel()
        await until(lambda: under_test.double.frames_up[-1].num_live_streams == 0)


async def test_a_scheduler_that_never_says_attached_leaves_the_front_end_not_ready() -> None:
    double = SessionDouble()
    double.attaches = False
    async with double, front_end(double, ready=False) as under_test:
        await until(lambda: bool(double.hellos))
        assert await under_test.health() == 2
        answer = await refusal(under_test.stub.Generate(text_request(), timeout=30))
        assert answer.reason == "SCHEDULER_UNAVAILABLE"


class _HeldContext:
    """A call whose writes wait until they are let go; keeps what was written, and how it ended."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.written: list[str] = []

    async def write(self, event: Any) -> None:
        await self.may_write.wait()
        self.written.append(str(event.WhichOneof("event")))

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any) -> None:
        self.written.append(code.name)
        raise grpc.aio.AbortError

    def done(self) -> bool:
        return False

    def peer(self) -> str:
        return "ipv4:192.0.2.1:1"

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("end", ["fails", "is given up"])
async def test_f132_output_is_written_before_the_status_of_a_failure(end: str) -> None:
    async with served() as under_test:
        context: Any = _HeldContext()
        call = asyncio.create_task(under_test.process._servicer.Generate(text_request(), context))
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(b"one", b"two")
        (generation,) = under_test.process.front_end._live.values()
        await until(lambda: generation.num_output_tokens == 6)
        if end == "fails":
            request.fail(INTERNAL, "WORKER_FAULT")
        else:
            under_test.process.front_end.give_up_all()
        await until(lambda: under_test.process.front_end.num_live == 0)
        context.may_write.set()
        with pytest.raises(grpc.aio.AbortError):
            await call
        assert context.written == ["accepted", "delta", "delta", "INTERNAL" if end == "fails" else "UNAVAILABLE"]
