"""Errors a client is told about.

RequestError          the call ends with a status other than OK; carries a Failure
  (no subclasses: the difference is in Failure.code and Failure.reason)
SessionLost           the stream to the scheduler is gone, or could not be opened
SessionProtocolError  the scheduler sent what the contract does not allow; the stream is dropped
TokenizerError        the model's tokenizer files cannot be used
ChatError             a conversation that the model's chat template refuses
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from scheduler_svc.frontend.usage import Usage

# Longest piece of a client's own input that is repeated in a message.
_MAX_QUOTED = 80


class Code(IntEnum):
    """Numbers of google.rpc.Code that the front end uses itself."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that is wrong. field: path within GenerateRequest, e.g. "sampling.top_p"."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Status and details of a call that does not end OK."""

    # A google.rpc.Code.
    code: int
    # ErrorInfo reason, UPPER_SNAKE.
    reason: str
    # For a person; says what to do.
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    violations: tuple[Violation, ...] = ()


class RequestError(Exception):
    """Ends a call. usage: what it cost so far, when it had been accepted."""

    def __init__(self, failure: Failure, usage: Usage | None = None) -> None:
        super().__init__(f"{failure.reason}: {failure.message}")
        self.failure = failure
        self.usage = usage


class SessionLost(Exception):
    """The stream to the scheduler is gone. The text says how."""


class SessionProtocolError(Exception):
    """The scheduler broke the contract of Attach."""


class TokenizerError(Exception):
    """The tokenizer files cannot be used. The text says why."""


class ChatError(Exception):
    """The conversation cannot be rendered. The text may be shown to the client."""


def quoted(text: str) -> str:
    """A client's own text, short enough for a message."""
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "...")


def invalid(violations: tuple[Violation, ...], reason: str = "INVALID_PARAMETER", **metadata: object) -> RequestError:
    """INVALID_ARGUMENT that names the fields."""
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    facts = {name: str(value) for name, value in metadata.items()}
    return RequestError(Failure(Code.INVALID_ARGUMENT, reason, message, facts, None, violations))


SCHEDULER_LOST = Failure(
    Code.UNAVAILABLE,
    "SCHEDULER_UNAVAILABLE",
    "the front end has no connection to the scheduler, and none came back in time; try again",
)
MODEL_CHANGED = Failure(
    Code.UNAVAILABLE,
    "MODEL_CHANGED",
    "another model is served now than the one that this request began with; send it again",
)
DRAINING = Failure(Code.UNAVAILABLE, "DRAINING", "this front end is shutting down; try again elsewhere")
SCHEDULER_DRAINING = Failure(Code.UNAVAILABLE, "DRAINING", "the scheduler is shutting down; try again later")
NO_WORKER = Failure(Code.UNAVAILABLE, "NO_WORKER", "no worker has joined yet, so no model is served; try again later")
SLOW_READER = Failure(
    Code.RESOURCE_EXHAUSTED, "SLOW_READER", "the client reads too slowly: too much output was waiting for it"
)
CLIENT_GONE = Failure(Code.CANCELLED, "CLIENT_GONE", "the client left")
DEADLINE = Failure(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the call's deadline passed before it was queued")
ABORT_NOT_ALLOWED = Failure(
    Code.PERMISSION_DENIED,
    "ABORT_NOT_ALLOWED",
    "without a token of their tenant or the cluster secret, only ids that the server drew can be aborted; cancel the "
    "call of the request instead, or leave request_id empty and use the id in `accepted`",
)
INTERNAL = Failure(Code.INTERNAL, "INTERNAL_ERROR", "internal error; the server's log has the cause")
