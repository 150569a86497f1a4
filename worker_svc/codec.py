"""Messages to the worker's own types and back: the only place where the two meet.

Decoding checks everything that can be judged from one message alone (column lengths, signs, ranges); whether a step
fits what the worker holds is the ledger's business. Decoding copies nothing: columns are read-only views of the
message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from google.protobuf import duration_pb2

from stepfence.v1 import model_pb2, sampling_pb2, step_pb2, worker_service_pb2
from worker_svc.errors import MalformedOpen, MalformedStep, OpenRefused
from worker_svc.limits import (
    FIRST_PROTOCOL_REVISION,
    MAX_DROPPED_IDS,
    MAX_HOST_CHARS,
    MAX_INFLIGHT_STEPS,
    MAX_MASKED_IDS,
    MAX_MESSAGE_BYTES,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_ROWS,
    MAX_REQUEST_ID_BYTES,
    MAX_TOKENIZER_CHUNK_BYTES,
    PROTOCOL_REVISION,
)
from worker_svc.runner.base import Geometry, RunnerCapabilities
from worker_svc.sampling import PARAMETERS, Sampling
from worker_svc.step import AddedRequest, FailureKind, Int32Column, Step, StepAnswer, StepOutput

_LITTLE_ENDIAN_INT32: Final = np.dtype("<i4")
_NOTHING: Final[Int32Column] = np.empty(0, np.int32)
_MAX_INT32: Final = 2**31 - 1
# Features that a scheduler needs; there are two.
_MAX_FEATURES: Final = 64
_FAILURE_KINDS: Final = {
    FailureKind.EXECUTION: step_pb2.STEP_ERROR_KIND_EXECUTION,
    FailureKind.DEVICE: step_pb2.STEP_ERROR_KIND_DEVICE,
}

TokenizerFiles = tuple[tuple[str, bytes], ...]


# --- open -------------------------------------------------------------------------------------------------------------


def decode_open(message: worker_service_pb2.Open) -> tuple[int, int, Geometry]:
    """(scheduler incarnation, epoch, geometry). Raises MalformedOpen for what no worker could accept."""
    oldest = max(FIRST_PROTOCOL_REVISION, PROTOCOL_REVISION - 1)
    if not oldest <= message.protocol_revision <= PROTOCOL_REVISION + 1:
        raise MalformedOpen(
            "PROTOCOL_REVISION",
            f"the scheduler speaks protocol revision {message.protocol_revision}, this worker revision "
            f"{PROTOCOL_REVISION}: bring both to releases whose revisions differ by one at most",
        )
    if message.epoch < 1:
        raise MalformedOpen("MALFORMED_OPEN", "epoch must be at least 1")
    geometry = Geometry(
        block_size=message.block_size,
        num_rows=message.num_rows,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        max_inflight_steps=message.max_inflight_steps,
    )
    for name in Geometry.__dataclass_fields__:
        if not 1 <= getattr(geometry, name) <= _MAX_INT32:
            raise MalformedOpen("MALFORMED_OPEN", f"{name} must be at least 1")
    return message.scheduler_incarnation, message.epoch, geometry


def check_geometry(geometry: Geometry, capabilities: RunnerCapabilities) -> None:
    """Hold an open against what GetCapabilities declared. Raises MalformedOpen that names the value and its limit."""
    if geometry.block_size % capabilities.block_size_multiple:
        raise MalformedOpen(
            "BLOCK_SIZE", f"block_size {geometry.block_size} is not a multiple of {capabilities.block_size_multiple}"
        )
    limits = {
        "block_size": capabilities.max_model_len + capabilities.block_size_multiple,
        "num_rows": MAX_NUM_ROWS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "max_model_len": capabilities.max_model_len,
        "max_inflight_steps": MAX_INFLIGHT_STEPS,
    }
    for name, limit in limits.items():
        value = getattr(geometry, name)
        if value > limit:
            raise MalformedOpen("OVER_LIMIT", f"{name} {value} is over this worker's limit of {limit}")


# --- steps ------------------------------------------------------------------------------------------------------------


def decode_step(message: step_pb2.SchedulerOutput, vocab_size: int) -> Step:
    """A step whose columns are well formed. Masked ids of `vocab_size` and above are left out: they cannot be sampled.

    Raises MalformedStep that names the field.
    """
    if message.epoch < 1 or message.step_seq < 1:
        raise MalformedStep("epoch and step_seq must be at least 1")
    if message.processed_step_seq >= message.step_seq:
        raise MalformedStep(f"processed_step_seq {message.processed_step_seq} not before step_seq {message.step_seq}")
    if len(message.new_requests) > MAX_NUM_ROWS:
        raise MalformedStep(f"new_requests: {len(message.new_requests)}, at most {MAX_NUM_ROWS} rows can be had")
    num_dropped = len(message.preempted_request_ids) + len(message.finished_request_ids)
    if num_dropped > MAX_DROPPED_IDS:
        raise MalformedStep(f"{num_dropped} preempted and finished requests, at most {MAX_DROPPED_IDS}")
    rows = _column(message.rows, "rows")
    num_drafts = _column(message.num_drafts, "num_drafts")
    draft_token_ids = _column(message.draft_token_ids, "draft_token_ids")
    num_tokens = _column(message.num_tokens, "num_tokens", least=1)
    appended_rows = _column(message.appended_rows, "appended_rows")
    appended_blocks = _column(message.appended_blocks, "appended_blocks", least=1)
    _equal_lengths(rows, num_tokens, "rows and num_tokens")
    _equal_lengths(appended_rows, appended_blocks, "appended_rows and appended_blocks")
    if len(num_drafts):
        _equal_lengths(rows, num_drafts, "rows and num_drafts")
    if int(num_drafts.sum(dtype=np.int64)) != len(draft_token_ids):
        raise MalformedStep("num_drafts does not add up to the length of draft_token_ids")
    return Step(
        epoch=message.epoch,
        step_seq=message.step_seq,
        fence_seq=message.fence_seq,
        processed_step_seq=message.processed_step_seq,
        dropped_ids=(*message.preempted_request_ids, *message.finished_request_ids),
        added=tuple(_decode_added(added, vocab_size) for added in message.new_requests),
        appended_rows=appended_rows,
        appended_blocks=appended_blocks,
        rows=rows,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        draft_token_ids=draft_token_ids,
    )


def _column(data: bytes, name: str, least: int = 0) -> Int32Column:
    if not data:
        return _NOTHING
    if len(data) % 4:
        raise MalformedStep(f"{name}: {len(data)} bytes are no int32 column")
    column: Int32Column = np.frombuffer(data, dtype=_LITTLE_ENDIAN_INT32).astype(np.int32, copy=False)
    if int(column.min()) < least:
        raise MalformedStep(f"{name}: {int(column.min())} is below {least}")
    return column


def _equal_lengths(one: Int32Column, other: Int32Column, names: str) -> None:
    if len(one) != len(other):
        raise MalformedStep(f"{names} have different lengths: {len(one)} and {len(other)}")


def _decode_added(message: step_pb2.NewRequest, vocab_size: int) -> AddedRequest:
    request_id = message.request_id
    if not 1 <= len(request_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise MalformedStep(f"new_requests: request_id must have 1 to {MAX_REQUEST_ID_BYTES} bytes")
    token_ids = _column(message.token_ids, f"token_ids of {request_id}")
    block_table = _column(message.block_table, f"block_table of {request_id}", least=1)
    if not len(token_ids):
        raise MalformedStep(f"token_ids of {request_id}: no tokens")
    if not 1 <= message.num_prompt_tokens <= len(token_ids):
        raise MalformedStep(f"{request_id}: num_prompt_tokens {message.num_prompt_tokens} of {len(token_ids)} tokens")
    if message.num_computed_tokens >= len(token_ids):
        raise MalformedStep(f"{request_id}: {message.num_computed_tokens} computed of {len(token_ids)} tokens")
    if message.row > _MAX_INT32:
        raise MalformedStep(f"{request_id}: row {message.row} is out of range")
    return AddedRequest(
        request_id=request_id,
        row=message.row,
        token_ids=token_ids,
        block_table=block_table,
        num_computed_tokens=message.num_computed_tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=_decode_sampling(message.sampling, request_id, vocab_size),
    )


def _decode_sampling(message: sampling_pb2.ResolvedSampling, request_id: str, vocab_size: int) -> Sampling:
    values = {}
    for parameter in PARAMETERS:
        value = getattr(message, parameter.name)
        if not parameter.is_valid(value):
            raise MalformedStep(f"{request_id}: sampling.{parameter.name} is {value}")
        values[parameter.name] = parameter.as_kept(value)
    num_masked = len(message.eos_token_ids) + len(message.stop_token_ids)
    if num_masked > MAX_MASKED_IDS:
        raise MalformedStep(f"{request_id}: {num_masked} end-of-sequence and stop ids, at most {MAX_MASKED_IDS}")
    masked = {*message.eos_token_ids, *message.stop_token_ids}
    return Sampling(**values, masked_token_ids=tuple(sorted(token_id for token_id in masked if token_id < vocab_size)))


def encode_answer(answer: StepAnswer) -> worker_service_pb2.RunStepsResponse:
    """The result frame of one step."""
    result = step_pb2.StepResult(
        epoch=answer.epoch, step_seq=answer.step_seq, staged_us=answer.staged_us, executed_us=answer.executed_us
    )
    if answer.failure is not None:
        result.error.kind = _FAILURE_KINDS[answer.failure]
        result.error.message = answer.message
    if answer.output is not None:
        _put_output(result, answer.output)
    return worker_service_pb2.RunStepsResponse(result=result)


def _put_output(result: step_pb2.StepResult, output: StepOutput) -> None:
    result.sampled_token_ids = _column_bytes(output.sampled_token_ids)
    if output.sampled_counts is not None:
        result.sampled_counts = _column_bytes(output.sampled_counts)
    result.num_rows_held = output.num_rows_held
    for failure in output.row_errors:
        result.row_errors.add(row=failure.row, kind=step_pb2.ROW_ERROR_KIND_OUTPUT_INVALID, message=failure.message)


def _column_bytes(column: Int32Column) -> bytes:
    return column.astype(_LITTLE_ENDIAN_INT32, copy=False).tobytes()


def check_features(message: worker_service_pb2.Open, capabilities: RunnerCapabilities) -> None:
    """Raises OpenRefused when the steps of an epoch would need what this worker does not have, or does not know."""
    if len(message.required_features) > _MAX_FEATURES:
        raise MalformedOpen("MALFORMED_OPEN", f"{len(message.required_features)} features, at most {_MAX_FEATURES}")
    missing = [number for number in message.required_features if number not in _features(capabilities)]
    if missing:
        names = ", ".join(map(_feature_name, missing))
        raise OpenRefused("FEATURE_NOT_SUPPORTED", f"the scheduler needs {names}, which this worker does not have")


def _features(capabilities: RunnerCapabilities) -> list[worker_service_pb2.WorkerFeature.ValueType]:
    features: list[worker_service_pb2.WorkerFeature.ValueType] = []
    if capabilities.max_num_drafts:
        features.append(worker_service_pb2.WORKER_FEATURE_DRAFTS)
        if capabilities.verifies_sampled_drafts:
            features.append(worker_service_pb2.WORKER_FEATURE_SAMPLED_DRAFTS)
    return features


def _feature_name(number: int) -> str:
    try:
        return worker_service_pb2.WorkerFeature.Name(number)  # type: ignore[arg-type]
    except ValueError:
        return f"feature {number}"


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


# --- the rest ---------------------------------------------------------------------------------------------------------


def encode_opened(
    worker_incarnation: int, num_blocks: int, executed_step_seq: int
) -> worker_service_pb2.RunStepsResponse:
    return worker_service_pb2.RunStepsResponse(
        opened=worker_service_pb2.Opened(
            worker_incarnation=worker_incarnation, num_blocks=num_blocks, executed_step_seq=executed_step_seq
        )
    )


def encode_draining(deadline_s: float) -> worker_service_pb2.RunStepsResponse:
    return worker_service_pb2.RunStepsResponse(draining=worker_service_pb2.Draining(deadline=_duration(deadline_s)))


def encode_capabilities(
    capabilities: RunnerCapabilities,
    worker_incarnation: int,
    tokenizer: TokenizerFiles,
    host: str = "",
    served_names: Sequence[str] = (),
) -> worker_service_pb2.GetCapabilitiesResponse:
    """`host` is left out when it is no name that the contract lets through (a kernel takes any bytes for one).
    served_names: under which clients ask for the model; none: the runner's."""
    defaults = capabilities.generation_defaults
    name, *other_names = served_names or (capabilities.model_name,)
    return worker_service_pb2.GetCapabilitiesResponse(
        protocol_revision=PROTOCOL_REVISION,
        worker_incarnation=worker_incarnation,
        model=model_pb2.ModelInfo(
            name=name,
            other_names=other_names,
            vocab_size=capabilities.vocab_size,
            max_model_len=capabilities.max_model_len,
            eos_token_ids=capabilities.eos_token_ids,
            generation_defaults=model_pb2.GenerationDefaults(
                temperature=defaults.temperature, top_p=defaults.top_p, top_k=defaults.top_k, min_p=defaults.min_p
            ),
            tokenizer_digest=tokenizer_digest(tokenizer),
        ),
        block_size_multiple=capabilities.block_size_multiple,
        max_num_rows=MAX_NUM_ROWS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_message_bytes=MAX_MESSAGE_BYTES,
        runner=capabilities.runner,
        device=capabilities.device,
        dtype=capabilities.dtype,
        max_num_drafts=capabilities.max_num_drafts,
        features=_features(capabilities),
        host=host if len(host) <= MAX_HOST_CHARS and host.isprintable() else "",
    )


def tokenizer_digest(files: TokenizerFiles) -> str:
    """sha256 (hex) over names (UTF-8) and bytes, in order; "" for no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()


def tokenizer_chunks(files: Iterable[tuple[str, bytes]]) -> Iterator[worker_service_pb2.GetTokenizerResponse]:
    """The files in pieces of at most 1 MiB; an empty file is one empty piece."""
    for name, data in files:
        for start in range(0, max(len(data), 1), MAX_TOKENIZER_CHUNK_BYTES):
            piece = data[start : start + MAX_TOKENIZER_CHUNK_BYTES]
            yield worker_service_pb2.GetTokenizerResponse(chunk=model_pb2.TokenizerChunk(file_name=name, data=piece))
