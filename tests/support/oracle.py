"""What transformers says the default model answers, greedily and in float32: the measure for everything end to end.

The continuations are computed by transformers from the very weights the worker loads, once per machine: they are kept
in the cache directory under the digest of the weights, the prompts and the versions involved.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worker_svc.fetch_model import fetch_model
from worker_svc.models.cache import cache_root, locked

# Where the best two tokens are closer than this, engines of equal right disagree: either is accepted, and the
# comparison ends there.
NEAR_TIE = 1e-3
DEFAULT_LENGTH = 64

_LONG_TEXT = (
    "The lighthouse keeper wrote down the weather every evening. On the first of March the wind came from the west and "
    "the sea was grey. On the second it rained for 17 hours, and three ships waited outside the harbour until the rain "
    "was over. On the third a woman from the village brought bread, cheese and a letter from his brother, who had gone "
    "to the city to become a printer. He read it twice, put it into the drawer with the others and went up the stairs, "
    "all 214 of them, to light the lamp. On the fourth of March there was fog, and nobody came. "
)
_PLAIN = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea,",
    "code": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "digits": "3, 1, 4, 1, 5, 9, 2, 6 and 2024-11-30 are",
    "letters": "삼겹살 🙂 é naïve",
    "long": _LONG_TEXT * 2 + "On the fifth of March",
}
_CHAT = {
    "chat-capital": [{"role": "user", "content": "What is the capital of Italy?"}],
    "chat-list": [{"role": "user", "content": "Name three fruits that are red."}],
    "chat-system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat-turns": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "Write a haiku about rain."},
    ],
}


@dataclass(frozen=True, slots=True)
class OraclePrompt:
    """A prompt in every form a test may send: plain text, or chat messages, and the ids of either."""

    name: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OracleEntry:
    """A greedy continuation, end-of-sequence ids treated like any other. gaps[i]: how far the best token was ahead of
    runners_up[i] when ids[i] was chosen."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]
    runners_up: tuple[int, ...]


def model_directory() -> Path:
    """The default model, fetched and converted when it is not on this machine yet."""
    return fetch_model("smollm2")


@functools.cache
def prompts() -> tuple[OraclePrompt, ...]:
    """Ten prompts, six plain and four chat, from 5 tokens to about 250."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    plain = [OraclePrompt(name, text, None, tuple(tokenizer(text)["input_ids"])) for name, text in _PLAIN.items()]
    chat = []
    for name, messages in _CHAT.items():
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        chat.append(OraclePrompt(name, None, tuple(messages), ids))
    return (*plain, *chat)


def oracle(asked: Sequence[OraclePrompt], length: int = DEFAULT_LENGTH) -> list[OracleEntry]:
    """transformers' greedy continuation of each prompt, `length` tokens."""
    store = cache_root() / "oracle" / f"{_digest(asked, length)}.json"
    with locked(store.with_suffix(".lock")):
        if not store.exists():
            entries = _compute(asked, length)
            partial = store.with_suffix(".part")
            partial.write_text(json.dumps([asdict(entry) for entry in entries]))
            partial.replace(store)
    return [
        OracleEntry(tuple(e["ids"]), tuple(e["gaps"]), tuple(e["runners_up"])) for e in json.loads(store.read_text())
    ]


def assert_greedy_equal(got_ids: Sequence[int], entry: OracleEntry) -> None:
    """got_ids, a greedy continuation of the same prompt, agrees with the oracle as far as it goes."""
    assert got_ids, "no tokens"
    for i, (got, expected) in enumerate(zip(got_ids, entry.ids, strict=False)):
        if entry.gaps[i] < NEAR_TIE:
            assert got in (expected, entry.runners_up[i]), f"token {i} is {got}, neither of the two near-equal ones"
            return
        assert got == expected, f"token {i} is {got}, the oracle says {expected} (ahead by {entry.gaps[i]:.4f})"


def _digest(asked: Sequence[OraclePrompt], length: int) -> str:
    import torch
    import transformers

    with (model_directory() / "model.safetensors").open("rb") as handle:
        weights = hashlib.file_digest(handle, "sha256").hexdigest()
    facts = [weights, [p.token_ids for p in asked], length, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _compute(asked: Sequence[OraclePrompt], length: int) -> list[OracleEntry]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    model.train(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine a team of two takes many times as long
    try:
        with torch.inference_mode():
            return [greedy_entry(model, p.token_ids, length) for p in asked]
    finally:
        torch.set_num_threads(threads)


def greedy_entry(model: Any, token_ids: Sequence[int], length: int) -> OracleEntry:
    """The greedy continuation by a transformers model, `length` tokens whatever they are."""
    import torch

    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(token_ids)])
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else every pad_token_id in the prompt is taken for padding
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(result.logits).float().topk(2, dim=-1)
    ids = best.indices[:, 0].tolist()
    assert result.sequences[0, len(token_ids) :].tolist() == ids
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    return OracleEntry(tuple(ids), tuple(gaps), tuple(best.indices[:, 1].tolist()))
