"""Neither prompts nor outputs hold up the event loop of a front end, with tokenizers as models have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from scheduler_svc.frontend.text import load_tokenizer
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc
from stepfence.v1.sampling_pb2 import SamplingParams
from tests.contract.frontend.harness import complete
from tests.support.measured_front_end import MeasuredFrontEnd
from tests.support.session_double import SessionDouble, byte_model
from tests.unit.frontend.tokenizer_files import byte_level_json, chat_config, files, metaspace_json

_MIB = 1 << 20
_TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
_FILES = {
    "byte-level": files(byte_level_json(), chat_config()),
    "byte fallback": files(metaspace_json(), chat_config(bos_token="<s>", eos_token="</s>", chat_template=_TEMPLATE)),
}
_NUM_CALLS = 256
# All of them are complete but for their last character while the output is one letter.
_STOP_STRINGS = ["a" * (1023 - index) + "!" for index in range(16)]


@dataclass(frozen=True)
class Measured:
    front_end: MeasuredFrontEnd
    stub: Any
    double: SessionDouble


@pytest_asyncio.fixture(params=_FILES, scope="module", loop_scope="module")
async def measured(request: pytest.FixtureRequest) -> AsyncIterator[Measured]:
    model = byte_model(vocab_size=500, max_model_len=3_000_000)
    double = SessionDouble(model=model, files=_FILES[request.param])
    async with double, MeasuredFrontEnd(double.address) as front_end:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        async with grpc.aio.insecure_channel(front_end.address, options=options) as channel:
            yield Measured(front_end, generation_service_pb2_grpc.GenerationServiceStub(channel), double)


def _text(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text)


def _chat(num_messages: int, content: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content) for _ in range(num_messages)])
    )


_PROMPTS = {
    "tokenized on the spot": _text("a1 <|im_end|> 삼" * 120),
    "letters without end": _text("a" * 2048),
    "digits": _text("1" * 2048),
    "spaces": _text(" " * 2048),
    "characters of four bytes": _text("😀" * 512),
    "short": _text("a1 <|im_end|> 삼" * 3500),
    "long": _text("a1 <|im_end|> 삼" * 40_000),
    "long, one word": _text("a" * (_MIB - 1)),
    "long, characters of four bytes": _text("😀" * (_MIB // 4)),
    "a chat of many messages": _chat(4096, "a </s> <|im_end|> 삼" * 8),
    "a chat of control strings": _chat(4096, "<|im_end|></s>"),
    "a chat of one message": _chat(1, "a </s> <|im_end|> 삼" * 30_000),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", _PROMPTS)
async def test_no_prompt_takes_long_in_one_turn(measured: Measured, kind: str) -> None:
    measured.double.play = lambda submit: [submit.prompt_token_ids[:4]]

    async def call() -> None:
        await measured.stub.Complete(complete(_PROMPTS[kind]), timeout=120)
        measured.double.frames_up.clear()
        measured.double.requests.clear()

    await measured.front_end.assert_short_turns(call)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_step_of_many_requests_takes_long_in_one_turn(measured: Measured) -> None:
    """Each with the most and longest stop strings, and each token is a long one."""
    double = measured.double
    double.play = None
    letter = _letter(double)

    async def call() -> None:
        request = pb.GenerateRequest(text="a", sampling=SamplingParams(stop=_STOP_STRINGS, min_tokens=0))
        calls = [measured.stub.Complete(complete(request), timeout=120) for _ in range(_NUM_CALLS)]
        requests = [await double.next_request() for _ in calls]
        for each in requests:
            each.accept()
        for _ in range(8):
            double.send_tokens({each.handle: [letter] * 100 for each in requests})
        for each in requests:
            each.end_length()
        answers = await asyncio.gather(*calls)
        assert {len(answer.token_ids) for answer in answers} == {800}

    await measured.front_end.assert_short_turns(call)


def _letter(double: SessionDouble) -> int:
    """The id of "a"."""
    return load_tokenizer(double.files).encode_text("aa")[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_long_output_takes_long_in_one_turn(measured: Measured) -> None:
    double = measured.double
    letter = _letter(double)
    double.play = lambda submit: [[letter] * 20_000] * 110

    async def call() -> None:
        answer = await measured.stub.Complete(complete(_text("a")), timeout=120)
        assert len(answer.token_ids) == 2_200_000

    await measured.front_end.assert_short_turns(call)
