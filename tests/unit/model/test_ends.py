"""The ids that end a sequence, from whichever file names them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model.tiny import tiny_llama
from worker_svc.models.config import BrokenModel
from worker_svc.models.registry import read_model_config

_ADDED = {"7": {"content": "<|end|>", "special": True}, "9": {"content": "<|other|>", "special": True}}


def _ends(directory: Path, **files: dict[str, Any]) -> tuple[int, ...]:
    """With these files beside a config.json that names no end; a file's name with _ for its dots."""
    tiny_llama(eos_token_id=None).save_pretrained(directory)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("eos_token_id", None)
    (directory / "generation_config.json").unlink(missing_ok=True)
    path.write_text(json.dumps(raw | files.pop("config", {})))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return read_model_config(directory)[1].eos_token_ids


@pytest.mark.parametrize("token", ["<|end|>", {"__type": "AddedToken", "content": "<|end|>", "normalized": False}])
def test_f94_an_end_that_only_the_tokenizer_names_is_an_end(tmp_path: Path, token: object) -> None:
    settings = {"eos_token": token, "added_tokens_decoder": _ADDED}
    assert _ends(tmp_path, tokenizer_config=settings) == (7,)


def test_f94_its_id_is_found_in_the_tokenizer_too(tmp_path: Path) -> None:
    added = {"added_tokens": [{"id": 3, "content": "<x>"}, {"id": 11, "content": "<|end|>"}], "model": {"vocab": {}}}
    assert _ends(tmp_path, tokenizer_config={"eos_token": "<|end|>"}, tokenizer=added) == (11,)
    plain = {"added_tokens": [], "model": {"vocab": {"a": 1, "</s>": 2}}}
    assert _ends(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer=plain) == (2,)
    unigram = {"model": {"type": "Unigram", "vocab": [["<pad>", 0.0], ["</s>", -1.0]]}}
    assert _ends(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer=unigram) == (1,)


def test_f94_the_ends_are_those_of_all_files_together(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": _ADDED}}
    assert _ends(tmp_path, config={"eos_token_id": 2}, generation_config={"eos_token_id": [2, 5]}, **files) == (2, 5, 7)


def test_a_tokenizer_without_a_known_end_adds_none(tmp_path: Path) -> None:
    assert _ends(tmp_path, tokenizer_config={"eos_token": "<|end|>"}) == ()
    assert _ends(tmp_path, tokenizer_config={"eos_token": "<|end|>"}, tokenizer={"model": None}) == ()
    assert _ends(tmp_path, tokenizer_config={"eos_token": None, "added_tokens_decoder": [1]}) == ()


def test_f93_ends_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _ends(tmp_path, config={"eos_token_id": [2, 99999, -1]}) == (2,)
    assert "outside the vocabulary of 300 ids are ignored: -1, 99999" in caplog.text


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.5, True])
def test_f93_an_end_that_is_no_id_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(BrokenModel, match=r"config\.json: eos_token_id is .*, an id or a list of ids is needed"):
        _ends(tmp_path, config={"eos_token_id": value})
