"""D57 on the front end's side: the loss of the scheduler is a pause.

The scheduler is a double that can drop its stream, come back, and look at what is submitted again."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from scheduler_svc.frontend.limits import Limits
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import session_service_pb2, usage_pb2
from tests.contract.frontend.harness import (
    EOF,
    FrontEndUnderTest,
    complete,
    refusal,
    sampled,
    served,
    text_request,
    until,
)
from tests.support.session_double import (
    INTERNAL,
    SessionDouble,
    _ids,
    byte_model,
)

RESUBMIT = (session_service_pb2.SESSION_FEATURE_RESUBMIT,)


def able(**changes: Any) -> SessionDouble:
    return SessionDouble(features=RESUBMIT, **changes)


async def lose_stream(under_test: FrontEndUnderTest) -> None:
    """The stream is dropped, and the front end has attached again."""
    double = under_test.double
    num_hellos = len(double.hellos)
    double.drop_stream()
    await until(lambda: len(double.hellos) > num_hellos)
    await double.attached()


async def text_of(call: Any) -> tuple[str, pb.Finished]:
    text, finished = "", None
    while (event := await call.read()) is not EOF:
        text += event.delta.text
        if event.HasField("finished"):
            finished = event.finished
    assert finished is not None
    return text, finished


def say_usage(double: SessionDouble, handle: int, **fields: Any) -> None:
    usage = usage_pb2.Usage(num_prompt_tokens=4, **fields)
    changed = session_service_pb2.UsageChanged(handle=handle, usage=usage)
    double.send(session_service_pb2.AttachResponse(usage_changed=[changed]))


async def test_d57_a_call_goes_on_where_it_was_and_no_token_comes_twice() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Generate(sampled("four", temperature=0.7, max_tokens=500, min_tokens=90), timeout=30)
        before = await double.next_request()
        before.accept(max_tokens=40)
        before.send_tokens(b"ab", b"c")
        assert (await call.read()).WhichOneof("event") == "accepted"
        await lose_stream(under_test)
        after = await double.next_request()
        first, again = before.submit, after.submit
        assert (again.request_id, again.prompt_token_ids) == (first.request_id, first.prompt_token_ids)
        assert _ids(again.output_token_ids) == list(b"abc")
        assert again.HasField("age") and not first.HasField("age") and not first.output_token_ids
        assert 0 <= again.age.seconds < 30
        # As it was accepted; the rest as it was asked for.
        assert (again.sampling.max_tokens, again.sampling.min_tokens) == (40, 40)
        again.sampling.max_tokens, again.sampling.min_tokens = first.sampling.max_tokens, first.sampling.min_tokens
        assert again.sampling == first.sampling
        after.accept(max_tokens=40)
        after.send_tokens(b"de")
        after.end_ok(usage_pb2.FINISH_REASON_LENGTH, num_tokens=5)
        text, finished = await text_of(call)
        assert text == "abcde"
        assert finished.usage.num_completion_tokens == 5
        await under_test.until_nothing_is_left()


async def test_d57_the_cost_of_all_streams_adds_up() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        before = await double.next_request()
        before.accept()
        say_usage(double, before.handle, num_cached_tokens=2)
        say_usage(double, before.handle, num_cached_tokens=2, num_preemptions=1, num_recomputed_tokens=5)
        before.send_tokens(b"ab")
        assert (await call.read()).WhichOneof("event") == "accepted"
        assert (await call.read()).delta.text == "ab"
        await lose_stream(under_test)
        after = await double.next_request()
        after.accept()
        # The double's: 3 cached, 2 preemptions, 11 computed again, 1.5 s queued, 7 ns preempted.
        after.end_length()
        _, finished = await text_of(call)
        usage = finished.usage
        # Of the first admission, on the first stream.
        assert usage.num_cached_tokens == 2
        assert usage.queued.ToNanoseconds() == 0
        assert (usage.num_preemptions, usage.num_recomputed_tokens) == (3, 16)
        # It stood still from its preemption until it was submitted again.
        assert usage.preempted.ToNanoseconds() > 7


async def test_d57_without_a_token_the_wait_for_the_first_admission_goes_on() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        before = await double.next_request()
        before.accept()
        say_usage(double, before.handle, num_cached_tokens=2, num_preemptions=1)
        await call.read()
        await lose_stream(under_test)
        after = await double.next_request()
        assert after.submit.HasField("age") and not after.submit.output_token_ids
        after.accept()
        after.end_length()
        _, finished = await text_of(call)
        assert finished.usage.num_cached_tokens == 3
        assert finished.usage.queued.ToMilliseconds() == 1500
        assert finished.usage.num_preemptions == 3


async def test_d57_a_call_that_no_scheduler_has_answered_is_submitted_as_a_new_one() -> None:
    async with served(able()) as under_test:
        call = under_test.stub.Complete(complete(text_request("four")), timeout=30)
        first = await under_test.double.next_request()
        await lose_stream(under_test)
        again = await under_test.double.next_request()
        assert first.request_id == again.request_id
        assert not again.submit.HasField("age") and not again.submit.output_token_ids
        again.accept()
        again.send_tokens(b"ok")
        again.end_length()
        assert (await call).text == "ok"


async def test_d57_older_requests_are_submitted_first_and_their_end_is_said() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        calls = [under_test.stub.Generate(text_request(f"text {n}"), timeout=30) for n in range(3)]
        requests = [await double.next_request() for _ in calls]
        for request in requests[:2]:
            request.accept()
        for call in calls[:2]:
            await call.read()
        del double.frames_up[:]
        await lose_stream(under_test)
        await until(lambda: any(frame.resubmits_done for frame in double.frames_up))
        await until(lambda: sum(len(frame.submits) for frame in double.frames_up) == 3)
        order: list[str] = []
        for frame in double.frames_up:
            order += ["again" if submit.HasField("age") else "new" for submit in frame.submits]
            order += ["done"] if frame.resubmits_done else []
        assert order == ["again", "again", "done", "new"]
        hellos = double.hellos
        assert hellos[0].front_end_incarnation == hellos[-1].front_end_incarnation != 0
        assert [hello.attach_seq for hello in hellos] == list(range(1, len(hellos) + 1))
        for call in calls:
            call.cancel()


async def test_d57_a_cancelled_request_is_not_submitted_again() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        double.answers_cancels = False
        kept, left, aborted = [under_test.stub.Generate(text_request(t), timeout=30) for t in ("a", "b", "c")]
        requests = [await double.next_request() for _ in range(3)]
        by_prompt = {bytes(request.prompt): request for request in requests}
        for request in requests:
            request.accept()
            request.send_tokens(b"xy")
        for call in (kept, left, aborted):
            await call.read()
        left.cancel()
        await by_prompt[b"b"].cancelled()
        await under_test.stub.Abort(pb.AbortRequest(request_id=by_prompt[b"c"].request_id), timeout=30)
        await by_prompt[b"c"].cancelled()
        await lose_stream(under_test)
        again = await double.next_request()
        assert bytes(again.prompt) == b"a"
        answer = await refusal(aborted)
        assert (answer.code, answer.reason) == ("CANCELLED", "ABORTED")
        assert answer.usage is not None and answer.usage.num_completion_tokens == 2
        again.accept()
        again.end_length()
        await text_of(kept)
        await under_test.until_nothing_is_left()
        assert len(double.requests) == 4


async def test_d57_a_text_that_has_ended_ends_without_the_next_scheduler() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        double.answers_text_ended = False
        call = under_test.stub.Generate(sampled("four", stop=["ST"]), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"abSTuv")
        await request.text_ended()
        double.drop_stream()
        text, finished = await text_of(call)
        assert (text, finished.stop_string) == ("ab", "ST")
        assert finished.usage.num_completion_tokens == 4
        await until(lambda: len(double.hellos) == 2)
        assert len(double.requests) == 1


@pytest.mark.parametrize("unary", [False, True])
async def test_d57_no_scheduler_within_the_grace_ends_every_call_with_what_it_cost(unary: bool) -> None:
    async with served(able(), scheduler_grace_s=0.5) as under_test:
        double = under_test.double
        calls = [
            under_test.stub.Complete(complete(text_request("four")), timeout=30)
            if unary
            else under_test.stub.Generate(text_request("four"), timeout=30)
            for _ in range(3)
        ]
        requests = [await double.next_request() for _ in calls]
        for request in requests[:2]:
            request.accept()
            request.send_tokens(b"abc")
        live = under_test.process.front_end._live
        await until(lambda: sum(generation.num_output_tokens for generation in live.values()) == 6)
        await double.stop()
        accepted, _, waiting = [await refusal(call) for call in calls]
        assert (accepted.code, accepted.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")
        assert accepted.usage is not None
        assert (accepted.usage.num_prompt_tokens, accepted.usage.num_completion_tokens) == (4, 3)
        assert (waiting.code, waiting.reason, waiting.usage) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE", None)


async def test_d57_a_scheduler_that_cannot_continue_requests_ends_them_and_takes_the_new_ones() -> None:
    async with served(SessionDouble()) as under_test:
        double = under_test.double
        begun = under_test.stub.Generate(text_request("four"), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        await begun.read()
        waiting = under_test.stub.Complete(complete(text_request("next")), timeout=30)
        await double.next_request()
        await lose_stream(under_test)
        again = await double.next_request()
        assert bytes(again.prompt) == b"next"
        again.accept()
        again.end_length()
        await waiting
        answer = await refusal(begun)
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")
        assert answer.usage is not None and answer.usage.num_completion_tokens == 2


async def test_d57_calls_made_during_the_pause_wait_for_the_next_scheduler() -> None:
    double = able()
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        await double.stop()
        await under_test.until_health(2)
        call = under_test.stub.Complete(complete(text_request()), timeout=30)
        await until(lambda: under_test.process.front_end.num_live == 1)
        assert (await under_test.stub.GetModel(pb.GetModelRequest(), timeout=30)).model.name == "bytes"
        await double.start()
        assert (await call).text == "ok"


async def test_d57_more_calls_than_may_wait_are_refused_with_the_time_to_come_again() -> None:
    async with served(able(), limits=Limits(max_held_requests=2)) as under_test:
        await under_test.double.stop()
        await under_test.until_health(2)
        held = [under_test.stub.Complete(complete(text_request()), timeout=30) for _ in range(2)]
        await until(lambda: under_test.process.front_end.num_live == 2)
        answer = await refusal(under_test.stub.Complete(complete(text_request()), timeout=30))
        assert (answer.code, answer.reason, answer.retry_after_s) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE", 1.0)
        for call in held:
            call.cancel()
        await under_test.until_nothing_is_left()


async def test_d57_deadlines_pass_during_the_pause_too() -> None:
    async with served(able()) as under_test:
        call = under_test.stub.Generate(text_request("four"), timeout=3)
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        await call.read()
        await under_test.double.stop()
        answer = await refusal(call)
        assert answer.code == "DEADLINE_EXCEEDED"
        # The front end's own answer, which comes before gRPC's.
        assert answer.reason == "DEADLINE_EXCEEDED"
        assert answer.usage is not None and answer.usage.num_completion_tokens == 2
        await under_test.until_nothing_is_left()


async def test_d57_a_request_that_is_refused_when_it_comes_again_ends_with_what_it_cost() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        await call.read()
        await lose_stream(under_test)
        (await double.next_request()).refuse(INTERNAL, "SOME_REASON")
        answer = await refusal(call)
        assert (answer.code, answer.reason) == ("INTERNAL", "SOME_REASON")
        assert answer.usage is not None and answer.usage.num_completion_tokens == 2


async def test_d57_another_model_does_not_continue_a_text() -> None:
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        await call.read()
        await lose_stream(under_test)
        again = await double.next_request()
        again.accept()
        double.model = byte_model(name="another")
        double.worker_joins()
        again.send_tokens(b"XY")
        answer = await refusal(call)
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "MODEL_CHANGED")
        assert answer.usage is not None and answer.usage.num_completion_tokens == 2
        assert await again.cancelled() == session_service_pb2.CANCEL_REASON_ABORTED
        await under_test.until_nothing_is_left()


async def test_d57_a_request_that_every_stream_is_lost_with_ends() -> None:
    """It may be what the streams are lost for: it must not take the others along for ever."""
    async with served(able()) as under_test:
        double = under_test.double
        call = under_test.stub.Complete(complete(text_request("poison")), timeout=60)

        async def drop_at_each() -> None:
            while True:
                await double.next_request()
                double.drop_stream()

        dropping = asyncio.create_task(drop_at_each())
        answer = await refusal(call)
        dropping.cancel()
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")
        assert len(double.requests) == 10
        await under_test.until_nothing_is_left()


async def test_d57_an_older_scheduler_is_not_followed_while_a_newer_one_is_remembered() -> None:
    double = able()
    double.term = 20
    async with served(double) as under_test:
        session = under_test.process.front_end._session
        double.term = 10
        double.drop_stream()
        await until(lambda: "older" in (under_test.process.front_end.not_ready_cause or ""))
        assert not session.attached
        double.term = 30
        await until(lambda: session.attached)


async def test_a_front_end_that_drains_during_the_pause_says_so_to_its_calls() -> None:
    async with served(able(), drain_deadline_s=0.2) as under_test:
        call = under_test.stub.Generate(text_request("four"), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        await call.read()
        await under_test.double.stop()
        under_test.process.stop()
        answer = await refusal(call)
        assert (answer.code, answer.reason) == (grpc.StatusCode.UNAVAILABLE.name, "DRAINING")
