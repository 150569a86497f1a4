"""`docker compose up` for real: scripted workers, disturbed in every way that an operator or a machine can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc.aio
import openai
import pytest

from stepfence.v1 import generation_service_pb2 as pb
from tests.e2e.client import Refusal, connect, generate, refusal, sampling
from tests.e2e.compose.stack import PATIENCE_S, PROJECT, ROOT, Stack, docker, expected, load
from tests.support.processes import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

_NUM_STREAMS = 20
# With the fixture's step time: long enough to break something meanwhile.
_NUM_TOKENS = 200


async def _refused(stack: Stack, prompt: str = "is anyone there?") -> Refusal | None:
    """How a short call fails; None when it does not."""
    async with connect(stack.address) as stub:
        try:
            await generate(stub, pb.GenerateRequest(text=prompt, sampling=sampling(max_tokens=3)), deadline_s=20)
        except grpc.aio.AioRpcError as error:
            return refusal(error)
    return None


async def _serves(stack: Stack) -> None:
    """Wait until a call succeeds."""
    async with asyncio.timeout(PATIENCE_S):
        while await _refused(stack) is not None:
            await asyncio.sleep(0.2)


# --- the files --------------------------------------------------------------------------------------------------------


def _config(*arguments: str, **settings: str) -> Any:
    stack = Stack(port=50051, files=("compose.yaml",), env_file="/dev/null", settings=settings)
    return json.loads(stack.compose(*arguments, "config", "--format", "json").stdout)


def test_only_the_gpu_profile_asks_for_gpus() -> None:
    plain, gpu = _config(), _config("--profile", "gpu")
    assert set(plain["services"]) == {"secret", "model", "scheduler", "frontend", "worker"}
    asks = {name for name, service in gpu["services"].items() if "reservations" in str(service.get("deploy"))}
    assert asks == {"worker-gpu"}
    (device,) = gpu["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert gpu["services"]["worker-gpu"]["networks"]["inside"]["aliases"] == ["worker"]


def test_older_engines_can_read_the_files() -> None:
    dockerfiles = sorted(ROOT.glob("deploy/docker/*.Dockerfile"))
    assert len(dockerfiles) == 3
    for path in dockerfiles:
        text = path.read_text()
        assert "# syntax=" not in text and "<<" not in text, path
    for path in ROOT.glob("compose*.yaml"):
        assert not re.search(r"start_interval|!reset|!override|develop:|^include:", path.read_text(), re.M), path


def test_every_documented_setting_reaches_what_it_sets() -> None:
    documented = re.findall(r"^#?(STEPFENCE_[A-Z_]+)=", (ROOT / ".env.example").read_text(), re.M)
    numeric = {"STEPFENCE_PORT": "51234", "STEPFENCE_OPENAI_PORT": "51235", "STEPFENCE_WORKERS": "77"} | {
        name: f"{700 + index}m"
        for index, name in enumerate(documented)
        if name.endswith("_MEMORY") and "KV" not in name
    }
    for name in documented:
        value = numeric.get(name, "a-strange-value")
        told = json.dumps(_config("--profile", "gpu", **{name: value}))
        size = str(int(value[:-1]) << 20) if value[-1] == "m" else value
        assert size in told, f"{name} has no effect"
    used = set(
        re.findall(r"\$\{(STEPFENCE_[A-Z_]+)|^ +(STEPFENCE_[A-Z_]+):", (ROOT / "compose.yaml").read_text(), re.M)
    )
    names = {name for pair in used for name in pair if name}
    # A path inside the containers is no setting of the deployment.
    assert names - {"STEPFENCE_CLUSTER_SECRET_FILE"} == set(documented)


# --- what runs --------------------------------------------------------------------------------------------------------


def test_services_become_healthy_in_order(bare: Stack) -> None:
    bare.up()
    scheduler, frontend = bare.container("scheduler"), bare.container("frontend")
    assert {found.health for found in bare.containers()} == {"healthy"}
    assert scheduler.first_healthy_at <= frontend.started_at


def test_f124_a_stranger_on_the_inside_network_can_neither_drain_nor_take_over(stack: Stack) -> None:
    (made,) = stack.containers("secret")
    assert made.exit_code == 0 and not made.is_running
    before = stack.lives()
    # The same program in the front end's container, without the secret.
    stranger = ("env", "--unset=STEPFENCE_CLUSTER_SECRET_FILE", "stepfence", "drain", "--target", "scheduler:50052")
    refused = stack.execute("frontend", *stranger, check=False)
    assert refused.returncode == 1 and "CLUSTER_SECRET_MISSING" in refused.stderr
    assert not stack.status()["draining"]
    open_worker = (
        "import grpc; from stepfence.v1 import worker_service_pb2 as pb, worker_service_pb2_grpc as s; "
        "stub = s.WorkerServiceStub(grpc.insecure_channel('worker:50061')); "
        "request = pb.RunStepsRequest(open=pb.Open(scheduler_incarnation=1, epoch=1)); "
        "list(stub.RunSteps(iter([request])))"
    )
    refused = stack.execute("frontend", "python", "-c", open_worker, check=False)
    assert refused.returncode and "UNAUTHENTICATED" in refused.stderr
    stack.up()
    assert stack.lives() == before


def test_containers_can_do_no_more_than_they_must(stack: Stack) -> None:
    for found in stack.containers():
        host, config = found.facts["HostConfig"], found.facts["Config"]
        assert config["User"] == "10001:10001" and not host["Privileged"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["CapAdd"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Memory"] > 0 and host["PidsLimit"] > 0
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert config["Healthcheck"]["Interval"] >= 10e9
        assert config["StopTimeout"] == 35
        told = stack.execute(found.service, "cat", "/proc/self/status").stdout
        assert re.search(r"^Uid:\s+10001\s+10001", told, re.M) and re.search(r"^CapEff:\s+0+$", told, re.M)
        assert re.search(r"^NoNewPrivs:\s+1$", told, re.M)
        refused = stack.execute(found.service, "touch", "/opt/stepfence/x", check=False)
        assert refused.returncode and "Read-only file system" in refused.stderr
        stack.execute(found.service, "touch", "/tmp/x")


def test_the_ports_of_clients_are_published_and_on_loopback_only(stack: Stack) -> None:
    published = {
        found.service: {port: bound for port, bound in found.facts["NetworkSettings"]["Ports"].items() if bound}
        for found in stack.containers()
    }
    ports = {"50051/tcp": stack.port, "8000/tcp": stack.openai_port}
    only = {port: [{"HostIp": "127.0.0.1", "HostPort": str(here)}] for port, here in ports.items()}
    assert published == {"scheduler": {}, "worker": {}, "frontend": only}
    networks = set(stack.container("scheduler").facts["NetworkSettings"]["Networks"])
    assert networks == {f"{PROJECT}_inside"}
    (inside,) = json.loads(docker("network", "inspect", *networks).stdout)
    assert inside["Internal"]


def test_f125_workers_are_on_the_inside_network_only(stack: Stack) -> None:
    for service in ("worker", "scheduler"):
        assert set(stack.container(service).facts["NetworkSettings"]["Networks"]) == {f"{PROJECT}_inside"}
    (fetched,) = stack.containers("model")
    assert fetched.exit_code == 0 and not fetched.is_running


def test_the_image_has_no_torch_no_pip_and_the_pinned_versions(stack: Stack) -> None:
    listing = "import importlib.metadata as m; print('\\n'.join(f'{d.name}=={d.version}' for d in m.distributions()))"
    installed = _pins(stack.execute("frontend", "python", "-c", listing).stdout)
    pinned = _pins((ROOT / "deploy/docker/constraints.txt").read_text())
    assert "grpcio" in installed and "stepfence" in installed
    assert not installed.keys() & {"torch", "pip", "setuptools", "hatchling"}
    for name, version in installed.items():
        assert name == "stepfence" or pinned.get(name) == version, name
    assert stack.container("scheduler").facts["Image"] == stack.container("frontend").facts["Image"]


def _pins(text: str) -> dict[str, str]:
    lines = (line.partition("==") for line in text.splitlines() if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in lines}


async def test_a_client_outside_and_one_in_a_container_get_the_answer(stack: Stack) -> None:
    async with connect(stack.address) as stub:
        answer = await generate(stub, pb.GenerateRequest(text="hello", sampling=sampling(max_tokens=30)))
    assert answer.token_ids == expected("hello", 30)
    inside = stack.execute("frontend", "stepfence", "generate", "hello", "--max-tokens", "30", "--temperature", "0")
    assert inside.stdout == bytes(expected("hello", 30)).decode() + "\n"
    assert "[length] 5 prompt tokens" in inside.stderr


async def test_openais_client_outside_gets_the_answer(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.openai_port}/v1", api_key="-") as client:
        answer = await client.completions.create(model="scripted", prompt="hello", max_tokens=30, temperature=0)
        assert answer.choices[0].text == bytes(expected("hello", 30)).decode()
        stream = await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hello"}], max_tokens=30, stream=True
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"


# --- one part fails ---------------------------------------------------------------------------------------------------


async def test_streams_pause_while_the_worker_is_killed_and_finish_after_its_return(stack: Stack) -> None:
    before = await asyncio.to_thread(stack.metrics)
    others = {name: life for name, life in stack.lives().items() if name != "worker"}
    async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "worker killed") as streams:
        await streams.all_have(5)
        await stack.run("kill", "worker")
        await asyncio.to_thread(wait_until, lambda: not stack.ranks_up(), "the scheduler has seen it", PATIENCE_S)
        had = streams.num_received
        assert streams.num_running == _NUM_STREAMS
        await asyncio.sleep(1)
        assert (streams.num_running, streams.num_received) == (_NUM_STREAMS, had)
        await stack.run("start", "worker")
        await streams.end()
    streams.check()
    assert all(stream.usage.num_recomputed_tokens for stream in streams.streams)
    assert {name: life for name, life in stack.lives().items() if name != "worker"} == others
    _assert_that_the_loss_can_be_found(stack, before)
    stack.wait_idle()


def _assert_that_the_loss_can_be_found(stack: Stack, before: dict[str, float]) -> None:
    """By an operator: in the metrics, in the status and in the log."""
    after = stack.metrics()
    name = "stepfence_requeued_after_worker_loss_total"
    assert after[name] - before.get(name, 0) == _NUM_STREAMS
    assert stack.status()["num_requeued_after_worker_loss"] == str(int(after[name]))
    assert '"message": "rank lost"' in stack.logs("scheduler")


async def test_a_worker_that_crashes_is_started_again(stack: Stack) -> None:
    crash = "import os, signal; [os.kill(int(p), signal.SIGKILL) for p in os.listdir('/proc') if p.isdigit() and "
    crash += "b'worker_svc' in open(f'/proc/{p}/cmdline', 'rb').read().split(b'\\0')]"
    async with load(stack.address, 5, _NUM_TOKENS, "worker crashed") as streams:
        await streams.all_have(5)
        await stack.run("exec", "--no-TTY", "worker", "python", "-c", crash)
        await streams.end()
    streams.check()
    assert stack.container("worker").facts["RestartCount"] == 1


async def test_d57_streams_pause_while_the_scheduler_is_killed_and_finish_after_its_return(stack: Stack) -> None:
    others = {name: life for name, life in stack.lives().items() if name != "scheduler"}
    async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "scheduler killed") as streams:
        await streams.all_have(5)
        await stack.run("kill", "scheduler")
        # What was on its way.
        await asyncio.sleep(1)
        had = streams.num_received
        await asyncio.sleep(1)
        assert (streams.num_running, streams.num_received) == (_NUM_STREAMS, had)
        await stack.run("start", "scheduler")
        await streams.end()
    streams.check()
    await _serves(stack)
    await _all_is_well_after_the_scheduler(stack, others)


async def test_a_recreated_scheduler_finishes_what_it_accepted_first(stack: Stack) -> None:
    others = {name: life for name, life in stack.lives().items() if name != "scheduler"}
    before = stack.container("scheduler").id
    async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "scheduler recreated") as streams:
        await streams.all_have(5)
        recreating = asyncio.create_task(
            stack.run("up", "--detach", "--no-build", "--no-deps", "--force-recreate", "scheduler")
        )
        await streams.end()
        await recreating
    streams.check()
    assert stack.container("scheduler").id != before
    await _serves(stack)
    await _all_is_well_after_the_scheduler(stack, others)


async def test_a_scheduler_that_returns_at_another_address_is_found(stack: Stack) -> None:
    others = {name: life for name, life in stack.lives().items() if name != "scheduler"}
    address = _inside_address(stack, "scheduler")
    await stack.run("kill", "scheduler")
    with _someone_else_on(f"{PROJECT}_inside"):
        await stack.run("start", "scheduler")
        assert _inside_address(stack, "scheduler") != address
        await _serves(stack)
        # Sooner than Compose's first look at the scheduler, 10 s after its start.
        assert stack.container("scheduler").health == "starting"
        await _all_is_well_after_the_scheduler(stack, others)


@contextlib.contextmanager
def _someone_else_on(network: str) -> Iterator[None]:
    """A container that takes the first free address."""
    name = f"{PROJECT}-someone"
    # The image's own labels would make it one of the project's containers.
    label = "com.docker.compose.project=none"
    options = ("--detach", "--rm", "--name", name, "--label", label, "--network", network, "--entrypoint", "sleep")
    docker("run", *options, "stepfence/scheduler:test", "300")
    try:
        yield
    finally:
        docker("rm", "--force", name)


def _inside_address(stack: Stack, service: str) -> str:
    return str(stack.container(service).facts["NetworkSettings"]["Networks"][f"{PROJECT}_inside"]["IPAddress"])


async def _all_is_well_after_the_scheduler(stack: Stack, others: dict[str, tuple[str, str]]) -> None:
    async with load(stack.address, _NUM_STREAMS, 30, "scheduler back") as streams:
        await streams.end()
    streams.check()
    assert {name: life for name, life in stack.lives().items() if name != "scheduler"} == others
    stack.wait_idle()


async def test_a_restarted_front_end_finishes_what_it_accepted(stack: Stack) -> None:
    others = {name: life for name, life in stack.lives().items() if name != "frontend"}
    async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "front end restarted") as streams:
        await streams.all_have(5)
        restarting = asyncio.create_task(stack.run("restart", "frontend"))
        await streams.end()
        await restarting
    streams.check()
    await _serves(stack)
    assert {name: life for name, life in stack.lives().items() if name != "frontend"} == others
    stack.wait_idle()


# --- more and fewer workers -------------------------------------------------------------------------------------------


async def test_no_stream_fails_while_one_worker_becomes_three_and_one_again(stack: Stack) -> None:
    lives = {name: life for name, life in stack.lives().items() if name != "worker"}
    async with load(stack.address, _NUM_STREAMS, 5 * _NUM_TOKENS, "scaled") as streams:
        await streams.all_have(5)
        await stack.run("up", "--detach", "--no-build", "--scale", "worker=3")
        await asyncio.to_thread(wait_until, lambda: len(stack.ranks_up()) == 3, "three ranks", PATIENCE_S)
        async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "on three") as more:
            await more.all_have(5)
            busy = {rank["rank"] for rank in stack.status()["ranks"] if rank["num_running"]}
            assert len(busy) > 1
            await stack.run("up", "--detach", "--no-build", "--scale", "worker=1")
            await more.end()
        more.check()
        await streams.end()
    streams.check()
    await asyncio.to_thread(wait_until, lambda: len(stack.status()["ranks"]) == 1, "two ranks given up", PATIENCE_S)
    (left,) = stack.containers("worker")
    assert left.is_running
    assert {name: life for name, life in stack.lives().items() if name != "worker"} == lives
    stack.wait_idle()


def test_workers_named_in_the_settings_stay_when_compose_is_asked_again(bare: Stack) -> None:
    """`up -d` is how settings are applied and services brought back: it must not take workers away."""
    settled = replace(bare, settings={**bare.settings, "STEPFENCE_WORKERS": "2"})
    settled.up()
    lives = {found.id for found in settled.containers("worker")}
    settled.compose("up", "--detach", "--no-build")
    settled.compose("up", "--detach", "--no-build", "worker")
    assert {found.id for found in settled.containers("worker") if found.is_running} == lives and len(lives) == 2


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_stop_lets_running_streams_finish(stack: Stack) -> None:
    async with load(stack.address, _NUM_STREAMS, _NUM_TOKENS, "stopped") as streams:
        await streams.all_have(5)
        stopping = asyncio.create_task(stack.run("stop"))
        await streams.end()
        await stopping
    streams.check()
    assert {found.service: found.exit_code for found in stack.containers()} == {
        "frontend": 0,
        "scheduler": 0,
        "worker": 0,
    }


def test_down_leaves_nothing(project: Stack) -> None:
    project.compose("up", "--detach", "--no-build", "scheduler", "worker")
    project.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={project.project}"
    for kind in ("container", "volume", "network"):
        every = ("--all",) if kind == "container" else ()
        assert docker(kind, "ls", "--quiet", *every, "--filter", label).stdout == "", kind


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_parts_may_start_in_any_order_and_workers_late(bare: Stack) -> None:
    start = ("up", "--detach", "--no-build", "--no-deps")
    # All parts read the cluster secret, so it is made before any of them.
    bare.compose("run", "--rm", "--no-TTY", "secret")
    bare.compose(*start, "frontend")
    await _until_refused(bare, "SCHEDULER_UNAVAILABLE")
    assert "no connection to the scheduler" in bare.logs("frontend")
    bare.compose(*start, "scheduler")
    await _until_refused(bare, "NO_WORKER")
    await asyncio.sleep(25)
    await _until_refused(bare, "NO_WORKER")
    _assert_that_the_lack_of_a_worker_is_told(bare)
    bare.compose(*start, "worker")
    await _serves(bare)
    wait_until(
        lambda: {found.health for found in bare.containers()} == {"healthy"}, "all services are healthy", PATIENCE_S
    )


async def _until_refused(stack: Stack, reason: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (refused := await _refused(stack)) is None or refused.reason != reason:
            await asyncio.sleep(0.2)
    assert refused.status is grpc.StatusCode.UNAVAILABLE


def _assert_that_the_lack_of_a_worker_is_told(stack: Stack) -> None:
    """To clients, to probes, and to whoever asks why."""
    called = stack.execute("frontend", "stepfence", "generate", "hello", check=False)
    assert called.returncode == 1
    assert "UNAVAILABLE / NO_WORKER" in called.stderr and "start a worker" in called.stderr
    probed = stack.execute("frontend", "stepfence", "health", "--ready", check=False)
    assert probed.returncode == 1 and "NOT_SERVING" in probed.stderr
    assert stack.container("scheduler").health == "healthy"
    assert stack.container("frontend").health != "healthy"
    assert "no worker is up (dns:///worker:50061:" in stack.execute("scheduler", "stepfence", "status").stdout
    assert "no worker" in stack.logs("frontend")


def test_a_taken_port_is_told(bare: Stack) -> None:
    with socket.socket() as taken:
        # Connections of the test before may still be closing; what counts is that somebody listens here now.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", bare.port))
        taken.listen()
        refused = bare.compose("up", "--detach", "--no-build", "--no-deps", "frontend", check=False)
    assert refused.returncode != 0
    assert f"127.0.0.1:{bare.port}" in refused.stderr and "address already in use" in refused.stderr


def test_a_worker_that_cannot_start_says_what_to_do(project: Stack) -> None:
    # The scripted stack's image has no torch.
    refused = docker("run", "--rm", "stepfence/scheduler:test", "worker", "--listen", "127.0.0.1:0", check=False)
    assert refused.returncode == 1
    assert "stepfence[worker]" in refused.stderr and "--runner scripted" in refused.stderr


def test_a_wrong_setting_is_told(project: Stack) -> None:
    refused = docker("run", "--rm", "--env", "STEPFENCE_MAX_SEQS=3", "stepfence/scheduler:test", check=False)
    assert refused.returncode == 2
    assert "STEPFENCE_MAX_SEQS" in refused.stderr and "STEPFENCE_MAX_NUM_SEQS" in refused.stderr
