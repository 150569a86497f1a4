"""What can go wrong at the edges of the scheduler process, as exceptions and as values.

    ShellError
    ├── SessionProtocolError    a front end broke the rules of its stream: the stream ends INVALID_ARGUMENT
    ├── SessionRefused          a front end of another revision, or that needs what is not here: FAILED_PRECONDITION
    ├── LinkLost                the transport to a worker failed; says nothing about the worker
    │   └── LinkRefused         nobody listens at the worker's address
    ├── LinkRejected            the worker itself ended the stream with a reason (contract rule 3): the epoch is over
    └── RankUnfit               a worker cannot serve here (model, sizes, revision): not opened, asked again later

A `Failure` is what a client is told; it carries a gRPC code by number, so that nothing here needs gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from scheduler_svc.core.events import AbortCause, EndReason, RefusalReason, RequestEnded, RequestRefused


class ShellError(Exception):
    """Base of everything the shell raises on purpose."""


class SessionProtocolError(ShellError):
    """A frame that breaks the rules of SessionService.Attach; the text says which."""


class SessionRefused(ShellError):
    """A front end that this scheduler cannot serve: the stream ends FAILED_PRECONDITION with the reason."""

    def __init__(self, reason: str, message: str) -> None:
        """reason: UPPER_SNAKE, of the ErrorInfo."""
        super().__init__(message)
        self.reason = reason


class LinkLost(ShellError):
    """The transport failed or was cut. The worker may be alive and keep what it holds."""


class LinkRefused(LinkLost):
    """A connection was refused: nobody listens at the address."""


class LinkRejected(ShellError):
    """The worker answered with an error of its own instead of failing in transport."""

    def __init__(self, code: str, message: str, reason: str = "") -> None:
        """code: a gRPC code's name. reason: of the ErrorInfo that came along, if any."""
        super().__init__(f"{reason or code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason


class RankUnfit(ShellError):
    """A worker that may not join; the text is the cause shown in GetStatus."""


class Code(IntEnum):
    """The codes of google.rpc.Code this process uses."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was refused or ended early, as the client will read it. retry_after_s in seconds."""

    code: Code
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    retry_after_s: float | None = None


_REFUSAL_CODES: Final = {
    RefusalReason.EMPTY_PROMPT: Code.INVALID_ARGUMENT,
    RefusalReason.PROMPT_TOO_LONG: Code.INVALID_ARGUMENT,
    RefusalReason.EXCEEDS_KV_CAPACITY: Code.INVALID_ARGUMENT,
    RefusalReason.INVALID_PARAMETER: Code.INVALID_ARGUMENT,
    RefusalReason.PRIORITY_NOT_SUPPORTED: Code.INVALID_ARGUMENT,
    RefusalReason.FEATURE_NOT_SUPPORTED: Code.INVALID_ARGUMENT,
    RefusalReason.DUPLICATE_REQUEST_ID: Code.ALREADY_EXISTS,
    RefusalReason.QUEUE_FULL: Code.RESOURCE_EXHAUSTED,
    RefusalReason.TENANT_LIMIT: Code.RESOURCE_EXHAUSTED,
    RefusalReason.NO_WORKER: Code.UNAVAILABLE,
    RefusalReason.DRAINING: Code.UNAVAILABLE,
}

_ENDED_FROM_OUTSIDE: Final = {
    AbortCause.CLIENT_GONE: (Code.CANCELLED, "CLIENT_GONE", "the client left"),
    AbortCause.FRONT_END_LOST: (Code.CANCELLED, "FRONT_END_LOST", "the stream of its front end is lost"),
    AbortCause.ABORTED: (Code.CANCELLED, "ABORTED", "Abort was called"),
    AbortCause.SLOW_READER: (Code.RESOURCE_EXHAUSTED, "SLOW_READER", "the client reads too slowly"),
    AbortCause.DEADLINE: (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline of the call passed"),
    AbortCause.DRAINED: (Code.UNAVAILABLE, "DRAINING", "the scheduler shut down before the request was done"),
}

_FAILED: Final = {
    EndReason.WORKER_FAULT: (Code.INTERNAL, "the workers that ran this request failed again and again"),
    EndReason.MODEL_OUTPUT_INVALID: (Code.INTERNAL, "the model gave no usable output for this request"),
    EndReason.NO_WORKER: (Code.UNAVAILABLE, "no worker can hold this request now; try again later"),
}


def refusal(effect: RequestRefused) -> Failure:
    """The client's view of a refused request."""
    return Failure(
        _REFUSAL_CODES[effect.reason], effect.reason.value, effect.message, effect.metadata, effect.retry_after_s
    )


def failure(effect: RequestEnded) -> Failure | None:
    """The client's view of an ended request; None when it ended well (stop or length)."""
    if effect.reason in (EndReason.STOP, EndReason.LENGTH):
        return None
    if effect.reason is EndReason.ABORTED:
        code, reason, message = _ENDED_FROM_OUTSIDE[effect.cause or AbortCause.ABORTED]
        return Failure(code, reason, effect.message or message)
    code, message = _FAILED[effect.reason]
    return Failure(code, effect.reason.name, effect.message or message)


NO_WORKER: Final = Failure(Code.UNAVAILABLE, RefusalReason.NO_WORKER.value, "no worker has joined yet; try again later")
NO_TOKENIZER: Final = Failure(Code.NOT_FOUND, "NO_TOKENIZER", "the served model has no tokenizer; send token ids")


def tokenizer_too_large(max_bytes: int) -> Failure:
    """What a front end is answered that asks for it."""
    message = f"the model's tokenizer files have more than {max_bytes} bytes, and are not passed on; send token ids"
    return Failure(Code.FAILED_PRECONDITION, "TOKENIZER_TOO_LARGE", message)


SHUT_DOWN: Final = Failure(Code.UNAVAILABLE, RefusalReason.DRAINING.value, "the scheduler is shutting down")
SLOW_FRONT_END: Final = Failure(
    Code.RESOURCE_EXHAUSTED, "SLOW_READER", "this front end reads its stream too slowly; its requests were aborted"
)
SUPERSEDED: Final = Failure(Code.ABORTED, "SUPERSEDED", "this front end has opened a newer stream")
SILENT_FRONT_END: Final = Failure(
    Code.DEADLINE_EXCEEDED, "FRONT_END_SILENT", "no frame came for too long; send one at least once a second"
)
