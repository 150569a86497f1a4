"""No text has fewer tokens than its size says, and nothing is said where a tokenizer loses text."""

from __future__ import annotations

import json
import sys
import unicodedata
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.template_process import Piece
from scheduler_svc.frontend.text import ByteTokenizer, Tokenizer, load_tokenizer
from tests.unit.frontend.tokenizer_files import byte_level_json, files, metaspace_json

_NFC = {"type": "NFC"}
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}


def changed(source: bytes, **parts: Any) -> bytes:
    return json.dumps({**json.loads(source), **parts}).encode()


def with_added(source: bytes, *contents: str, **flags: bool) -> bytes:
    tokenizer = tokenizers.Tokenizer.from_buffer(source)
    tokenizer.add_tokens([tokenizers.AddedToken(content, **flags) for content in contents])
    return tokenizer.to_str().encode()


def in_sequence(source: bytes, **step: Any) -> bytes:
    """With one more pre-tokenizer at the beginning."""
    others = json.loads(source)["pre_tokenizer"]
    return changed(source, pre_tokenizer={"type": "Sequence", "pretokenizers": [step, others]})


def metaspace_without_normalizer() -> bytes:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return changed(metaspace_json(), normalizer=None, pre_tokenizer=step)


_KNOWN = {
    "byte-level": byte_level_json(),
    "byte fallback": metaspace_json(),
    "metaspace": metaspace_without_normalizer(),
    "composed": changed(byte_level_json(), normalizer=_NFC),
    "long added tokens": with_added(byte_level_json(), "é" * 40, "e\u0301" * 40),
    "long added tokens, composed": with_added(changed(byte_level_json(), normalizer=_NFC), "é" * 40, "e\u0301" * 40),
    "long special tokens": with_added(byte_level_json(), "삼" * 40, special=True),
    "split": in_sequence(
        byte_level_json(), type="Split", pattern={"Regex": "\\s+"}, behavior="Isolated", invert=False
    ),
}  # fmt: skip

_TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(
            ["é" * 40, "e\u0301" * 40, "삼" * 40, "<|im_end|>", " " * 30, "the capital", "\u1112\u1161\u11ab", "\u212a",
             "\u03b1\u0313\u0300\u0345", "😀", "naïve kitten"]
        ),
        max_size=5,
    ).map("".join),
)  # fmt: skip


@cache
def loaded(kind: str) -> Tokenizer:
    return load_tokenizer(files(_KNOWN[kind], {}))


@pytest.mark.parametrize("kind", _KNOWN)
@given(text=_TEXTS)
def test_f97_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    tokenizer = loaded(kind)
    num_bytes = len(text.encode())
    assert len(tokenizer.encode_text(text)) >= tokenizer.fewest_tokens(num_bytes, is_chat=False)
    for plain in (False, True):
        token_ids = tokenizer.encode_pieces([Piece(text, plain=plain)])
        assert len(token_ids) >= tokenizer.fewest_tokens(num_bytes, is_chat=True)


@pytest.mark.parametrize("kind", _KNOWN)
def test_f97_something_is_known(kind: str) -> None:
    for is_chat in (False, True):
        assert loaded(kind).fewest_tokens(1 << 20, is_chat=is_chat) > 1000
        assert loaded(kind).fewest_tokens(0, is_chat=is_chat) == 0


def _without(source: bytes, entry: str) -> bytes:
    description = json.loads(source)
    del description["model"]["vocab"][entry]
    description["model"]["merges"] = [pair for pair in description["model"]["merges"] if entry not in "".join(pair)]
    return json.dumps(description).encode()


_LOSING = {
    "white space is stripped": changed(
        byte_level_json(), normalizer={"type": "Strip", "strip_left": True, "strip_right": True}
    ),
    "accents are stripped": changed(byte_level_json(), normalizer={"type": "StripAccents"}),
    "in a sequence": changed(
        byte_level_json(), normalizer={"type": "Sequence", "normalizers": [_NFC, {"type": "NFKC"}]}
    ),
    "something is replaced by less": changed(
        byte_level_json(), normalizer={"type": "Replace", "pattern": {"String": "aaaa"}, "content": "a"}
    ),
    "a pattern is replaced": changed(
        byte_level_json(), normalizer={"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}
    ),
    "separators are removed": in_sequence(
        byte_level_json(), type="Split", pattern={"String": " "}, behavior="Removed", invert=False
    ),
    "white space is removed": in_sequence(byte_level_json(), type="WhitespaceSplit"),
    "white space around an added token": with_added(byte_level_json(), "xyz", lstrip=True),
    "unknown letters are one token": changed(
        byte_level_json(), model={"type": "BPE", "vocab": {"a": 0, "<unk>": 1}, "merges": [], "unk_token": "<unk>",
        "fuse_unk": True}, added_tokens=[], pre_tokenizer=None, decoder=None,
    ),
    "another model": changed(
        byte_level_json(), model={"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
        added_tokens=[],
    ),
    "a byte without a token": _without(byte_level_json(), "Ā"),
    "a byte of the fallback without a token": _without(metaspace_json(), "<0x00>"),
}  # fmt: skip


@pytest.mark.parametrize("kind", _LOSING)
def test_f97_nothing_is_known_of_a_tokenizer_that_loses_text(kind: str) -> None:
    tokenizer = load_tokenizer(files(_LOSING[kind], {}))
    assert tokenizer.fewest_tokens(1 << 30, is_chat=False) == 0
    assert tokenizer.fewest_tokens(1 << 30, is_chat=True) == 0


def test_f97_white_space_around_special_tokens_matters_in_chats_only() -> None:
    tokenizer = load_tokenizer(files(with_added(byte_level_json(), "<|x|>", special=True, rstrip=True), {}))
    assert tokenizer.fewest_tokens(1 << 20, is_chat=False) > 1000
    assert tokenizer.fewest_tokens(1 << 20, is_chat=True) == 0


def test_f97_composition_makes_text_at_most_four_times_shorter() -> None:
    longest: dict[str, int] = {}
    letters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for letter in letters:
        decomposed = unicodedata.normalize("NFD", letter)
        longest[decomposed] = max(longest.get(decomposed, 0), len(letter.encode()))
    for letter in letters:
        composed, parts = unicodedata.normalize("NFC", letter), unicodedata.normalize("NFD", letter)
        # Every part in its longest form, and the letter itself.
        written = max(len(letter.encode()), sum(longest[part] for part in parts))
        assert written <= 4 * len(composed.encode()), hex(ord(letter))


def test_f97_the_scripted_vocabulary_is_exact() -> None:
    tokenizer = ByteTokenizer({"special_tokens": {"<bos>": 256}})
    assert tokenizer.fewest_tokens(1000, is_chat=False) == 1000
    assert tokenizer.fewest_tokens(1000, is_chat=True) == 200
