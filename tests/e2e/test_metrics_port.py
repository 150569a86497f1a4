"""The metrics port of a real scheduler under connections that say nothing."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from scheduler_svc.cli.ports import free_address
from stepfence.v1 import generation_service_pb2, generation_service_pb2_grpc
from tests.support.processes import Deployment

pytestmark = pytest.mark.e2e

_NUM_CONNECTIONS = 600


@contextlib.contextmanager
def _open_files(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_f120_idle_connections_end_nothing_and_scrapes_are_answered(tmp_path: Path) -> None:
    metrics = free_address("127.0.0.1:0", set())
    host, _, port = metrics.rpartition(":")
    with _open_files(1024), Deployment(tmp_path) as stepfence, contextlib.ExitStack() as idle:
        stepfence.start_worker(runner="scripted", num_blocks="65")
        scheduler = stepfence.start_scheduler(metrics_listen=metrics)
        stepfence.start_frontend()
        stepfence.wait_ready()
        num_threads = _num_threads(scheduler.pid)
        with grpc.insecure_channel(stepfence.frontend_address) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            request = generation_service_pb2.GenerateRequest(text="hello")
            request.sampling.max_tokens = 400
            events = stub.Generate(request, timeout=90)
            ended = threading.Event()
            kinds: list[str | None] = []

            def read() -> None:
                kinds.extend(event.WhichOneof("event") for event in events)
                ended.set()

            threading.Thread(target=read, daemon=True).start()
            for _ in range(_NUM_CONNECTIONS):
                idle.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(3):
                with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as answer:
                    assert b"vllm:num_requests_running" in answer.read()
            assert ended.wait(90)
            assert (kinds[0], kinds[-1]) == ("accepted", "finished")
        # Not one for each connection. gRPC keeps a few of its own, as it likes.
        assert _num_threads(scheduler.pid) <= num_threads + 4
        assert scheduler.stop() == 0
        assert '"level": "error"' not in scheduler.output()
