"""What can happen to the scheduler, and what it answers. Events go into `Scheduler.handle`, effects come out of it.

The core keeps no client: a request is known outside by `handle`, an integer the shell chose, unique among live
requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.core.stats import Usage


class AbortCause(Enum):
    """Why a request is ended from outside."""

    CLIENT_GONE = "client_gone"
    # The stream of its front end is lost, which submits it again on the next one.
    FRONT_END_LOST = "front_end_lost"
    ABORTED = "aborted"
    SLOW_READER = "slow_reader"
    DEADLINE = "deadline"
    DRAINED = "drained"


class PauseState(Enum):
    UNPAUSED = "UNPAUSED"
    # Running requests go on, nobody is admitted.
    PAUSED_NEW = "PAUSED_NEW"
    # Nothing runs.
    PAUSED_ALL = "PAUSED_ALL"


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: `now` in seconds of a monotonic clock, never smaller than before. The shell sends one before each
    batch of other events; deadlines and graces are judged by it."""

    now: float


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A new request. Answered by exactly one RequestAccepted or RequestRefused."""

    request_id: str
    handle: int
    # Prompt token ids.
    prompt: array[int]
    # 0: as many as fit.
    max_tokens: int = 0
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    # Opaque to the core: handed to the worker with the request (encoded sampling parameters).
    sampling: bytes = b""
    # Time of Tick's clock by which it must have ended; None: none.
    deadline: float | None = None
    # Tie-break under priority; None: the order of arrival. Given for all requests, or for none.
    arrival: float | None = None
    # Of a request that was accepted before, on a stream that is lost: the output token ids that its front end has
    # received. None: a new request. With it `arrival` is a time of Tick's clock and gives the place in the queue.
    output_tokens: array[int] | None = None
    # Do not read the prefix cache for this request (its blocks are still cached).
    skip_prefix_cache: bool = False
    # Not admitted before GrammarReady comes for it.
    awaits_grammar: bool = False
    # Names of what a rank must have to run it.
    features: tuple[str, ...] = ()
    # For whom it runs; "": callers that show no token.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """End a live request; ignored when it is not live. Answered by RequestEnded."""

    request_id: str
    cause: AbortCause


@dataclass(frozen=True, slots=True)
class TextEnded:
    """A stop string completed within output token `num_tokens` - 1: ends the request, reason STOP, with that many
    tokens."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A rank opened epoch `epoch` with an empty pool of `num_blocks` blocks, null block included."""

    rank: str
    epoch: int
    num_blocks: int
    # The model's longest sequence; the effective limit is the smaller of it and the configured one.
    max_model_len: int
    vocab_size: int
    # Bytes that the message of one step may take; None: any number. The longest request must fit beside the columns of
    # a full step (step_bytes).
    max_step_bytes: int | None = None
    # Names of what its worker has beyond what every worker has.
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLost:
    """The rank's epoch is over: worker gone, step failed, watchdog, wrong answer. All that ran there is preempted, its
    fences and its prefix index are dropped. `graceful` epochs (drain, orderly leave) are not counted against
    requests (D31)."""

    rank: str
    reason: str
    graceful: bool = False


@dataclass(frozen=True, slots=True)
class RankDraining:
    """Admit nothing more on this rank."""

    rank: str


@dataclass(frozen=True, slots=True)
class RowFailed:
    """A row that yields nothing although its step was executed. The KV it has written is not to be trusted."""

    row: int
    # For people.
    message: str


@dataclass(frozen=True, slots=True)
class StepAcked:
    """A rank's answer to the oldest of its steps in flight.

    sampled: token ids of the rows that sample, in row order. counts: how many each row of the step has (0 for a partial
    prefill), or None when each sampling row has exactly one. row_errors: rows that failed alone; they have 0 in counts,
    which must be given then. Raises WorkerProtocolError from handle(), with nothing changed, when the answer does not
    fit the step.
    """

    rank: str
    epoch: int
    step_seq: int
    sampled: list[int]
    counts: list[int] | None = None
    row_errors: tuple[RowFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftsProposed:
    """Drafts for the next step, proposed from outside after a result (reference: synchronous speculative decoding)."""

    rank: str
    drafts: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a request that awaits it is compiled; ignored for others."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PauseRequested:
    state: PauseState


@dataclass(frozen=True, slots=True)
class PrefixCacheResetRequested:
    """Forget every cached prefix of every rank. Answered by PrefixCacheReset."""

    preempt_running: bool = False


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Refuse new requests from now on; accepted ones go on."""


RequestEvent = RequestArrived | RequestAborted | TextEnded
RankEvent = RankJoined | RankLost | RankDraining | StepAcked
# What a resource takes in.
ResourceEvent = DraftsProposed | GrammarReady
OperatorEvent = PauseRequested | PrefixCacheResetRequested | DrainStarted
Event = Tick | RequestEvent | RankEvent | ResourceEvent | OperatorEvent


# --- effects --------------------------------------------------------------------------------------------------------


class RefusalReason(Enum):
    """Why a request was not accepted; names are the ErrorInfo reasons of the contract."""

    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    EXCEEDS_KV_CAPACITY = "EXCEEDS_KV_CAPACITY"
    INVALID_PARAMETER = "INVALID_PARAMETER"
    PRIORITY_NOT_SUPPORTED = "PRIORITY_NOT_SUPPORTED"
    FEATURE_NOT_SUPPORTED = "FEATURE_NOT_SUPPORTED"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_LIMIT = "TENANT_LIMIT"
    NO_WORKER = "NO_WORKER"
    DRAINING = "DRAINING"


class EndReason(Enum):
    """How an accepted request ended."""

    STOP = "stop"
    LENGTH = "length"
    # Ended from outside; RequestEnded.cause says why.
    ABORTED = "aborted"
    # Its rows were in flight in too many ended epochs (D31).
    WORKER_FAULT = "worker_fault"
    # No living rank can ever hold it, or none came back in time (D30).
    NO_WORKER = "no_worker"
    # Its row failed alone: the model's output was not usable (D51).
    MODEL_OUTPUT_INVALID = "model_output_invalid"


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    handle: int
    request_id: str
    num_prompt_tokens: int
    # After clipping.
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRefused:
    handle: int
    request_id: str
    reason: RefusalReason
    # For a person; says what to do.
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokensProduced:
    """New output tokens of one step, for all requests it concerns: parallel columns, tokens flat in the order of
    handles. counts is None when each has exactly one. Comes before the RequestEnded of any of them."""

    handles: list[int]
    counts: list[int] | None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class RequestEnded:
    handle: int
    request_id: str
    reason: EndReason
    usage: Usage
    # The id that stopped it (EOS or stop id), when reason is STOP and an id did.
    stop_token_id: int | None = None
    cause: AbortCause | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class UsageChanged:
    """What a live request has cost so far: sent when it is admitted, preempted, or has computed again what it lost, so
    that its front end knows it should this scheduler be lost."""

    handle: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A fact for the log: one per preemption."""

    rank: str
    victim: str
    # Who needed the blocks; "" when the rank was lost or the cache reset.
    beneficiary: str
    cause: str
    num_blocks_gained: int
    num_tokens_to_recompute: int
    num_preemptions_before: int


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    success: bool
    message: str


Effect = (
    RequestAccepted
    | RequestRefused
    | TokensProduced
    | UsageChanged
    | RequestEnded
    | RequestPreempted
    | PrefixCacheReset
)


class WorkerProtocolError(Exception):
    """A worker's answer does not fit what it was sent (contract rule 9): end its epoch."""
