"""OpenAI's clients, unmodified, against real processes: what they get, what leaving early frees, and what a full queue,
a killed worker and a killed scheduler look like to them. `make gateway-test` runs this file with Node's client, too."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler_svc.core.events import RequestAborted
from scheduler_svc.journal import Recording, Scheduled
from tests.support.processes import Deployment, wait_until
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

_NODE = Path(__file__).parent / "node"
# Slow enough that a stream is still running when something happens to it.
_SCRIPT = json.dumps({"delay_ms": 5})


class OpenAIDeployment(Deployment):
    """With an OpenAI port."""

    def __init__(self, folder: Path, worker: dict[str, str] | None = None, **settings: str) -> None:
        """worker: settings of the worker; None: a scripted one."""
        super().__init__(folder)
        from scheduler_svc.cli.ports import free_address

        self.openai_address = free_address("127.0.0.1:0", set())
        self.start_worker(0, **({"num_blocks": "257", "script": _SCRIPT} if worker is None else worker))
        self.start_scheduler(block_size="16", record=str(folder / "recording"), **settings)
        self.start_frontend(openai_listen=self.openai_address)
        self.wait_ready(300)

    @property
    def base_url(self) -> str:
        return f"http://{self.openai_address}/v1"

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="-", max_retries=0, timeout=90)

    def process(self, name: str) -> Any:
        return next(process for process in self.processes if process.name == name)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[OpenAIDeployment]:
    with OpenAIDeployment(tmp_path) as running:
        yield running


def scripted(prompt: str, num_tokens: int) -> str:
    """What an undisturbed scripted worker answers at temperature 0."""
    return bytes(complete(list(prompt.encode()), num_tokens, Sampling())).decode()


async def _text(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


# --- a client that leaves ---------------------------------------------------------------------------------------------


async def test_leaving_early_frees_the_blocks_at_once(deployment: OpenAIDeployment) -> None:
    async with deployment.client() as client:
        stream = await client.completions.create(model="scripted", prompt="x" * 500, max_tokens=3000, stream=True)
        async for _ in stream:
            if deployment.status().num_running:
                break
        left_at = time.monotonic()
        await stream.close()
        await asyncio.to_thread(deployment.wait_idle)
        assert time.monotonic() - left_at < 60
    deployment.process("scheduler").stop()
    # As the recording tells it: at most two steps were planned between the abort and the end of its blocks.
    recording = Recording(deployment.folder / "recording")
    events = [line.what for line in recording.lines()]
    aborted = next(index for index, event in enumerate(events) if isinstance(event, RequestAborted))
    later = [event for event in events[aborted:] if isinstance(event, Scheduled) and event.output is not None]
    assert len(later) <= 2
    assert any(event.output is not None and event.output.finished_request_ids for event in later)


# --- a full queue -----------------------------------------------------------------------------------------------------


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with OpenAIDeployment(tmp_path, max_queued_requests="1", max_num_seqs="1") as deployment:
        async with deployment.client() as client:
            calls = [
                asyncio.create_task(client.completions.create(model="scripted", prompt=f"p{index}", max_tokens=300))
                for index in range(6)
            ]
            done = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in done if isinstance(answer, openai.RateLimitError)]
        assert refused and len(refused) < 6
        assert all(int(answer.response.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.code for answer in refused} == {"queue_full"}
        assert all(isinstance(answer, openai.RateLimitError) or answer.choices for answer in done)  # type: ignore[union-attr]
        # With its own retries the client gets through.
        patient = openai.AsyncOpenAI(base_url=deployment.base_url, api_key="-", max_retries=20, timeout=90)
        async with patient:
            answers = await asyncio.gather(
                *(patient.completions.create(model="scripted", prompt=f"p{index}", max_tokens=20) for index in range(6))
            )
        assert all(len(answer.choices[0].text) == 20 for answer in answers)


# --- parts that die ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["worker-0", "scheduler"])
async def test_streams_pause_while_a_part_is_killed_and_end_with_the_text_they_would_have_had(
    deployment: OpenAIDeployment, part: str
) -> None:
    async with deployment.client() as client:
        streams = [
            await client.completions.create(
                model="scripted", prompt=f"prompt {index}", max_tokens=200, temperature=0, stream=True
            )
            for index in range(8)
        ]
        reading = [asyncio.create_task(_text(stream)) for stream in streams]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(deployment.process(part).kill)
        if part == "scheduler":
            deployment.start_scheduler(block_size="16")
        else:
            deployment.start_worker(num_blocks="257", script=_SCRIPT)
        texts = await asyncio.wait_for(asyncio.gather(*reading), 90)
    assert texts == [scripted(f"prompt {index}", 200) for index in range(8)]
    await asyncio.to_thread(deployment.wait_idle)


# --- Node -------------------------------------------------------------------------------------------------------------


@pytest.mark.node
def test_the_client_for_node_gets_the_same(deployment: OpenAIDeployment) -> None:
    node = shutil.which("node")
    assert node and (_NODE / "node_modules" / "openai").is_dir(), "run `make gateway-test`, which installs the client"
    found = _with_node(node, deployment, "scripted")
    assert len(found["chat"]["text"]) == 8
    assert found["completion"]["text"] == scripted("Hello", 8)
    wait_until(lambda: not deployment.status().num_running, "the request that was left has ended")
    deployment.wait_idle()


@pytest.mark.model
@pytest.mark.node
@pytest.mark.timeout(600)
def test_both_clients_get_the_same_of_a_real_model(tmp_path: Path) -> None:
    from tests.support.oracle import model_directory

    node = shutil.which("node")
    assert node is not None
    worker = {
        "runner": "model",
        "model": str(model_directory()),
        "dtype": "float32",
        "num_blocks": "257",
        "threads": "2",
    }
    with OpenAIDeployment(tmp_path, worker) as deployment:
        name = "smollm2-135m-instruct"
        found = _with_node(node, deployment, name)
        with openai.OpenAI(base_url=deployment.base_url, api_key="-", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "Hello"}]
            chat = client.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0, seed=7)
            completion = client.completions.create(model=name, prompt="Hello", max_tokens=8, temperature=0)
            stopped = client.completions.create(
                model=name, prompt="The capital of France is", max_tokens=16, temperature=0, stop=["."]
            )
        assert found["chat"]["text"] == chat.choices[0].message.content
        assert found["completion"]["text"] == completion.choices[0].text
        assert "Paris" in stopped.choices[0].text and "." not in stopped.choices[0].text
        deployment.wait_idle()


def _with_node(node: str, deployment: OpenAIDeployment, model: str) -> dict[str, Any]:
    """What Node's client found, checked as far as it is the same for every model."""
    run = subprocess.run(
        [node, "client.js", deployment.base_url, model],
        cwd=_NODE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert run.returncode == 0, run.stderr
    found = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert found["models"]["ids"] == [model]
    assert found["chat"]["finish"] == found["stream"]["finish"] == "length"
    assert found["chat"]["text"] == found["stream"]["text"]
    assert found["stream"]["usage"]["completion_tokens"] == found["chat"]["usage"]["completion_tokens"] == 8
    assert (found["another model"]["status"], found["another model"]["code"]) == (404, "model_not_found")
    assert (found["tools"]["status"], found["tools"]["param"]) == (400, "tools")
    assert found["left early"]["seen"] > 3
    return found
