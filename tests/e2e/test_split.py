"""The split as one: client, front end, scheduler and scripted worker as real processes."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import usage_pb2
from tests.e2e.client import DEADLINE_S, Stream, connect, generate, refusal, sampling
from tests.support.processes import Deployment, wait_until

_BLOCK_SIZE = 16
_USABLE_BLOCKS = 64
_POOL_TOKENS = _BLOCK_SIZE * _USABLE_BLOCKS
_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("split")) as deployment:
        deployment.start_worker(num_blocks=str(_USABLE_BLOCKS + 1), max_model_len=str(_MODEL_LEN))
        deployment.start_scheduler(max_num_seqs="16", block_size=str(_BLOCK_SIZE))
        deployment.start_frontend()
        deployment.wait_ready()
        yield deployment


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(split: Deployment) -> Iterator[None]:
    yield
    split.wait_idle()


def _text(prompt: str, **given: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling=sampling(**given))


def _ids(num_tokens: int, **given: Any) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[97 + index % 26 for index in range(num_tokens)])
    return pb.GenerateRequest(token_ids=ids, sampling=sampling(**given))


async def test_a_stream_and_a_unary_call_give_the_same(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        stream = await generate(stub, _text("hello there", max_tokens=40))
        answer = await stub.Complete(
            pb.CompleteRequest(request=_text("hello there", max_tokens=40)), timeout=DEADLINE_S
        )
    assert (stream.text, stream.token_ids) == (answer.text, list(answer.token_ids))
    assert len(stream.token_ids) == 40 == stream.usage.num_completion_tokens
    assert stream.finished is not None
    assert stream.finished.reason == answer.reason == usage_pb2.FINISH_REASON_LENGTH
    assert stream.num_prompt_tokens == stream.usage.num_prompt_tokens == len("hello there")
    # The scripted worker's ids are the bytes of its text.
    assert bytes(stream.token_ids).decode() == stream.text


async def test_the_second_of_two_equal_prompts_is_a_cache_hit_with_the_same_text(split: Deployment) -> None:
    prompt = "a prompt of several blocks, " * 4
    async with connect(split.frontend_address) as stub:
        first = await generate(stub, _text(prompt, max_tokens=8))
        second = await generate(stub, _text(prompt, max_tokens=8))
    assert first.text == second.text
    assert first.usage.num_cached_tokens == 0
    assert second.usage.num_cached_tokens == (len(prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE


async def test_a_seed_repeats_and_another_seed_does_not(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        texts = [
            (await generate(stub, _text("seeded", max_tokens=32, temperature=1.0, seed=seed))).text
            for seed in (7, 7, 8)
        ]
    assert texts[0] == texts[1] != texts[2]


async def test_the_text_ends_before_a_stop_string_and_nothing_after_it_is_billed(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        whole = await generate(stub, _text("stop here", max_tokens=30))
        stop = whole.text[10:13]
        cut = await generate(stub, _text("stop here", max_tokens=30, stop=[stop]))
    end = whole.text.index(stop)
    assert cut.finished is not None
    assert (cut.text, cut.finished.reason, cut.finished.stop_string) == (
        whole.text[:end],
        usage_pb2.FINISH_REASON_STOP,
        stop,
    )
    assert cut.usage.num_completion_tokens == end + len(stop)


async def test_chat_is_rendered_by_the_models_template(split: Deployment) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    async with connect(split.frontend_address) as stub:
        stream = await generate(stub, pb.GenerateRequest(chat=chat, sampling=sampling(max_tokens=4)))
        model = (await stub.GetModel(pb.GetModelRequest(), timeout=DEADLINE_S)).model
    assert stream.num_prompt_tokens > len("hi")
    assert model.max_model_len == _MODEL_LEN and model.vocab_size == 260


async def test_a_served_model_may_be_named(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        name = (await stub.GetModel(pb.GetModelRequest(), timeout=DEADLINE_S)).model.name
        request = _text("hi", max_tokens=2)
        request.model = name
        assert (await generate(stub, request)).usage.num_completion_tokens == 2


def test_the_command_line_streams_text_and_tells_the_cost(split: Deployment) -> None:
    command = [sys.executable, "-m", "scheduler_svc", "generate", "hello", "--target", split.frontend_address]
    options = ["--max-tokens", "12", "--temperature", "0"]
    plain = subprocess.run([*command, *options], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert len(plain.stdout) == 13 and plain.stdout.endswith("\n")
    assert "[length] 5 prompt tokens" in plain.stderr and "12 completion tokens" in plain.stderr
    lines = subprocess.run(
        [*command, *options, "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert "".join(event["delta"]["text"] for event in events if "delta" in event) == plain.stdout[:-1]
    assert "accepted" in events[0] and "finished" in events[-1]


def test_the_command_line_shows_status_and_audit(split: Deployment) -> None:
    for command, told in (("status", "1 running"), ("audit", "64 usable = 64 free")):
        answer = subprocess.run(
            [sys.executable, "-m", "scheduler_svc", command, "--target", split.scheduler_address],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        assert told.replace("1 running", "0 running") in answer.stdout
        assert split.worker_addresses[0] in answer.stdout


# --- wrong input ------------------------------------------------------------------------------------------------------

_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_WRONG: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "no prompt at all": (pb.GenerateRequest(), _INVALID, "EMPTY_PROMPT"),
    "empty text": (_text(""), _INVALID, "EMPTY_PROMPT"),
    "no token ids": (_ids(0), _INVALID, "EMPTY_PROMPT"),
    "prompt of the model's length": (_ids(_MODEL_LEN, max_tokens=1), _INVALID, "PROMPT_TOO_LONG"),
    "prompt above the pool": (_ids(_POOL_TOKENS + 1, max_tokens=1), _INVALID, "EXCEEDS_KV_CAPACITY"),
    "prompt and output above the pool": (_ids(1000, max_tokens=26), _INVALID, "EXCEEDS_KV_CAPACITY"),
    "text over 1 MiB": (_text("x" * (1024 * 1024 + 1)), _INVALID, "PROMPT_TOO_LARGE"),
    "negative temperature": (_text("x", temperature=-0.1), _INVALID, "INVALID_PARAMETER"),
    "temperature not a number": (_text("x", temperature=float("nan")), _INVALID, "INVALID_PARAMETER"),
    "infinite temperature": (_text("x", temperature=float("inf")), _INVALID, "INVALID_PARAMETER"),
    "top_p 0": (_text("x", top_p=0.0), _INVALID, "INVALID_PARAMETER"),
    "top_p above 1": (_text("x", top_p=1.5), _INVALID, "INVALID_PARAMETER"),
    "top_k below -1": (_text("x", top_k=-2), _INVALID, "INVALID_PARAMETER"),
    "min_p above 1": (_text("x", min_p=2.0), _INVALID, "INVALID_PARAMETER"),
    "max_tokens 0": (_text("x", max_tokens=0), _INVALID, "INVALID_PARAMETER"),
    "min_tokens above max_tokens": (_text("x", max_tokens=2, min_tokens=3), _INVALID, "INVALID_PARAMETER"),
    "empty stop string": (_text("x", stop=[""]), _INVALID, "INVALID_PARAMETER"),
    "17 stop strings": (_text("x", stop=["s"] * 17), _INVALID, "INVALID_PARAMETER"),
    "long stop string": (_text("x", stop=["s" * 1025]), _INVALID, "INVALID_PARAMETER"),
    "129 stop ids": (_text("x", stop_token_ids=[1] * 129), _INVALID, "INVALID_PARAMETER"),
    "stop id beyond the vocabulary": (_text("x", stop_token_ids=[260]), _INVALID, "INVALID_PARAMETER"),
    "token id beyond the vocabulary": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[260])),
        _INVALID,
        "INVALID_PARAMETER",
    ),
    "absurd token id": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), _INVALID, "INVALID_PARAMETER"),
    "long request id": (pb.GenerateRequest(text="x", request_id="i" * 257), _INVALID, "INVALID_PARAMETER"),
    "long cache salt": (pb.GenerateRequest(text="x", cache_salt="s" * 257), _INVALID, "INVALID_PARAMETER"),
    "priority under fcfs": (pb.GenerateRequest(text="x", priority=1), _INVALID, "PRIORITY_NOT_SUPPORTED"),
    "unknown model": (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    "chat with an unknown role": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="wizard", content="x")])),
        _INVALID,
        "INVALID_CHAT",
    ),
    "chat without messages": (pb.GenerateRequest(chat=pb.Chat()), _INVALID, "INVALID_CHAT"),
}


@pytest.mark.parametrize("name", _WRONG)
async def test_wrong_input_gets_the_status_and_reason_of_the_contract(split: Deployment, name: str) -> None:
    request, status, reason = _WRONG[name]
    async with connect(split.frontend_address) as stub:
        for call in (
            generate(stub, request),
            stub.Complete(pb.CompleteRequest(request=request), timeout=DEADLINE_S),
        ):
            with pytest.raises(grpc.RpcError) as error:
                await call
            refused = refusal(error.value)
            assert (refused.status, refused.reason) == (status, reason), refused
            assert refused.message


async def test_a_refusal_for_capacity_names_what_is_needed_and_what_there_is(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        with pytest.raises(grpc.RpcError) as error:
            await generate(stub, _ids(1000, max_tokens=26))
    refused = refusal(error.value)
    assert refused.metadata == {"needed_tokens": "1025", "available_tokens": "1024"}
    assert "1025" in refused.message and "1024" in refused.message


async def test_what_just_fits_is_served(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        exact = await generate(stub, _ids(1000, max_tokens=25))
        clipped = await generate(stub, _ids(_POOL_TOKENS))
    assert exact.usage.num_completion_tokens == 25
    assert clipped.usage.num_completion_tokens == 1


async def test_a_live_id_cannot_be_used_twice_and_is_free_after_its_end(split: Deployment) -> None:
    request = _text("long", max_tokens=900, ignore_eos=True)
    request.request_id = "twice"
    async with connect(split.frontend_address) as stub:
        call: Any = stub.Generate(request, timeout=DEADLINE_S)
        events = aiter(call)
        assert (await anext(events)).accepted.request_id == "twice"
        with pytest.raises(grpc.RpcError) as error:
            await generate(stub, request)
        refused = refusal(error.value)
        assert (refused.status, refused.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
        with pytest.raises(grpc.RpcError) as error:
            await stub.Abort(pb.AbortRequest(request_id="twice"), timeout=DEADLINE_S)
        assert refusal(error.value).reason == "ABORT_NOT_ALLOWED"
        call.cancel()
        request.sampling.max_tokens = 3
        async with asyncio.timeout(DEADLINE_S):
            # The scheduler hears of the cancelled call a moment later.
            while True:
                try:
                    answer = await generate(stub, request)
                    break
                except grpc.RpcError as still_live:
                    if refusal(still_live).reason != "DUPLICATE_REQUEST_ID":
                        raise
                    await asyncio.sleep(0.01)
        assert answer.usage.num_completion_tokens == 3


async def test_an_id_that_the_server_drew_can_be_aborted_until_its_end(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        call: Any = stub.Generate(_text("long", max_tokens=900, ignore_eos=True), timeout=DEADLINE_S)
        events = aiter(call)
        drawn = (await anext(events)).accepted.request_id
        await stub.Abort(pb.AbortRequest(request_id=drawn), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as error:
            async for _ in events:
                pass
        aborted = refusal(error.value)
        assert (aborted.status, aborted.reason) == (grpc.StatusCode.CANCELLED, "ABORTED")
        with pytest.raises(grpc.RpcError) as error:
            await stub.Abort(pb.AbortRequest(request_id=drawn), timeout=DEADLINE_S)
        assert refusal(error.value).reason == "REQUEST_NOT_FOUND"


async def test_a_deadline_ends_the_request_and_frees_what_it_held(split: Deployment) -> None:
    async with connect(split.frontend_address) as stub:
        with pytest.raises(grpc.RpcError) as error:
            async for _ in stub.Generate(_text("late", max_tokens=1000, ignore_eos=True), timeout=0.05):
                pass
    assert refusal(error.value).status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_may_leave_at_any_moment(split: Deployment) -> None:
    rng = random.Random(17)

    async def leave(index: int) -> None:
        async with connect(split.frontend_address) as stub:
            call: Any = stub.Generate(_text(f"leaving {index}", max_tokens=500, ignore_eos=True), timeout=DEADLINE_S)
            for _ in range(rng.randrange(6)):
                if not isinstance(await call.read(), pb.GenerateResponse):
                    break
            if index % 2:
                # Otherwise the connection itself is closed.
                call.cancel()

    await asyncio.gather(*(leave(index) for index in range(24)))
    async with connect(split.frontend_address) as stub:
        assert (await generate(stub, _text("still there", max_tokens=5))).usage.num_completion_tokens == 5


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_64_streams_of_which_some_are_cancelled_leave_nothing_behind(split: Deployment) -> None:
    rng = random.Random(64)
    lengths = [rng.randrange(20, 300) for _ in range(64)]
    prompts = [f"stream {index} " + "and more " * rng.randrange(12) for index in range(64)]
    leavers = set(rng.sample(range(64), 7))

    async def run(stub: Any, index: int) -> Stream | None:
        request = _text(prompts[index], max_tokens=lengths[index], ignore_eos=True)
        if index not in leavers:
            return await generate(stub, request)
        stream = Stream()
        call = stub.Generate(request, timeout=DEADLINE_S)
        keep = rng.randrange(lengths[index])
        async for response in call:
            stream.take(response)
            if len(stream.token_ids) >= keep:
                break
        call.cancel()
        return None

    async with connect(split.frontend_address) as stub:
        streams = await asyncio.gather(*(run(stub, index) for index in range(64)))
        for index in (leaver for leaver in range(64) if leaver not in leavers):
            stream = streams[index]
            assert stream is not None and stream.usage.num_completion_tokens == lengths[index]
            assert len(stream.token_ids) == lengths[index]
        # Whatever ran beside them: the same text as alone (four of them, for the time it takes).
        wait_until(lambda: not split.leftovers(), "the streams' blocks are free")
        for index in [index for index in range(64) if index not in leavers][:4]:
            alone = await generate(stub, _text(prompts[index], max_tokens=lengths[index], ignore_eos=True))
            crowded = streams[index]
            assert crowded is not None and alone.text == crowded.text
