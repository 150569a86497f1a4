"""Small real tokenizers, as files of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scheduler_svc.frontend.calls import ChatMessage
from scheduler_svc.frontend.text import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, and 12345 people know it.",
    "삼겹살 🙂 é naïve — ein Überfluß an Zeichen, 삼겹살 삼겹살 🙂🙂",
    "def main():\n    return [x for x in range(10)]\n\n\nuser assistant system im_start im_end",
]


@cache
def byte_level_json() -> bytes:
    """Byte-level BPE with ChatML special tokens and a special token that swallows the white space before it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("naïve kitten", special=False)])
    return tokenizer.to_str().encode()


@cache
def metaspace_json() -> bytes:
    """BPE with byte fallback and a beginning-of-sequence token, in the style of sentencepiece models."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS[0]], trainer)
    # Byte tokens are not special, though the trainer can only be told so.
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < 3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str().encode()


def chat_config(**changes: Any) -> dict[str, Any]:
    return {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        **changes,
    }


def files(tokenizer_json: bytes, config: dict[str, Any]) -> dict[str, bytes]:
    return {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps(config).encode()}


def encode_chat(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """The ids of a conversation, as a front end makes them."""
    return tokenizer.encode_pieces(tokenizer.render_chat(messages))
