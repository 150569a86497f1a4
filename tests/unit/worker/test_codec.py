"""Messages become steps or are refused; nothing else ever happens."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfence.v1 import sampling_pb2, step_pb2, worker_service_pb2
from tests.support.scheduler_double import column, new_request
from tests.unit.worker.builders import capabilities, geometry, ints
from worker_svc import codec
from worker_svc.errors import ContractError, MalformedOpen, MalformedStep, StepRefused
from worker_svc.ledger import Ledger
from worker_svc.limits import MAX_DROPPED_IDS, MAX_MASKED_IDS
from worker_svc.step import FailureKind, StepAnswer, StepOutput

_VOCAB = 260


def _message() -> step_pb2.SchedulerOutput:
    return step_pb2.SchedulerOutput(
        epoch=3,
        step_seq=7,
        fence_seq=5,
        processed_step_seq=4,
        new_requests=[
            new_request(
                "a",
                2,
                [1, 2, 3, 4, 5],
                [9, 8],
                num_computed=4,
                num_prompt=3,
                sampling=sampling_pb2.ResolvedSampling(
                    temperature=0.5,
                    top_p=0.25,
                    top_k=-1,
                    min_p=0.125,
                    min_tokens=6,
                    seed=2**64 - 1,
                    eos_token_ids=[257, 2],
                    stop_token_ids=[65, 2, 4_000_000_000],
                ),
            )
        ],
        rows=column([2, 0]),
        num_tokens=column([1, 3]),
        appended_rows=column([0]),
        appended_blocks=column([12]),
        preempted_request_ids=["p"],
        finished_request_ids=["f", "g"],
        num_drafts=column([0, 2]),
        draft_token_ids=column([65, 66]),
    )


def test_a_step_arrives_as_it_was_sent() -> None:
    step = codec.decode_step(_message(), _VOCAB)
    assert (step.epoch, step.step_seq, step.fence_seq, step.processed_step_seq) == (3, 7, 5, 4)
    assert step.dropped_ids == ("p", "f", "g")
    assert step.rows.tolist() == [2, 0] and step.num_tokens.tolist() == [1, 3]
    assert step.appended_rows.tolist() == [0] and step.appended_blocks.tolist() == [12]
    assert step.num_drafts.tolist() == [0, 2] and step.draft_token_ids.tolist() == [65, 66]
    (request,) = step.added
    assert (request.request_id, request.row) == ("a", 2)
    assert request.token_ids.tolist() == [1, 2, 3, 4, 5] and request.block_table.tolist() == [9, 8]
    assert (request.num_computed_tokens, request.num_prompt_tokens) == (4, 3)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert (sampling.top_k, sampling.min_tokens, sampling.seed) == (0, 6, 2**64 - 1)


def test_ids_that_cannot_be_sampled_need_no_mask() -> None:
    """A client may name any stop id; the largest of them must not reach an index."""
    (request,) = codec.decode_step(_message(), _VOCAB).added
    assert request.sampling.masked_token_ids == (2, 65, 257)


def test_columns_are_int32_whatever_they_are_read_from() -> None:
    step = codec.decode_step(_message(), _VOCAB)
    for name in ("rows", "num_tokens", "num_drafts", "draft_token_ids", "appended_rows", "appended_blocks"):
        assert getattr(step, name).dtype == np.int32


@pytest.mark.parametrize("name", ["rows", "num_tokens", "appended_rows", "appended_blocks", "num_drafts"])
@pytest.mark.parametrize("data", [b"\1", b"\1\0\0\0\0", column([-5]), column([1, 1, 1])])
def test_a_broken_column_is_named(name: str, data: bytes) -> None:
    message = _message()
    setattr(message, name, data)
    with pytest.raises(MalformedStep, match=name):
        codec.decode_step(message, _VOCAB)


def test_answers_say_what_was_sampled_or_what_failed() -> None:
    output = StepOutput(sampled_token_ids=ints([5, 6, 7]), sampled_counts=ints([1, 0, 2]), num_rows_held=4)
    answer = StepAnswer(epoch=2, step_seq=9, output=output, staged_us=11, executed_us=22)
    result = codec.encode_answer(answer).result
    assert (result.epoch, result.step_seq, result.num_rows_held) == (2, 9, 4)
    assert (result.staged_us, result.executed_us) == (11, 22)
    assert result.sampled_token_ids == column([5, 6, 7]) and result.sampled_counts == column([1, 0, 2])
    assert not result.HasField("error")

    failed = StepAnswer(epoch=2, step_seq=9, failure=FailureKind.DEVICE, message="ECC")
    result = codec.encode_answer(failed).result
    assert (result.error.kind, result.error.message) == (step_pb2.STEP_ERROR_KIND_DEVICE, "ECC")
    assert not result.sampled_token_ids


def test_generation_defaults_that_the_model_does_not_state_stay_unset() -> None:
    encoded = codec.encode_capabilities(capabilities(), 5, ()).model
    assert not encoded.generation_defaults.HasField("temperature")
    assert encoded.tokenizer_digest == ""


def test_a_large_tokenizer_travels_in_pieces_and_an_empty_file_is_kept() -> None:
    files = (("tokenizer.json", bytes(2 * 1024 * 1024 + 5)), ("empty.json", b""))
    chunks = [response.chunk for response in codec.tokenizer_chunks(files)]
    assert [(chunk.file_name, len(chunk.data)) for chunk in chunks] == [
        ("tokenizer.json", 1024 * 1024),
        ("tokenizer.json", 1024 * 1024),
        ("tokenizer.json", 5),
        ("empty.json", 0),
    ]


# --- anything at all --------------------------------------------------------------------------------------------------

_COLUMN = st.one_of(
    st.binary(max_size=12),
    st.lists(st.integers(-2, 9), max_size=4).map(column),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(column),
)
_UINT32 = st.one_of(st.integers(0, 8), st.integers(0, 2**32 - 1))
_UINT64 = st.one_of(st.integers(0, 4), st.integers(0, 2**64 - 1))
_FLOAT = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0]))
_SAMPLING = st.builds(
    sampling_pb2.ResolvedSampling,
    temperature=_FLOAT,
    top_p=_FLOAT,
    top_k=st.integers(-(2**31), 2**31 - 1),
    min_p=_FLOAT,
    min_tokens=_UINT32,
    seed=_UINT64,
    eos_token_ids=st.lists(_UINT32, max_size=3),
    stop_token_ids=st.lists(_UINT32, max_size=3),
)
_GOOD_SAMPLING = st.just(sampling_pb2.ResolvedSampling(top_p=1.0))
_IDS = st.one_of(st.sampled_from(["a", "b", "c"]), st.text(max_size=5))
_REQUEST = st.builds(
    step_pb2.NewRequest,
    request_id=_IDS,
    row=_UINT32,
    token_ids=_COLUMN,
    block_table=_COLUMN,
    num_computed_tokens=_UINT32,
    num_prompt_tokens=_UINT32,
    sampling=st.one_of(_GOOD_SAMPLING, _SAMPLING),
)
_STEP = st.builds(
    step_pb2.SchedulerOutput,
    epoch=_UINT64,
    step_seq=_UINT64,
    fence_seq=_UINT64,
    processed_step_seq=_UINT64,
    new_requests=st.lists(_REQUEST, max_size=3),
    rows=_COLUMN,
    num_tokens=_COLUMN,
    appended_rows=_COLUMN,
    appended_blocks=_COLUMN,
    preempted_request_ids=st.lists(_IDS, max_size=2),
    finished_request_ids=st.lists(_IDS, max_size=2),
    num_drafts=_COLUMN,
    draft_token_ids=_COLUMN,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_STEP, min_size=1, max_size=3))
def test_any_step_is_taken_or_refused_by_codec_and_ledger(messages: list[step_pb2.SchedulerOutput]) -> None:
    ledger = Ledger(geometry(), 10, capabilities())
    for message in messages:
        try:
            ledger.apply(codec.decode_step(message, _VOCAB))
        except (MalformedStep, StepRefused):
            return
        assert 0 <= ledger.num_rows_held <= 8


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_step_or_are_refused(data: bytes) -> None:
    try:
        message = step_pb2.SchedulerOutput.FromString(data)
    except DecodeError:
        return
    with contextlib.suppress(MalformedStep):
        assert codec.decode_step(message, _VOCAB).step_seq == message.step_seq


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        worker_service_pb2.Open,
        scheduler_incarnation=_UINT64,
        epoch=_UINT64,
        protocol_revision=_UINT32,
        block_size=_UINT32,
        num_rows=_UINT32,
        max_num_batched_tokens=_UINT32,
        max_model_len=_UINT32,
        max_inflight_steps=_UINT32,
    )
)
def test_any_open_is_within_the_limits_or_refused(message: worker_service_pb2.Open) -> None:
    with contextlib.suppress(MalformedOpen):
        _, epoch, opened = codec.decode_open(message)
        codec.check_geometry(opened, capabilities())
        assert epoch >= 1 and opened.max_model_len <= capabilities().max_model_len


def test_every_refusal_travels_as_error_info() -> None:
    from google.rpc import error_details_pb2, status_pb2

    error: ContractError = StepRefused("ROW_TAKEN", "🙂" * 5000)
    ((key, value),) = error.trailing_metadata()
    status = status_pb2.Status.FromString(value)
    info = error_details_pb2.ErrorInfo()
    assert key == "grpc-status-details-bin" and status.details[0].Unpack(info)
    assert (info.reason, info.domain, status.code) == ("ROW_TAKEN", "stepfence", 9)
    assert 390 < len(error.message.encode()) <= 400 and len(value) < 2000


def test_f118_lists_of_a_step_are_bounded_before_they_are_copied() -> None:
    step = step_pb2.SchedulerOutput(epoch=1, step_seq=1)
    step.finished_request_ids.extend([""] * (MAX_DROPPED_IDS + 1))
    with pytest.raises(MalformedStep, match="preempted and finished"):
        codec.decode_step(step, _VOCAB)
    step = step_pb2.SchedulerOutput(epoch=1, step_seq=1)
    added = step.new_requests.add(request_id="r", token_ids=bytes(4), num_prompt_tokens=1)
    added.sampling.top_p = 1
    added.sampling.stop_token_ids.extend([1] * (MAX_MASKED_IDS + 1))
    with pytest.raises(MalformedStep, match="stop ids"):
        codec.decode_step(step, _VOCAB)
