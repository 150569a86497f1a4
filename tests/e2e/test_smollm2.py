"""The real model through the split, as processes, against transformers token for token (float32, greedy)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import usage_pb2
from tests.e2e.client import Stream, connect, generate, sampling
from tests.support.oracle import (
    DEFAULT_LENGTH,
    OracleEntry,
    OraclePrompt,
    assert_greedy_equal,
    model_directory,
    oracle,
    prompts,
)
from tests.support.processes import Deployment

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

Expected = list[tuple[OraclePrompt, OracleEntry]]

# The longest prompt and its output fill 20 of these; 16 requests together need several times as many.
_SMALL_POOL_BLOCKS = 49
# Of one call; a real model on a busy machine is slow.
_DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def expected() -> Expected:
    return list(zip(prompts(), oracle(prompts()), strict=True))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A worker with room for everything; tests start the scheduler they need over it."""
    with Deployment(tmp_path_factory.mktemp("roomy")) as deployment:
        _start_worker(deployment, num_blocks="1025")
        deployment.start_frontend()
        yield deployment


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A worker whose pool is too small for 16 requests at once."""
    with Deployment(tmp_path_factory.mktemp("tight")) as deployment:
        _start_worker(deployment, num_blocks=str(_SMALL_POOL_BLOCKS))
        deployment.start_scheduler()
        deployment.start_frontend()
        deployment.wait_ready()
        yield deployment


def _start_worker(deployment: Deployment, **settings: str) -> None:
    deployment.start_worker(0, runner="model", model=str(model_directory()), dtype="float32", threads="1", **settings)


def _restart_scheduler(deployment: Deployment, **settings: str) -> None:
    """Another scheduler over the same worker and front end, which find it by themselves."""
    for process in deployment.processes:
        if process.name == "scheduler" and process.is_running:
            process.stop()
    deployment.start_scheduler(**settings)
    deployment.wait_ready()


def _request(prompt: OraclePrompt, **given: Any) -> pb.GenerateRequest:
    """The prompt as a client would send it: text or chat."""
    request = pb.GenerateRequest(sampling=sampling(max_tokens=DEFAULT_LENGTH, ignore_eos=True, **given))
    if prompt.text is not None:
        request.text = prompt.text
    for message in prompt.messages or ():
        request.chat.messages.add(**message)
    return request


async def _at_once(deployment: Deployment, asked: list[pb.GenerateRequest]) -> list[Stream]:
    async with connect(deployment.frontend_address) as stub:
        return await asyncio.gather(*(generate(stub, request, deadline_s=_DEADLINE_S) for request in asked))


async def _last_of(deployment: Deployment, others: list[pb.GenerateRequest], last: pb.GenerateRequest) -> Stream:
    """Run `last` beside the others, submitted after all of them."""
    async with connect(deployment.frontend_address) as stub:
        accepted = [asyncio.Event() for _ in others]
        running = [
            asyncio.create_task(generate(stub, request, event, _DEADLINE_S))
            for request, event in zip(others, accepted, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in accepted))
        stream = await generate(stub, last, deadline_s=_DEADLINE_S)
        await asyncio.gather(*running)
    return stream


def _check(streams: list[Stream], expected: Expected) -> None:
    for stream, (prompt, entry) in zip(streams, expected, strict=True):
        assert stream.num_prompt_tokens == len(prompt.token_ids), prompt.name
        assert len(stream.token_ids) == DEFAULT_LENGTH
        assert_greedy_equal(stream.token_ids, entry)


def _sixteen(expected: Expected) -> Expected:
    return [expected[index % len(expected)] for index in range(16)]


async def test_greedy_ids_equal_transformers_alone(roomy: Deployment, expected: Expected) -> None:
    _restart_scheduler(roomy)
    async with connect(roomy.frontend_address) as stub:
        streams = [await generate(stub, _request(prompt), deadline_s=_DEADLINE_S) for prompt, _ in expected]
    _check(streams, expected)
    roomy.wait_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_greedy_ids_equal_transformers_16_at_once(roomy: Deployment, expected: Expected, depth: int) -> None:
    _restart_scheduler(roomy, max_inflight_steps=str(depth))
    asked = _sixteen(expected)
    streams = await _at_once(roomy, [_request(prompt) for prompt, _ in asked])
    _check(streams, asked)
    roomy.wait_idle()


async def test_greedy_ids_equal_transformers_in_steps_of_16_tokens(roomy: Deployment, expected: Expected) -> None:
    _restart_scheduler(roomy, max_num_batched_tokens="16")
    asked = _sixteen(expected)
    streams = await _at_once(roomy, [_request(prompt) for prompt, _ in asked])
    _check(streams, asked)
    roomy.wait_idle()


async def test_greedy_ids_equal_transformers_with_cache_hits(roomy: Deployment, expected: Expected) -> None:
    _restart_scheduler(roomy)
    first = await _at_once(roomy, [_request(prompt) for prompt, _ in expected])
    second = await _at_once(roomy, [_request(prompt) for prompt, _ in expected])
    for stream, (prompt, _) in zip(second, expected, strict=True):
        assert stream.usage.num_cached_tokens == (len(prompt.token_ids) - 1) // 16 * 16, prompt.name
    assert sum(stream.usage.num_cached_tokens for stream in second) > 200
    _check(first, expected)
    _check(second, expected)
    roomy.wait_idle()


async def test_greedy_ids_equal_transformers_across_preemptions(tight: Deployment, expected: Expected) -> None:
    asked = _sixteen(expected)
    before = tight.status().num_preemptions
    streams = await _at_once(tight, [_request(prompt) for prompt, _ in asked])
    assert sum(stream.usage.num_preemptions for stream in streams) == tight.status().num_preemptions - before > 0
    assert any(stream.usage.num_recomputed_tokens for stream in streams)
    _check(streams, asked)
    tight.wait_idle()


async def test_a_seed_gives_the_same_tokens_alone_in_company_and_across_a_preemption(
    roomy: Deployment, tight: Deployment, expected: Expected
) -> None:
    _restart_scheduler(roomy)
    company = [_request(prompt) for prompt, _ in _sixteen(expected)[:15]]
    seeded = _request(expected[1][0], temperature=0.9, top_p=0.95, top_k=40, seed=2024)
    (alone,) = await _at_once(roomy, [seeded])
    crowded = (await _at_once(roomy, [*company, seeded]))[-1]
    # Ten begin with room for their prompts, and not for all their outputs: who came last is taken first.
    others = [_request(prompt) for index, (prompt, _) in enumerate(expected) if index != 1]
    preempted = await _last_of(tight, others, seeded)
    assert preempted.usage.num_preemptions > 0
    assert alone.token_ids == crowded.token_ids == preempted.token_ids
    tight.wait_idle()


async def test_the_models_own_end_of_text_stops_a_chat(roomy: Deployment) -> None:
    _restart_scheduler(roomy)
    request = pb.GenerateRequest(sampling=sampling(max_tokens=64))
    request.chat.messages.add(role="user", content="What is the capital of Italy?")
    (stream,) = await _at_once(roomy, [request])
    assert stream.finished is not None and stream.finished.reason == usage_pb2.FINISH_REASON_STOP
    assert stream.text and "<|im_end|>" not in stream.text and len(stream.token_ids) < 64
    assert stream.finished.stop_token_id in (await _eos_ids(roomy))


async def _eos_ids(deployment: Deployment) -> list[int]:
    async with connect(deployment.frontend_address) as stub:
        return list((await stub.GetModel(pb.GetModelRequest(), timeout=60)).model.eos_token_ids)
