"""Long prompts, however many, keep nobody waiting but each other, and what cannot fit is not tokenized at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.session_client import ServedModel
from scheduler_svc.frontend.template_process import Piece
from scheduler_svc.frontend.text import ByteTokenizer
from stepfence.v1 import generation_service_pb2 as pb
from tests.contract.frontend.harness import FrontEndUnderTest, complete, refusal, served, text_request, until
from tests.support.session_double import SessionDouble, byte_model
from tests.unit.frontend.tokenizer_files import byte_level_json, chat_config, files

_MIB = 1 << 20
_LONG = "a" * 100_000
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class HeldTokenizer(ByteTokenizer):
    """Long texts and chats wait until they are let go. fewest: what is known about every text."""

    def __init__(self, fewest: int = 0) -> None:
        super().__init__({"chat_template": _TEMPLATE})
        self.let_go = threading.Event()
        self.chats_let_go = threading.Event()
        self.chats_let_go.set()
        self.num_tokenized = 0
        self.num_held = 0
        self._fewest = fewest

    def fewest_tokens(self, num_bytes: int, *, is_chat: bool) -> int:
        return self._fewest

    def encode_text(self, text: str) -> list[int]:
        self._hold(len(text))
        return [1]

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        self._hold(sum(len(piece.text) for piece in pieces))
        return [2]

    def render_chat(self, messages: Any) -> list[Piece]:
        self.chats_let_go.wait()
        return [Piece("".join(message.content for message in messages), plain=True)]

    def _hold(self, size: int) -> None:
        self.num_tokenized += 1
        if size >= len(_LONG):
            self.num_held += 1
            self.let_go.wait()


@asynccontextmanager
async def held(tokenizer: HeldTokenizer, limits: Limits | None = None) -> AsyncIterator[FrontEndUnderTest]:
    double = SessionDouble(model=byte_model(max_model_len=10_000_000))
    double.play = lambda submit: [b"ok"]
    async with served(double, limits=limits) as under_test:
        session: Any = under_test.process.front_end._session
        session._model = ServedModel(session._model.description, tokenizer)
        try:
            yield under_test
        finally:
            tokenizer.let_go.set()
            tokenizer.chats_let_go.set()


def _start(under_test: FrontEndUnderTest, request: pb.GenerateRequest) -> asyncio.Future[Any]:
    call: asyncio.Future[Any] = asyncio.ensure_future(under_test.stub.Complete(complete(request), timeout=60))
    return call


def _chat(content: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content)]))


async def test_f97_short_prompts_do_not_wait_for_long_ones() -> None:
    tokenizer = HeldTokenizer()
    async with held(tokenizer) as under_test:
        long = [_start(under_test, request) for request in [text_request(_LONG)] * 6 + [_chat(_LONG)] * 6]
        await until(lambda: under_test.process.front_end.num_streams == 12 and tokenizer.num_held == 1)
        for request in (text_request("a"), text_request("a" * 3000), text_request("a" * 60_000), _chat("hi")):
            assert (await _start(under_test, request)).text == "ok"
        assert tokenizer.num_held == 1 and not any(call.done() for call in long)
        tokenizer.let_go.set()
        assert [call.text for call in await asyncio.gather(*long)] == ["ok"] * 12


async def test_f97_texts_do_not_wait_for_chat_templates() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.let_go.set()
    tokenizer.chats_let_go.clear()
    async with held(tokenizer) as under_test:
        chats = [_start(under_test, _chat("hi")) for _ in range(4)]
        await until(lambda: under_test.process.front_end.num_streams == 4)
        for text in ("a", "a" * 3000, _LONG):
            assert (await _start(under_test, text_request(text))).text == "ok"
        assert not any(chat.done() for chat in chats)
        tokenizer.chats_let_go.set()
        assert [call.text for call in await asyncio.gather(*chats)] == ["ok"] * 4


@pytest.mark.parametrize(
    "limits", [Limits(max_waiting_prompt_bytes=3 * len(_LONG)), Limits(max_waiting_prompts=3)], ids=["bytes", "number"]
)
@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_f97_too_many_long_prompts_are_refused_and_may_come_again(limits: Limits, kind: str) -> None:
    tokenizer = HeldTokenizer()
    request = text_request(_LONG) if kind == "text" else _chat(_LONG)
    async with held(tokenizer, limits) as under_test:
        waiting = []
        for _ in range(3):
            waiting.append(_start(under_test, request))
            await until(lambda: _num_waiting(under_test) == len(waiting))
        refused = await refusal(under_test.stub.Complete(complete(request), timeout=60))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_after_s == 1.0
        assert "long prompts wait to be tokenized" in refused.message
        # Others have a place, and so has the next one when a client leaves before its turn.
        assert (await _start(under_test, text_request("a" * 3000))).text == "ok"
        waiting.pop().cancel()
        await until(lambda: _num_waiting(under_test) == 2)
        waiting.append(_start(under_test, request))
        await until(lambda: _num_waiting(under_test) == 3)
        tokenizer.let_go.set()
        assert [call.text for call in await asyncio.gather(*waiting)] == ["ok"] * 3
        assert (await _start(under_test, request)).text == "ok"
        await until(lambda: _num_waiting(under_test) == 0)


def _num_waiting(under_test: FrontEndUnderTest) -> int:
    """Prompts in the lane of the long ones."""
    lanes: Any = under_test.process.front_end._lanes
    return int(lanes._lanes[lanes.lane_for(len(_LONG))]._num_prompts)


async def test_f97_chats_that_wait_are_bounded_too() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.chats_let_go.clear()
    async with held(tokenizer, Limits(max_waiting_prompts=2)) as under_test:
        chats = [_start(under_test, _chat("hi")) for _ in range(2)]
        await until(lambda: under_test.process.front_end.num_streams == 2)
        refused = await refusal(under_test.stub.Complete(complete(_chat("hi")), timeout=60))
        assert (refused.reason, refused.retry_after_s) == ("QUEUE_FULL", 1.0)
        assert "chats wait to be rendered" in refused.message
        tokenizer.chats_let_go.set()
        assert [call.text for call in await asyncio.gather(*chats)] == ["ok"] * 2


async def test_f97_a_prompt_larger_than_the_queue_is_taken_when_it_is_alone() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.let_go.set()
    async with held(tokenizer, Limits(max_waiting_prompt_bytes=10)) as under_test:
        for request in (text_request(_LONG), _chat(_LONG)):
            assert (await _start(under_test, request)).text == "ok"


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("size", [100, len(_LONG)])
async def test_f97_what_cannot_fit_is_not_tokenized(kind: str, size: int) -> None:
    tokenizer = HeldTokenizer(fewest=10_000_000)
    async with held(tokenizer) as under_test:
        request = text_request("a" * size) if kind == "text" else _chat("a" * size)
        refused = await refusal(under_test.stub.Complete(complete(request), timeout=60))
        assert (refused.code, refused.reason, refused.fields) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG", ["prompt"])
        assert f"has {size} bytes, which are at least 10000000 tokens" in refused.message
        assert refused.metadata == {
            "num_bytes": str(size), "fewest_tokens": "10000000", "max_model_len": "10000000",
        }  # fmt: skip
        assert tokenizer.num_tokenized == 0


async def test_f97_the_field_case() -> None:
    """A model of 1,000 tokens, each of at most a few bytes, and twelve prompts of 1 MiB."""
    model = files(byte_level_json(), chat_config(chat_template=_TEMPLATE))
    longest = max(len(entry) for entry in json.loads(byte_level_json())["model"]["vocab"])
    double = SessionDouble(files=model, model=byte_model(vocab_size=500, max_model_len=1000))
    async with served(double) as under_test:
        calls = [
            under_test.stub.Complete(complete(request), timeout=60)
            for request in [text_request("a" * _MIB)] * 6 + [_chat("a" * (_MIB - 4))] * 6
        ]
        for call in calls:
            refused = await refusal(call)
            assert refused.reason == "PROMPT_TOO_LONG"
            assert 1000 < int(refused.metadata["fewest_tokens"]) < _MIB / longest + 1
