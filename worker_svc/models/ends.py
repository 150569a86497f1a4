"""The ids that end a sequence, from every file of a model that names one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker_svc.models.config import read_json
from worker_svc.models.fields import BrokenModel

logger = logging.getLogger(__name__)


def end_ids(directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that config.json, generation_config.json or tokenizer_config.json calls an end, in ascending order.

    raw, generation: the first two. Ids outside the vocabulary are left out, with a warning. Raises BrokenModel for a
    value that is neither an id nor a list of ids.
    """
    ids: set[int] = set()
    for name, source in (("config.json", raw), ("generation_config.json", generation)):
        ids.update(_stated(source.get("eos_token_id"), f"{directory / name}: eos_token_id"))
    ids.update(_of_tokenizer(directory))
    outside = sorted(one for one in ids if not 0 <= one < vocab_size)
    if outside:
        logger.warning(
            "%s: ends of a sequence that are outside the vocabulary of %d ids are ignored: %s",
            directory,
            vocab_size,
            ", ".join(map(str, outside)),
        )
    return tuple(sorted(ids.difference(outside)))


def _stated(value: Any, what: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        raise BrokenModel(f"{what} is {value!r}, an id or a list of ids is needed")
    return values


def _of_tokenizer(directory: Path) -> list[int]:
    """The id of the tokenizer's `eos_token`, where there is one and it is found."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return []
    settings = read_json(path)
    token = settings.get("eos_token")
    if isinstance(token, dict):  # written with its flags
        token = token.get("content")
    if not isinstance(token, str) or not token:
        return []
    return next(_ids_of(token, settings, directory / "tokenizer.json"), [])


def _ids_of(token: str, settings: Mapping[str, Any], tokenizer: Path) -> Iterator[list[int]]:
    """Where a token's id may stand; the large file is read only when the small one does not have it."""
    added = settings.get("added_tokens_decoder")
    for key, entry in added.items() if isinstance(added, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == token and str(key).isdecimal():
            yield [int(key)]
    if not tokenizer.exists():
        return
    for entry in _added_tokens(tokenizer):
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            yield [entry["id"]]
    raw = read_json(tokenizer)
    model = raw.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict) and isinstance(vocabulary.get(token), int):
        yield [vocabulary[token]]
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        yield from ([at] for at, pair in enumerate(vocabulary) if isinstance(pair, list) and pair and pair[0] == token)


def _added_tokens(tokenizer: Path) -> list[Any]:
    """The list of that name in a tokenizer.json, without the megabytes of vocabulary and merges that follow it; empty
    when it is not found."""
    text = tokenizer.read_text(encoding="utf-8", errors="replace")
    key = text.find('"added_tokens"')
    start = text.find("[", key)
    if key < 0 or start < 0:
        return []
    try:
        found = json.JSONDecoder().raw_decode(text, start)[0]
    except ValueError:
        return []
    return found if isinstance(found, list) else []
