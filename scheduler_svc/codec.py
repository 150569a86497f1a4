"""Messages to and from front ends <-> the scheduler's own types.

Columns are `array('i')` here and little-endian int32 bytes on the wire (`rpc/wire.py`). A message that cannot be read
raises SessionProtocolError.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration

from scheduler_svc.core.events import AbortCause, EndReason, RequestEnded
from scheduler_svc.core.stats import Usage
from scheduler_svc.core.step_bytes import MAX_ID_BYTES, MAX_STOP_TOKEN_IDS
from scheduler_svc.errors import Failure, SessionProtocolError, SessionRefused
from scheduler_svc.errors import failure as ended_failure
from scheduler_svc.rpc import tenants
from scheduler_svc.rpc.wire import PROTOCOL_REVISION, pack, unpack, works_with
from scheduler_svc.workers.codec import ModelFacts, TokenizerPiece
from stepfence.v1 import model_pb2, sampling_pb2, session_service_pb2, usage_pb2

# More than a protobuf Duration may say; front ends may say it all the same. Seconds.
_MAX_DURATION_S: Final = 315_576_000_000
# Features that a front end needs; there are two.
_MAX_FEATURES: Final = 64
# Submits, cancels and ends of text in one frame of a front end, of each kind.
MAX_FRAME_ITEMS: Final = 1024


# --- from a front end ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the front end sent it; well-formed, not yet judged. timeout_s: seconds left, None: no deadline.

    output_tokens: None for a new request. For one that was accepted on an earlier stream, they are the outputs that the
    front end has received, and age_s are the seconds since it was first submitted."""

    handle: int
    request_id: str
    prompt: array[int]
    sampling: SamplingFacts
    priority: int
    cache_salt: str
    timeout_s: float | None
    output_tokens: array[int] | None = None
    age_s: float = 0.0
    # "": the tenant without a name.
    tenant: str = ""


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
    RESUBMIT = session_service_pb2.SESSION_FEATURE_RESUBMIT
    TENANTS = session_service_pb2.SESSION_FEATURE_TENANTS


@dataclass(frozen=True, slots=True)
class Hello:
    """How a front end begins. required_features: numbers, known here or not."""

    front_end_id: str
    required_features: frozenset[int]
    # 0: not given. attach_seq counts the streams of one incarnation.
    incarnation: int = 0
    attach_seq: int = 0


@dataclass(frozen=True, slots=True)
class SessionFrame:
    """One frame of a front end. resubmits_done: with this frame, all requests of earlier streams have been submitted
    again."""

    hello: Hello | None
    submissions: tuple[Submission, ...]
    cancellations: tuple[Cancellation, ...]
    text_ends: tuple[TextEnd, ...]
    num_live_streams: int
    resubmits_done: bool = False


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
        resubmits_done=message.resubmits_done,
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
    if len(message.required_features) > _MAX_FEATURES:
        raise SessionProtocolError(f"hello: {len(message.required_features)} features, at most {_MAX_FEATURES}")
    return Hello(
        message.front_end_id,
        frozenset(message.required_features),
        message.front_end_incarnation,
        message.attach_seq,
    )


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
    output_tokens, age_s = _outputs(message)
    timeout_s = None
    if message.HasField("timeout"):
        timeout_s = seconds_of(message.timeout)
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
        output_tokens=output_tokens,
        age_s=age_s,
        tenant=message.tenant,
    )


def _outputs(message: session_service_pb2.Submit) -> tuple[array[int] | None, float]:
    """What a request that was accepted on an earlier stream brings along."""
    handle = message.handle
    if not message.HasField("age"):
        if message.output_token_ids:
            raise SessionProtocolError(f"submit {handle}: output_token_ids without age")
        return None, 0.0
    try:
        outputs = unpack(message.output_token_ids)
    except ValueError:
        raise SessionProtocolError(f"submit {handle}: output_token_ids is no whole number of int32") from None
    return outputs, max(0.0, seconds_of(message.age))


def seconds_of(duration: Duration) -> float:
    """A duration in seconds; one that is longer than durations may be counts as the longest."""
    seconds = duration.seconds + duration.nanos * 1e-9
    return min(max(seconds, -_MAX_DURATION_S), _MAX_DURATION_S)


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
    if submission.tenant and not tenants.is_name(submission.tenant):
        return "tenant", f"must be {tenants.RULE}"
    whole_id = tenants.qualified(submission.tenant, submission.request_id)
    for name, value in (("request_id", whole_id), ("cache_salt", submission.cache_salt)):
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


# --- to a front end ------------------------------------------------------------------------------------------------


def attached_frame(
    scheduler_incarnation: int, features: Iterable[SessionFeature], term: int
) -> session_service_pb2.AttachResponse:
    """The first frame down."""
    attached = session_service_pb2.Attached(
        scheduler_incarnation=scheduler_incarnation,
        protocol_revision=PROTOCOL_REVISION,
        features=[int(feature) for feature in features],  # type: ignore[misc]
        term=term,
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


def add_usage(frame: session_service_pb2.AttachResponse, handle: int, usage: Usage) -> None:
    """State what a live request has cost so far in a frame."""
    frame.usage_changed.add(handle=handle, usage=encode_usage(usage))


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
