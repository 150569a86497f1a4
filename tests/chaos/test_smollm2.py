"""Real workers are killed amid real texts: every text is the one of an undisturbed run (float32, greedy)."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from stepfence.v1 import generation_service_pb2 as pb
from tests.e2e.client import Stream, connect, sampling
from tests.support.oracle import DEFAULT_LENGTH, OraclePrompt, assert_greedy_equal, model_directory, oracle, prompts
from tests.support.processes import Deployment, Process

pytestmark = [pytest.mark.model]

# Of one call: a real model on a busy machine that is killed again and again is slow.
_DEADLINE_S = 900.0


def start_worker(deployment: Deployment, index: int) -> Process:
    return deployment.start_worker(
        index, runner="model", model=str(model_directory()), dtype="float32", threads="1", num_blocks="513"
    )


def request_of(prompt: OraclePrompt) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt.token_ids), sampling=sampling(max_tokens=DEFAULT_LENGTH, ignore_eos=True)
    )


async def generate(stub: Any, prompt: OraclePrompt, stream: Stream) -> None:
    async for response in stub.Generate(request_of(prompt), timeout=_DEADLINE_S):
        stream.take(response)


@pytest.mark.parametrize(
    "num_streams, num_kills",
    [
        pytest.param(6, 1, id="short", marks=[pytest.mark.timeout(400)]),
        pytest.param(20, 3, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
async def test_texts_survive_the_death_of_their_workers(tmp_path: Path, num_streams: int, num_kills: int) -> None:
    expected = list(zip(prompts(), oracle(prompts()), strict=True))
    asked = [expected[index % len(expected)] for index in range(num_streams)]
    streams = [Stream() for _ in asked]
    rng = random.Random(num_streams)
    with Deployment(tmp_path, num_workers=2) as deployment:
        for index in range(2):
            start_worker(deployment, index)
        deployment.start_scheduler(max_fruitless_epochs="0")
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready, 300.0)
        async with connect(deployment.frontend_address) as stub:
            running = asyncio.gather(
                *(generate(stub, prompt, stream) for (prompt, _), stream in zip(asked, streams, strict=True))
            )
            for kill in range(num_kills):
                # Every kill finds its worker in the middle of texts.
                await all_have(streams, 5 + kill * (DEFAULT_LENGTH - 15) // num_kills)
                index = rng.randrange(2)
                worker = next(process for process in deployment.processes if process.name == f"worker-{index}")
                await asyncio.to_thread(worker.kill)
                start_worker(deployment, index)
            await running
        status = await asyncio.to_thread(deployment.status)
        assert status.num_requeued_after_worker_loss > 0
        print(
            f"chaos: SmolLM2, {num_streams} streams, {num_kills} kills, "
            f"{status.num_requeued_after_worker_loss} requeued, epochs {[rank.epoch for rank in status.ranks]}"
        )
        for (prompt, entry), stream in zip(asked, streams, strict=True):
            assert stream.finished is not None and len(stream.token_ids) == DEFAULT_LENGTH, prompt.name
            assert_greedy_equal(stream.token_ids, entry)
        await asyncio.to_thread(deployment.wait_idle, 300.0)


@pytest.mark.parametrize(
    "num_streams, num_kills",
    [
        pytest.param(4, 1, id="short", marks=[pytest.mark.timeout(400)]),
        pytest.param(64, 20, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
    ],
)
async def test_d57_texts_survive_the_death_of_their_scheduler(tmp_path: Path, num_streams: int, num_kills: int) -> None:
    expected = list(zip(prompts(), oracle(prompts()), strict=True))
    asked = [expected[index % len(expected)] for index in range(num_streams)]
    streams = [Stream() for _ in asked]
    pauses: list[float] = []
    with Deployment(tmp_path, num_workers=1) as deployment:
        start_worker(deployment, 0)
        deployment.start_scheduler()
        deployment.start_frontend()
        await asyncio.to_thread(deployment.wait_ready, 300.0)
        async with connect(deployment.frontend_address) as stub:
            running = asyncio.gather(
                *(generate(stub, prompt, stream) for (prompt, _), stream in zip(asked, streams, strict=True))
            )
            for kill in range(num_kills):
                await all_have(streams, 3 + kill * (DEFAULT_LENGTH - 10) // num_kills)
                scheduler = next(process for process in deployment.processes if process.name == "scheduler")
                before = sum(len(stream.token_ids) for stream in streams)
                killed_at = time.monotonic()
                await asyncio.to_thread(scheduler.kill)
                deployment.start_scheduler()
                while sum(len(stream.token_ids) for stream in streams) <= before and not running.done():
                    await asyncio.sleep(0.01)
                pauses.append(time.monotonic() - killed_at)
            await running
        print(
            f"chaos: SmolLM2, {num_streams} streams, scheduler killed {num_kills} times, until the next token s "
            f"{[round(pause, 2) for pause in sorted(pauses)]}"
        )
        for (prompt, entry), stream in zip(asked, streams, strict=True):
            assert stream.finished is not None and len(stream.token_ids) == DEFAULT_LENGTH, prompt.name
            assert_greedy_equal(stream.token_ids, entry)
            assert stream.usage.num_completion_tokens == DEFAULT_LENGTH
        await asyncio.to_thread(deployment.wait_idle, 300.0)


async def all_have(streams: list[Stream], num_tokens: int) -> None:
    """Wait until half of the streams have so many tokens."""
    while sorted(len(stream.token_ids) for stream in streams)[len(streams) // 2] < num_tokens:
        await asyncio.sleep(0.02)
