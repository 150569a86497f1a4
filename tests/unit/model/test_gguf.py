"""GGUF files become directories that hold the same model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from tests.support.oracle import assert_greedy_equal, greedy_entry
from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import Settings, tiny_llama, write_gguf
from worker_svc import memory
from worker_svc.memory import ALLOWANCE_BYTES, MemoryLimit, NotEnoughMemory
from worker_svc.models import gguf_tokenizer
from worker_svc.models.config import BrokenModel, UnsupportedModel
from worker_svc.models.gguf import convert_gguf
from worker_svc.models.gguf_tokenizer import build_tokenizer
from worker_svc.runner.model_runner import ModelRunner

PROMPT = [5, 77, 30, 201, 8, 8, 130]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFENCE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_file_holds_the_same_tensors_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model)
    directory = convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    tensors = load_file(directory / "model.safetensors")
    expected = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_file_whose_conversion_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    num_bytes = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    write_gguf(tmp_path / "m.gguf", model, quantise=gguf.GGMLQuantizationType.Q8_0)
    fits = num_bytes + ALLOWANCE_BYTES
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(fits - 1, "the limit"))
    with pytest.raises(NotEnoughMemory, match=r"of weights in float32, to convert m\.gguf \(once\)"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(fits, "the limit"))
    assert convert_gguf(tmp_path / "m.gguf", tmp_path / "cache").is_dir()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_a_gguf_file_answers_like_transformers(tmp_path: Path, heads: tuple[int, int]) -> None:
    model = tiny_llama(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    write_gguf(tmp_path / "m.gguf", model)
    loop = StepLoop(ModelRunner.load(Settings(str(tmp_path / "m.gguf"))), max_model_len=128)
    request = loop.add(PROMPT, 24)
    loop.run()
    assert_greedy_equal(request.outputs, greedy_entry(model, PROMPT, 24))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_matrices_are_dequantised(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    model = tiny_llama()
    write_gguf(tmp_path / "m.gguf", model, quantise=quantisation)
    tensors = load_file(convert_gguf(tmp_path / "m.gguf", tmp_path / "cache") / "model.safetensors")
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    expected = gguf.dequantize(gguf.quantize(weight, quantisation), quantisation)
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], torch.from_numpy(expected.copy()))


def test_stored_rope_factors_stretch_the_frequencies(tmp_path: Path) -> None:
    """llama.cpp evaluates the llama3 rule and stores factors; the converted model must rotate as transformers does."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_llama(rope_parameters=scaling)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).tolist()
    assert max(factors) == pytest.approx(4.0)
    write_gguf(tmp_path / "m.gguf", model, rope_factors=factors)
    loop = StepLoop(ModelRunner.load(Settings(str(tmp_path / "m.gguf"))), max_model_len=256)
    prompt = [i * 7 % 290 + 3 for i in range(100)]
    request = loop.add(prompt, 16)
    loop.run()
    assert_greedy_equal(request.outputs, greedy_entry(model, prompt, 16))


def test_the_tokenizer_splits_digits_before_the_byte_level_rule(tmp_path: Path) -> None:
    """`pre` = smollm: with the plain rule " 12" would become the tokens "Ġ1" and "2"."""
    model = tiny_llama()
    write_gguf(tmp_path / "a.gguf", model, pre="smollm")
    write_gguf(tmp_path / "b.gguf", model, pre="gpt-2")
    digits, plain = (
        Tokenizer.from_file(str(convert_gguf(tmp_path / name, tmp_path / "cache") / "tokenizer.json"))
        for name in ("a.gguf", "b.gguf")
    )
    assert digits.encode(" 12").tokens == ["Ġ", "1", "2"]
    assert plain.encode(" 12").tokens == ["Ġ1", "2"]
    for text in ("a 12\n", "삼겹살 🙂 é naïve", "<|im_start|>12"):
        assert digits.decode(digits.encode(text).ids, skip_special_tokens=False) == text
    assert digits.encode("<|im_start|>").ids == [1]


def test_the_directory_names_template_ends_and_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "My-Model.gguf", tiny_llama())
    runner = ModelRunner.load(Settings(str(tmp_path / "My-Model.gguf")))
    files = dict(runner.tokenizer_files())
    config = json.loads(files["tokenizer_config.json"])
    assert config["chat_template"].startswith("{% for m in messages %}")
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert runner.capabilities.eos_token_ids == (2,)
    assert runner.capabilities.model_name == "my-model"
    assert runner.capabilities.max_model_len == 512


def test_conversion_happens_once_and_appears_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama())
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: convert_gguf(tmp_path / "m.gguf", tmp_path / "cache"), range(8)))
    assert len(found) == 1
    directory = found.pop()
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(tmp_path / "m.gguf", tmp_path / "cache") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [directory.name]


def test_a_file_that_changed_is_converted_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama())
    first = convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    write_gguf(tmp_path / "m.gguf", tiny_llama(seed=2))
    second = convert_gguf(tmp_path / "m.gguf", tmp_path / "cache")
    assert first != second
    a, b = (load_file(d / "model.safetensors")["model.norm.weight"] for d in (first, second))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("kept", [3, 100, 5000, -100])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama())
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:kept])
    with pytest.raises(BrokenModel, match=r"cut\.gguf"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(BrokenModel, match="not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "cache")


def test_unsupported_files_say_what_is_supported(tmp_path: Path) -> None:
    model = tiny_llama()
    write_gguf(tmp_path / "arch.gguf", model, architecture="gemma3")
    with pytest.raises(UnsupportedModel, match=r"'gemma3'; supported GGUF architectures: llama"):
        convert_gguf(tmp_path / "arch.gguf", tmp_path / "cache")
    write_gguf(tmp_path / "pre.gguf", model, pre="strange")
    with pytest.raises(UnsupportedModel, match=r"pre 'strange'; supported: .*smollm"):
        convert_gguf(tmp_path / "pre.gguf", tmp_path / "cache")
    write_gguf(tmp_path / "spm.gguf", model, tokenizer_model="llama")
    with pytest.raises(UnsupportedModel, match=r"'llama'; supported: gpt2"):
        convert_gguf(tmp_path / "spm.gguf", tmp_path / "cache")


def _fields(**changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "a:b", "$A", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fields = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": [],
        "token_type": [3, 3, 3],
        "bos_token_id": 1,
        "add_bos_token": True,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("bos_token_id", [0, 1, 2])
def test_f121_a_beginning_of_sequence_may_be_any_text(bos_token_id: int) -> None:
    tokenizer = build_tokenizer(_fields(bos_token_id=bos_token_id))
    assert tokenizer.encode("x").ids[0] == bos_token_id
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.encode("x").ids == tokenizer.encode("x").ids


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"bos_token_id": 99_999}, "bos_token_id is 99999"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"merges": ["q"]}, "not a pair"),
        ({"merges": [7]}, "cannot be used: AttributeError"),
        ({"tokens": ["<s>", 5]}, "cannot be used: TypeError|hold its own merges"),
        ({"tokens": 5}, "cannot be used: TypeError"),
    ],
)
def test_f121_whatever_is_wrong_with_the_vocabulary_is_a_broken_model(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BrokenModel, match=text):
        build_tokenizer(_fields(**changes))


def test_f121_a_panic_of_the_library_is_a_broken_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*arguments: object) -> None:
        raise Panic("in Rust")

    monkeypatch.setattr(gguf_tokenizer, "_add_special_tokens", panic)
    with pytest.raises(BrokenModel, match="cannot be used: Panic: in Rust"):
        build_tokenizer(_fields())
