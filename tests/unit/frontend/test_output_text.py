from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.frontend.calls import Delta
from scheduler_svc.frontend.output_text import OutputAssembler
from scheduler_svc.frontend.stops import StopMatcher
from scheduler_svc.frontend.text import ByteDecoder
from tests.unit.frontend.test_stops import first_stop

WORDS = "삼겹살 🙂 é naïve"

# A vocabulary made for one test: the ids are the places of these byte strings; "special" ones have no bytes.
Vocabulary = Sequence[bytes]


def assembler(
    vocabulary: Vocabulary, stops: list[str] | None = None, stop_ids: Sequence[int] = (), min_tokens: int = 0
) -> OutputAssembler:
    return OutputAssembler(
        ByteDecoder(lambda token_id: vocabulary[token_id]),
        StopMatcher(stops) if stops else None,
        stop_ids=frozenset(stop_ids),
        min_tokens=min_tokens,
    )


def complete_text(data: bytes) -> str:
    """What is documented for the end of an output: a character that never became complete has no text."""
    return data.decode("utf-8", errors="ignore")


def stream(output: OutputAssembler, frames: Sequence[Sequence[int]], stop_token_id: int | None = None) -> list[Delta]:
    deltas = [output.push(frame) for frame in frames]
    deltas.append(output.finish(stop_token_id))
    return [delta for delta in deltas if delta is not None]


def all_splits(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def joined(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def joined_ids(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("size", range(1, 8))
def test_f69_no_delta_ends_within_a_character_at_any_split_and_any_cut(size: int) -> None:
    vocabulary = all_splits(WORDS.encode(), size)
    for length in range(1, len(vocabulary) + 1):
        deltas = stream(assembler(vocabulary), [[token_id] for token_id in range(length)])
        assert joined(deltas) == complete_text(b"".join(vocabulary[:length]))
        assert "\ufffd" not in joined(deltas)
        assert joined_ids(deltas) == list(range(length))
        together = stream(assembler(vocabulary), [list(range(length))])
        assert joined(together) == joined(deltas)


@given(st.data())
def test_ids_and_text_of_every_delta_match(data: st.DataObject) -> None:
    vocabulary = data.draw(st.lists(st.binary(min_size=0, max_size=4), min_size=1, max_size=12))
    text_stops = data.draw(st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=3))
    output = assembler(vocabulary, text_stops)
    sent = b""
    for token_id in range(len(vocabulary)):
        delta = output.push([token_id])
        if output.stop_string is not None:
            break
        if delta is not None:
            assert delta.token_ids
            data_of_delta = b"".join(vocabulary[token] for token in delta.token_ids)
            sent += data_of_delta
            # Neither waits for the other: what was sent decodes to what was sent.
            assert delta.text == data_of_delta.decode("utf-8", errors="replace")
    assert b"".join(vocabulary).startswith(sent)


@given(st.lists(st.binary(min_size=0, max_size=4), max_size=12))
@example([b"\xed\xa0"])
@example([b"\xf0\x9f", b"\x99\x82", b"\xf0\x9f", b"a"])
def test_invalid_bytes_appear_as_in_decoding_everything_at_once(vocabulary: list[bytes]) -> None:
    deltas = stream(assembler(vocabulary), [[token_id] for token_id in range(len(vocabulary))])
    everything = b"".join(vocabulary)
    whole = everything.decode("utf-8", errors="replace")
    # Apart from the documented tail, which a decoder that sees the end shows as U+FFFD.
    assert whole.startswith(joined(deltas))
    assert whole[len(joined(deltas)) :] in ("", "\ufffd", "\ufffd\ufffd")
    assert joined_ids(deltas) == list(range(len(vocabulary)))


@given(
    st.text("abAB é삼🙂", max_size=20),
    st.lists(st.integers(0, 60), max_size=12),
    st.lists(st.text("abAB é삼🙂", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(0, 4),
)
def test_f70_the_stream_equals_a_look_at_everything_at_once(
    text: str, token_cuts: list[int], stops: list[str], frame_cuts: list[int], min_tokens: int
) -> None:
    data = text.encode()
    edges = [0, *sorted({min(cut, len(data)) for cut in token_cuts}), len(data)]
    vocabulary = [data[start:end] for start, end in itertools.pairwise(edges) if start < end]
    frames = [0, *sorted({min(cut, len(vocabulary)) for cut in frame_cuts}), len(vocabulary)]
    output = assembler(vocabulary, stops, min_tokens=min_tokens)
    deltas = []
    for start, end in itertools.pairwise(frames):
        delta = output.push(range(start, end))
        deltas += [delta] if delta is not None else []
        # Nothing was sent that is not before the stop string.
        assert expected_text(vocabulary, stops, min_tokens).startswith(joined(deltas))
    rest = output.finish(None)
    deltas += [rest] if rest is not None else []
    assert joined(deltas) == expected_text(vocabulary, stops, min_tokens)
    assert output.num_tokens == expected_num_tokens(vocabulary, stops, min_tokens)
    assert joined_ids(deltas) == list(range(len(joined_ids(deltas))))
    delivered = b"".join(vocabulary[token_id] for token_id in joined_ids(deltas))
    assert complete_text(delivered).startswith(joined(deltas))


def expected_stop(vocabulary: Vocabulary, stops: list[str], min_tokens: int) -> tuple[int, int] | None:
    """(start in characters, tokens billed): the first stop string completed by a token with index >= min_tokens."""
    for num_tokens in range(min_tokens + 1, len(vocabulary) + 1):
        before = complete_text(b"".join(vocabulary[: num_tokens - 1]))
        text = complete_text(b"".join(vocabulary[:num_tokens]))
        found = [
            (start + len(stop), -len(stop))
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if found:
            end, minus_length = min(found)
            return end + minus_length, num_tokens
    return None


def expected_text(vocabulary: Vocabulary, stops: list[str], min_tokens: int) -> str:
    text = complete_text(b"".join(vocabulary))
    stop = expected_stop(vocabulary, stops, min_tokens)
    if min_tokens == 0:
        found = first_stop(text, stops)
        assert (None if stop is None else stop[0]) == (None if found is None else found.start)
    return text if stop is None else text[: stop[0]]


def expected_num_tokens(vocabulary: Vocabulary, stops: list[str], min_tokens: int) -> int:
    stop = expected_stop(vocabulary, stops, min_tokens)
    return len(vocabulary) if stop is None else stop[1]


def test_a_stop_string_over_three_tokens_never_leaks() -> None:
    output = assembler([b"abc", b"DEF", b"G", b"HI", b"Jxyz", b"more"], ["DEFGHIJ"])
    assert output.push([0]) == Delta("abc", (0,))
    assert [output.push([token_id]) for token_id in (1, 2, 3)] == [None, None, None]
    assert output.push([4, 5]) is None
    assert (output.stop_string, output.num_tokens) == ("DEFGHIJ", 5)
    assert output.push([5]) is None
    assert output.finish(None) is None
    assert output.num_tokens == 5


def test_a_token_that_reaches_into_the_stop_string_is_delivered_with_the_part_before_it() -> None:
    output = assembler([b"one ", b"two ST", b"OP three"], ["STOP"])
    assert output.push([0, 1]) == Delta("one ", (0,))
    assert output.push([2]) == Delta("two ", (1,))
    assert output.num_tokens == 3


def test_a_token_with_nothing_but_bytes_of_the_stop_string_is_not_delivered() -> None:
    syllable = "삼".encode()
    output = assembler([b"ab" + syllable[:1], syllable[1:] + b"X"], ["삼X"])
    assert output.push([0]) is None
    assert output.push([1]) == Delta("ab", (0,))
    assert output.num_tokens == 2


def test_what_only_looked_like_a_stop_string_comes_at_the_end() -> None:
    output = assembler([b"abc", b"DE"], ["DEFG"])
    assert stream(output, [[0, 1]]) == [Delta("abc", (0,)), Delta("DE", (1,))]


def test_a_stop_id_is_counted_and_neither_it_nor_its_text_is_delivered() -> None:
    output = assembler([b"abc", b"END", b"after"], stop_ids=[1])
    assert stream(output, [[0, 1, 2]], stop_token_id=1) == [Delta("abc", (0,))]
    assert (output.num_tokens, output.stop_token_id) == (2, 1)


def test_a_stop_id_flushes_what_was_held_for_a_stop_string() -> None:
    output = assembler([b"abST", b"END"], ["STOP"], stop_ids=[1])
    assert stream(output, [[0], [1]], stop_token_id=1) == [Delta("abST", (0,))]


def test_f24_a_stop_id_before_min_tokens_is_a_token_like_any_other() -> None:
    output = assembler([b"abc", b"END"], stop_ids=[1], min_tokens=2)
    assert stream(output, [[1, 0, 1]], stop_token_id=1) == [Delta("ENDabc", (1, 0))]
    assert output.num_tokens == 3


def test_a_stop_id_that_did_not_end_the_request_is_delivered_after_all() -> None:
    output = assembler([b"abc", b"END"], stop_ids=[1])
    assert stream(output, [[0, 1]], stop_token_id=None) == [Delta("abc", (0,)), Delta("END", (1,))]
    assert output.num_tokens == 2


def test_without_a_tokenizer_deltas_carry_ids() -> None:
    output = OutputAssembler(None, stop_ids=frozenset([9]))
    assert output.push([4, 5]) == Delta("", (4, 5))
    assert output.push([9]) is None


def test_special_tokens_are_delivered_without_text() -> None:
    assert stream(assembler([b"a", b"", b"b"]), [[0], [1], [2]]) == [
        Delta("a", (0,)),
        Delta("", (1,)),
        Delta("b", (2,)),
    ]
