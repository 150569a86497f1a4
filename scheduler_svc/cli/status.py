"""What the scheduler says about itself, and what operators may ask of it: `stepfence status`, `audit`, `drain` and
`reset-cache`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from scheduler_svc.cli.rpc_errors import SCHEDULER, explain
from scheduler_svc.logs import printable
from scheduler_svc.rpc.channels import blocking_channel
from scheduler_svc.rpc.cluster_secret import Metadata
from scheduler_svc.rpc.tls import Tls
from stepfence.v1 import admin_service_pb2 as pb
from stepfence.v1.admin_service_pb2_grpc import AdminServiceStub

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """How a command calls the scheduler. metadata: the cluster secret, when there is one. use_proxy: through the proxy
    that the environment names. tls None: in plain text."""

    target: str
    metadata: Metadata = ()
    use_proxy: bool = False
    tls: Tls | None = None


def show_status(scheduler: SchedulerCall, as_json: bool) -> int:
    """Print what runs where. Exit code 0, or 1 when the scheduler does not answer."""
    try:
        with blocking_channel(scheduler.target, use_proxy=scheduler.use_proxy, tls=scheduler.tls) as channel:
            status = AdminServiceStub(channel).GetStatus(
                pb.GetStatusRequest(), timeout=_TIMEOUT_S, metadata=scheduler.metadata
            )
    except grpc.RpcError as error:
        return _failed(error, scheduler.target)
    if as_json:
        _print_json(status)
    else:
        print("\n".join(status_lines(status)))
    return 0


def show_audit(scheduler: SchedulerCall, as_json: bool) -> int:
    """Print the count of every KV block. Exit code 0 consistent, 1 not (or no answer)."""
    try:
        with blocking_channel(scheduler.target, use_proxy=scheduler.use_proxy, tls=scheduler.tls) as channel:
            audit = AdminServiceStub(channel).AuditKv(
                pb.AuditKvRequest(), timeout=_TIMEOUT_S, metadata=scheduler.metadata
            )
    except grpc.RpcError as error:
        return _failed(error, scheduler.target)
    if as_json:
        _print_json(audit)
    else:
        _print_audit(audit)
    return 0 if all(rank.consistent for rank in audit.ranks) else 1


def drain(scheduler: SchedulerCall, deadline_s: float | None) -> int:
    """Ask the scheduler to finish what it has accepted and to end; None: its own deadline. Does not wait for that.
    Exit code 0, or 1 when it does not answer."""
    request = pb.DrainRequest()
    if deadline_s is not None:
        request.deadline.CopyFrom(_duration(deadline_s))
    try:
        with blocking_channel(scheduler.target, use_proxy=scheduler.use_proxy, tls=scheduler.tls) as channel:
            AdminServiceStub(channel).Drain(request, timeout=_TIMEOUT_S, metadata=scheduler.metadata)
    except grpc.RpcError as error:
        return _failed(error, scheduler.target)
    limit = "its --drain-deadline-s" if deadline_s is None else f"{deadline_s:g} s"
    print(f"draining: new requests are refused, accepted ones may take up to {limit}, then the scheduler ends")
    return 0


def reset_cache(scheduler: SchedulerCall, preempt_running: bool) -> int:
    """Ask the scheduler to forget all cached prefixes. Exit code 0, or 1 when nothing was reset or nobody answers."""
    request = pb.ResetPrefixCacheRequest(preempt_running=preempt_running)
    try:
        with blocking_channel(scheduler.target, use_proxy=scheduler.use_proxy, tls=scheduler.tls) as channel:
            answer = AdminServiceStub(channel).ResetPrefixCache(
                request, timeout=_TIMEOUT_S, metadata=scheduler.metadata
            )
    except grpc.RpcError as error:
        return _failed(error, scheduler.target)
    if not answer.success:
        advice = "" if preempt_running else "; wait until nothing runs, or use --preempt-running"
        print(f"error: nothing was reset: {answer.message}{advice}", file=sys.stderr)
        return 1
    print("reset: all cached prefixes are forgotten")
    return 0


def _duration(seconds: float) -> Duration:
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def _failed(error: grpc.RpcError, target: str) -> int:
    failure = explain(error, target, SCHEDULER)
    print("\n".join(failure.lines()), file=sys.stderr)
    return failure.exit_code


def _print_json(message: Message) -> None:
    told = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(told, ensure_ascii=False))


def status_lines(status: pb.GetStatusResponse) -> list[str]:
    """What runs where, for people."""
    state = "draining" if status.draining else "ready" if status.ready else f"not ready: {status.not_ready_cause}"
    lines = [
        f"scheduler {status.version}, policy {_word(pb.SchedulingPolicy.Name(status.policy))}, {state}",
        f"{status.num_running} running, {status.num_waiting} waiting, {status.num_skipped} put aside; "
        f"{status.num_preemptions} preemptions, {status.num_requeued_after_worker_loss} requeued after a worker's loss"
        f"{_recomputed(status)}",
    ]
    for name, rank in zip(_names(status.ranks), status.ranks, strict=True):
        cause = f" ({rank.cause})" if rank.cause else ""
        state = _word(pb.RankState.Name(rank.state))
        lines.append(
            f"worker {name}  {state}{cause}, epoch {rank.epoch}, {rank.num_running} running, "
            f"{rank.num_rows_held} rows, {rank.num_free_blocks} of {max(rank.num_blocks - 1, 0)} blocks free, "
            f"{rank.num_parked_blocks} parked, {rank.sent_step_seq} steps sent, {rank.acked_step_seq} acknowledged"
        )
    for front_end in status.front_ends:
        lines.append(
            f"front end {front_end.front_end_id}: {front_end.num_live_streams} streams, "
            f"{front_end.num_live_requests} requests"
        )
    # Names and causes come from peers, which may put anything into them.
    return [printable(line) for line in lines]


def _recomputed(status: pb.GetStatusResponse) -> str:
    """The share of tokens that were computed again; nothing while there are none."""
    again, computed = status.num_recomputed_tokens, status.num_computed_tokens
    if not again or not computed:
        return ""
    share = 100 * again / computed
    return f"; {again} of {computed} tokens computed again ({share:.{0 if share >= 1 else 2}f} %)"


def _word(name: str) -> str:
    """RANK_STATE_UP as up, SCHEDULING_POLICY_FCFS as fcfs."""
    return name.rpartition("_")[2].lower()


def _names(ranks: Sequence[pb.RankStatus]) -> list[str]:
    """Addresses and, beside them, host names, where there are any; all equally long."""
    columns = [[rank.rank for rank in ranks]]
    if any(rank.host for rank in ranks):
        columns.append([_host(rank) for rank in ranks])
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  ".join(cells) for cells in zip(*padded, strict=True)]


def _host(rank: pb.RankStatus) -> str:
    """The worker's host; while none is there, the one that was there last."""
    if rank.host and rank.state not in (pb.RANK_STATE_UP, pb.RANK_STATE_DRAINING):
        return f"(was {rank.host})"
    return rank.host or "-"


def _print_audit(audit: pb.AuditKvResponse) -> None:
    for rank in audit.ranks:
        print(
            f"{rank.rank}: {rank.usable} usable = {rank.free} free + {rank.held} held + {rank.parked} parked: "
            + ("consistent" if rank.consistent else "NOT consistent")
        )
        for violation in rank.violations:
            print(f"  {printable(violation)}")
    print(f"{audit.num_live_requests} live requests")
