"""The tokenizer inside a GGUF file, as a tokenizer.json. Byte-level BPE vocabularies (`tokenizer.ggml.model` =
gpt2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from worker_svc.models.config import BrokenModel, UnsupportedModel

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# The splitting rule of Llama 3 (and of those that adopted it), as its tokenizer.json states it.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_first() -> pre_tokenizers.PreTokenizer:
    # Digits are split one by one before the byte-level rule; otherwise a space next to a digit joins it.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_first,
    "starcoder": _digits_first,
    "refact": _digits_first,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}


def write_tokenizer(fields: Mapping[str, Any], path: Path) -> None:
    """Write tokenizer.json. Raises UnsupportedModel for a vocabulary or splitting rule that is not known here,
    BrokenModel for one that contradicts itself, and OSError when it cannot be written."""
    build_tokenizer(fields).save(str(path))


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a file's metadata. Raises UnsupportedModel or BrokenModel."""
    try:
        return _build_tokenizer(fields)
    except (BrokenModel, UnsupportedModel, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the Rust library, among others, is no Exception.
        raise BrokenModel(f"the GGUF file's tokenizer cannot be used: {type(error).__name__}: {error}") from error


def _build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    kind = fields["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise UnsupportedModel(
            f"GGUF tokenizer model {kind!r}; supported: gpt2 (byte-level BPE). "
            "A Hugging Face directory of the same model works."
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"GGUF tokenizer pre {pre!r}; supported: {', '.join(_PRE_TOKENIZERS)}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise BrokenModel("the GGUF vocabulary holds the same token twice")
    merges = [_pair(merge) for merge in fields["tokenizer.ggml.merges"]]
    whole_words = _PRE_TOKENIZERS[pre] is _llama3
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=whole_words))
    except Exception as error:  # tokenizers raises bare Exception
        raise BrokenModel(f"the GGUF vocabulary does not hold its own merges: {error}") from error
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, fields)
    _post_process(tokenizer, tokens, fields)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or not left or not right:
        raise BrokenModel(f"the GGUF vocabulary holds a merge that is not a pair: {merge!r}")
    return left, right


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], fields: Mapping[str, Any]) -> None:
    types: list[int] = fields.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _post_process(tokenizer: Tokenizer, tokens: list[str], fields: Mapping[str, Any]) -> None:
    byte_level = processors.ByteLevel(trim_offsets=False)
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", False) and bos_id is not None:
        if not 0 <= bos_id < len(tokens):
            raise BrokenModel(f"tokenizer.ggml.bos_token_id is {bos_id}, of {len(tokens)} tokens")
        # The template has a name of its own for it: a token may be anything, such as "a:b" or "$A", which mean
        # something there.
        bos = {"id": "bos", "ids": [bos_id], "tokens": [tokens[bos_id]]}
        template = processors.TemplateProcessing(single="bos $A", pair="bos $A bos $B", special_tokens=[bos])
        tokenizer.post_processor = processors.Sequence([byte_level, template])
    else:
        tokenizer.post_processor = byte_level


def tokenizer_config(fields: Mapping[str, Any], max_len: int) -> dict[str, Any]:
    """tokenizer_config.json: chat template and the names of the special tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config
