"""Output text is what the output adds to the text of the prompt, wherever the prompt ends."""

from __future__ import annotations

from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.text import ByteTokenizer, Tokenizer, load_tokenizer
from tests.unit.frontend.tokenizer_files import byte_level_json, files, metaspace_json

_SOURCES = {"byte-level": byte_level_json, "byte fallback": metaspace_json}

# Characters of one to four bytes, and what is several characters and looks like one.
_PIECES = (
    *("a", "Hello", " ", "  ", "\n", "The quick", "▁", "12", "."),
    *("é", "ß", "e\u0301", "\u00a0", "삼", "겹", "▲", "\u200d", "\ufe0f"),
    *("😀", "🙂", "👨\u200d👩\u200d👧", "🇩🇪🇫🇷", "👍🏽", "\U0010ffff", "🏴\U000e0067\U000e007f"),
)
_TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=4), max_size=10).map("".join)


@cache
def ours(kind: str) -> Tokenizer:
    return load_tokenizer(files(_SOURCES[kind](), {}))


@cache
def library(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_buffer(_SOURCES[kind]())


def at_once(kind: str, token_ids: list[int]) -> str:
    return str(library(kind).decode(token_ids, skip_special_tokens=True))


def bytes_as_ids(data: bytes) -> list[int]:
    ids = [library("byte fallback").token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [token_id for token_id in ids if token_id is not None]


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    decoder = tokenizer.decoder(prompt)
    return [decoder.push(token_id) for token_id in output]


def added(kind: str, token_ids: list[int], num_prompt: int) -> str:
    """The text after that of the prompt, without a character that the prompt only begins."""
    whole = at_once(kind, token_ids)
    for end in range(num_prompt, -1, -1):
        known = at_once(kind, token_ids[:end])
        if kind == "byte-level":
            known = known.rstrip("\ufffd")
        if whole.startswith(known):
            return whole[len(known) :]
    raise AssertionError("the empty text is the beginning of every text")


@pytest.mark.parametrize("kind", _SOURCES)
@given(text=_TEXTS.filter(lambda text: "\ufffd" not in text))
def test_f90_the_text_is_what_decoding_prompt_and_output_at_once_adds(kind: str, text: str) -> None:
    token_ids = ours(kind).encode_text(text)
    for num_prompt in range(len(token_ids) + 1):
        parts = streamed(ours(kind), token_ids[:num_prompt], token_ids[num_prompt:])
        assert "".join(parts) == added(kind, token_ids, num_prompt), num_prompt
        # And no later than the token that completes a character.
        for end in range(num_prompt, len(token_ids) + 1):
            if "\ufffd" not in at_once(kind, token_ids[:num_prompt]) + at_once(kind, token_ids[:end]):
                assert "".join(parts[: end - num_prompt]) == added(kind, token_ids[:end], num_prompt)


@pytest.mark.parametrize("kind", _SOURCES)
@given(prompt=_TEXTS, output=_TEXTS)
def test_f90_a_prompt_and_an_answer_that_are_texts_of_their_own(kind: str, prompt: str, output: str) -> None:
    prompt_ids = ours(kind).encode_text(prompt)
    output_ids = [i for i in ours(kind).encode_text(output) if kind == "byte-level" or i != 1]
    text = "".join(streamed(ours(kind), prompt_ids, output_ids))
    assert text == at_once(kind, prompt_ids + output_ids)[len(at_once(kind, prompt_ids)) :]


@pytest.mark.parametrize("kind", _SOURCES)
def test_f90_the_field_case(kind: str) -> None:
    tokenizer = ours(kind)
    token_ids = tokenizer.encode_text("Hello 😀😀\nHello")
    num_prompt = len(tokenizer.encode_text("Hello 😀😀"))
    assert "".join(streamed(tokenizer, token_ids[:num_prompt], token_ids[num_prompt:])) == "\nHello"


def test_f90_a_replacement_character_in_a_text_is_text_at_once() -> None:
    byte_ids = bytes_as_ids("\ufffd".encode())
    decoder = ours("byte fallback").decoder([])
    assert [decoder.push(token_id) for token_id in byte_ids] == ["", "", "\ufffd"]
    assert not decoder.pending


@pytest.mark.parametrize("kind", _SOURCES)
def test_f90_the_output_may_complete_a_character_of_the_prompt_or_not(kind: str) -> None:
    tokenizer = ours(kind)
    token_ids = tokenizer.encode_text("삼👾")
    assert "".join(streamed(tokenizer, token_ids[:-1], token_ids[-1:])) == "👾"
    assert "".join(streamed(tokenizer, token_ids[:-2], token_ids[-2:])) == "👾"
    # The prompt's own rest is no part of the answer.
    (letter,) = tokenizer.encode_text("a")[-1:]
    assert "".join(streamed(tokenizer, token_ids[:-2], [letter])).strip() == "a"


def test_f90_bytes_that_are_no_text_are_replaced_and_text_goes_on() -> None:
    (word,) = ours("byte fallback").encode_text("The")[1:2]
    tokenizer = ours("byte fallback")
    for data, expected in (
        (b"\xff", "\ufffd"),
        ("😀".encode() + b"\xff", "😀\ufffd"),
        (b"\xf0\x9f", "\ufffd"),
        (b"\x80" + "é".encode(), "\ufffdé"),
        (b"\xf0\x9f" + "😀".encode(), "\ufffd😀"),
    ):
        first = streamed(tokenizer, [], [word])[0]
        assert "".join(streamed(tokenizer, [], [*bytes_as_ids(data), word])) == f"{expected} {first}", data


def test_f90_the_scripted_vocabulary_too() -> None:
    tokenizer = ByteTokenizer({})
    assert "".join(streamed(tokenizer, list("a é".encode())[:-1], [0xA9, 0x21])) == "é!"
    assert "".join(streamed(tokenizer, [0x61, 0xC3], [0x21])) == "!"


def test_f90_special_tokens_at_the_end_of_a_prompt_change_nothing() -> None:
    tokenizer = ours("byte fallback")
    prompt = tokenizer.encode_text("Hello 😀")
    (word, *_) = tokenizer.encode_text("brown")[1:]
    for num_special in (0, 1, 63, 64, 65, 1000):
        assert streamed(tokenizer, [*prompt, *[2] * num_special], [word])[0].startswith(" "), num_special


# Letters that stand for bytes in such a vocabulary; "õ" and "ÿ" alone are entries of it already, of bytes that no text
# has.
_ADDED = ("õ", "café", "đem", "Ċx", "삼", "plain", "two words", "ÿ", "¡hola")


@cache
def _added_tokens() -> tuple[Tokenizer, dict[str, int]]:
    tokenizer = tokenizers.Tokenizer.from_buffer(byte_level_json())
    tokenizer.add_tokens([tokenizers.AddedToken(content, normalized=False) for content in _ADDED])
    ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return load_tokenizer(files(tokenizer.to_str().encode(), {})), ids


@pytest.mark.parametrize("content", _ADDED)
def test_f106_added_tokens_are_written_in_utf8(content: str) -> None:
    tokenizer, ids = _added_tokens()
    assert streamed(tokenizer, [], [ids[content]]) == [content]
    encoded = tokenizer.encode_text(f"a{content}b")
    assert ids[content] in encoded
    assert "".join(streamed(tokenizer, [], encoded)) == f"a{content}b"


@given(st.lists(st.sampled_from([*_ADDED, "a", "é", "😀", " "]), max_size=8).map("".join))
def test_f106_a_text_with_added_tokens_comes_back(text: str) -> None:
    tokenizer, _ = _added_tokens()
    assert "".join(streamed(tokenizer, [], tokenizer.encode_text(text))) == text
