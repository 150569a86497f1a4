"""What is wrong is refused with a status, a reason and the field's name, and holds nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from scheduler_svc.frontend.openai.requests import NEUTRAL
from tests.contract.frontend.harness import until
from tests.contract.openai.harness import CHAT, COMPLETIONS, HELLO, answering, door, head
from tests.support.session_double import INTERNAL, UNAVAILABLE, SessionDouble

WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls", ""),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater"),
    ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens", "greater"),
    ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "not both"),
    ({"messages": HELLO, "max_tokens": "3"}, "max_tokens", "integer"),
    ({"messages": HELLO, "max_tokens": True}, "max_tokens", "integer"),
    ({"messages": HELLO, "temperature": -1}, "temperature", "0 to 100"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature", "number"),
    ({"messages": HELLO, "top_p": 2}, "top_p", "at most 1"),
    ({"messages": HELLO, "stop": ""}, "stop", "empty"),
    ({"messages": HELLO, "stop": ["a"] * 17}, "stop", "at most 16"),
    ({"messages": HELLO, "stop": [1]}, "stop[0]", "string"),
    ({"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids", "negative"),
    ({"messages": HELLO, "stop_token_ids": [999]}, "stop_token_ids", "vocabulary"),
    ({"messages": HELLO, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most max_tokens"),
    ({"messages": HELLO, "seed": 1 << 64}, "seed", "less"),
    ({"messages": HELLO, "priority": 3}, "priority", "order of arrival"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"messages": HELLO, "stream": True, "stream_options": {"other": 1}}, "stream_options.other", "not permitted"),
    ({"messages": HELLO, "stream": "yes"}, "stream", "boolean"),
    ({"messages": HELLO, "max_tokns": 3}, "max_tokns", "did you mean max_tokens?"),
    ({"messages": HELLO, "prompt": "x"}, "prompt", "known"),
    ({"messages": HELLO, "n": 2}, "n", "not served"),
    ({"messages": HELLO, "n": True}, "n", "not served"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 3}, "logprobs", "not served"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools", "not served"),
    ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "not served"),
    ({"messages": HELLO, "store": True}, "store", "not served"),
    ({"messages": HELLO, "cache_salt": "x" * 300}, "cache_salt", "at most 256"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "text"),
    ({"prompt": None}, "prompt", "text"),
    ({"prompt": {"text": "x"}}, "prompt", "text"),
    ({"prompt": [1, "x"]}, "prompt", "token ids only"),
    ({"prompt": [1, True]}, "prompt", "token ids only"),
    ({"prompt": [-1]}, "prompt", "negative"),
    ({"prompt": [1 << 40]}, "prompt", "token ids only"),
    ({"prompt": [999]}, "prompt", "vocabulary"),
    ({"prompt": ["a", 1]}, "prompt[1]", "text"),
    ({"prompt": ["a", [1.5]]}, "prompt[1]", "token ids only"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a", "b"], "request_id": "x"}, "request_id", "single prompt"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": "x", "echo": True}, "echo", "not served"),
    ({"prompt": "x", "best_of": 2}, "best_of", "not served"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not served"),
    ({"prompt": "x", "messages": HELLO}, "messages", "known"),
]


async def test_every_wrong_body_is_refused_with_its_field() -> None:
    async with answering() as opened:
        for path, wrong in ((CHAT, WRONG_CHATS), (COMPLETIONS, WRONG_COMPLETIONS)):
            for body, field, words in wrong:
                answer = await opened.post(path, body)
                assert answer.status == 400, (body, answer.body)
                error = answer.error
                assert error["type"] == "invalid_request_error"
                assert error["param"] == field, (body, error)
                assert words in error["message"] and field in error["message"], (body, error)
        await opened.under_test.until_nothing_is_left()
        assert not opened.double.live


async def test_fields_that_are_not_served_may_ask_for_nothing() -> None:
    async with answering() as opened:
        for name, values in NEUTRAL.items():
            for value in (None, *("anything" if value is ... else value for value in values)):
                answer = await opened.post(CHAT, {"messages": HELLO, name: value})
                assert answer.status == 200, (name, value, answer.body)


BROKEN = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b"{" * 5000, b"[" * 5000]
BROKEN += [b'{"prompt": "\\ud800"}', b'{"prompt": "x"} {"prompt": "y"}']


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
async def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    async with answering() as opened:
        answer = await opened.post(COMPLETIONS, body)
        assert answer.status == 400
        assert answer.error["code"] == "invalid_json"


async def test_other_content_is_refused() -> None:
    async with answering() as opened:
        body = json.dumps({"prompt": "x"}).encode()
        # What a web page may send to any address without asking.
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await opened.post(COMPLETIONS, body, {"Content-Type": kind})
            assert answer.status == 415
        answer = await opened.post(COMPLETIONS, body, {"Content-Encoding": "gzip"})
        assert answer.status == 415
        answer = await opened.post(COMPLETIONS, body, {"Content-Type": "application/json; charset=utf-8"})
        assert answer.status == 200


async def test_other_paths_and_methods_are_refused_by_name() -> None:
    async with answering() as opened:
        for method, path, status in (
            ("GET", CHAT, 405),
            ("POST", "/v1/models", 405),
            ("POST", "/v1/chat/completions/", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/", 404),
        ):
            answer = await opened.request(method, path, b"", {})
            assert answer.status == status, (method, path)
            assert answer.error["reason"] == "NOT_SERVED"
            assert "/v1/chat/completions" in answer.error["message"]


async def test_another_model_is_not_found() -> None:
    async with answering() as opened:
        with pytest.raises(openai.NotFoundError) as refused:
            await opened.client.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert refused.value.code == "model_not_found"
        assert "'bytes'" in refused.value.message


async def test_a_prompt_that_is_too_long_has_the_code_that_programs_look_for() -> None:
    async with answering() as opened:
        with pytest.raises(openai.BadRequestError) as refused:
            await opened.client.completions.create(model="bytes", prompt="x" * 100_000)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as refused:
            await opened.client.chat.completions.create(
                model="bytes", messages=[{"role": "user", "content": "x" * 100_000}]
            )
        assert refused.value.param == "messages"


async def test_a_full_queue_is_a_rate_limit_with_retry_after() -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.client.chat.completions.create(model="bytes", messages=HELLO, stream=True))
        request = await opened.double.next_request()
        request.refuse(8, "QUEUE_FULL", "too many", retry_after={"seconds": 2})
        with pytest.raises(openai.RateLimitError) as refused:
            await calling
        assert refused.value.response.headers["retry-after"] == "2"
        assert refused.value.code == "queue_full"
        await opened.under_test.until_nothing_is_left()


async def test_calls_are_bounded_together_with_those_of_grpc() -> None:
    async with door(max_calls=3) as opened:
        calling = [
            asyncio.create_task(opened.client.chat.completions.create(model="bytes", messages=HELLO)) for _ in range(2)
        ]
        requests = [await opened.double.next_request() for _ in range(2)]
        # Two prompts are two calls.
        answer = await opened.post(COMPLETIONS, {"prompt": ["a", "b"]})
        assert answer.status == 429 and answer.headers["retry-after"] == "1"
        for request in requests:
            request.accept()
            request.end_length()
        await asyncio.gather(*calling)
        await opened.under_test.until_nothing_is_left()


@pytest.mark.parametrize(("code", "status"), [(INTERNAL, 500), (UNAVAILABLE, 503), (4, 504)])
async def test_a_failure_has_its_status_and_what_it_cost(code: int, status: int) -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.post(COMPLETIONS, {"prompt": "x"}))
        request = await opened.double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        request.fail(code, "SOME_REASON", "the cause")
        answer = await calling
        assert answer.status == status
        assert answer.error["message"] == "the cause"
        assert answer.error["reason"] == "SOME_REASON"
        assert answer.error["usage"]["completion_tokens"] == 2


async def test_a_failure_in_mid_stream_is_its_last_event() -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.client.chat.completions.create(model="bytes", messages=HELLO, stream=True))
        request = await opened.double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        request.fail(UNAVAILABLE, "SCHEDULER_UNAVAILABLE", "gone")
        stream, text = await calling, ""
        with pytest.raises(openai.APIError) as failed:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "ab"
        assert failed.value.code == "scheduler_unavailable"
        assert isinstance(failed.value.body, dict) and failed.value.body["usage"]["completion_tokens"] == 2


async def test_one_refused_prompt_refuses_the_whole_list() -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.post(COMPLETIONS, {"prompt": ["a", "b"]}))
        first, second = await opened.double.next_request(), await opened.double.next_request()
        first.accept()
        second.refuse(8, "QUEUE_FULL")
        answer = await calling
        assert answer.status == 429
        assert await first.cancelled()
        await opened.under_test.until_nothing_is_left()


async def test_large_bodies_are_refused_before_they_are_held() -> None:
    async with door(max_prompt_bytes=1 << 20) as opened:
        limit = opened.under_test.process.front_end.limits.max_http_body_bytes
        reader, writer = await opened.connect()
        writer.write(head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": str(limit + 1)}))
        assert b"413" in await reader.readline()
        writer.close()
        # Without a length, it is counted as it comes.
        reader, writer = await opened.connect()
        writer.write(head("POST", CHAT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}))
        with pytest.raises((ConnectionError, BrokenPipeError)):
            for _ in range(2 * limit // 65536):
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
            raise ConnectionError
        assert b"413" in await reader.readline()
        writer.close()


async def test_a_body_or_a_head_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.frontend.openai.app.BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr("scheduler_svc.frontend.openai.server.HEAD_TIMEOUT_S", 0.1)
    async with door() as opened:
        reader, writer = await opened.connect()
        writer.write(head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": "10"}) + b"{")
        assert b"408" in await reader.readline()
        writer.close()
        for beginning in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHo"):
            reader, writer = await opened.connect()
            writer.write(beginning)
            async with asyncio.timeout(30):
                with pytest.raises(ConnectionError):
                    if not await reader.read():
                        raise ConnectionError
            writer.close()
        await until(lambda: opened.under_test.process.front_end.num_streams == 0)


async def test_no_model_yet() -> None:
    double = SessionDouble()
    double.has_worker = False
    async with door(double, ready=False) as opened:
        answer = await opened.get("/v1/models")
        assert answer.status == 503
        assert (await opened.get("/health")).status == 503
        assert (await opened.post(CHAT, {"messages": HELLO})).status == 503
