"""The worker as a process: what it says, when it is ready, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.scheduler_double import PATIENCE_S, Book, SchedulerDouble, new_request
from tests.support.worker_fixtures import generate, target_at
from worker_svc import openmp
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

pytestmark = [pytest.mark.own_worker, pytest.mark.e2e]

_ROOT = Path(__file__).parents[3]
_SERVICE = "stepfence.v1.WorkerService"
# Python that makes torch, transformers and the like impossible to import.
_NO_TORCH = (
    "import sys\n"
    "class Blocked:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in ('torch', 'safetensors', 'gguf', 'transformers'):\n"
    "            raise ModuleNotFoundError(name, name=name)\n"
    "sys.meta_path.insert(0, Blocked())"
)


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line_with(self, text: str) -> dict[str, object]:
        """Read the log up to the line that has this text."""
        assert self.process.stderr is not None
        while raw := await asyncio.wait_for(self.process.stderr.readline(), PATIENCE_S):
            self.lines.append(raw.decode())
            if text in self.lines[-1]:
                line: dict[str, object] = json.loads(self.lines[-1])
                return line
        raise AssertionError(f"no line with {text!r} in {''.join(self.lines)}")

    async def address(self) -> str:
        return str((await self.line_with("listening"))["address"])

    async def end(self) -> int:
        """Wait for the end; the exit code."""
        assert self.process.stderr is not None
        self.lines.append((await asyncio.wait_for(self.process.stderr.read(), PATIENCE_S)).decode())
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@asynccontextmanager
async def _started(*arguments: str, before: str = "", **environment: str) -> AsyncIterator[_Process]:
    """`python -m worker_svc` with these arguments; `before` is Python that runs first."""
    command = ["-m", "worker_svc", *arguments]
    if before:
        code = f"{before}\nimport runpy, sys\nsys.argv[1:] = {list(arguments)!r}\n"
        command = ["-c", code + "runpy.run_module('worker_svc', run_name='__main__')"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPFENCE_")}
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "protos")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env={**kept, "PYTHONPATH": path, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    try:
        yield _Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _serve(*more: str) -> tuple[str, ...]:
    return ("serve", "--runner", "scripted", "--listen", "127.0.0.1:0", *more)


async def _health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(response.status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_worker_ends_on_one_signal_within_five_seconds(number: signal.Signals) -> None:
    async with _started(*_serve()) as worker:
        await worker.line_with("ready")
        asked_at = time.monotonic()
        worker.process.send_signal(number)
        assert await worker.end() == 0
        assert time.monotonic() - asked_at < 5


async def test_a_worker_needs_no_torch_and_serves_at_once() -> None:
    async with _started(*_serve(), before=_NO_TORCH) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            outputs = await generate(target, await target.open(scheduler), Book(), [72, 105], 5)
        assert outputs == complete([72, 105], 5, Sampling())
    async with _started("serve", "--listen", "127.0.0.1:0", before=_NO_TORCH) as worker:
        assert await worker.end() == 1
        assert "install stepfence[worker]" in worker.lines[-1]


async def test_health_tells_alive_from_ready_and_reflection_lists_the_service() -> None:
    slow = json.dumps({"load_delay_s": 2.0})
    async with _started(*_serve("--script", slow)) as worker:
        address = await worker.address()
        assert await _health(address, "") == health_pb2.HealthCheckResponse.SERVING
        assert await _health(address, _SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        await worker.line_with("ready")
        assert await _health(address, _SERVICE) == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(address) as channel:
            reflection: reflection_pb2_grpc.ServerReflectionStub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for response in reflection.ServerReflectionInfo(iter([request])):
                assert _SERVICE in [service.name for service in response.list_services_response.service]


async def test_a_signal_while_the_model_loads_ends_it() -> None:
    async with _started(*_serve("--script", '{"load_delay_s": 600}')) as worker:
        await worker.address()
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.end() == 0


async def test_a_model_that_cannot_be_loaded_exits_1_and_says_why() -> None:
    async with _started(*_serve("--script", '{"load_error": "the file is broken"}')) as worker:
        assert await worker.end() == 1
        assert "the file is broken" in worker.lines[-1] and "Traceback" not in worker.lines[-1]


async def test_a_model_that_does_not_fit_is_refused_with_the_limit_before_torch_is_loaded() -> None:
    small = "from worker_svc import memory\nmemory.memory_limit = lambda: memory.MemoryLimit(300_000_000, 'of a test')"
    async with _started("serve", "--listen", "127.0.0.1:0", before=f"{_NO_TORCH}\n{small}") as worker:
        assert await worker.end() == 1
        line = json.loads(worker.lines[-1])
        assert (line["level"], line["message"]) == ("error", "the model could not be loaded")
        assert "not enough memory: 1 GiB of KV cache" in line["cause"] and "286.1 MiB (of a test)" in line["cause"]
    async with _started(*_serve(), before=small) as worker:
        await worker.line_with("ready")


@pytest.mark.parametrize(
    "theirs, expected",
    [
        ({}, str(openmp.SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ({"KMP_BLOCKTIME": "0"}, None),
    ],
)
async def test_threads_stop_spinning_early_unless_the_environment_says_how_they_wait(
    theirs: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is when torch is first asked for: its OpenMP library reads the environment once."""
    for name in openmp.SET_BY_PEOPLE:
        monkeypatch.delenv(name, raising=False)
    tell = _NO_TORCH.replace(
        "raise Mod", "print(os.environ.get('GOMP_SPINCOUNT'), flush=True, file=sys.stderr); raise Mod"
    )
    async with _started("serve", "--listen", "127.0.0.1:0", before=f"import os\n{tell}", **theirs) as worker:
        assert await worker.end() == 1
        assert f"{expected}\n" in worker.lines[-1].splitlines(keepends=True)


async def test_a_draining_worker_is_not_ready_and_exits_3_when_work_is_cut_off() -> None:
    async with _started(*_serve("--drain-deadline-s", "1.5")) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            await session.run(book.step({0: 2}, new=[new_request("a", 0, [72, 105], [1, 2])]))
            worker.process.send_signal(signal.SIGTERM)
            frame = await session.read()
            assert frame is not None and frame.WhichOneof("frame") == "draining"
            assert await _health(address, _SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await _health(address, "") == health_pb2.HealthCheckResponse.SERVING
            assert await worker.end() == 3


async def test_a_drain_that_completes_exits_0() -> None:
    async with _started(*_serve()) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            await session.run(book.step({0: 2}, new=[new_request("a", 0, [72, 105], [1, 2])]))
            worker.process.send_signal(signal.SIGTERM)
            await session.read()
            await session.run(book.step({0: 1}, preempted=[]))
            await session.run(book.step(preempted=["a"]))
            assert await worker.end() == 0


@pytest.mark.parametrize("second, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_it_at_once_even_in_the_middle_of_a_step(second: signal.Signals, code: int) -> None:
    stall = json.dumps({"faults": [{"kind": "stall", "at_step": 1}]})
    async with _started(*_serve("--script", stall)) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            await session.send(book.step({0: 2}, new=[new_request("a", 0, [72, 105], [1, 2])]))
            worker.process.send_signal(signal.SIGTERM)
            await worker.line_with("draining")
            worker.process.send_signal(second)
            assert await worker.end() == code


async def test_a_deadline_that_passes_in_the_middle_of_a_step_exits_3() -> None:
    stall = json.dumps({"faults": [{"kind": "stall", "at_step": 2}]})
    async with _started(*_serve("--script", stall, "--drain-deadline-s", "0.5")) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            await session.run(book.step({0: 2}, new=[new_request("a", 0, [72, 105], [1, 2])]))
            await session.send(book.step({0: 1}))
            worker.process.send_signal(signal.SIGTERM)
            assert await worker.end() == 3


async def test_f63_a_device_failure_is_answered_and_exits_1() -> None:
    faults = json.dumps({"faults": [{"kind": "device", "at_step": 1}]})
    async with _started(*_serve(), STEPFENCE_SCRIPT=faults) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            result = await session.run(book.step({0: 2}, new=[new_request("a", 0, [72, 105], [1, 2])]))
            assert "the device fails" in result.error.message
            assert await worker.end() == 1


async def test_a_scripted_crash_exits_with_its_code() -> None:
    faults = json.dumps({"faults": [{"kind": "exit", "request_id": "poison", "exit_code": 9}]})
    async with _started(*_serve("--script", faults)) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            session, book = await target.open(scheduler), Book()
            await session.run(book.step({0: 2}, new=[new_request("good", 0, [72, 105], [1, 2])]))
            await session.send(book.step({1: 2}, new=[new_request("poison-7", 1, [72, 105], [3, 4])]))
            assert await worker.end() == 9


async def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with _started("serve", "--runner", "scripted", "--listen", f"127.0.0.1:{port}") as worker:
            assert await worker.end() == 1
            (line,) = map(json.loads, "".join(worker.lines).splitlines())
            assert line["message"] == f"cannot listen on 127.0.0.1:{port}: choose another address with --listen"
            assert line["cause"] == "Address already in use"


@pytest.mark.parametrize(
    "host, exposed", [("0.0.0.0", True), ("[::]", True), ("127.0.0.2", False), ("localhost", False)]
)
async def test_d5_a_port_beyond_loopback_is_pointed_out(host: str, exposed: bool) -> None:
    async with _started("serve", "--runner", "scripted", "--listen", f"{host}:0") as worker:
        await worker.line_with("ready")
        assert any("reachable from other machines" in line for line in worker.lines) is exposed


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "COMMAND"),
        (("serve", "--swap-space", "4"), "always recomputed"),
        (("serve", "--num-block", "4"), "--num-blocks"),
        (("serve", "--bogus"), "--bogus: unknown setting; see `stepfence worker --help`"),
        (("serve", "--max-num-seqs", "4"), "not of the worker"),
        (("serve", "--num-blocks", "many"), "--num-blocks: "),
        (("serve", "--from-file", "/a/b.toml", "--num-blocks", "many"), "[worker] num_blocks (in /a/b.toml): "),
        (("serve", "--listen", "50061"), "HOST:PORT"),
        (("serve", "--runner", "scripted", "--script", "{"), "JSON"),
        (("serve", "--script", "{}"), "runner"),
        (("bake",), "bake"),
    ],
)
async def test_wrong_usage_exits_2_and_says_what_is_meant(arguments: tuple[str, ...], said: str) -> None:
    async with _started(*arguments) as worker:
        assert await worker.end() == 2
        assert said in worker.lines[-1]


async def test_help_says_what_each_flag_takes() -> None:
    async with _started("serve", "--help") as worker:
        assert worker.process.stdout is not None
        told = " ".join((await worker.process.stdout.read()).decode().split())
        assert await worker.end() == 0
    for name, takes in (("num-blocks", "N"), ("kv-memory", "BYTES"), ("listen", "HOST:PORT"), ("script", "JSON")):
        assert f"--{name} {takes} " in told
    assert "cpu or cuda. [default: cpu]" in told and "usage: stepfence worker [OPTIONS]" in told


async def test_wrong_environment_exits_2_and_injected_variables_are_ignored() -> None:
    async with _started(*_serve(), STEPFENCE_NUM_BLOCK="4") as worker:
        assert await worker.end() == 2
        assert "STEPFENCE_NUM_BLOCKS" in worker.lines[-1]
    injected = {
        "STEPFENCE_WORKER_SERVICE_HOST": "10.0.0.1",
        "STEPFENCE_WORKER_PORT_50061_TCP_ADDR": "10.0.0.1",
        "STEPFENCE_MAX_NUM_SEQS": "8",
        "STEPFENCE_NUM_BLOCKS": "17",
    }
    async with _started(*_serve(), **injected) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        async with SchedulerDouble(address) as scheduler:
            assert (await target.open(scheduler)).opened.num_blocks == 17


async def test_f59_a_silent_stream_survives_impatient_pings() -> None:
    async with _started(*_serve()) as worker:
        address = await worker.address()
        await worker.line_with("ready")
        target = await target_at(address)
        pings = (
            ("grpc.keepalive_time_ms", 100),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )
        async with SchedulerDouble(address, pings) as scheduler:
            session, book = await target.open(scheduler), Book()
            await asyncio.sleep(2.5)
            assert (await session.run(book.step())).step_seq == 1
