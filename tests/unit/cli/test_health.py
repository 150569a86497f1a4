"""`stepfence health`, `status` and `audit` against servers of the test's own making, over real gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from scheduler_svc.cli import generate, status
from scheduler_svc.cli.health import check
from stepfence.v1 import admin_service_pb2 as pb
from stepfence.v1 import admin_service_pb2_grpc as pb_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Scheduler(pb_grpc.AdminServiceServicer):
    consistent = True

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        rank = pb.RankStatus(
            rank="127.0.0.1:50061", state=pb.RANK_STATE_LOST, cause="watchdog", num_blocks=65, num_free_blocks=64
        )
        front_end = pb.FrontEndStatus(front_end_id="fe[1]", num_live_streams=3)
        return pb.GetStatusResponse(
            policy=pb.SCHEDULING_POLICY_FCFS, not_ready_cause="no worker", ranks=[rank], front_ends=[front_end]
        )

    def AuditKv(self, request: pb.AuditKvRequest, context: Any) -> pb.AuditKvResponse:
        violations = [] if self.consistent else ["block 3 is in two places"]
        rank = pb.RankAudit(rank="a:1", usable=64, free=60, held=3, parked=1, consistent=self.consistent)
        rank.violations.extend(violations)
        return pb.AuditKvResponse(ranks=[rank], num_live_requests=2)


@pytest.fixture
def process() -> Iterator[tuple[str, health.HealthServicer, _Scheduler]]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    servicer, scheduler = health.HealthServicer(), _Scheduler()  # type: ignore[abstract]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    pb_grpc.add_AdminServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer, scheduler
    server.stop(None).wait()


def test_alive_and_ready_are_different_questions(process: tuple[str, health.HealthServicer, _Scheduler]) -> None:
    target, servicer, _ = process
    servicer.set("", _SERVING)
    servicer.set("stepfence.v1.SessionService", _NOT_SERVING)
    assert check(target, "", 30).serving
    answer = check(target, None, 30)
    assert not answer.serving and "stepfence.v1.SessionService: NOT_SERVING" in answer.text
    servicer.set("stepfence.v1.SessionService", _SERVING)
    assert check(target, None, 30).serving
    assert check(target, "stepfence.v1.SessionService", 30).serving


def test_a_service_that_is_not_there_is_not_ready(process: tuple[str, health.HealthServicer, _Scheduler]) -> None:
    target, _, _ = process
    assert not check(target, "stepfence.v1.WorkerService", 30).serving
    assert not check(target, None, 30).serving
    assert not check("127.0.0.1:1", "", 30).serving


def test_status_is_text_for_people_and_json_for_programs(
    process: tuple[str, health.HealthServicer, _Scheduler], capsys: pytest.CaptureFixture[str]
) -> None:
    target, _, _ = process
    assert status.show_status(status.SchedulerCall(target), as_json=False) == 0
    told = capsys.readouterr().out
    assert "not ready: no worker" in told and "fe[1]: 3 streams" in told and "64 of 64" in told
    assert status.show_status(status.SchedulerCall(target), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["cause"] == "watchdog"


def test_an_inconsistent_audit_fails_and_names_what_is_broken(
    process: tuple[str, health.HealthServicer, _Scheduler], capsys: pytest.CaptureFixture[str]
) -> None:
    target, _, scheduler = process
    assert status.show_audit(status.SchedulerCall(target), as_json=False) == 0
    assert "64 usable = 60 free + 3 held + 1 parked: consistent" in capsys.readouterr().out
    scheduler.consistent = False
    assert status.show_audit(status.SchedulerCall(target), as_json=False) == 1
    assert "block 3 is in two places" in capsys.readouterr().out
    assert status.show_audit(status.SchedulerCall(target), as_json=True) == 1
    assert status.show_audit(status.SchedulerCall("127.0.0.1:1"), as_json=True) == 1
    assert "stepfence up" in capsys.readouterr().err


def test_the_wrong_kind_of_process_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1), options=(("grpc.so_reuseport", 0),))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        for show in (status.show_status, status.show_audit):
            assert show(status.SchedulerCall(target), as_json=False) == 1
            assert (
                "that address is not a scheduler (a front end answers on 50051 by default; the scheduler on 50052)"
                in capsys.readouterr().err
            )
        assert generate.run(generate.GenerateOptions(prompt="hello", target=target)) == 1
        assert "that address is not a front end (a front end answers on 50051" in capsys.readouterr().err
    finally:
        server.stop(None).wait()
