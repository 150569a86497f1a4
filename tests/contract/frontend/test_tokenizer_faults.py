"""A tokenizer or a template that fails in any way: calls end with a status, and the front end goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from scheduler_svc.frontend import session_transport, template_process
from scheduler_svc.frontend.session_client import TOKENIZER_UNUSABLE
from scheduler_svc.frontend.template_process import Piece, TemplateProcess
from stepfence.v1 import generation_service_pb2 as pb
from tests.contract.frontend.harness import complete, front_end, read_stream, refusal, served, text_request, until
from tests.support.session_double import BYTE_TOKENIZER, SessionDouble, byte_model
from tests.unit.frontend.tokenizer_files import byte_level_json, files


class _Panic(BaseException):
    """As pyo3_runtime.PanicException: no Exception."""


def _panicking() -> dict[str, bytes]:
    description = json.loads(byte_level_json())
    description["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    return files(json.dumps(description).encode(), {})


_BROKEN = {
    "a panic": _panicking(),
    "deep nesting": {"tokenizer.json": byte_level_json(), "tokenizer_config.json": b"[" * 100_000},
}


@pytest.mark.parametrize("kind", _BROKEN)
async def test_f121_token_ids_are_served_without_a_usable_tokenizer(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    double = SessionDouble(files=_BROKEN[kind])
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        for _ in range(2):
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
            assert (await read_stream(under_test.stub.Generate(request, timeout=30))).token_ids == list(b"ok")
            chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
            for refused in (text_request(), chat):
                answer = await refusal(under_test.stub.Complete(complete(refused), timeout=30))
                assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "NO_TOKENIZER")
            # The same model again: nothing more to say.
            num_hellos = len(double.hellos)
            double.drop_stream()
            await until(lambda: len(double.hellos) > num_hellos)  # noqa: B023
            await under_test.until_health(1)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert [record.msg for record in errors] == [TOKENIZER_UNUSABLE]


async def test_f100_text_is_served_without_a_usable_template(caplog: pytest.LogCaptureFixture) -> None:
    double = SessionDouble(files=files(byte_level_json(), {"chat_template": "{% if 1 %}" * 3000}))
    double.play = lambda submit: [list(submit.prompt_token_ids[:1])]
    async with served(double) as under_test:
        for _ in range(2):
            assert (await under_test.stub.Complete(complete(text_request("a")), timeout=30)).text == "a"
            answer = await refusal(under_test.stub.Complete(complete(_chat("hi")), timeout=30))
            assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "INVALID_CHAT")
            assert answer.fields == ["chat"]
            assert "the model's chat template (in tokenizer_config.json) cannot be used: " in answer.message
            # The same model again: nothing more to say.
            num_hellos = len(double.hellos)
            double.drop_stream()
            await until(lambda: len(double.hellos) > num_hellos)  # noqa: B023
            await under_test.until_health(1)
        assert len([record for record in caplog.records if "so chats are refused" in record.message]) == 1


async def test_f98_a_template_that_never_ends_stops_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TemplateProcess(cpu_s=0.5)
    monkeypatch.setattr(template_process, "SHARED", process)
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    model_files = {"byte_tokenizer.json": json.dumps({"chat_template": template}).encode()}
    double = SessionDouble(files=model_files, model=byte_model(max_model_len=10_000))
    double.play = lambda submit: [b"ok"]
    try:
        async with served(double) as under_test:
            chats = [
                asyncio.ensure_future(refusal(under_test.stub.Complete(complete(_chat("hi")), timeout=60)))
                for _ in range(3)
            ]
            await until(lambda: under_test.process.front_end.num_streams == 3)
            for text in ("hi", "a" * 3000, "a" * 3999):
                assert (await under_test.stub.Complete(complete(text_request(text)), timeout=60)).text == "ok"
            assert not any(chat.done() for chat in chats[1:])
            for chat in chats:
                answer = await chat
                assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "INVALID_CHAT")
                assert "(in byte_tokenizer.json) used more than 0.5 s of CPU time" in answer.message
    finally:
        process.close()


async def _only_token_ids_are_served(double: SessionDouble, caplog: pytest.LogCaptureFixture, cause: str) -> None:
    """From the first moment on, with one line in the log, and with the tokenizer asked for once."""
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        for _ in range(2):
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
            assert (await read_stream(under_test.stub.Generate(request, timeout=30))).token_ids == list(b"ok")
            answer = await refusal(under_test.stub.Complete(complete(text_request()), timeout=30))
            assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "NO_TOKENIZER")
            num_hellos = len(double.hellos)
            double.drop_stream()
            await until(lambda: len(double.hellos) > num_hellos)  # noqa: B023
            await under_test.until_health(1)
        assert double.num_tokenizer_calls == 1
    (record,) = [record for record in caplog.records if "tokenizer" in record.message]
    assert record.msg == TOKENIZER_UNUSABLE
    assert cause in record.__dict__["cause"]


async def test_a_tokenizer_that_the_scheduler_finds_too_large_is_asked_for_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = SessionDouble()
    double.tokenizer_refusal = (grpc.StatusCode.FAILED_PRECONDITION, "the files have more than so many bytes")
    await _only_token_ids_are_served(double, caplog, "the files have more than so many bytes")


async def test_a_tokenizer_over_the_limit_is_fetched_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_transport, "_MAX_TOKENIZER_BYTES", 4_000)
    double = SessionDouble(files={"byte_tokenizer.json": b"{" + b" " * 10_000 + b"}"})
    await _only_token_ids_are_served(double, caplog, "the tokenizer's files have more than 4000 bytes")


async def test_a_tokenizer_that_comes_slowly_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time allowed is that between two parts of it: fetched from the beginning again and again, it would never be
    here."""
    monkeypatch.setattr(session_transport, "_CALL_TIMEOUT_S", 0.6)
    double = SessionDouble(files={"byte_tokenizer.json": b"{" + b" " * 5_000 + b"}"})
    double.tokenizer_pause_s = 0.2
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"
        assert double.num_tokenizer_calls == 1


async def test_a_tokenizer_of_which_nothing_more_comes_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_transport, "_CHUNK_TIMEOUT_S", 0.1)
    double = SessionDouble()
    double.tokenizer_pause_s = 600.0
    double.play = lambda submit: [b"ok"]
    async with double as scheduler, front_end(scheduler, ready=False) as under_test:
        await until(lambda: double.num_tokenizer_calls >= 2)
        double.tokenizer_pause_s = 0.0
        monkeypatch.setattr(session_transport, "_CHUNK_TIMEOUT_S", 30.0)
        await under_test.until_health(1)
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"


class _FaultyTokenizer:
    """Encodes bytes; fails where it is asked to."""

    def __init__(self, place: str, error: BaseException) -> None:
        self._place = place
        self._error = error

    def _fail(self, place: str) -> None:
        if place == self._place:
            raise self._error

    def encode_text(self, text: str) -> list[int]:
        self._fail("text")
        return list(text.encode())

    def render_chat(self, messages: Sequence[Any]) -> list[Piece]:
        self._fail("chat")
        return [Piece("rendered", plain=False)]

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        self._fail("rendered chat")
        return [1]

    def fewest_tokens(self, num_bytes: int, *, is_chat: bool) -> int:
        return 0

    def decoder(self, prompt_token_ids: Sequence[int]) -> Any:
        self._fail("decoder")
        return self

    # --- the decoder ---

    pending = False

    def push(self, token_id: int) -> str:
        self._fail("output")
        if token_id == ord("!"):
            self._fail("late output")
        return chr(token_id)


def _chat(content: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=content)]))


_REQUESTS: dict[str, tuple[str, Callable[[], pb.GenerateRequest]]] = {
    "a short text": ("text", text_request),
    "a text that is tokenized in a thread": ("text", lambda: text_request("a" * 900 + " " * 2000)),
    "a short chat": ("chat", lambda: _chat("hi")),
    "a long chat": ("chat", lambda: _chat("a" * 3000)),
    "a chat that is rendered": ("rendered chat", lambda: _chat("hi")),
    "what reads the output": ("decoder", text_request),
    "the output": ("output", text_request),
    "the end of the output": ("late output", text_request),
}


@pytest.mark.parametrize("error", [_Panic("p"), RecursionError("p"), MemoryError("p")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("kind", _REQUESTS)
async def test_f121_every_call_ends_with_a_status_and_the_front_end_goes_on(kind: str, error: BaseException) -> None:
    place, request = _REQUESTS[kind]
    double = SessionDouble()
    double.play = lambda submit: [b"ok", b"ok!"]
    async with served(double) as under_test:
        session = under_test.process.front_end._session
        served_model = session._model
        assert served_model is not None
        faulty = type(served_model)(served_model.description, _FaultyTokenizer(place, error))
        session._model = faulty
        for call in (
            under_test.stub.Generate(request(), timeout=30),
            under_test.stub.Complete(complete(request()), timeout=30),
        ):
            answer = await refusal(call)
            assert (answer.code, answer.reason) == ("INTERNAL", "INTERNAL_ERROR")
        session._model = served_model
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "okok!"
        assert len(double.hellos) == 1
        await under_test.until_nothing_is_left()


async def test_f121_a_failure_while_the_model_is_fetched_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: the stream is opened again, and the session lives on."""
    double = SessionDouble(files=BYTE_TOKENIZER)
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        session = under_test.process.front_end._session
        transport, broken = session._transport, [True, True]
        get_model = transport.get_model

        async def fail() -> Any:
            if broken:
                broken.pop()
                raise _Panic("p")
            return await get_model()

        monkeypatch.setattr(transport, "get_model", fail)
        double.drop_stream()
        await until(lambda: not broken)
        await under_test.until_health(1)
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"
    assert "session failed" in caplog.text
