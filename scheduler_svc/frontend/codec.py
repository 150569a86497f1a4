"""Protobuf ⇄ the front end's own types, in both directions: client messages, session frames, error details."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from scheduler_svc.frontend import calls
from scheduler_svc.frontend.errors import Code, Failure, RequestError, SessionProtocolError, Violation, invalid
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.usage import Usage
from stepfence.v1 import generation_service_pb2 as generation_pb2
from stepfence.v1 import model_pb2, sampling_pb2, session_service_pb2, usage_pb2

DOMAIN = "stepfence"
# Error details travel as HTTP/2 trailers, for which 8 KiB is a common limit; the message is in there twice.
_MAX_MESSAGE_BYTES = 800
_MAX_VIOLATIONS = 8
_MAX_METADATA = 16

_CANCEL_REASONS = {
    calls.CancelReason.CLIENT_GONE: session_service_pb2.CANCEL_REASON_CLIENT_GONE,
    calls.CancelReason.ABORTED: session_service_pb2.CANCEL_REASON_ABORTED,
    calls.CancelReason.SLOW_READER: session_service_pb2.CANCEL_REASON_SLOW_READER,
    calls.CancelReason.DRAINED: session_service_pb2.CANCEL_REASON_DRAINED,
}
_FINISH_REASONS = {
    usage_pb2.FINISH_REASON_STOP: calls.FinishReason.STOP,
    usage_pb2.FINISH_REASON_LENGTH: calls.FinishReason.LENGTH,
}
_WIRE_FINISH_REASONS = {reason: number for number, reason in _FINISH_REASONS.items()}


# --- clients --------------------------------------------------------------------------------------------------------


def decode_call(request: generation_pb2.GenerateRequest, limits: Limits) -> calls.GenerateCall:
    """A client's call. Nothing is copied before its length is known to be within the limits. Raises RequestError."""
    _check_counts(request, limits)
    return calls.GenerateCall(
        prompt=_decode_prompt(request),
        request_id=request.request_id,
        sampling=_decode_sampling(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        model=request.model,
    )


def _check_counts(request: generation_pb2.GenerateRequest, limits: Limits) -> None:
    num_messages = len(request.chat.messages)
    if num_messages > limits.max_chat_messages:
        description = f"at most {limits.max_chat_messages} messages, not {num_messages}"
        raise invalid((Violation("chat.messages", description),), "PROMPT_TOO_LARGE")
    violations = []
    num_strings, num_ids = len(request.sampling.stop), len(request.sampling.stop_token_ids)
    if num_strings > limits.max_stop_strings:
        description = f"at most {limits.max_stop_strings} strings, not {num_strings}"
        violations.append(Violation("sampling.stop", description))
    if num_ids > limits.max_stop_ids:
        violations.append(Violation("sampling.stop_token_ids", f"at most {limits.max_stop_ids} ids, not {num_ids}"))
    if violations:
        raise invalid(tuple(violations))


def _decode_prompt(request: generation_pb2.GenerateRequest) -> calls.Prompt | None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return calls.TextPrompt(request.text)
    if kind == "token_ids":
        return calls.IdsPrompt(request.token_ids.ids)
    if kind == "chat":
        return calls.ChatPrompt(
            tuple(calls.ChatMessage(message.role, message.content) for message in request.chat.messages)
        )
    return None


def _decode_sampling(sampling: sampling_pb2.SamplingParams) -> calls.Sampling:
    return calls.Sampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        min_tokens=sampling.min_tokens if sampling.HasField("min_tokens") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def encode_event(event: calls.Accepted | calls.Delta | calls.Finished) -> generation_pb2.GenerateResponse:
    if isinstance(event, calls.Accepted):
        accepted = generation_pb2.Accepted(request_id=event.request_id, num_prompt_tokens=event.num_prompt_tokens)
        return generation_pb2.GenerateResponse(accepted=accepted)
    if isinstance(event, calls.Delta):
        return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=event.text, token_ids=event.token_ids))
    finished = generation_pb2.Finished(reason=_WIRE_FINISH_REASONS[event.reason], usage=encode_usage(event.usage))
    if event.stop_token_id is not None:
        finished.stop_token_id = event.stop_token_id
    if event.stop_string is not None:
        finished.stop_string = event.stop_string
    return generation_pb2.GenerateResponse(finished=finished)


class CompleteAnswer:
    """The answer of Complete, made of the events of its request as they come: made at the end, a long one would take
    long."""

    def __init__(self) -> None:
        self._response = generation_pb2.CompleteResponse()
        self._texts: list[str] = []

    def add(self, event: calls.Accepted | calls.Delta | calls.Finished) -> None:
        """The next event."""
        response = self._response
        if isinstance(event, calls.Accepted):
            response.request_id = event.request_id
        elif isinstance(event, calls.Delta):
            self._texts.append(event.text)
            response.token_ids.extend(event.token_ids)
        else:
            response.reason = _WIRE_FINISH_REASONS[event.reason]
            response.usage.CopyFrom(encode_usage(event.usage))
            if event.stop_token_id is not None:
                response.stop_token_id = event.stop_token_id
            if event.stop_string is not None:
                response.stop_string = event.stop_string

    def message(self) -> generation_pb2.CompleteResponse:
        """Once, after the last event."""
        self._response.text = "".join(self._texts)
        return self._response


def encode_model(model: calls.ModelDescription) -> model_pb2.ModelInfo:
    return model_pb2.ModelInfo(
        name=model.name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=model_pb2.GenerationDefaults(
            temperature=model.temperature, top_p=model.top_p, top_k=model.top_k, min_p=model.min_p
        ),
        tokenizer_digest=model.tokenizer_digest,
        other_names=model.other_names,
    )


def encode_error(error: RequestError) -> status_pb2.Status:
    """The failure with its details. A code that is no error, or unknown, becomes INTERNAL."""
    failure = error.failure
    known = failure.code != code_pb2.OK and failure.code in code_pb2.Code.values()
    status = status_pb2.Status(code=failure.code if known else int(Code.INTERNAL), message=_shortened(failure.message))
    metadata = dict(list(failure.metadata.items())[:_MAX_METADATA])
    _add(status, error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=metadata))
    if failure.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in failure.violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(field=violation.field, description=_shortened(violation.description))
        _add(status, bad_request)
    if failure.retry_after_s is not None:
        retry_delay = _encode_duration(round(failure.retry_after_s * 1e9))
        _add(status, error_details_pb2.RetryInfo(retry_delay=retry_delay))
    if error.usage is not None:
        _add(status, encode_usage(error.usage))
    return status


def _shortened(text: str) -> str:
    return text.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def encode_usage(usage: Usage) -> usage_pb2.Usage:
    return usage_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_preemptions=usage.num_preemptions,
        num_recomputed_tokens=usage.num_recomputed_tokens,
        queued=_encode_duration(usage.queued_ns),
        preempted=_encode_duration(usage.preempted_ns),
    )


# --- the scheduler --------------------------------------------------------------------------------------------------


def decode_model(model: model_pb2.ModelInfo) -> calls.ModelDescription:
    defaults = model.generation_defaults
    return calls.ModelDescription(
        name=model.name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=tuple(model.eos_token_ids),
        temperature=defaults.temperature if defaults.HasField("temperature") else None,
        top_p=defaults.top_p if defaults.HasField("top_p") else None,
        top_k=defaults.top_k if defaults.HasField("top_k") else None,
        min_p=defaults.min_p if defaults.HasField("min_p") else None,
        tokenizer_digest=model.tokenizer_digest,
        other_names=tuple(model.other_names),
    )


def encode_submit(handle: int, submission: calls.Submission) -> session_service_pb2.Submit:
    sampling = submission.sampling
    submit = session_service_pb2.Submit(
        handle=handle,
        request_id=submission.request_id,
        prompt_token_ids=_encode_column(submission.prompt_token_ids),
        sampling=sampling_pb2.ResolvedSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=sampling.seed,
            eos_token_ids=sampling.eos_token_ids,
            stop_token_ids=sampling.stop_token_ids,
        ),
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        tenant=submission.tenant,
    )
    if submission.timeout_s is not None:
        submit.timeout.CopyFrom(_encode_duration(round(submission.timeout_s * 1e9)))
    return submit


def add_history(submit: session_service_pb2.Submit, output_token_ids: array[int], age_s: float) -> None:
    """Make it the message of a request that was accepted before, with the outputs that have come, age_s seconds after
    it was first submitted."""
    submit.output_token_ids = _encode_column(output_token_ids)
    submit.age.CopyFrom(_encode_duration(round(age_s * 1e9)))


def encode_cancel(handle: int, reason: calls.CancelReason) -> session_service_pb2.Cancel:
    return session_service_pb2.Cancel(handle=handle, reason=_CANCEL_REASONS[reason])


def decode_failure(failure: session_service_pb2.Failure) -> Failure:
    return Failure(
        code=failure.code,
        reason=failure.reason,
        message=failure.message,
        metadata=dict(failure.metadata),
        retry_after_s=_decode_duration(failure.retry_after) / 1e9 if failure.HasField("retry_after") else None,
    )


def decode_ended(ended: session_service_pb2.RequestEnded) -> calls.Ended:
    usage = decode_usage(ended.usage) if ended.HasField("usage") else None
    outcome = ended.WhichOneof("outcome")
    if outcome == "failure":
        return calls.Ended(None, None, decode_failure(ended.failure), usage)
    reason = _FINISH_REASONS.get(ended.ok.reason)
    if outcome != "ok" or reason is None:
        raise SessionProtocolError(f"request with handle {ended.handle} ended without an outcome")
    stop_token_id = ended.ok.stop_token_id if ended.ok.HasField("stop_token_id") else None
    return calls.Ended(reason, stop_token_id, None, usage)


def decode_usage(usage: usage_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_preemptions=usage.num_preemptions,
        num_recomputed_tokens=usage.num_recomputed_tokens,
        queued_ns=_decode_duration(usage.queued),
        preempted_ns=_decode_duration(usage.preempted),
    )


def decode_tokens(columns: session_service_pb2.TokenColumns) -> Iterator[tuple[int, array[int]]]:
    """(handle, its tokens) in the order sent. Raises SessionProtocolError, before anything is yielded, when the columns
    do not fit together."""
    handles = _decode_column(columns.handles)
    token_ids = _decode_column(columns.token_ids)
    counts = _decode_column(columns.counts) if columns.counts else array("i", (1,)) * len(handles)
    if len(counts) != len(handles) or sum(counts) != len(token_ids) or min(counts, default=0) < 0:
        raise SessionProtocolError(
            f"token columns do not fit: {len(handles)} handles, {len(counts)} counts, {len(token_ids)} ids"
        )
    return _rows(handles, counts, token_ids)


def _rows(handles: array[int], counts: array[int], token_ids: array[int]) -> Iterator[tuple[int, array[int]]]:
    position = 0
    for handle, count in zip(handles, counts, strict=True):
        yield handle, token_ids[position : position + count]
        position += count


def _encode_column(values: array[int]) -> bytes:
    """values: int32."""
    column = values if values.typecode == "i" else array("i", values)
    if sys.byteorder != "little":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _decode_column(data: bytes) -> array[int]:
    column = array("i")
    try:
        column.frombytes(data)
    except ValueError:
        raise SessionProtocolError(f"a column of {len(data)} bytes is no column of int32") from None
    if sys.byteorder != "little":
        column.byteswap()
    return column


def _encode_duration(nanoseconds: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def _decode_duration(duration: duration_pb2.Duration) -> int:
    return duration.seconds * 10**9 + duration.nanos
