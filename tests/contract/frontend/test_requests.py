"""What a client may ask for, what the scheduler then sees, and what is refused with which status and reason."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from scheduler_svc.frontend.api import GenerationServicer
from scheduler_svc.frontend.text import ByteTokenizer
from scheduler_svc.rpc.cluster_secret import ClusterSecret
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import model_pb2, session_service_pb2, usage_pb2
from stepfence.v1.sampling_pb2 import SamplingParams
from tests.contract.frontend.harness import complete, read_stream, refusal, sampled, served, text_request
from tests.support.session_double import SessionDouble, byte_model

FLOAT32 = pytest.approx


def refusing_double(**model: Any) -> SessionDouble:
    """Accepts and answers whatever reaches it, so that what is not refused shows."""
    double = SessionDouble(byte_model(**model))
    double.play = lambda submit: [b"ok"]
    return double


async def test_a_stream_is_accepted_deltas_finished() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request("hello", request_id="r1"), timeout=30)
        request = await under_test.double.next_request()
        assert request.prompt == list(b"hello")
        request.accept()
        request.send_tokens(b"one ", b"two")
        request.end_length()
        streamed = await read_stream(call)
        assert (streamed.accepted.request_id, streamed.accepted.num_prompt_tokens) == ("r1", 5)
        assert [delta.text for delta in streamed.deltas] == ["one ", "two"]
        assert [bytes(delta.token_ids) for delta in streamed.deltas] == [b"one ", b"two"]
        assert streamed.finished.reason == usage_pb2.FINISH_REASON_LENGTH
        assert streamed.finished.WhichOneof("matched") is None
        usage = streamed.finished.usage
        assert (usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens) == (5, 7, 3)
        assert (usage.num_preemptions, usage.num_recomputed_tokens) == (2, 11)
        assert (usage.queued.ToNanoseconds(), usage.preempted.ToNanoseconds()) == (1_500_000_000, 7)


async def test_complete_gives_the_same_as_the_stream() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"one ", b"two"]
        streamed = await read_stream(under_test.stub.Generate(text_request(request_id="r1"), timeout=30))
        response = await under_test.stub.Complete(complete(text_request(request_id="r1")), timeout=30)
        assert response.text == streamed.text == "one two"
        assert list(response.token_ids) == streamed.token_ids
        assert (response.request_id, response.reason) == ("r1", streamed.finished.reason)
        assert response.usage == streamed.finished.usage


async def test_an_id_is_assigned_when_the_client_gives_none() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"x"]
        ids = {(await under_test.stub.Complete(complete(text_request()), timeout=30)).request_id for _ in range(3)}
        assert len(ids) == 3
        assert ids == {request.request_id for request in under_test.double.requests}


async def test_defaults_are_the_models_then_the_documented_ones() -> None:
    defaults = model_pb2.GenerationDefaults(temperature=0.6, top_k=20)
    async with served(SessionDouble(byte_model(eos_token_ids=[257, 258], generation_defaults=defaults))) as under_test:
        under_test.double.play = lambda submit: [b"x"]
        await under_test.stub.Complete(complete(text_request()), timeout=30)
        explicit = sampled(
            temperature=0, top_p=0.5, top_k=-1, min_p=0.25, max_tokens=7, min_tokens=3, seed=2**64 - 1,
            stop_token_ids=[5, 6, 5], ignore_eos=True,
        )  # fmt: skip
        await under_test.stub.Complete(complete(explicit), timeout=30)
        unset, given = (request.submit.sampling for request in under_test.double.requests)
        assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p) == FLOAT32((0.6, 1, 20, 0))
        assert (unset.max_tokens, unset.min_tokens) == (0, 0)
        assert (list(unset.eos_token_ids), list(unset.stop_token_ids)) == ([257, 258], [])
        assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0, 0.5, 0, 0.25)
        assert (given.max_tokens, given.min_tokens, given.seed) == (7, 3, 2**64 - 1)
        assert (list(given.eos_token_ids), list(given.stop_token_ids)) == ([], [5, 6])


async def test_d33_an_unset_seed_is_drawn_for_every_request() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"x"]
        for _ in range(4):
            await under_test.stub.Complete(complete(text_request()), timeout=30)
        seeds = {request.submit.sampling.seed for request in under_test.double.requests}
        assert len(seeds) == 4
        assert max(seeds) > 2**32


async def test_what_the_scheduler_needs_travels_along() -> None:
    async with served(SessionDouble(features=[session_service_pb2.SESSION_FEATURE_PRIORITY])) as under_test:
        under_test.double.play = lambda submit: [b"x"]
        request = text_request(priority=-3, cache_salt="tenant", model="bytes")
        await under_test.stub.Complete(complete(request), timeout=20)
        await under_test.stub.Complete(complete(request))
        timed, untimed = (request.submit for request in under_test.double.requests)
        assert (timed.priority, timed.cache_salt) == (-3, "tenant")
        assert 0 < timed.timeout.ToNanoseconds() < 20e9
        assert not untimed.HasField("timeout")


async def test_prompts_may_be_ids_or_a_chat() -> None:
    async with served() as under_test:
        under_test.double.play = lambda submit: [b"x"]
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[256, 97, 259]))
        await under_test.stub.Complete(complete(ids), timeout=30)
        messages = [pb.ChatMessage(role="system", content="é"), pb.ChatMessage(role="user", content="hi")]
        await under_test.stub.Complete(complete(pb.GenerateRequest(chat=pb.Chat(messages=messages))), timeout=30)
        first, second = under_test.double.requests
        assert first.prompt == [256, 97, 259]
        assert second.prompt == list("<system>é<user>hi".encode())


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


def ids(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), **fields)


INVALID = "INVALID_ARGUMENT"
BAD_PARAMETER = (INVALID, "INVALID_PARAMETER")
NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[pb.GenerateRequest, tuple[str, str], list[str]]] = [
    (pb.GenerateRequest(), (INVALID, "EMPTY_PROMPT"), ["prompt"]),
    (text_request(""), (INVALID, "EMPTY_PROMPT"), ["prompt"]),
    (ids(), (INVALID, "EMPTY_PROMPT"), ["prompt"]),
    (text_request("x" * 1000), (INVALID, "PROMPT_TOO_LONG"), ["prompt"]),
    (ids(*[1] * 1000), (INVALID, "PROMPT_TOO_LONG"), ["prompt"]),
    # F60: far over every limit, refused before anything is queued.
    (ids(*[1] * 1_500_000), (INVALID, "PROMPT_TOO_LONG"), ["prompt"]),
    (text_request("x" * (2**20 + 1)), (INVALID, "PROMPT_TOO_LARGE"), ["text"]),
    (text_request("é" * (2**19 + 1)), (INVALID, "PROMPT_TOO_LARGE"), ["text"]),
    (chat(("user", "x" * 2**20)), (INVALID, "PROMPT_TOO_LARGE"), ["chat"]),
    (chat(*[("user", "")] * 4097), (INVALID, "PROMPT_TOO_LARGE"), ["chat.messages"]),
    (ids(260), BAD_PARAMETER, ["token_ids.ids"]),
    (ids(1, 2**32 - 1), BAD_PARAMETER, ["token_ids.ids"]),
    (chat(), (INVALID, "INVALID_CHAT"), ["chat"]),
    (chat(("tool", "x")), (INVALID, "INVALID_CHAT"), ["chat"]),
    (chat(("user", "x"), ("", "y")), (INVALID, "INVALID_CHAT"), ["chat"]),
    (text_request(model="other"), ("NOT_FOUND", "MODEL_NOT_FOUND"), []),
    (text_request(model="\U0001f642" * 100_000), ("NOT_FOUND", "MODEL_NOT_FOUND"), []),
    (chat(("\U0001f642" * 100_000, "x")), (INVALID, "INVALID_CHAT"), ["chat"]),
    (text_request(priority=1), (INVALID, "PRIORITY_NOT_SUPPORTED"), ["priority"]),
    (text_request(priority=-1), (INVALID, "PRIORITY_NOT_SUPPORTED"), ["priority"]),
    (text_request(request_id="é" * 129), BAD_PARAMETER, ["request_id"]),
    (text_request(cache_salt="s" * 257), BAD_PARAMETER, ["cache_salt"]),
    *[(sampled(temperature=value), BAD_PARAMETER, ["sampling.temperature"]) for value in (-0.1, 100.5, NAN, INF, -INF)],
    *[(sampled(top_p=value), BAD_PARAMETER, ["sampling.top_p"]) for value in (0, -1, 1.01, NAN, INF)],
    *[(sampled(min_p=value), BAD_PARAMETER, ["sampling.min_p"]) for value in (-0.01, 1.01, NAN, -INF)],
    *[(sampled(top_k=value), BAD_PARAMETER, ["sampling.top_k"]) for value in (-2, -(2**31))],
    (sampled(max_tokens=0), BAD_PARAMETER, ["sampling.max_tokens"]),
    (sampled(max_tokens=3, min_tokens=4), BAD_PARAMETER, ["sampling.min_tokens"]),
    (sampled(stop=["a"] * 17), BAD_PARAMETER, ["sampling.stop"]),
    (sampled(stop=["a", ""]), BAD_PARAMETER, ["sampling.stop"]),
    (sampled(stop=["é" * 513]), BAD_PARAMETER, ["sampling.stop"]),
    (sampled(stop_token_ids=[260]), BAD_PARAMETER, ["sampling.stop_token_ids"]),
    (sampled(stop_token_ids=[1] * 129), BAD_PARAMETER, ["sampling.stop_token_ids"]),
    (
        sampled(temperature=-1, top_p=2, max_tokens=0),
        BAD_PARAMETER,
        ["sampling.temperature", "sampling.top_p", "sampling.max_tokens"],
    ),
]


async def test_every_wrong_request_gets_its_status_reason_and_fields() -> None:
    async with served(refusing_double()) as under_test:
        for request, expected, fields in REFUSED:
            told = await refusal(under_test.stub.Generate(request, timeout=30))
            assert ((told.code, told.reason), told.fields) == (expected, fields), told
            assert told.domain == "stepfence"
            assert told.message
            assert told.usage is None
            same = await refusal(under_test.stub.Complete(complete(request), timeout=30))
            assert (same.code, same.reason, same.fields) == (told.code, told.reason, told.fields)
        assert under_test.double.requests == []
        await under_test.until_nothing_is_left()


async def test_everything_at_its_limit_is_accepted() -> None:
    async with served(refusing_double(max_model_len=2**20 + 2)) as under_test:
        for request in (
            text_request("x" * 2**20),
            ids(*[259] * 1000),
            text_request(request_id="é" * 128, cache_salt="s" * 256, model="bytes"),
            sampled(temperature=100, top_p=1, min_p=1, top_k=2**31 - 1),
            sampled(temperature=0, top_p=1e-9, min_p=0, top_k=0),
            sampled(max_tokens=2**32 - 1, min_tokens=2**32 - 1),
            sampled(min_tokens=2**32 - 1),
            sampled(stop=["é" * 512] * 16, stop_token_ids=[259] * 128),
        ):
            assert (await under_test.stub.Complete(complete(request), timeout=30)).text == "ok"
        await under_test.until_nothing_is_left()


async def test_a_prompt_one_short_of_the_models_length_is_accepted() -> None:
    async with served(refusing_double(max_model_len=10)) as under_test:
        assert (await under_test.stub.Complete(complete(ids(*[1] * 9)), timeout=30)).text == "ok"
        told = await refusal(under_test.stub.Complete(complete(ids(*[1] * 10)), timeout=30))
        assert told.metadata == {"num_prompt_tokens": "10", "max_model_len": "10"}


async def test_a_model_without_tokenizer_takes_ids_only() -> None:
    async with served(refusing_double(tokenizer_digest="")) as under_test:
        for request in (
            text_request(),
            chat(("user", "x")),
            ids(1, sampling=SamplingParams(stop=["x"])),
        ):
            told = await refusal(under_test.stub.Generate(request, timeout=30))
            assert (told.code, told.reason) == (INVALID, "NO_TOKENIZER")
        response = await under_test.stub.Complete(complete(ids(1)), timeout=30)
        assert (response.text, bytes(response.token_ids)) == ("", b"ok")


async def test_a_broken_tokenizer_leaves_ids_usable() -> None:
    double = SessionDouble(files={"tokenizer.json": b"{"})
    double.play = lambda submit: [b"ok"]
    async with served(double) as under_test:
        told = await refusal(under_test.stub.Generate(text_request(), timeout=30))
        assert told.reason == "NO_TOKENIZER"
        assert list((await under_test.stub.Complete(complete(ids(1)), timeout=30)).token_ids) == list(b"ok")


async def test_the_schedulers_refusal_is_passed_on_as_it_stands() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(), timeout=30)
        request = await under_test.double.next_request()
        retry_after = {"seconds": 2, "nanos": 500_000_000}
        request.refuse(8, "QUEUE_FULL", "the queue is full", metadata={"queued": "1024"}, retry_after=retry_after)
        told = await refusal(call)
        assert (told.code, told.reason, told.message) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "the queue is full")
        assert (told.metadata, told.retry_after_s, told.usage) == ({"queued": "1024"}, 2.5, None)
        await under_test.until_nothing_is_left()


@pytest.mark.parametrize("code", [0, 99, -1])
async def test_a_refusal_without_a_proper_code_is_internal(code: int) -> None:
    async with served() as under_test:
        call = under_test.stub.Complete(complete(text_request()), timeout=30)
        (await under_test.double.next_request()).refuse(code, "ODD")
        assert (await refusal(call)).code == "INTERNAL"


async def test_an_unforeseen_error_is_logged_and_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(tokenizer: ByteTokenizer, text: str) -> list[int]:
        raise RuntimeError("a secret of the house")

    async with served() as under_test:
        monkeypatch.setattr(ByteTokenizer, "encode_text", explode)
        with caplog.at_level(logging.ERROR):
            told = await refusal(under_test.stub.Generate(text_request(), timeout=30))
        assert (told.code, told.reason) == ("INTERNAL", "INTERNAL_ERROR")
        assert "secret" not in told.message
        assert "a secret of the house" in caplog.text
        await under_test.until_nothing_is_left()


async def test_a_write_on_a_call_that_is_over_is_no_error_of_this_process(caplog: pytest.LogCaptureFixture) -> None:
    """Found by fuzzing: the client's deadline passes while an answer is written, and gRPC says so before it knows."""

    class OverContext:
        async def write(self, message: object) -> None:
            raise grpc.aio.InternalError("execute_batch failed")

        def done(self) -> bool:
            return False

        def time_remaining(self) -> None:
            return None

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def abort(self, *details: object) -> None:
            raise grpc.aio.AbortError

    async with served() as under_test:
        under_test.double.play = lambda submit: [b"some", b"text"]
        servicer = GenerationServicer(under_test.process.front_end)
        context: Any = OverContext()
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AbortError):
            await servicer.Generate(text_request(), context)
        assert caplog.records == []
        await under_test.until_nothing_is_left()


async def test_f18_a_live_id_is_refused_and_free_again_after_the_end() -> None:
    async with served() as under_test:
        first = under_test.stub.Generate(text_request(request_id="same"), timeout=30)
        request = await under_test.double.next_request()
        request.accept()
        for _ in range(2):
            told = await refusal(under_test.stub.Complete(complete(text_request(request_id="same")), timeout=30))
            assert (told.code, told.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        request.send_tokens(b"x")
        request.end_length()
        assert (await read_stream(first)).text == "x"
        second = under_test.stub.Generate(text_request(request_id="same"), timeout=30)
        again = await under_test.double.next_request()
        assert again.handle not in under_test.double.live or again is not request
        # Late words about the first one do not land in the second.
        under_test.double.send_tokens({request.handle: list(b"stale")})
        again.accept()
        again.send_tokens(b"fresh")
        again.end_length()
        assert (await read_stream(second)).text == "fresh"


async def test_f18_an_id_is_free_right_after_an_abort() -> None:
    secret = ClusterSecret("the-secret-of-this-test")
    async with served(secret=secret) as under_test:
        first = under_test.stub.Generate(text_request(request_id="same"), timeout=30)
        (await under_test.double.next_request()).accept()
        await under_test.stub.Abort(pb.AbortRequest(request_id="same"), timeout=30, metadata=secret.metadata)
        assert (await refusal(first)).reason == "ABORTED"
        second = under_test.stub.Generate(text_request(request_id="same"), timeout=30)
        again = await under_test.double.next_request()
        again.accept()
        again.end_length()
        assert (await read_stream(second)).text == ""


async def test_a_duplicate_known_to_the_scheduler_only_is_refused() -> None:
    async with served() as under_test:
        call = under_test.stub.Generate(text_request(request_id="elsewhere"), timeout=30)
        (await under_test.double.next_request()).refuse(6, "DUPLICATE_REQUEST_ID")
        told = await refusal(call)
        assert (told.code, told.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")


async def test_get_model_tells_what_is_served() -> None:
    defaults = model_pb2.GenerationDefaults(top_p=0.5)
    model = byte_model(eos_token_ids=[1, 2], generation_defaults=defaults)
    async with served(SessionDouble(model)) as under_test:
        response = await under_test.stub.GetModel(pb.GetModelRequest(), timeout=30)
        assert response.model == model


async def test_before_a_worker_joined_everything_is_no_worker() -> None:
    double = SessionDouble()
    double.has_worker = False
    double.play = lambda submit: [b"ok"]
    async with served(double, ready=False) as under_test:
        await double.attached()
        for call in (
            under_test.stub.Generate(text_request(), timeout=30),
            under_test.stub.Complete(complete(text_request()), timeout=30),
            under_test.stub.GetModel(pb.GetModelRequest(), timeout=30),
        ):
            told = await refusal(call)
            assert (told.code, told.reason) == ("UNAVAILABLE", "NO_WORKER")
        double.worker_joins()
        await under_test.until_health(1)
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"


async def test_long_text_is_tokenized_beside_the_loop() -> None:
    async with served(refusing_double(max_model_len=2**22)) as under_test:
        tokenizing = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Slow(ByteTokenizer):
            def encode_text(self, text: str) -> list[int]:
                # Returns only when the loop has run meanwhile; on the loop itself this would never end.
                asyncio.run_coroutine_threadsafe(self._note(), loop).result(30)
                return super().encode_text(text)

            async def _note(self) -> None:
                tokenizing.set()

        under_test.process.front_end._session.model.tokenizer.__class__ = Slow
        response = await under_test.stub.Complete(complete(text_request("x" * 100_000)), timeout=30)
        assert response.text == "ok"
        assert tokenizing.is_set()


async def test_over_16_mib_is_refused_by_grpc_itself() -> None:
    async with served(refusing_double()) as under_test:
        call = under_test.stub.Generate(text_request("x" * (2**24 + 1)), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await under_test.stub.Complete(complete(text_request()), timeout=30)).text == "ok"
