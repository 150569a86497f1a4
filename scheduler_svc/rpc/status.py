"""Ends a call with a status and the details of the contract: google.rpc.ErrorInfo, and RetryInfo where it helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN: Final = "stepfence"


class Failed(Protocol):
    """What a status is made of. code: a number of google.rpc.Code; reason: UPPER_SNAKE."""

    @property
    def code(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def retry_after_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that is refused before any handler sees it."""

    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


NO_SECRET: Final = Refusal(
    code_pb2.UNAUTHENTICATED,
    "CLUSTER_SECRET_MISSING",
    "this service takes calls with the cluster secret only: give the caller the same --cluster-secret-file",
)
WRONG_SECRET: Final = Refusal(
    code_pb2.UNAUTHENTICATED,
    "CLUSTER_SECRET_WRONG",
    "the cluster secret of the call is not the one of this service: all parts must read the same file",
)


def to_status(failure: Failed) -> status_pb2.Status:
    """The failure as google.rpc.Status."""
    status = status_pb2.Status(code=int(failure.code), message=failure.message)
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=dict(failure.metadata))
    status.details.add().Pack(info)
    if failure.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(failure.retry_after_s * 1e9)))
        status.details.add().Pack(retry)
    return status


def reason_of(details: bytes) -> str:
    """The reason in the ErrorInfo of an encoded google.rpc.Status; "" when there is none."""
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info):
                return str(info.reason)
    except DecodeError:
        return ""
    return ""


async def abort(context: Any, failure: Failed) -> NoReturn:
    """End the call of this servicer context with the failure; does not return."""
    status = rpc_status.to_status(to_status(failure))
    await context.abort(status.code, status.details, trailing_metadata=status.trailing_metadata)
    raise AssertionError(f"abort returned for {code_pb2.Code.Name(int(failure.code))}")
