"""Proto <-> the scheduler's own types. The only module of this process, servicers and gRPC stream clients apart, that
touches generated code.

Columns are `array('i')` here and little-endian int32 bytes on the wire. A worker's message that cannot be read raises
WorkerProtocolError, a front end's SessionProtocolError.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from scheduler_svc.core.events import AbortCause, EndReason, RequestEnded, RowFailed, WorkerProtocolError
from scheduler_svc.core.output import DeferredFree, NewRow, SchedulerOutput
from scheduler_svc.core.stats import Usage
from scheduler_svc.core.step_bytes import MAX_ID_BYTES, MAX_STOP_TOKEN_IDS
from scheduler_svc.errors import Failure, SessionProtocolError, SessionRefused
from scheduler_svc.errors import failure as ended_failure
from stepfence.v1 import (
    model_pb2,
    sampling_pb2,
    session_service_pb2,
    step_pb2,
    usage_pb2,
    worker_service_pb2,
)

# Revision of the protos that is spoken here, and the first that was released. Peers whose revisions differ by one work
# together.
PROTOCOL_REVISION: Final = 2
_FIRST_PROTOCOL_REVISION: Final = 2
# Submits, cancels and ends of text in one frame of a front end, of each kind.
MAX_FRAME_ITEMS: Final = 1024
# As long as a name in DNS can be.
MAX_HOST_CHARS: Final = 253
# It travels on to the client in a header.
_MAX_ROW_MESSAGE_CHARS: Final = 400
_BIG_ENDIAN: Final = sys.byteorder == "big"


# --- columns --------------------------------------------------------------------------------------------------------


def pack(column: array[int]) -> bytes:
    """A column of int32 as it travels."""
    if _BIG_ENDIAN:
        column = array("i", column)
        column.byteswap()
    return column.tobytes()


def unpack(data: bytes) -> array[int]:
    """The opposite of `pack`. Raises ValueError when the bytes are no whole number of elements."""
    column = array("i")
    column.frombytes(data)
    if _BIG_ENDIAN:
        column.byteswap()
    return column


# --- worker: down ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What distinguishes one served model from another (D44), and its ModelInfo as it came (D41)."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer_digest: str
    info: bytes

    def identity(self) -> tuple[tuple[str, str | int], ...]:
        """The facts in which all ranks must agree, each with its name."""
        return (
            ("model", self.name),
            ("vocabulary", self.vocab_size),
            ("maximum length", self.max_model_len),
            ("tokenizer digest", self.tokenizer_digest),
        )


class WorkerFeature(IntEnum):
    """What workers may have beyond the messages of their revision; the numbers of the proto's enum."""

    DRAFTS = worker_service_pb2.WORKER_FEATURE_DRAFTS
    SAMPLED_DRAFTS = worker_service_pb2.WORKER_FEATURE_SAMPLED_DRAFTS


_KNOWN_FEATURES: Final = frozenset(map(int, WorkerFeature))


def works_with(revision: int) -> bool:
    """Whether a peer that speaks this revision of the protos can be worked with."""
    return max(_FIRST_PROTOCOL_REVISION, PROTOCOL_REVISION - 1) <= revision <= PROTOCOL_REVISION + 1


@dataclass(frozen=True, slots=True)
class WorkerCapabilities:
    """What a worker can do; sizes in rows, tokens and bytes."""

    protocol_revision: int
    worker_incarnation: int
    model: ModelFacts
    block_size_multiple: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_message_bytes: int
    max_num_drafts: int
    # Those that are known here.
    features: frozenset[WorkerFeature]
    description: str
    # Its host name; "" when it gave none, or one that is not printable or too long.
    host: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    worker_incarnation: int
    num_blocks: int
    executed_step_seq: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to one step. counts None: one id for each sampling row. error: the epoch is over."""

    epoch: int
    step_seq: int
    sampled: list[int]
    counts: list[int] | None
    num_rows_held: int
    staged_us: int
    executed_us: int
    error: str | None = None
    row_errors: tuple[RowFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    deadline_s: float


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What a worker has finished between results."""

    epoch: int
    progress_seq: int


WorkerFrame = Opened | StepResult | WorkerDraining | WorkerProgress


@dataclass(frozen=True, slots=True)
class TokenizerPiece:
    """A piece of one tokenizer file, passed on as it came."""

    file_name: str
    data: bytes


def decode_capabilities(data: bytes) -> WorkerCapabilities:
    """Read a GetCapabilitiesResponse."""
    message = worker_service_pb2.GetCapabilitiesResponse()
    _parse(message, data)
    model = message.model
    return WorkerCapabilities(
        protocol_revision=message.protocol_revision,
        worker_incarnation=message.worker_incarnation,
        model=ModelFacts(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            tokenizer_digest=model.tokenizer_digest,
            info=model.SerializeToString(deterministic=True),
        ),
        block_size_multiple=max(1, message.block_size_multiple),
        max_num_rows=message.max_num_rows,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_message_bytes=message.max_message_bytes,
        max_num_drafts=message.max_num_drafts,
        features=frozenset(map(WorkerFeature, _KNOWN_FEATURES & set(message.features))),
        description=" ".join(part for part in (message.runner, message.device, message.dtype) if part),
        host=_host(message.host),
    )


def _host(name: str) -> str:
    return name if len(name) <= MAX_HOST_CHARS and name.isprintable() else ""


def decode_worker_frame(data: bytes) -> WorkerFrame:
    """Read a RunStepsResponse."""
    message = worker_service_pb2.RunStepsResponse()
    _parse(message, data)
    kind = message.WhichOneof("frame")
    if kind == "result":
        return _step_result(message.result)
    if kind == "opened":
        opened = message.opened
        return Opened(opened.worker_incarnation, opened.num_blocks, opened.executed_step_seq)
    if kind == "draining":
        return WorkerDraining(message.draining.deadline.ToNanoseconds() * 1e-9)
    if kind == "progress":
        return WorkerProgress(message.progress.epoch, message.progress.progress_seq)
    raise WorkerProtocolError("a frame without content")


def _step_result(message: step_pb2.StepResult) -> StepResult:
    error = None
    if message.HasField("error"):
        kind = step_pb2.StepErrorKind.Name(message.error.kind) if message.error.kind in (0, 1, 2) else "unknown kind"
        error = f"{kind.removeprefix('STEP_ERROR_KIND_').lower()} error: {message.error.message}"
    try:
        sampled = unpack(message.sampled_token_ids).tolist()
        counts = unpack(message.sampled_counts).tolist() if message.sampled_counts else None
    except ValueError:
        raise WorkerProtocolError(f"step {message.step_seq}: a column is no whole number of int32") from None
    return StepResult(
        epoch=message.epoch,
        step_seq=message.step_seq,
        sampled=sampled,
        counts=counts,
        num_rows_held=message.num_rows_held,
        staged_us=message.staged_us,
        executed_us=message.executed_us,
        error=error,
        row_errors=tuple(RowFailed(each.row, _row_error(each)) for each in message.row_errors),
    )


def _row_error(error: step_pb2.RowError) -> str:
    known = step_pb2.RowErrorKind.DESCRIPTOR.values_by_number
    kind = known[error.kind].name.removeprefix("ROW_ERROR_KIND_").lower() if error.kind in known else "unknown kind"
    return f"{error.message} ({kind})"[:_MAX_ROW_MESSAGE_CHARS]


def decode_tokenizer_piece(data: bytes) -> TokenizerPiece:
    """Read a GetTokenizerResponse."""
    message = worker_service_pb2.GetTokenizerResponse()
    _parse(message, data)
    return TokenizerPiece(message.chunk.file_name, message.chunk.data)


def _parse(message: ProtoMessage, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WorkerProtocolError(f"not a {message.DESCRIPTOR.name}: {error}") from None


# --- worker: up -----------------------------------------------------------------------------------------------------


def encode_open(
    *,
    scheduler_incarnation: int,
    epoch: int,
    block_size: int,
    num_rows: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    max_inflight_steps: int,
    required_features: Iterable[WorkerFeature] = (),
) -> bytes:
    """The first frame of a stream. required_features: what the steps of the epoch may use."""
    opening = worker_service_pb2.Open(
        scheduler_incarnation=scheduler_incarnation,
        epoch=epoch,
        protocol_revision=PROTOCOL_REVISION,
        block_size=block_size,
        num_rows=num_rows,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_inflight_steps=max_inflight_steps,
        required_features=[int(feature) for feature in sorted(required_features)],  # type: ignore[misc]
    )
    return worker_service_pb2.RunStepsRequest(open=opening).SerializeToString()


def encode_step(output: SchedulerOutput, max_bytes: int, *, processed_progress_seq: int = 0) -> bytes:
    """The frame that carries one step. The core plans steps so that they fit into max_bytes (core/step_bytes.py);
    announcements of deferred frees for which there is no room are left out."""
    message = worker_service_pb2.RunStepsRequest()
    step = message.step
    step.epoch = output.epoch
    step.step_seq = output.step_seq
    step.processed_step_seq = output.processed_step_seq
    step.processed_progress_seq = processed_progress_seq
    for row in output.new_requests:
        _add_row(step, row)
    step.preempted_request_ids.extend(output.preempted_request_ids)
    step.finished_request_ids.extend(output.finished_request_ids)
    _fill_computation(step, output)
    _add_deferred_frees(step, output.deferred_frees, max_bytes)
    return message.SerializeToString()


def _add_row(step: step_pb2.SchedulerOutput, row: NewRow) -> None:
    new = step.new_requests.add(
        request_id=row.request_id,
        row=row.row,
        token_ids=pack(row.token_ids),
        block_table=pack(row.block_table),
        num_computed_tokens=row.num_computed_tokens,
        num_prompt_tokens=row.num_prompt_tokens,
    )
    new.sampling.ParseFromString(row.sampling)


def _fill_computation(step: step_pb2.SchedulerOutput, output: SchedulerOutput) -> None:
    step.fence_seq = output.fence_seq
    step.rows = pack(output.rows)
    step.num_tokens = pack(output.num_tokens)
    step.appended_rows = pack(output.appended_rows)
    step.appended_blocks = pack(output.appended_blocks)
    if output.num_drafts is not None:
        step.num_drafts = pack(output.num_drafts)
        step.draft_token_ids = pack(output.draft_token_ids)


_FREE_REASONS: Final = {
    "finished": step_pb2.FREE_REASON_FINISHED,
    "preempted": step_pb2.FREE_REASON_PREEMPTED,
    "aborted": step_pb2.FREE_REASON_ABORTED,
}


def _add_deferred_frees(step: step_pb2.SchedulerOutput, frees: Sequence[DeferredFree], max_bytes: int) -> None:
    if not frees:
        return
    room = max_bytes - step.ByteSize() - 64
    for free in frees:
        # They tell observers something and workers nothing: what has no room stays out.
        room -= 4 * len(free.block_ids) + 4 * len(free.request_id) + 64
        if room < 0:
            return
        step.deferred_frees.add(
            fence_seq=free.fence_seq,
            request_id=free.request_id,
            block_ids=pack(array("i", free.block_ids)),
            reason=_FREE_REASONS.get(free.reason, step_pb2.FREE_REASON_UNSPECIFIED),
        )


# --- front end: up --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    """A new request as the front end sent it; well-formed, not yet judged. timeout_s: seconds left, None: no
    deadline."""

    handle: int
    request_id: str
    prompt: array[int]
    sampling: SamplingFacts
    priority: int
    cache_salt: str
    timeout_s: float | None
    # It was begun on another stream; this scheduler does not go on with such requests (SESSION_FEATURE_RESUBMIT).
    has_outputs: bool = False


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """Resolved sampling parameters: what the scheduler itself looks at, and all of them encoded for the worker."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Cancellation:
    handle: int
    cause: AbortCause


@dataclass(frozen=True, slots=True)
class TextEnd:
    handle: int
    num_tokens: int


class SessionFeature(IntEnum):
    """What a scheduler may have beyond the messages of its revision; the numbers of the proto's enum."""

    PRIORITY = session_service_pb2.SESSION_FEATURE_PRIORITY


@dataclass(frozen=True, slots=True)
class Hello:
    """How a front end begins. required_features: numbers, known here or not."""

    front_end_id: str
    required_features: frozenset[int]


@dataclass(frozen=True, slots=True)
class SessionFrame:
    """One frame of a front end."""

    hello: Hello | None
    submissions: tuple[Submission, ...]
    cancellations: tuple[Cancellation, ...]
    text_ends: tuple[TextEnd, ...]
    num_live_streams: int


_CANCEL_CAUSES: Final = {
    session_service_pb2.CANCEL_REASON_CLIENT_GONE: AbortCause.CLIENT_GONE,
    session_service_pb2.CANCEL_REASON_ABORTED: AbortCause.ABORTED,
    session_service_pb2.CANCEL_REASON_SLOW_READER: AbortCause.SLOW_READER,
    session_service_pb2.CANCEL_REASON_DRAINED: AbortCause.DRAINED,
}


def decode_session_frame(message: session_service_pb2.AttachRequest) -> SessionFrame:
    """Read one frame of Attach. Raises SessionProtocolError for what no front end may send."""
    for name, items in (
        ("submits", message.submits),
        ("cancels", message.cancels),
        ("text_ended", message.text_ended),
    ):
        if len(items) > MAX_FRAME_ITEMS:
            raise SessionProtocolError(f"{len(items)} {name} in one frame, at most {MAX_FRAME_ITEMS}")
    hello = None
    if message.HasField("hello"):
        hello = _hello(message.hello)
    return SessionFrame(
        hello=hello,
        submissions=tuple(_submission(each) for each in message.submits),
        cancellations=tuple(_cancellation(each) for each in message.cancels),
        text_ends=tuple(_text_end(each) for each in message.text_ended),
        num_live_streams=message.num_live_streams,
    )


def _hello(message: session_service_pb2.Hello) -> Hello:
    if not works_with(message.protocol_revision):
        raise SessionRefused(
            "PROTOCOL_REVISION",
            f"the front end speaks protocol revision {message.protocol_revision}, this scheduler revision "
            f"{PROTOCOL_REVISION}: bring both to releases whose revisions differ by one at most",
        )
    if len(message.front_end_id.encode()) > MAX_ID_BYTES:
        raise SessionProtocolError(f"hello: front_end_id is longer than {MAX_ID_BYTES} bytes")
    return Hello(message.front_end_id, frozenset(message.required_features))


def check_session_features(hello: Hello, features: Iterable[SessionFeature]) -> None:
    """Raises SessionRefused when a front end needs what this scheduler does not have, or does not know."""
    missing = sorted(hello.required_features - set(map(int, features)))
    if missing:
        known = session_service_pb2.SessionFeature.DESCRIPTOR.values_by_number
        names = ", ".join(known[number].name if number in known else f"feature {number}" for number in missing)
        raise SessionRefused(
            "FEATURE_NOT_SUPPORTED", f"the front end needs {names}, which this scheduler does not have"
        )


def _handle(value: int, where: str) -> int:
    # It travels back in a column of int32.
    if value > 0x7FFF_FFFF:
        raise SessionProtocolError(f"{where}: handle {value} is larger than 2^31 - 1")
    return value


def _submission(message: session_service_pb2.Submit) -> Submission:
    handle = _handle(message.handle, "submit")
    if not message.HasField("sampling"):
        raise SessionProtocolError(f"submit {handle}: no sampling parameters")
    try:
        prompt = unpack(message.prompt_token_ids)
    except ValueError:
        raise SessionProtocolError(f"submit {handle}: prompt_token_ids is no whole number of int32") from None
    timeout_s = None
    if message.HasField("timeout"):
        timeout_s = message.timeout.seconds + message.timeout.nanos * 1e-9
    sampling = message.sampling
    return Submission(
        handle=handle,
        request_id=message.request_id,
        prompt=prompt,
        sampling=SamplingFacts(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            # One more than is allowed is enough to refuse the request.
            eos_token_ids=tuple(sampling.eos_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
            stop_token_ids=tuple(sampling.stop_token_ids[: MAX_STOP_TOKEN_IDS + 1]),
            encoded=_known_fields(sampling),
        ),
        priority=message.priority,
        cache_salt=message.cache_salt,
        timeout_s=timeout_s,
        has_outputs=bool(message.output_token_ids),
    )


def _known_fields(message: sampling_pb2.ResolvedSampling) -> bytes:
    # Fields nobody here knows do not travel on: they would grow step messages without limit.
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def _cancellation(message: session_service_pb2.Cancel) -> Cancellation:
    cause = _CANCEL_CAUSES.get(message.reason)
    if cause is None:
        raise SessionProtocolError(f"cancel {message.handle}: reason {message.reason} is unknown")
    return Cancellation(_handle(message.handle, "cancel"), cause)


def _text_end(message: session_service_pb2.TextEnded) -> TextEnd:
    if message.num_tokens < 1:
        raise SessionProtocolError(f"text_ended {message.handle}: num_tokens must be at least 1")
    return TextEnd(_handle(message.handle, "text_ended"), message.num_tokens)


def parameter_problem(submission: Submission, vocab_size: int | None) -> tuple[str, str] | None:
    """The first field that is out of range, and what is wrong with it; None when all are fine. vocab_size None:
    unknown."""
    return _text_problem(submission) or _sampling_problem(submission.sampling) or _token_problem(submission, vocab_size)


def _text_problem(submission: Submission) -> tuple[str, str] | None:
    if not submission.request_id:
        return "request_id", "must not be empty"
    for name, value in (("request_id", submission.request_id), ("cache_salt", submission.cache_salt)):
        if len(value.encode()) > MAX_ID_BYTES:
            return name, f"must be at most {MAX_ID_BYTES} bytes of UTF-8"
    return None


def _sampling_problem(sampling: SamplingFacts) -> tuple[str, str] | None:
    # Written so that NaN fails.
    checks = (
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "must be in [0, 100]"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "must be in (0, 1]"),
        ("top_k", sampling.top_k >= 0, "must not be negative (0 = off)"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "must be in [0, 1]"),
        (
            "min_tokens",
            sampling.max_tokens == 0 or sampling.min_tokens <= sampling.max_tokens,
            "must not be larger than max_tokens",
        ),
        ("stop_token_ids", len(sampling.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS}"),
        ("eos_token_ids", len(sampling.eos_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS}"),
    )
    return next(((name, message) for name, holds, message in checks if not holds), None)


def _token_problem(submission: Submission, vocab_size: int | None) -> tuple[str, str] | None:
    limit = vocab_size if vocab_size is not None else 1 << 31
    for name, ids in (
        ("eos_token_ids", submission.sampling.eos_token_ids),
        ("stop_token_ids", submission.sampling.stop_token_ids),
    ):
        if any(each >= limit for each in ids):
            return name, f"token ids must be below {limit}, the model's vocabulary"
    if submission.prompt:
        prompt = np.frombuffer(submission.prompt, dtype=np.int32)
        if int(prompt.min()) < 0 or int(prompt.max()) >= limit:
            return "prompt_token_ids", f"token ids must be between 0 and {limit - 1}, the model's vocabulary"
    return None


# --- front end: down ------------------------------------------------------------------------------------------------


def attached_frame(
    scheduler_incarnation: int, features: Iterable[SessionFeature]
) -> session_service_pb2.AttachResponse:
    """The first frame down."""
    attached = session_service_pb2.Attached(
        scheduler_incarnation=scheduler_incarnation,
        protocol_revision=PROTOCOL_REVISION,
        features=[int(feature) for feature in features],  # type: ignore[misc]
    )
    return session_service_pb2.AttachResponse(attached=attached)


def readiness_frame(is_ready: bool, cause: str) -> session_service_pb2.AttachResponse:
    """Whether a worker is up, and why not."""
    readiness = session_service_pb2.ReadinessChanged(ready=is_ready, cause=cause)
    return session_service_pb2.AttachResponse(readiness=readiness)


def add_ended(frame: session_service_pb2.AttachResponse, handle: int, effect: RequestEnded) -> None:
    """State the end of a request in a frame."""
    ended = frame.ended.add(handle=handle, usage=encode_usage(effect.usage))
    problem = ended_failure(effect)
    if problem is not None:
        ended.failure.CopyFrom(encode_failure(problem))
        return
    ended.ok.reason = (
        usage_pb2.FINISH_REASON_STOP if effect.reason is EndReason.STOP else usage_pb2.FINISH_REASON_LENGTH
    )
    if effect.stop_token_id is not None:
        ended.ok.stop_token_id = effect.stop_token_id


def set_tokens(
    frame: session_service_pb2.AttachResponse, handles: list[int], counts: list[int] | None, tokens: list[int]
) -> None:
    """State the tokens of one step in a frame: columns as in TokensProduced, with the front end's handles."""
    columns = frame.tokens
    columns.handles = pack(array("i", handles))
    columns.token_ids = pack(array("i", tokens))
    if counts is not None:
        columns.counts = pack(array("i", counts))


def encode_usage(usage: Usage) -> usage_pb2.Usage:
    """Usage as clients read it."""
    message = usage_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_preemptions=usage.num_preemptions,
        num_recomputed_tokens=usage.num_recomputed_tokens,
    )
    message.queued.FromNanoseconds(max(0, round(usage.queued_s * 1e9)))
    message.preempted.FromNanoseconds(max(0, round(usage.preempted_s * 1e9)))
    return message


def encode_failure(failure: Failure) -> session_service_pb2.Failure:
    """A failure as the front end turns it into status and details."""
    message = session_service_pb2.Failure(
        code=int(failure.code), reason=failure.reason, message=failure.message, metadata=dict(failure.metadata)
    )
    if failure.retry_after_s is not None:
        message.retry_after.FromNanoseconds(max(0, round(failure.retry_after_s * 1e9)))
    return message


def model_info(facts: ModelFacts) -> model_pb2.ModelInfo:
    """The served model as the worker described it."""
    return model_pb2.ModelInfo.FromString(facts.info)


def tokenizer_responses(
    pieces: Sequence[TokenizerPiece],
) -> Iterator[session_service_pb2.SessionServiceGetTokenizerResponse]:
    """The tokenizer, piece by piece, as it came."""
    for piece in pieces:
        chunk = model_pb2.TokenizerChunk(file_name=piece.file_name, data=piece.data)
        yield session_service_pb2.SessionServiceGetTokenizerResponse(chunk=chunk)
