"""OpenAI's own client, unmodified, gets what it expects."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from stepfence.v1 import session_service_pb2
from tests.contract.frontend.harness import until
from tests.contract.openai.harness import CHAT, COMPLETIONS, HELLO, answering, door
from tests.support.session_double import SessionDouble, byte_model


async def test_a_chat_is_answered() -> None:
    async with answering() as opened:
        answer = await opened.client.chat.completions.create(model="bytes", messages=HELLO, max_tokens=7)
        assert answer.choices[0].message.content == "Hi there"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert (answer.object, answer.model) == ("chat.completion", "bytes")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("<user>Hello")
        assert answer.usage.completion_tokens == 8
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        # What preemption did to it.
        assert answer.usage.model_dump()["stepfence"]["num_preemptions"] == 2
        submit = opened.submits[-1]
        assert submit.sampling.max_tokens == 7
        assert answer.id == submit.request_id
        await opened.under_test.until_nothing_is_left()


async def test_a_chat_is_streamed_with_its_usage() -> None:
    async with answering() as opened:
        stream = await opened.client.chat.completions.create(
            model="bytes", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_with_done_and_has_usage_only_when_asked() -> None:
    async with answering() as opened:
        answer = await opened.post(COMPLETIONS, {"prompt": "Hello", "stream": True})
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.events[-1] == "[DONE]"
        assert all("usage" not in event for event in answer.events[:-1])
        assert "".join(event["choices"][0]["text"] for event in answer.events[:-1]) == "Hi there"
        assert answer.headers["x-request-id"] == answer.events[0]["id"]


async def test_a_completion_is_answered_from_text_and_from_ids() -> None:
    async with answering() as opened:
        by_text = await opened.client.completions.create(model="bytes", prompt="abc")
        by_ids = await opened.client.completions.create(model="bytes", prompt=list(b"abc"))
        assert by_text.choices[0].text == by_ids.choices[0].text == "Hi there"
        prompts = [bytes(request.prompt_token_ids) for request in opened.submits]
        assert prompts[0] == prompts[1]
        # As in OpenAI's own service.
        assert [submit.sampling.max_tokens for submit in opened.submits] == [16, 16]


async def test_a_list_of_prompts_is_answered_in_order() -> None:
    async with door() as opened:
        opened.double.play = lambda submit: [bytes(submit.prompt_token_ids[::4])[::-1]]
        answer = await opened.client.completions.create(model="bytes", prompt=["abc", "defg", "h"], max_tokens=5)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "cba"), (1, "gfed"), (2, "h")]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 8)
        stream = await opened.client.completions.create(
            model="bytes", prompt=[list(b"abc"), list(b"de")], max_tokens=5, stream=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: "cba", 1: "ed"}
        await opened.under_test.until_nothing_is_left()


async def test_every_served_parameter_arrives() -> None:
    async with answering() as opened:
        await opened.client.chat.completions.create(
            model="bytes",
            messages=HELLO,
            max_completion_tokens=9,
            temperature=0.5,
            top_p=0.75,
            seed=-1,
            stop=["one", "two"],
            user="joe",
            n=1,
            logprobs=False,
            frequency_penalty=0,
            response_format={"type": "text"},
            extra_body={
                "top_k": 5,
                "min_p": 0.25,
                "min_tokens": 2,
                "stop_token_ids": [7],
                "ignore_eos": True,
                "cache_salt": "salt",
                "request_id": "mine",
            },
        )
        submit = opened.submits[-1]
        sampling = submit.sampling
        assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 5, 0.25)
        assert sampling.seed == (1 << 64) - 1
        assert list(sampling.stop_token_ids) == [7]
        assert not sampling.eos_token_ids
        assert submit.request_id == "mine"
        assert submit.cache_salt == "salt"


async def test_a_stop_string_ends_the_text_and_is_named() -> None:
    async with answering([b"one STOP two"]) as opened:
        answer = await opened.client.chat.completions.create(model="bytes", messages=HELLO, stop="STOP")
        assert answer.choices[0].message.content == "one "
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].model_dump()["stop_reason"] == "STOP"


async def test_contents_may_be_parts_and_roles_are_the_templates() -> None:
    async with answering() as opened:
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            # As the client sends an earlier answer back.
            {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": None},
        ]
        await opened.client.chat.completions.create(model="bytes", messages=messages)
        ids = opened.submits[-1].prompt_token_ids
        assert bytes(ids[::4]).decode() == "<system>Be brief.<user>a\nb<assistant>c"


async def test_the_served_model_is_listed() -> None:
    async with door() as opened:
        models = await opened.client.models.list()
        assert [model.id for model in models.data] == ["bytes"]
        assert (await opened.client.models.retrieve("bytes")).model_dump()["max_model_len"] == 100_000
        with pytest.raises(openai.NotFoundError) as refused:
            await opened.client.models.retrieve("other/one")
        assert "bytes" in refused.value.message
        assert (await opened.get("/health")).json == {"status": "ready"}


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.client.chat.completions.create(model="bytes", messages=HELLO, stream=True))
        request = await opened.double.next_request()
        request.accept()
        request.send_tokens(b"some")
        answer = await calling
        assert (await anext(aiter(answer))).choices
        await answer.close()
        assert await request.cancelled()
        await opened.under_test.until_nothing_is_left()


async def test_a_client_that_leaves_before_the_whole_answer_ends_its_request() -> None:
    async with door() as opened:
        calling = asyncio.create_task(opened.client.chat.completions.create(model="bytes", messages=HELLO))
        request = await opened.double.next_request()
        request.accept()
        calling.cancel()
        assert await request.cancelled()
        await opened.under_test.until_nothing_is_left()


async def test_a_client_that_leaves_while_it_is_queued_ends_its_request() -> None:
    async with door() as opened:
        reader, writer = await opened.connect()
        body = b'{"prompt": ["one", "two"]}'
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (COMPLETIONS.encode(), len(body))
            + body
        )
        first, second = await opened.double.next_request(), await opened.double.next_request()
        writer.close()
        assert await first.cancelled() and await second.cancelled()
        assert await reader.read() == b""
        await opened.under_test.until_nothing_is_left()


async def test_a_quiet_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.frontend.openai.app.KEEP_ALIVE_S", 0.02)
    async with door() as opened:
        calling = asyncio.create_task(opened.post(CHAT, {"messages": HELLO, "stream": True}))
        request = await opened.double.next_request()
        request.accept()
        await asyncio.sleep(0.2)
        request.send_tokens(b"late")
        request.end_length()
        answer = await calling
        assert answer.body.count(b"\n\n: ") >= 1
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]) == "late"


async def test_calls_follow_each_other_on_one_connection() -> None:
    async with answering() as opened:
        for _ in range(3):
            await opened.client.completions.create(model="bytes", prompt="x")
        await until(lambda: opened.under_test.process.front_end.num_streams == 0)


async def test_a_lost_scheduler_is_a_pause_here_too() -> None:
    async with door(SessionDouble(features=(session_service_pb2.SESSION_FEATURE_RESUBMIT,))) as opened:
        calling = asyncio.create_task(opened.client.completions.create(model="bytes", prompt="x", max_tokens=5))
        request = await opened.double.next_request()
        request.accept()
        request.send_tokens(b"ab")
        (generation,) = opened.under_test.process.front_end._live.values()
        await until(lambda: generation.num_output_tokens == 2)
        opened.double.drop_stream()
        again = await opened.double.next_request()
        assert bytes(again.submit.output_token_ids[::4]) == b"ab"
        again.accept()
        again.send_tokens(b"cde")
        again.end_length()
        assert (await calling).choices[0].text == "abcde"


async def test_a_model_with_several_names_is_served_under_each_of_them() -> None:
    model = byte_model(name="small", other_names=["gpt-4o", "org/small"])
    async with answering(double=SessionDouble(model)) as opened:
        assert [one.id for one in (await opened.client.models.list()).data] == ["small", "gpt-4o", "org/small"]
        assert (await opened.client.models.retrieve("org/small")).id == "org/small"
        for name in ("small", "gpt-4o", "org/small"):
            answer = await opened.client.completions.create(model=name, prompt="x")
            assert answer.model == name
        with pytest.raises(openai.NotFoundError, match="'gpt-4o'"):
            await opened.client.completions.create(model="gpt-4", prompt="x")
