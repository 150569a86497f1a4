"""Messages to and from workers <-> the scheduler's own types.

A message that cannot be read raises WorkerProtocolError.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from scheduler_svc.core.events import RowFailed, WorkerProtocolError
from scheduler_svc.core.output import DeferredFree, NewRow, SchedulerOutput
from scheduler_svc.rpc.field_count import check_num_fields
from scheduler_svc.rpc.wire import PROTOCOL_REVISION, pack, unpack
from stepfence.v1 import step_pb2, worker_service_pb2

# As long as a name in DNS can be.
MAX_HOST_CHARS: Final = 253
# They travel on to clients in headers, and into the log.
_MAX_ROW_MESSAGE_CHARS: Final = 400
_MAX_ERROR_CHARS: Final = 400
_MAX_KIND_CHARS: Final = 64
# Of a model's name, of the digest of its tokenizer and of a file's name. The description of the model goes to every
# front end, and its name into every metric.
_MAX_NAME_BYTES: Final = 256
_MAX_MODEL_BYTES: Final = 64 << 10
# Of a packed list of numbers; columns are bytes.
_MAX_LIST_BYTES: Final = 4096


# --- from a worker -------------------------------------------------------------------------------------------------


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
    _check_name(model.name, "the model's name")
    _check_name(model.tokenizer_digest, "the tokenizer's digest")
    if model.ByteSize() > _MAX_MODEL_BYTES:
        raise WorkerProtocolError(
            f"its description of the model has {model.ByteSize()} bytes, at most {_MAX_MODEL_BYTES} are taken"
        )
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
        description=" ".join(
            part[:_MAX_KIND_CHARS] for part in (message.runner, message.device, message.dtype) if part
        ),
        host=_host(message.host),
    )


def _check_name(name: str, what: str) -> None:
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise WorkerProtocolError(f"{what} has more than {_MAX_NAME_BYTES} bytes")


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
        error = f"{kind.removeprefix('STEP_ERROR_KIND_').lower()} error: {message.error.message[:_MAX_ERROR_CHARS]}"
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
    _check_name(message.chunk.file_name, "the file name of a piece of the tokenizer")
    return TokenizerPiece(message.chunk.file_name, message.chunk.data)


def _parse(message: ProtoMessage, data: bytes) -> None:
    try:
        check_num_fields(data, cast(Descriptor, message.DESCRIPTOR), max_list_bytes=_MAX_LIST_BYTES)
        message.ParseFromString(data)
    except DecodeError as error:
        raise WorkerProtocolError(f"not a {message.DESCRIPTOR.name}: {error}") from None


# --- to a worker ---------------------------------------------------------------------------------------------------


def encode_open(
    *,
    scheduler_incarnation: int,
    term: int,
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
        term=term,
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
