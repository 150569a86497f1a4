"""`stepfence health`: one health check as an exit code, for probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from scheduler_svc.rpc.channels import blocking_channel
from scheduler_svc.rpc.tls import Tls

# Each kind of process serves one of these, and is ready when it says so.
READY_SERVICES: Final = (
    "stepfence.v1.GenerationService",
    "stepfence.v1.SessionService",
    "stepfence.v1.WorkerService",
)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """serving False: not serving, unknown service or not reachable; text says which."""

    serving: bool
    text: str


def check(target: str, service: str | None, timeout_s: float, tls: Tls | None = None) -> HealthAnswer:
    """Ask `target` about one service ("" = is the process alive); service None: whether whatever it serves is ready."""
    with blocking_channel(target, tls=tls) as channel:
        stub = HealthStub(channel)
        for name in READY_SERVICES if service is None else (service,):
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=timeout_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                return HealthAnswer(False, f"{target}: {error.code().name}: {error.details()}")
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            return HealthAnswer(serving, f"{target}: {name or 'process'}: {status}")
    return HealthAnswer(False, f"{target}: serves {service or 'no Stepfence service'}? It says no")
