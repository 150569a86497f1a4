"""How few tokens a text can have, from the text's size alone.

A token of a tokenizer that loses nothing stands for at most as many bytes as the longest entry of its vocabulary has. A
tokenizer that removes white space, folds unknown letters into one token, or takes more text for a token than the
token's own loses something: then nothing is known, and nothing is refused by its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

# Canonical composition (NFC) makes text shorter, at most to a quarter: a composed letter has up to four parts, and
# singletons such as the Kelvin sign are three times as long as what replaces them.
_COMPOSITION: Final = 4
_LOSSLESS_PRE_TOKENIZERS: Final = frozenset(("ByteLevel", "Digits", "Metaspace"))
_SPLITTING_PRE_TOKENIZERS: Final = frozenset(("Split", "Punctuation"))


def max_token_bytes(description: Mapping[str, Any], alphabet: Mapping[str, int], *, special: bool) -> int | None:
    """Most bytes of UTF-8 in a text for which one token stands; None: not known. description: tokenizer.json. alphabet:
    the letters of byte-level vocabularies. special: whether special tokens act in the text."""
    model = description.get("model") or {}
    vocabulary = model.get("vocab")
    added = [token for token in description.get("added_tokens") or () if special or not token.get("special")]
    factor = _normalizer_factor(description.get("normalizer"))
    if (
        factor is None
        or model.get("type") != "BPE"
        or not isinstance(vocabulary, dict)
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or not all(map(_is_lossless, _flattened(description.get("pre_tokenizer"), "pretokenizers")))
    ):
        return None
    if _is_byte_level(description):
        if not alphabet.keys() <= vocabulary.keys():
            return None
        longest = max(map(len, vocabulary))
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        longest = max(len(entry.encode()) for entry in vocabulary)
    else:
        return None
    return factor * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _normalizer_factor(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times as long as its result a text can be; None: any number."""
    factor = 1
    for each in _flattened(normalizer, "normalizers"):
        kind = each.get("type")
        if kind == "NFC":
            factor *= _COMPOSITION
        elif kind == "Replace":
            pattern = (each.get("pattern") or {}).get("String")
            if not isinstance(pattern, str) or len(pattern.encode()) > len(str(each.get("content")).encode()):
                return None
        elif kind not in ("ByteLevel", "Prepend"):
            return None
    return factor


def _is_lossless(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    return kind in _LOSSLESS_PRE_TOKENIZERS or (
        kind in _SPLITTING_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"
    )


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    steps = (
        *_flattened(description.get("normalizer"), "normalizers"),
        *_flattened(description.get("pre_tokenizer"), "pretokenizers"),
    )
    return any(step.get("type") == "ByteLevel" for step in steps)


def _flattened(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence, in order. parts: the name of its list."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    nested: Sequence[Mapping[str, Any]] = step.get(parts) or ()
    for each in nested:
        yield from _flattened(each, parts)
