"""What a worker refuses, and how a refusal travels.

ContractError                  one gRPC status, one reason (UPPER_SNAKE), one sentence for a person
├── MalformedStep              INVALID_ARGUMENT     the message itself cannot be right; the epoch is over
├── MalformedOpen              INVALID_ARGUMENT     likewise for open, or a frame out of place
├── BadRequest                 INVALID_ARGUMENT     likewise for a call with one request, or none came
├── StepRefused                FAILED_PRECONDITION  the step does not fit what the worker holds; the epoch is over
├── OpenRefused                FAILED_PRECONDITION  this session cannot be opened; what is held stays as it is
├── Superseded                 ABORTED              a newer stream was opened
├── NotLetIn                   UNAUTHENTICATED      the call does not carry the cluster secret
├── NotReady                   UNAVAILABLE          model loading, or draining
├── NoTokenizer                NOT_FOUND            the model brings none
└── InternalFault              INTERNAL             a fault of the worker's own; logged, not told; the epoch is over
"""

from __future__ import annotations

from typing import ClassVar, Final

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "stepfence"
_DETAILS_KEY: Final = "grpc-status-details-bin"
# A status travels in HTTP/2 headers, once percent-encoded and once in base64; peers refuse more than 8 KiB of them.
_MAX_MESSAGE_BYTES: Final = 400


class ContractError(Exception):
    """A refusal that the other side is told, as it stands."""

    code: ClassVar[grpc.StatusCode]

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason: Final = reason
        self.message: Final = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The google.rpc.Status with an ErrorInfo, as gRPC's rich error model carries it."""
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN))
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=[detail])
        return ((_DETAILS_KEY, status.SerializeToString()),)


class MalformedStep(ContractError):
    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str) -> None:
        super().__init__("MALFORMED_STEP", message)


class MalformedOpen(ContractError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class BadRequest(ContractError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class StepRefused(ContractError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class OpenRefused(ContractError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Superseded(ContractError):
    code = grpc.StatusCode.ABORTED

    def __init__(self, message: str) -> None:
        super().__init__("SUPERSEDED", message)


class NotLetIn(ContractError):
    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self, *, is_wrong: bool) -> None:
        if is_wrong:
            super().__init__(
                "CLUSTER_SECRET_WRONG",
                "the cluster secret of the call is not the one of this service: all parts must read the same file",
            )
        else:
            super().__init__(
                "CLUSTER_SECRET_MISSING",
                "this service takes calls with the cluster secret only: give the caller the same --cluster-secret-file",
            )


class NotReady(ContractError):
    code = grpc.StatusCode.UNAVAILABLE


class NoTokenizer(ContractError):
    code = grpc.StatusCode.NOT_FOUND

    def __init__(self) -> None:
        super().__init__("NO_TOKENIZER", "the model has no tokenizer; send token ids")


class InternalFault(ContractError):
    code = grpc.StatusCode.INTERNAL

    def __init__(self) -> None:
        super().__init__("INTERNAL_ERROR", "the worker failed; its log says why")
