"""AdminService: what operators ask and wish. Questions are answered from the state between two turns; wishes go through
the loop like everything else."""

from __future__ import annotations

from typing import Any, Final

from scheduler_svc.codec import seconds_of
from scheduler_svc.core.config import Policy
from scheduler_svc.service import SchedulerService
from scheduler_svc.workers.client import RankClient
from scheduler_svc.workers.session import RankState
from stepfence.v1 import admin_service_pb2 as pb
from stepfence.v1 import admin_service_pb2_grpc

_POLICIES: Final = {policy: pb.SchedulingPolicy.Value(f"SCHEDULING_POLICY_{policy.name}") for policy in Policy}
_RANK_STATES: Final = {
    RankState.CONNECTING: pb.RANK_STATE_CONNECTING,
    RankState.UP: pb.RANK_STATE_UP,
    RankState.DRAINING: pb.RANK_STATE_DRAINING,
    RankState.LOST: pb.RANK_STATE_LOST,
}


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """AdminService over gRPC."""

    def __init__(self, service: SchedulerService, version: str) -> None:
        self._service = service
        self._version = version

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """See admin_service.proto."""
        service = self._service
        core = service.core
        return pb.GetStatusResponse(
            scheduler_incarnation=service.incarnation,
            version=self._version,
            policy=_POLICIES[service.config.policy],
            ready=service.is_ready,
            not_ready_cause=service.not_ready_cause(),
            draining=service.is_draining,
            num_waiting=core.num_waiting,
            num_skipped=core.num_skipped,
            num_running=core.num_running,
            ranks=[self._rank_status(client) for client in service.pool.clients],
            front_ends=[
                pb.FrontEndStatus(
                    front_end_id=session.front_end_id,
                    num_live_streams=session.num_live_streams,
                    num_live_requests=session.num_live_requests,
                )
                for session in service.hub.sessions
            ],
            num_preemptions=core.totals.num_preemptions,
            num_requeued_after_worker_loss=core.totals.num_requeued_after_worker_loss,
            num_computed_tokens=core.totals.num_computed_tokens,
            num_recomputed_tokens=core.totals.num_recomputed_tokens,
        )

    def _rank_status(self, client: RankClient) -> pb.RankStatus:
        status = pb.RankStatus(
            rank=client.rank,
            state=_RANK_STATES[client.state],
            features=[int(feature) for feature in sorted(client.features)],  # type: ignore[misc]
            cause=client.cause,
            epoch=client.epoch,
            num_rows_held=client.num_rows_held,
            host=client.host,
        )
        view = self._service.core.rank_view(client.rank)
        if view is not None:
            status.num_running = view.num_running
            status.num_blocks = view.num_blocks
            status.num_free_blocks = view.num_free_blocks
            status.num_parked_blocks = view.num_parked_blocks
            status.sent_step_seq = view.sent_step_seq
            status.acked_step_seq = view.acked_step_seq
        return status

    async def AuditKv(self, request: pb.AuditKvRequest, context: Any) -> pb.AuditKvResponse:
        """See admin_service.proto."""
        return pb.AuditKvResponse(
            ranks=[
                pb.RankAudit(
                    rank=facts.rank,
                    usable=facts.usable,
                    free=facts.free,
                    held=facts.held,
                    parked=facts.parked,
                    consistent=not facts.violations,
                    violations=facts.violations,
                )
                for facts in self._service.core.audit()
            ],
            num_live_requests=self._service.core.num_live_requests,
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """See admin_service.proto."""
        deadline_s = None
        if request.HasField("deadline"):
            deadline_s = seconds_of(request.deadline)
        self._service.drain(deadline_s)
        return pb.DrainResponse()

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        """See admin_service.proto."""
        reset = await self._service.reset_prefix_cache(preempt_running=request.preempt_running)
        return pb.ResetPrefixCacheResponse(success=reset.success, message=reset.message)
