"""No message, legal or not, holds up the event loop of a front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from scheduler_svc.frontend.limits import Limits
from stepfence.v1 import generation_service_pb2_grpc
from tests.contract.frontend.harness import complete, read_refusal, served, text_request
from tests.support.measured_front_end import MeasuredFrontEnd
from tests.support.session_double import SessionDouble, byte_model
from tests.support.wire import bytes_field, number_field, repeated, varint

_GENERATE = "/stepfence.v1.GenerationService/Generate"
_COMPLETE = "/stepfence.v1.GenerationService/Complete"
_ABORT = "/stepfence.v1.GenerationService/Abort"
_GET_MODEL = "/stepfence.v1.GenerationService/GetModel"
_CHECK = "/grpc.health.v1.Health/Check"

_MESSAGE_BYTES = Limits().max_message_bytes
_MIB = 1 << 20
# What fits into a message beside the tags and lengths around it.
_ROOM = _MESSAGE_BYTES - 64
# Ids of three bytes each, as the vocabularies of today have them.
_LARGEST_ID = 199_999
_MAX_MODEL_LEN = 1_400_000

_SAMPLING = b"".join(
    (
        *(bytes_field(8, bytes([ord("a") + index]) * 1023 + b"!") for index in range(16)),
        bytes_field(9, b"".join(varint(1000 + index) for index in range(128))),
    )
)
_OTHER_FIELDS = b"".join((bytes_field(1, b"i" * 256), bytes_field(5, _SAMPLING), bytes_field(7, b"s" * 256)))
_CHAT = bytes_field(1, bytes_field(1, b"user") + bytes_field(2, b"x" * 252)) * 4096


def _ids(num_bytes: int) -> bytes:
    return bytes_field(3, bytes_field(1, repeated(varint(_LARGEST_ID), num_bytes)))


@dataclass(frozen=True)
class Sent:
    """An encoded GenerateRequest, or another method's request, and the reasons it may end with."""

    data: bytes
    reasons: tuple[str, ...]
    method: str = _GENERATE


_OK = ("",)
_LEGAL = {
    "nothing but text": Sent(bytes_field(2, b"a" * _MIB), _OK),
    "text of four-byte characters": Sent(bytes_field(2, "😀".encode() * (_MIB // 4)), _OK),
    "text that is tokenized on the spot": Sent(bytes_field(2, b"a" * 2048), _OK),
    "token ids": Sent(_ids(_ROOM), _OK),
    "token ids, one by one": Sent(bytes_field(3, repeated(b"\x08\x01", 32_000)), _OK),
    "a chat of many messages": Sent(bytes_field(4, _CHAT), _OK),
    "a chat of one message": Sent(
        bytes_field(4, bytes_field(1, bytes_field(1, b"user") + bytes_field(2, b"a" * (_MIB - 4)))), _OK
    ),
    "stop strings and ids": Sent(bytes_field(2, b"a") + bytes_field(5, _SAMPLING), _OK),
    "text and all else": Sent(bytes_field(2, b"a" * _MIB) + _OTHER_FIELDS, _OK),
    "token ids and all else": Sent(_ids(_ROOM - len(_OTHER_FIELDS)) + _OTHER_FIELDS, _OK),
    "a chat and all else": Sent(bytes_field(4, _CHAT) + _OTHER_FIELDS, _OK),
    "an unary call": Sent(bytes_field(1, _ids(_ROOM - 16)), _OK, _COMPLETE),
    "abort": Sent(bytes_field(1, b"i" * 256), ("ABORT_NOT_ALLOWED",), _ABORT),
}

_BAD, _LARGE, _LONG = ("INVALID_PARAMETER",), ("PROMPT_TOO_LARGE",), ("PROMPT_TOO_LONG",)
_ILLEGAL = {
    "text": Sent(bytes_field(2, b"a" * _ROOM), _LARGE),
    "text of two-byte characters": Sent(bytes_field(2, "é".encode() * (_ROOM // 2)), _LARGE),
    "text that is no UTF-8": Sent(bytes_field(2, b"\xff" * _ROOM), ("UNDECODABLE",)),
    "more token ids than the model takes": Sent(bytes_field(3, bytes_field(1, b"\x01" * (_ROOM - 8))), _LONG),
    "the last token id is unknown": Sent(
        bytes_field(3, bytes_field(1, repeated(varint(_LARGEST_ID), _ROOM - 16) + varint(_LARGEST_ID + 1))), _BAD
    ),
    "token ids, one by one": Sent(bytes_field(3, repeated(b"\x08\x01", _ROOM)), _BAD),
    "empty chat messages": Sent(bytes_field(4, repeated(b"\x0a\x00", _ROOM)), _BAD),
    "as many empty chat messages as are counted": Sent(bytes_field(4, b"\x0a\x00" * 16_380), _LARGE),
    "one message more than a chat may have": Sent(bytes_field(4, _CHAT + b"\x0a\x00"), _LARGE),
    "a large chat": Sent(
        bytes_field(4, repeated(bytes_field(1, bytes_field(1, b"user") + bytes_field(2, b"x" * 1000)), _ROOM)), _LARGE
    ),
    "stop strings": Sent(bytes_field(2, b"a") + bytes_field(5, repeated(b"\x42\x00", _ROOM)), _BAD),
    "long stop strings": Sent(
        bytes_field(2, b"a") + bytes_field(5, bytes_field(8, b"x" * (_ROOM // 16 - 8)) * 16), _BAD
    ),
    "stop ids": Sent(bytes_field(2, b"a") + bytes_field(5, bytes_field(9, b"\x01" * (_ROOM - 16))), _BAD),
    "stop ids, one by one": Sent(bytes_field(2, b"a") + bytes_field(5, repeated(b"\x48\x01", _ROOM)), _BAD),
    "sampling parameters again and again": Sent(repeated(b"\x2a\x00", _ROOM), _BAD),
    "text and chats in turn": Sent(repeated(b"\x12\x00\x22\x00", _ROOM), _BAD),
    "fields of another time": Sent(repeated(number_field(15, 0), _ROOM), _BAD),
    "a request id": Sent(bytes_field(2, b"a") + bytes_field(1, b"i" * (_ROOM - 8)), _BAD),
    "a salt": Sent(bytes_field(2, b"a") + bytes_field(7, b"s" * (_ROOM - 8)), _BAD),
    "a model": Sent(bytes_field(2, b"a") + bytes_field(8, b"m" * (_ROOM - 8)), ("MODEL_NOT_FOUND",)),
    "everything": Sent(
        bytes_field(4, repeated(b"\x0a\x00", _ROOM // 3))
        + bytes_field(5, repeated(b"\x42\x00", _ROOM // 3) + bytes_field(9, b"\x01" * (_ROOM // 3 - 64))),
        _BAD,
    ),
    "no message at all": Sent(b"\xff" * _ROOM, ("UNDECODABLE",)),
    "an unary call": Sent(bytes_field(1, bytes_field(4, repeated(b"\x0a\x00", _ROOM))), _BAD, _COMPLETE),
    "an unary call with requests again and again": Sent(repeated(b"\x0a\x00", _ROOM), _BAD, _COMPLETE),
    "abort": Sent(bytes_field(1, b"i" * _ROOM), ("ABORT_NOT_ALLOWED",), _ABORT),
    "abort again and again": Sent(repeated(b"\x0a\x00", _ROOM), _BAD, _ABORT),
    "the model": Sent(repeated(number_field(15, 0), _ROOM), _BAD, _GET_MODEL),
    "health": Sent(repeated(b"\x0a\x00", _ROOM), _BAD, _CHECK),
}


@dataclass(frozen=True)
class Measured:
    front_end: MeasuredFrontEnd
    channel: grpc.aio.Channel
    double: SessionDouble


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def measured() -> AsyncIterator[Measured]:
    model = byte_model(vocab_size=_LARGEST_ID + 1, max_model_len=_MAX_MODEL_LEN)
    async with SessionDouble(model=model) as double, MeasuredFrontEnd(double.address) as front_end:
        double.play = lambda submit: [b"ok"]
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(front_end.address, options=options) as channel:
            yield Measured(front_end, channel, double)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sent", [*_LEGAL.values(), *_ILLEGAL.values()], ids=[*_LEGAL, *(f"not {n}" for n in _ILLEGAL)])
async def test_f118_no_message_takes_long_in_one_turn(measured: Measured, sent: Sent) -> None:
    async def send() -> None:
        assert await _reason(measured.channel, sent) in sent.reasons
        # What the double remembers is large here.
        measured.double.frames_up.clear()
        measured.double.requests.clear()

    await measured.front_end.assert_short_turns(send)


async def _reason(channel: Any, sent: Sent) -> str:
    """Send the bytes as they are; "" for a call that ends OK."""
    try:
        if sent.method == _GENERATE:
            async for _ in channel.unary_stream(sent.method)(sent.data, timeout=60):
                pass
        else:
            await channel.unary_unary(sent.method)(sent.data, timeout=60)
    except grpc.aio.AioRpcError as error:
        return read_refusal(error).reason
    return ""


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "gzip"])
@pytest.mark.parametrize("num_bytes", [_MESSAGE_BYTES + 1, 16_000_000, 64 << 20])
async def test_f118_the_receive_limit_holds_after_decompression_and_others_go_on(
    compression: grpc.Compression, num_bytes: int
) -> None:
    async with served() as under_test:
        other = under_test.stub.Generate(text_request(), timeout=60)
        request = await under_test.double.next_request()
        request.accept()
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(under_test.address, options, compression=compression) as channel:
            empty_messages = bytes_field(4, repeated(b"\x0a\x00", num_bytes))
            for method, data in ((_GENERATE, empty_messages), (_COMPLETE, bytes_field(1, empty_messages))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _whole(channel, method, data)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        request.send_tokens(b"x")
        request.end_length()
        assert [event.WhichOneof("event") async for event in other] == ["accepted", "delta", "finished"]
        assert len(under_test.double.hellos) == 1


async def _whole(channel: Any, method: str, data: bytes) -> None:
    if method == _GENERATE:
        async for _ in channel.unary_stream(method)(data, timeout=60):
            pass
    else:
        await channel.unary_unary(method)(data, timeout=60)


async def test_f118_compressed_messages_within_the_limit_are_served() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"some", b"text"]
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(under_test.address, options, compression=grpc.Compression.Gzip) as channel:
            stub: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            answer = await stub.Complete(complete(text_request("a" * 900)), timeout=60)
        assert answer.text == "sometext"


async def test_f118_the_receive_limit_follows_the_longest_prompt() -> None:
    async with served(max_prompt_bytes=6 << 20) as under_test:
        text = "a" * (6 << 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await under_test.stub.Complete(complete(text_request(text)), timeout=60)
        # The text was taken and tokenized: the model is what it is too long for.
        assert read_refusal(caught.value).reason == "PROMPT_TOO_LONG"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await under_test.stub.Complete(complete(text_request(text + "a")), timeout=60)
        assert read_refusal(caught.value).reason == "PROMPT_TOO_LARGE"


def test_f118_the_largest_prompt_always_fits_into_a_message() -> None:
    for max_prompt_bytes in (1, 1 << 20, 3 << 20, 16 << 20):
        limits = Limits(max_prompt_bytes=max_prompt_bytes)
        assert limits.max_message_bytes >= max(4 << 20, max_prompt_bytes + 500_000)


async def test_f118_a_model_longer_than_a_message_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = byte_model(vocab_size=200_000, max_model_len=1_400_000)
    async with served(SessionDouble(model=model)):
        assert [r for r in caplog.records if "raise --max-prompt-bytes" in r.message]
    caplog.clear()
    model = byte_model(vocab_size=200_000, max_model_len=1_048_576)
    async with served(SessionDouble(model=model)):
        assert not [r for r in caplog.records if "raise --max-prompt-bytes" in r.message]


@pytest.mark.parametrize(
    "send", [lambda stub: stub.Generate(text_request()), lambda stub: stub.Complete(complete(text_request()))]
)
async def test_f127_bytes_that_are_no_message_get_a_reason(send: Callable[[Any], Any]) -> None:
    async with served() as under_test:
        for method in (_GENERATE, _COMPLETE, _ABORT, _GET_MODEL, _CHECK):
            assert await _reason(under_test.channel, Sent(b"\xff\xff", (), method)) == "UNDECODABLE"
        # And the server goes on.
        assert await under_test.health() == health_pb2.HealthCheckResponse.SERVING
        call = send(under_test.stub)
        request = await under_test.double.next_request()
        request.accept()
        request.end_length()
        await asyncio.wait_for(_to_the_end(call), 30)


async def _to_the_end(call: Any) -> None:
    if hasattr(call, "read"):
        async for _ in call:
            pass
    else:
        await call
