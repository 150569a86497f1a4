"""scheduler encode -> bytes -> worker decode, and the bounds on the size of a message."""

from __future__ import annotations

from array import array
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.events import WorkerProtocolError
from scheduler_svc.core.output import DeferredFree, NewRow, SchedulerOutput
from scheduler_svc.core.step_bytes import columns_bytes, largest_row_bytes, row_bytes
from scheduler_svc.rpc import wire
from scheduler_svc.workers import codec as workers_codec
from stepfence.v1 import sampling_pb2, step_pb2, worker_service_pb2
from worker_svc import codec as worker_codec
from worker_svc.runner.scripted import ScriptedRunner

VOCAB = 1000
ids = st.integers(0, VOCAB - 1)


@st.composite
def new_rows(draw: st.DrawFn, row: int, block_size: int = 4) -> NewRow:
    tokens = draw(st.lists(ids, min_size=1, max_size=40))
    num_computed = draw(st.integers(0, (len(tokens) - 1) // block_size)) * block_size
    sampling = sampling_pb2.ResolvedSampling(
        temperature=draw(st.sampled_from([0.0, 0.5])), top_p=1.0, seed=draw(st.integers(0, 2**64 - 1))
    )
    return NewRow(
        request_id=f"r{row}-" + draw(st.text(max_size=8)),
        row=row,
        token_ids=array("i", tokens),
        block_table=array("i", range(1, 2 + len(tokens) // block_size)),
        num_computed_tokens=num_computed,
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        sampling=sampling.SerializeToString(),
    )


@st.composite
def outputs(draw: st.DrawFn) -> SchedulerOutput:
    num_new = draw(st.integers(0, 6))
    rows = [draw(new_rows(row)) for row in range(num_new)]
    # At least one step before it, so that frames sent ahead have a fence to stand on.
    return SchedulerOutput(
        rank="rank",
        epoch=draw(st.integers(1, 9)),
        step_seq=17,
        fence_seq=draw(st.integers(2, 99)),
        processed_step_seq=15,
        new_requests=tuple(rows),
        rows=array("i", range(num_new)),
        num_tokens=array("i", [len(row.token_ids) - row.num_computed_tokens for row in rows]),
        appended_rows=array("i", [20, 21]),
        appended_blocks=array("i", [7, 8]),
        preempted_request_ids=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=3))),
        finished_request_ids=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=3))),
        deferred_frees=(DeferredFree(3, "gone", (4, 5), "aborted"),),
        num_drafts=None,
        draft_token_ids=array("i"),
        total_num_tokens=sum(len(row.token_ids) - row.num_computed_tokens for row in rows),
    )


def _step(frame: bytes) -> step_pb2.SchedulerOutput:
    return worker_service_pb2.RunStepsRequest.FromString(frame).step


@given(outputs())
@settings(max_examples=100, deadline=None)
def test_what_the_scheduler_encodes_the_worker_decodes(output: SchedulerOutput) -> None:
    message = _step(workers_codec.encode_step(output, 1 << 24))
    step = worker_codec.decode_step(message, VOCAB)
    assert (step.epoch, step.step_seq, step.fence_seq) == (output.epoch, output.step_seq, output.fence_seq)
    assert step.processed_step_seq == output.processed_step_seq
    assert step.rows.tolist() == output.rows.tolist()
    assert step.num_tokens.tolist() == output.num_tokens.tolist()
    assert step.appended_blocks.tolist() == output.appended_blocks.tolist()
    assert set(step.dropped_ids) == {*output.preempted_request_ids, *output.finished_request_ids}
    for mine, theirs in zip(output.new_requests, step.added, strict=True):
        assert (mine.request_id, mine.row) == (theirs.request_id, theirs.row)
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.block_table.tolist() == theirs.block_table.tolist()
        assert mine.num_computed_tokens == theirs.num_computed_tokens
        assert mine.num_prompt_tokens == theirs.num_prompt_tokens
        assert sampling_pb2.ResolvedSampling.FromString(mine.sampling).seed == theirs.sampling.seed
    (free,) = message.deferred_frees
    assert (free.fence_seq, free.request_id, free.reason) == (3, "gone", step_pb2.FREE_REASON_ABORTED)


@given(outputs(), st.integers(0, 600))
@settings(max_examples=200, deadline=None)
def test_a_step_takes_no_more_bytes_than_the_core_counts(output: SchedulerOutput, room: int) -> None:
    """Columns and dropped ids as for a full step, and each new request by its own; frees that have no room stay out."""
    num_rows = max(len(output.rows), len(output.preempted_request_ids) + len(output.finished_request_ids))
    entries = sum(
        row_bytes(len(row.token_ids), len(row.block_table), row.request_id, row.sampling) for row in output.new_requests
    )
    limit = columns_bytes(num_rows, max(output.total_num_tokens, len(output.appended_rows))) + entries
    assert all(
        row_bytes(len(row.token_ids), len(row.block_table), row.request_id, row.sampling) <= largest_row_bytes(64, 4)
        for row in output.new_requests
    )
    frame = workers_codec.encode_step(output, limit + room)
    assert len(frame) <= limit + room
    assert len(_step(frame).new_requests) == len(output.new_requests)


def test_the_bound_of_a_step_holds_for_blocks_of_one_token_and_as_many_drafts_as_possible() -> None:
    num_rows, num_tokens = 128, 2048
    ids = tuple("x" * 252 + f"{index:04d}" for index in range(num_rows))
    output = SchedulerOutput(
        rank="r0",
        epoch=1 << 60,
        step_seq=1 << 40,
        fence_seq=1 << 40,
        processed_step_seq=1 << 40,
        new_requests=(),
        rows=array("i", range(num_rows)),
        num_tokens=array("i", [num_tokens // num_rows] * num_rows),
        appended_rows=array("i", [row for row in range(num_rows) for _ in range(num_tokens // num_rows)]),
        appended_blocks=array("i", range(num_tokens)),
        preempted_request_ids=(),
        finished_request_ids=ids,
        deferred_frees=(),
        num_drafts=array("i", [num_tokens // num_rows - 1] * num_rows),
        draft_token_ids=array("i", [99] * (num_tokens - num_rows)),
        total_num_tokens=num_tokens,
    )
    assert len(workers_codec.encode_step(output, 1 << 24)) <= columns_bytes(num_rows, num_tokens)


def test_what_is_no_message_is_a_breach_of_the_protocol() -> None:
    with pytest.raises(WorkerProtocolError):
        workers_codec.decode_worker_frame(b"\xff\xff\xff")
    with pytest.raises(WorkerProtocolError):
        workers_codec.decode_worker_frame(b"")
    with pytest.raises(WorkerProtocolError):
        workers_codec.decode_capabilities(b"\x08")


def _host_after_the_journey(told: str) -> str:
    message = worker_codec.encode_capabilities(ScriptedRunner().capabilities, 1, (), told)
    return workers_codec.decode_capabilities(message.SerializeToString()).host


def _host_told(host: str) -> str:
    message = worker_service_pb2.GetCapabilitiesResponse(host=host)
    return workers_codec.decode_capabilities(message.SerializeToString()).host


def test_a_worker_tells_its_host_name() -> None:
    assert _host_after_the_journey("0123456789ab") == "0123456789ab"
    assert _host_after_the_journey("h" * 253) == "h" * 253
    # An older worker tells none.
    assert workers_codec.decode_capabilities(b"").host == ""


@pytest.mark.parametrize("name", ["h" * 254, "a\nb", "\x1b[2J", "a\u202eb", "\udcff"])
def test_a_name_that_no_host_should_have_is_not_told(name: str) -> None:
    assert _host_after_the_journey(name) == ""


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_whatever_a_foreign_worker_calls_its_host_is_short_and_printable_or_ignored(name: str) -> None:
    host = _host_told(name)
    assert host == (name if len(name) <= 253 and name.isprintable() else "")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_from_a_worker_are_a_frame_or_a_breach(data: bytes) -> None:
    for decode in (
        workers_codec.decode_worker_frame,
        workers_codec.decode_capabilities,
        workers_codec.decode_tokenizer_piece,
    ):
        with suppress(WorkerProtocolError):
            decode(data)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
@settings(max_examples=50, deadline=None)
def test_columns_are_little_endian_int32(values: list[int]) -> None:
    data = wire.pack(array("i", values))
    assert data == b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert wire.unpack(data).tolist() == values
