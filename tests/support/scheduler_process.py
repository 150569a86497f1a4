"""A whole scheduler in the test's own event loop, behind real sockets, with short waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.config import SchedulerSettings
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.rpc.cluster_secret import ClusterSecret, metadata_of
from scheduler_svc.server import SchedulerProcess
from scheduler_svc.service import SchedulerService
from stepfence.v1 import admin_service_pb2 as admin
from stepfence.v1 import admin_service_pb2_grpc

SESSION_SERVICE = "stepfence.v1.SessionService"


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def state_of(rank: admin.RankStatus) -> str:
    """up, lost, ..."""
    return admin.RankState.Name(rank.state).removeprefix("RANK_STATE_").lower()


class RunningScheduler:
    """What a test needs of it."""

    def __init__(
        self, process: SchedulerProcess, channel: grpc.aio.Channel, secret: ClusterSecret | None = None
    ) -> None:
        self._metadata = metadata_of(secret)
        self.process = process
        self.address = f"127.0.0.1:{process.port}"
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self.exit_code: asyncio.Task[int] | None = None

    @property
    def service(self) -> SchedulerService:
        assert self.process.service is not None
        return self.process.service

    @property
    def core(self) -> Scheduler:
        return self.service.core

    async def status(self) -> admin.GetStatusResponse:
        answer: admin.GetStatusResponse = await self.admin.GetStatus(admin.GetStatusRequest(), metadata=self._metadata)
        return answer

    async def rank(self, address: str) -> admin.RankStatus:
        """One rank's status."""
        return next(rank for rank in (await self.status()).ranks if rank.rank == address)

    async def health(self, service: str = SESSION_SERVICE) -> int:
        """A health status number: 1 serving, 2 not serving."""
        answer = await self._health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def ready(self, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while await self.health() != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)

    async def not_ready(self, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while await self.health() != health_pb2.HealthCheckResponse.NOT_SERVING:
                await asyncio.sleep(0.01)

    async def rank_is(self, address: str, state: str, timeout_s: float = 20.0) -> admin.RankStatus:
        """Wait for a rank's state."""
        async with asyncio.timeout(timeout_s):
            while True:
                for rank in (await self.status()).ranks:
                    if rank.rank == address and state_of(rank) == state:
                        return rank
                await asyncio.sleep(0.01)

    async def all_free(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing is live and every block of every rank is free, by the scheduler's own audit."""
        async with asyncio.timeout(timeout_s):
            while True:
                audit = await self.admin.AuditKv(admin.AuditKvRequest(), metadata=self._metadata)
                assert all(rank.consistent for rank in audit.ranks), audit
                if audit.num_live_requests == 0 and all(rank.free == rank.usable for rank in audit.ranks):
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_scheduler(
    *workers: str, secret: ClusterSecret | None = None, **settings: Any
) -> AsyncIterator[RunningScheduler]:
    """Start a scheduler for these workers, and end it."""
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "block_size": 4,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "step_watchdog_s": 2.0,
        "first_steps_watchdog_s": 2.0,
        "metrics_listen": None,
    }
    process = SchedulerProcess(SchedulerSettings(worker=workers, **{**values, **settings}), secret=secret)
    serving = asyncio.create_task(process.serve(owns_process=False))
    started = asyncio.create_task(process.started.wait())
    await asyncio.wait({serving, started}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert process.started.is_set(), serving
    async with grpc.aio.insecure_channel(f"127.0.0.1:{process.port}") as channel:
        scheduler = RunningScheduler(process, channel, secret)
        scheduler.exit_code = serving
        try:
            yield scheduler
        finally:
            if serving.done():
                serving.result()
            serving.cancel()
            await asyncio.gather(serving, started, return_exceptions=True)
