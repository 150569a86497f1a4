"""A Compose project of its own for tests: containers, their states and logs, and clients that load it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import usage_pb2
from tests.e2e.client import Stream, connect, sampling
from tests.support.processes import wait_until
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

ROOT: Final = Path(__file__).parents[3]
PROJECT: Final = "stepfence-test"
# How long one docker command may take; building is the longest of them.
_COMMAND_S: Final = 300.0
BUILD_S: Final = 1200.0
# Services that do their work and end.
_RUN_ONCE: Final = frozenset({"secret", "model"})
# How long a change of the whole stack may take: health is asked every 10 s.
PATIENCE_S: Final = 120.0


def docker(*arguments: str, patience_s: float = _COMMAND_S, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run docker with these arguments; a failure carries its output."""
    return _run(["docker", *arguments], dict(os.environ), patience_s, check)


def _run(
    command: list[str], environment: dict[str, str], patience_s: float, check: bool
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience_s, check=False
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


@dataclass(frozen=True)
class Container:
    """What `docker inspect` says about one."""

    facts: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.facts["Id"])

    @property
    def service(self) -> str:
        return str(self.facts["Config"]["Labels"]["com.docker.compose.service"])

    @property
    def started_at(self) -> str:
        return str(self.facts["State"]["StartedAt"])

    @property
    def is_running(self) -> bool:
        return bool(self.facts["State"]["Running"])

    @property
    def exit_code(self) -> int:
        return int(self.facts["State"]["ExitCode"])

    @property
    def health(self) -> str:
        """starting, healthy or unhealthy."""
        return str(self.facts["State"]["Health"]["Status"])

    @property
    def first_healthy_at(self) -> str:
        """End of the oldest probe on record that succeeded."""
        return str(next(probe["End"] for probe in self.facts["State"]["Health"]["Log"] if probe["ExitCode"] == 0))


@dataclass
class Stack:
    """One project. `settings` are STEPFENCE_* variables, as a person's environment or .env would give them."""

    port: int
    openai_port: int = 8000
    files: tuple[str, ...] = ("compose.yaml", "compose.scripted.yaml")
    settings: dict[str, str] = field(default_factory=dict)
    env_file: str = ".env.example"
    project: str = PROJECT

    @property
    def address(self) -> str:
        """Where clients call."""
        return f"127.0.0.1:{self.port}"

    def compose(
        self, *arguments: str, check: bool = True, patience_s: float = _COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run docker compose on this project."""
        files = [part for file in self.files for part in ("--file", file)]
        command = ["docker", "compose", "--project-name", self.project, "--env-file", self.env_file, *files]
        environment = {**os.environ, "STEPFENCE_TAG": "test", "STEPFENCE_PORT": str(self.port)}
        environment |= {"STEPFENCE_OPENAI_PORT": str(self.openai_port), **self.settings}
        return _run([*command, *arguments], environment, patience_s, check)

    async def run(self, *arguments: str) -> str:
        """The same, while clients go on; its standard output."""
        return (await asyncio.to_thread(self.compose, *arguments)).stdout

    def up(self, *arguments: str) -> None:
        """Start what is not there yet and wait until it is healthy."""
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "180", *arguments)

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")

    def remove_images(self) -> None:
        """Those that tests built; the layers stay in the engine's cache."""
        images = [f"stepfence/{name}:test" for name in ("scheduler", "worker-scripted", "worker-cpu")]
        docker("image", "rm", "--force", *images, check=False)

    def containers(self, service: str = "") -> list[Container]:
        """Those of one service, or of all that go on running (`secret` and `model` run once), running or not."""
        filters = ["--filter", f"label=com.docker.compose.project={self.project}"]
        if service:
            filters += ["--filter", f"label=com.docker.compose.service={service}"]
        ids = docker("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()
        found = [Container(facts) for facts in json.loads(docker("inspect", *ids).stdout)] if ids else []
        return [one for one in found if one.service == service or (not service and one.service not in _RUN_ONCE)]

    def container(self, service: str) -> Container:
        """The only one of a service."""
        (found,) = self.containers(service)
        return found

    def lives(self) -> dict[str, tuple[str, str]]:
        """Per service, which container it is and since when it runs, to tell whether it was touched. One each."""
        return {found.service: (found.id, found.started_at) for found in self.containers()}

    def execute(self, service: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside a service's container."""
        return self.compose("exec", "--no-TTY", service, *command, check=check)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service).stdout

    def status(self) -> Any:
        """What `stepfence status` says in the scheduler's container."""
        return json.loads(self.execute("scheduler", "stepfence", "status", "--json").stdout)

    def ranks_up(self) -> list[str]:
        """Addresses of the ranks that are up."""
        return [rank["rank"] for rank in self.status()["ranks"] if rank["state"] == "RANK_STATE_UP"]

    def wait_idle(self) -> None:
        """Until nothing is left of any request, and the blocks add up."""
        wait_until(self._is_idle, "nothing is left of any request", PATIENCE_S)

    def _is_idle(self) -> bool:
        audit = self.execute("scheduler", "stepfence", "audit", "--json", check=False)
        if audit.returncode:
            return False
        told = json.loads(audit.stdout)
        return told["num_live_requests"] == 0 and all(rank["free"] == rank["usable"] for rank in told["ranks"])

    def metrics(self) -> dict[str, float]:
        """Every sample of the scheduler's metrics, read as docs/operations.md says."""
        fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9400/metrics').read().decode())"
        lines = self.execute("scheduler", "python", "-c", fetch).stdout.splitlines()
        return {
            name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#") if name
        }


def expected(prompt: str, num_tokens: int) -> list[int]:
    """What an undisturbed scripted worker generates at temperature 0."""
    return complete(list(prompt.encode()), num_tokens, Sampling())


@dataclass
class Load:
    """Streams that run at the same time. `streams[i]` fills while stream i runs; its error, if any, is in `errors`."""

    num_tokens: int
    streams: list[Stream]
    prompts: list[str]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    errors: dict[int, grpc.aio.AioRpcError] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return sum(not task.done() for task in self.tasks)

    @property
    def num_received(self) -> int:
        """Tokens of all streams."""
        return sum(len(stream.token_ids) for stream in self.streams)

    async def all_have(self, num_tokens: int) -> None:
        """Until every stream has so many tokens; fails when one ended before."""
        async with asyncio.timeout(PATIENCE_S):
            while any(len(stream.token_ids) < num_tokens for stream in self.streams):
                assert not self.errors, self.errors
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        """Until every stream has ended, well or not."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self.tasks)

    def check(self, indexes: range | None = None) -> None:
        """Every stream ended well and has exactly its own tokens."""
        assert not self.errors, self.errors
        for index in indexes or range(len(self.streams)):
            stream, prompt = self.streams[index], self.prompts[index]
            assert stream.finished is not None and stream.finished.reason == usage_pb2.FINISH_REASON_LENGTH
            assert stream.token_ids == expected(prompt, self.num_tokens), prompt


@contextlib.asynccontextmanager
async def load(address: str, num_streams: int, num_tokens: int, name: str) -> AsyncIterator[Load]:
    """Start streams with prompts of their own; what still runs at the end is cancelled."""
    prompts = [
        f"{name}, stream {index}, " + "with something in front of it " * (index % 4) for index in range(num_streams)
    ]
    running = Load(num_tokens, [Stream() for _ in prompts], prompts)
    async with connect(address) as stub:
        for index in range(num_streams):
            running.tasks.append(asyncio.create_task(_follow(running, index, stub)))
        try:
            yield running
        finally:
            for task in running.tasks:
                task.cancel()
            await asyncio.gather(*running.tasks, return_exceptions=True)


async def _follow(running: Load, index: int, stub: Any) -> None:
    request = pb.GenerateRequest(text=running.prompts[index], sampling=sampling(max_tokens=running.num_tokens))
    try:
        async for response in stub.Generate(request, timeout=2 * PATIENCE_S):
            running.streams[index].take(response)
    except grpc.aio.AioRpcError as error:
        running.errors[index] = error
