"""More connections than a process may have descriptors."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import grpc
import pytest

from scheduler_svc.cli.health import check
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import generation_service_pb2_grpc, sampling_pb2
from tests.support.processes import Deployment, wait_until

_LIMIT = 400
# A call that is not answered at all would end with this, and with another status.
_DEADLINE_S = 20.0


def _flood(address: str, stack: contextlib.ExitStack) -> None:
    """Open more connections than there are descriptors, and say nothing on them."""
    host, _, port = address.rpartition(":")
    for _ in range(_LIMIT + 50):
        stack.enter_context(socket.create_connection((host, int(port)), timeout=30))


@pytest.mark.parametrize("flooded", ["worker-0", "scheduler", "frontend"])
def test_f130_connections_beyond_the_descriptors_are_refused_and_the_others_served(
    tmp_path: Path, flooded: str
) -> None:
    request = pb.CompleteRequest(
        request=pb.GenerateRequest(text="hello", sampling=sampling_pb2.SamplingParams(max_tokens=5))
    )
    with Deployment(tmp_path, max_open_files=_LIMIT) as stepfence, contextlib.ExitStack() as stack:
        stepfence.start_worker()
        stepfence.start_scheduler()
        frontend = stepfence.start_frontend()
        stepfence.wait_ready()
        wait_until(
            lambda: check(frontend.address, "stepfence.v1.GenerationService", 5.0).serving, "the front end is ready"
        )
        channel = stack.enter_context(grpc.insecure_channel(frontend.address))
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        stub.Complete(request, timeout=_DEADLINE_S)
        (process,) = (process for process in stepfence.processes if process.name == flooded)
        with contextlib.ExitStack() as flood:
            _flood(process.address, flood)
            # A new connection is refused at once; a probe that waits would say nothing of the process.
            answer = check(process.address, "", _DEADLINE_S)
            assert not answer.serving and "UNAVAILABLE" in answer.text, answer
            # What is connected goes on, and so do the connections between the parts.
            assert stub.Complete(request, timeout=_DEADLINE_S).usage.num_completion_tokens == 5
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < _LIMIT
        wait_until(lambda: check(process.address, "", 5.0).serving, "connections are taken again")
        assert all(other.is_running for other in stepfence.processes)
