"""Counting the fields of encoded messages before they are decoded."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.rpc.field_count import TooManyFields, Undecodable, check_num_fields
from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import session_service_pb2
from tests.support.wire import bytes_field, number_field, varint

_KIND = pb.GenerateRequest.DESCRIPTOR

_NUMBERS = st.builds(number_field, st.integers(1, 20), st.integers(0, 2**64 - 1))
_FIXED = st.integers(1, 20).map(lambda field: varint(field << 3 | 1) + bytes(8))
_SMALL = st.integers(1, 20).map(lambda field: varint(field << 3 | 5) + bytes(4))
_LEAVES = st.one_of(
    _NUMBERS, _FIXED, _SMALL, st.builds(bytes_field, st.sampled_from((1, 2, 7, 8, 19)), st.just(b"text"))
)
# A chat of messages, sampling parameters, and what is around them.
_MESSAGES = st.lists(
    st.one_of(
        _LEAVES,
        st.lists(st.lists(_LEAVES, max_size=4).map(lambda parts: bytes_field(1, b"".join(parts))), max_size=4).map(
            lambda parts: bytes_field(4, b"".join(parts))
        ),
        st.lists(_LEAVES, max_size=6).map(lambda parts: bytes_field(5, b"".join(parts))),
    ),
    max_size=12,
).map(b"".join)


def _is_decodable(data: bytes) -> bool:
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        return False
    return True


@given(_MESSAGES)
def test_f118_what_protobuf_takes_is_counted_to_its_end_and_the_bound_is_exact(data: bytes) -> None:
    if not _is_decodable(data) or not (num_fields := _count(data)):
        return
    # Behind a text of some length, so that the message is too long to be taken unseen.
    padded = bytes_field(1, b"x" * (2 * num_fields + 2)) + data
    check_num_fields(padded, _KIND, num_fields + 1)
    with pytest.raises(TooManyFields):
        check_num_fields(padded, _KIND, num_fields)


def _count(data: bytes) -> int:
    """The fields of a message, by asking with ever larger bounds."""
    padding = bytes_field(1, b"x" * 4096)
    for bound in range(1, 2000):
        try:
            check_num_fields(padding + data, _KIND, bound)
        except TooManyFields:
            continue
        return bound - 1
    raise AssertionError("no end")


@given(st.binary(max_size=64))
def test_f118_any_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        check_num_fields(data, _KIND, 1)
    except (TooManyFields, Undecodable):
        return


@pytest.mark.parametrize(
    "data, field",
    [
        (bytes_field(4, b"\x0a\x00" * 100), "chat.messages"),
        (bytes_field(4, bytes_field(1, b"\x0a\x00" * 100)), "chat.messages.role"),
        (bytes_field(5, b"\x42\x00" * 100), "sampling.stop"),
        (number_field(30, 1) * 100, "field 30"),
    ],
)
def test_f118_the_field_where_the_count_ends_is_named(data: bytes, field: str) -> None:
    with pytest.raises(TooManyFields) as caught:
        check_num_fields(data, _KIND, 20)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [
        bytes_field(2, b"a" * 90)[:-1],
        b"\xff" * 90,
        varint(2 << 3 | 7) + bytes(90),
        # A message within a message that is longer than the one around it.
        bytes_field(4, b"\x0a\x7f") + bytes(90),
        bytes_field(2, b"a" * 90) + b"\x80",
    ],
)
def test_f118_bytes_that_end_or_begin_wrongly_are_no_message(data: bytes) -> None:
    with pytest.raises(Undecodable):
        check_num_fields(data, _KIND, 10)


def test_f118_texts_and_packed_lists_are_one_field() -> None:
    request: Any = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100_000)), request_id="r" * 200_000)
    check_num_fields(request.SerializeToString(), _KIND, 3)


def test_f118_the_largest_frame_of_a_front_end_is_taken() -> None:
    """512 submits, cancels and ends of text each, with all that they may carry."""
    submit = session_service_pb2.Submit(handle=2**31 - 1, request_id="r" * 256, prompt_token_ids=bytes(4))
    submit.priority, submit.cache_salt = -1, "s" * 256
    submit.timeout.FromNanoseconds(10**9 + 1)
    sampling = submit.sampling
    sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p = 1, 1, 1, 1
    sampling.max_tokens, sampling.min_tokens, sampling.seed = 1, 1, 1
    sampling.eos_token_ids.extend(range(128))
    sampling.stop_token_ids.extend(range(128))
    frame = session_service_pb2.AttachRequest(
        submits=[submit] * 512,
        cancels=[session_service_pb2.Cancel(handle=1, reason=session_service_pb2.CANCEL_REASON_ABORTED)] * 512,
        text_ended=[session_service_pb2.TextEnded(handle=1, num_tokens=1)] * 512,
        num_live_streams=1,
    )
    check_num_fields(frame.SerializeToString(), frame.DESCRIPTOR)
