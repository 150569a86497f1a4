"""A failed call as something a person can act on: status, reason, message, what to do, and what was used so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_svc.rpc.channels import MAX_MESSAGE_BYTES
from stepfence.v1 import usage_pb2

# Reasons of the ErrorInfo detail; protos/README.md lists them all.
_ADVICE: Final[dict[str, str]] = {
    "EMPTY_PROMPT": "give a prompt that has at least one token",
    "PROMPT_TOO_LONG": "shorten the prompt: it must leave room for one token below the model's length",
    "PROMPT_TOO_LARGE": "shorten the prompt, or raise the front end's --max-prompt-bytes",
    "EXCEEDS_KV_CAPACITY": "lower --max-tokens or shorten the prompt, or give the worker more --kv-memory",
    "PRIORITY_NOT_SUPPORTED": "leave --priority out, or start the scheduler with --policy priority",
    "MODEL_NOT_FOUND": "leave --model out to use the served one",
    "DUPLICATE_REQUEST_ID": "leave --request-id out, or wait for the other request to end",
    "QUEUE_FULL": "try again later",
    "TOO_MANY_CALLS": "try again when one of the calls from here has ended",
    "TENANT_LIMIT": "try again later, or ask for fewer tokens (--max-tokens)",
    "UNAUTHENTICATED": "name the file that holds your token: --token-file FILE, or STEPFENCE_TOKEN_FILE in the "
    "environment",
    "NO_WORKER": "start a worker, or wait until it has loaded its model; `stepfence status` shows it",
    "DRAINING": "the server is about to stop: try again, or use another one",
    "SCHEDULER_UNAVAILABLE": "the front end has lost its scheduler and keeps trying: try again",
    "NO_TOKENIZER": "this model takes token ids only",
    "CLUSTER_SECRET_MISSING": "name the file that the scheduler reads, too: --cluster-secret-file FILE, or "
    "STEPFENCE_CLUSTER_SECRET_FILE in the environment",
    "CLUSTER_SECRET_WRONG": "name the file that the scheduler reads: --cluster-secret-file FILE, or "
    "STEPFENCE_CLUSTER_SECRET_FILE in the environment",
    "MODEL_OUTPUT_INVALID": "the model gave logits that are not finite: its weights may be damaged or badly rounded",
    "WORKER_FAULT": "workers failed while they ran this request; their logs say why",
}
FRONT_END: Final = "front end"
SCHEDULER: Final = "scheduler"
_WHERE: Final = "(a front end answers on 50051 by default; the scheduler on 50052)"
# The request itself is at fault: sending it again cannot help.
_CALLER_AT_FAULT: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class CallFailure:
    """One failed call. reason is "" when the status came from gRPC itself."""

    status: str
    reason: str
    message: str
    advice: str
    retry_after_s: float | None
    usage: usage_pb2.Usage | None
    # 1, or 2 when the request itself is at fault.
    exit_code: int

    def lines(self) -> list[str]:
        """What to tell a person, without the usage."""
        name = f"{self.status} / {self.reason}" if self.reason else self.status
        told = [f"error: {name}: {self.message}"]
        if self.advice:
            told.append(f"  {self.advice}")
        if self.retry_after_s is not None:
            told.append(f"  the server asks to wait {self.retry_after_s:g} s")
        return told


def explain(error: Any, target: str, server: str = FRONT_END) -> CallFailure:
    """Read status and details of a failed call to `target`.

    error: the grpc.RpcError, which is also the call. server: FRONT_END or SCHEDULER, which of them was meant.
    """
    code: grpc.StatusCode = error.code()
    reason, usage, retry_after, violations = "", None, None, []
    rich = rpc_status.from_call(error)
    for detail in rich.details if rich is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(usage_pb2.Usage.DESCRIPTOR):
            usage = usage_pb2.Usage()
            detail.Unpack(usage)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = [f"{violation.field}: {violation.description}" for violation in bad.field_violations]
    message = error.details() or "no message"
    advice = _ADVICE.get(reason, "")
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        advice = (
            f"is anything listening at {target}? Start it with `stepfence up`, or name another address with --target "
            "(with Compose, the scheduler answers in its container only: docker compose exec scheduler stepfence ...)"
        )
        if "closed" in message or "SSL" in message or "handshak" in message:
            advice += ". A server with TLS closes connections without it, or with the wrong certificate: --tls-dir"
    if code is grpc.StatusCode.UNIMPLEMENTED and not reason:
        advice = f"that address is not a {server} {_WHERE}"
    return CallFailure(
        status=code.name,
        reason=reason,
        message="; ".join([message, *(text for text in violations if text not in message)]),
        advice=advice,
        retry_after_s=retry_after,
        usage=usage,
        exit_code=2 if code in _CALLER_AT_FAULT else 1,
    )


def too_large(num_bytes: int) -> CallFailure:
    """A request that no server here would even read: refused in the same way as one that is longer than
    --max-prompt-bytes."""
    return CallFailure(
        status=grpc.StatusCode.INVALID_ARGUMENT.name,
        reason="PROMPT_TOO_LARGE",
        message=f"the request has {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be sent",
        advice="shorten the prompt",
        retry_after_s=None,
        usage=None,
        exit_code=2,
    )
