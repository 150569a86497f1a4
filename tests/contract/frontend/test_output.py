"""What comes back over the wire: whole characters, stop strings, stop ids, usage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import session_service_pb2, usage_pb2
from tests.contract.frontend.harness import (
    FrontEndUnderTest,
    Streamed,
    complete,
    read_stream,
    sampled,
    served,
    text_request,
    until,
    until_taken,
)
from tests.support.session_double import SessionDouble, byte_model
from tests.unit.frontend.tokenizer_files import byte_level_json, chat_config, files

WORDS = "삼겹살 🙂 é naïve"


async def both(
    under_test: FrontEndUnderTest, request: pb.GenerateRequest, frames: Sequence[Sequence[int]]
) -> tuple[Streamed, pb.CompleteResponse]:
    """The same generation as a stream and as one answer."""
    under_test.double.play = lambda submit: frames
    streamed = await read_stream(under_test.stub.Generate(request, timeout=30))
    response = await under_test.stub.Complete(complete(request), timeout=30)
    return streamed, response


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
async def test_f69_joined_deltas_equal_the_unary_text_at_every_cut(size: int) -> None:
    data = WORDS.encode()
    async with served() as under_test:
        for length in range(1, len(data) + 1):
            frames = [data[start : min(start + size, length)] for start in range(0, length, size)]
            streamed, response = await both(under_test, text_request(), frames)
            assert streamed.text == response.text == data[:length].decode(errors="ignore")
            assert bytes(streamed.token_ids) == bytes(response.token_ids) == data[:length]
            assert all("\ufffd" not in delta.text for delta in streamed.deltas)
            for delta in streamed.deltas[:-1]:
                assert bytes(delta.token_ids).decode() == delta.text
            assert response.usage.num_completion_tokens == length


async def test_f69_end_of_sequence_within_a_character() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens("a삼".encode()[:3], [257])
        request.end_ok(usage_pb2.FINISH_REASON_STOP, stop_token_id=257)
        streamed = await read_stream(call)
        assert (streamed.text, bytes(streamed.token_ids)) == ("a", "a삼".encode()[:3])
        assert (streamed.finished.reason, streamed.finished.stop_token_id) == (usage_pb2.FINISH_REASON_STOP, 257)
        assert streamed.finished.usage.num_completion_tokens == 4


@pytest.mark.parametrize("frames", [[b"abcDEF", b"G", b"HI", b"Jxyz", b"more"], [b"abcDEFGHIJxyzmore"]])
async def test_f70_a_stop_string_never_leaks_and_nothing_after_it_is_billed(frames: list[bytes]) -> None:
    async with served() as under_test:
        streamed, response = await both(under_test, sampled(stop=["DEFGHIJ"]), frames)
        assert streamed.text == response.text == "abc"
        assert bytes(streamed.token_ids) == bytes(response.token_ids) == b"abc"
        for ended in (streamed.finished, response):
            assert (ended.reason, ended.stop_string) == (usage_pb2.FINISH_REASON_STOP, "DEFGHIJ")
            assert ended.usage.num_completion_tokens == 10
        # Unless the scheduler had ended it in the same frame, it was told.
        assert {request.text_ended_at for request in under_test.double.requests} <= {10, None}


async def test_f70_nothing_that_may_become_a_stop_string_is_sent_before_that_is_known() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(sampled(stop=["ab!", "abcd"]), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        assert (await call.read()).WhichOneof("event") == "accepted"
        request.send_tokens(b"x", b"a", b"b", b"c")
        assert (await call.read()).delta.text == "x"
        unread = asyncio.ensure_future(call.read())
        await until_taken(under_test)
        assert not unread.done()
        request.send_tokens(b"e")
        assert (await unread).delta.text == "abce"
        request.send_tokens(b"a", b"b", b"!", b"zzz")
        assert await request.text_ended() == 8
        finished = (await call.read()).finished
        assert (finished.stop_string, finished.usage.num_completion_tokens) == ("ab!", 8)


async def test_a_stop_string_complete_with_the_last_token_is_a_stop() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(sampled(stop=["END"], max_tokens=6), timeout=30)
        request = await under_test.double.next_request()
        request.accept(max_tokens=6)
        rows = session_service_pb2.AttachResponse()
        request.send_tokens(b"abcEND")
        request.end_length()
        under_test.double.send(rows)
        streamed = await read_stream(call)
        assert streamed.text == "abc"
        assert (streamed.finished.reason, streamed.finished.stop_string) == (usage_pb2.FINISH_REASON_STOP, "END")


async def test_a_failure_after_the_text_had_ended_does_not_take_the_text_away() -> None:
    double = SessionDouble()
    async with served(double) as under_test:
        call = under_test.stub.Generate(sampled(stop=["END"]), timeout=30)
        request = await double.next_request()
        request.accept()
        request.send_tokens(b"abcEND")
        request.fail(4, "DEADLINE_EXCEEDED")
        streamed = await read_stream(call)
        assert (streamed.text, streamed.finished.stop_string) == ("abc", "END")


async def test_f24_stop_strings_and_stop_ids_count_after_min_tokens_only() -> None:
    async with served() as under_test:
        streamed, _ = await both(under_test, sampled(stop=["ab"], min_tokens=2), [b"a", b"b", b"a", b"b", b"c"])
        assert (streamed.text, streamed.finished.stop_string) == ("ab", "ab")
        assert streamed.finished.usage.num_completion_tokens == 4


async def test_a_stop_id_of_the_client_is_counted_and_not_delivered() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(sampled(stop_token_ids=[ord("!")]), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        request.send_tokens(b"abc!")
        request.end_ok(usage_pb2.FINISH_REASON_STOP, stop_token_id=ord("!"))
        streamed = await read_stream(call)
        assert (streamed.text, bytes(streamed.token_ids)) == ("abc", b"abc")
        assert (streamed.finished.stop_token_id, streamed.finished.usage.num_completion_tokens) == (ord("!"), 4)


async def test_ignored_end_of_sequence_ids_are_output() -> None:
    async with served() as under_test:
        streamed, _ = await both(under_test, sampled(ignore_eos=True), [[97, 257, 98]])
        assert (streamed.text, streamed.token_ids) == ("ab", [97, 257, 98])
        assert streamed.finished.reason == usage_pb2.FINISH_REASON_LENGTH


async def test_several_requests_share_a_frame() -> None:
    async with served() as under_test:
        calls = [under_test.stub.Generate(text_request(), timeout=30) for _ in range(3)]
        requests = [await under_test.double.next_request() for _ in calls]
        for request in requests:
            request.accept()
        under_test.double.send_tokens({request.handle: [97 + place] for place, request in enumerate(requests)})
        under_test.double.send_tokens({request.handle: [65 + place] * place for place, request in enumerate(requests)})
        for request in requests:
            request.end_length()
        texts = {(await read_stream(call)).text for call in calls}
        assert texts == {"a", "bB", "cCC"}


async def test_a_real_vocabulary_over_the_wire() -> None:
    config = chat_config()
    double = SessionDouble(
        byte_model(vocab_size=426, tokenizer_digest="bpe", eos_token_ids=[2]), files(byte_level_json(), config)
    )
    async with served(double) as under_test:
        tokenizer = under_test.process.front_end._session.model.tokenizer
        assert tokenizer is not None
        token_ids = tokenizer.encode_text(WORDS)
        for length in range(1, len(token_ids) + 1):
            frames = [[token_id] for token_id in token_ids[:length]]
            streamed, response = await both(under_test, text_request(), frames)
            assert streamed.text == response.text
            assert WORDS.startswith(response.text)
            assert streamed.token_ids == list(response.token_ids) == token_ids[:length]
        assert response.text == WORDS


async def test_the_tokenizer_is_fetched_once_while_its_digest_stays() -> None:
    double = SessionDouble()
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        double.worker_joins()
        double.drop_stream()
        await until(lambda: len(double.hellos) == 2)
        await under_test.until_health(1)
        await read_stream(under_test.stub.Generate(text_request(), timeout=30))
        assert double.num_tokenizer_calls == 1


async def test_a_changed_model_is_taken_over() -> None:
    double = SessionDouble()
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        double.model = byte_model(name="other", tokenizer_digest="bytes-2")
        double.files = {"byte_tokenizer.json": json.dumps({"chat_template": "new"}).encode()}
        double.worker_joins()

        async def served_name() -> Any:
            return (await under_test.stub.GetModel(pb.GetModelRequest(), timeout=30)).model.name

        async with asyncio.timeout(30):
            while await served_name() != "other":
                await asyncio.sleep(0.005)
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
        await under_test.stub.Complete(complete(pb.GenerateRequest(chat=chat)), timeout=30)
        assert double.requests[-1].prompt == list(b"new")
