"""Nothing that a client of the OpenAI port sends or asks for holds up the event loop of a front end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from scheduler_svc.frontend.text import load_tokenizer
from tests.contract.openai.harness import CHAT, COMPLETIONS, Port, head
from tests.support.measured_front_end import MeasuredFrontEnd
from tests.support.session_double import SessionDouble, byte_model
from tests.unit.frontend.tokenizer_files import byte_level_json, chat_config, files

_MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def measured() -> AsyncIterator[tuple[MeasuredFrontEnd, SessionDouble]]:
    double = SessionDouble(
        model=byte_model(vocab_size=500, max_model_len=3_000_000), files=files(byte_level_json(), chat_config())
    )
    async with double, MeasuredFrontEnd(double.address) as front_end:
        yield front_end, double


def _json(body: Any) -> bytes:
    return _body(json.dumps(body).encode())


def _body(data: bytes) -> bytes:
    return head("POST", COMPLETIONS, {"Content-Type": "application/json", "Content-Length": str(len(data))}) + data


def _chat(messages: list[Any]) -> bytes:
    data = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    return head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": str(len(data))}) + data


def _chunked(data: bytes, size: int) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (data[i : i + size] for i in range(0, len(data), size)))
    return (
        head("POST", COMPLETIONS, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
        + chunks
        + (b"0\r\n\r\n")
    )


_SENT: dict[str, tuple[bytes, int]] = {
    "a long text": (_json({"prompt": "a1 <|im_end|> x" * 69_000}), 200),
    "characters written as six bytes each": (_json({"prompt": "\u00e9" * 500_000}), 200),
    "token ids": (_json({"prompt": [7] * 1_000_000}), 200),
    "many prompts": (_json({"prompt": [[7] * 4000] * 128}), 200),
    "many messages": (_chat([{"role": "user", "content": "a </s> x" * 8}] * 4096), 200),
    "many parts of a message": (_chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 4096}]), 200),
    "many wrong messages": (_chat([{}] * 4096), 400),
    "many messages too many": (_chat([0] * 1_000_000), 400),
    "many wrong parts": (_chat([{"role": "user", "content": [{}] * 4096}]), 400),
    "many parts too many": (_chat([{"role": "user", "content": [{}] * 200_000}]), 400),
    "many fields": (_json({f"field_{index}": 1 for index in range(200_000)}), 400),
    "a long name of a field": (_json({"x" * 3 * _MIB: 1}), 400),
    "many long names in a small body": (_json({"x" * 120 + str(index): 1 for index in range(120)}), 400),
    "nested lists": (_body(b'{"prompt": ' + b"[" * 2 * _MIB), 400),
    "a body in chunks of a byte": (_chunked(json.dumps({"prompt": [7] * 40_000}).encode(), 1), 200),
    "many stop strings": (_json({"prompt": "x", "stop": ["a" * 1023 + str(index) for index in range(9)]}), 200),
    "many stop strings too many": (_json({"prompt": "x", "stop": ["a"] * 500_000}), 400),
    "a long value of a field that is not served": (_json({"prompt": "x", "tools": [{"a": [1] * 500_000}]}), 400),
    "a long head": (
        head("POST", COMPLETIONS, {f"x-{index}": "y" * 9 for index in range(1200)}) + b'{"prompt": "x"}',
        415,
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", _SENT)
async def test_nothing_that_is_sent_takes_long_in_one_turn(
    measured: tuple[MeasuredFrontEnd, SessionDouble], kind: str
) -> None:
    front_end, double = measured
    double.play = lambda submit: [submit.prompt_token_ids[:4]]
    data, status = _SENT[kind]

    async def send() -> None:
        answer = await Port(front_end.openai_address).send(data)
        assert answer.status == status, answer.body[:500]
        double.frames_up.clear()
        double.requests.clear()

    await front_end.assert_short_turns(send)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_no_long_output_takes_long_in_one_turn(
    measured: tuple[MeasuredFrontEnd, SessionDouble], stream: bool
) -> None:
    front_end, double = measured
    letter = load_tokenizer(double.files).encode_text("aa")[-1]
    num_frames = 20 if stream else 110
    double.play = lambda submit: [[letter] * 20_000] * num_frames

    async def call() -> None:
        answer = await Port(front_end.openai_address).send(_json({"prompt": ["a", "b"], "stream": stream}))
        assert answer.status == 200
        assert len(answer.body) > 2 * num_frames * 20_000

    await front_end.assert_short_turns(call)
