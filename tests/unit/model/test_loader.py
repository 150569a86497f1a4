"""Hugging Face directories: what loads, what is refused, and with which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.oracle import assert_greedy_equal, greedy_entry
from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import Settings, load_runner, tiny_llama
from worker_svc import memory
from worker_svc.memory import ALLOWANCE_BYTES, MemoryLimit, NotEnoughMemory
from worker_svc.models.config import BrokenModel, UnsupportedModel
from worker_svc.models.decoder import num_weights
from worker_svc.models.loader import locate_model
from worker_svc.models.registry import read_model_config
from worker_svc.runner.base import GenerationDefaults, Geometry
from worker_svc.runner.model_runner import ModelRunner

PROMPT = [5, 77, 30, 201, 8, 8, 130]


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _load(directory: Path) -> ModelRunner:
    return ModelRunner.load(Settings(str(directory)))


def test_weights_in_several_files_load_through_their_index(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loop = StepLoop(_load(tmp_path), max_model_len=64)
    request = loop.add(PROMPT, 16)
    loop.run()
    assert_greedy_equal(request.outputs, greedy_entry(model, PROMPT, 16))
    next(tmp_path.glob("*-of-*.safetensors")).unlink()
    with pytest.raises(BrokenModel, match="is missing"):
        _load(tmp_path)


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_old_and_new_ways_to_write_rope_are_read(tmp_path: Path, form: dict[str, object]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | form))
    _, config = read_model_config(tmp_path)
    (rope,) = {layer.rope for layer in config.layers}
    assert rope.theta == 500.0
    assert (rope.scaling is not None) == bool(form.get("rope_scaling"))


def test_generation_defaults_and_all_ends_are_read(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 9], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    capabilities = _load(tmp_path).capabilities
    assert capabilities.eos_token_ids == (2, 9)
    assert capabilities.generation_defaults == GenerationDefaults(temperature=0.6, top_k=20)
    assert capabilities.model_name == tmp_path.name.lower()


def test_other_architectures_are_refused_naming_the_supported(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _edit_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM; supported: LlamaForCausalLM"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        (
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_parameters.rope_type 'proportional'; supported: default",
        ),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=said):
        _load(tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_size": 0}, {"vocab_size": "many"}, {"num_key_value_heads": 3}])
def test_absurd_settings_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(BrokenModel, match=r"config\.json"):
        _load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"

    save_file({n: t for n, t in weights.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=f"hold no {name}"):
        _load(tmp_path)
    save_file(weights | {name: torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"is \(3, 3\)"):
        _load(tmp_path)
    save_file(weights | {"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="q_norm"):
        _load(tmp_path)
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="is I8; supported: F32"):
        _load(tmp_path)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BrokenModel, match=r"model\.safetensors cannot be read"):
        _load(tmp_path)


def test_what_is_nowhere_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"neither a directory, nor a GGUF file, nor a known name \(smollm2\)"):
        locate_model("nothing")
    for path in (str(tmp_path / "nothing"), "~/nothing/here", "nothing.GGUF"):
        with pytest.raises(
            BrokenModel, match=r"nothing is there; inside a container .* on the worker's volume"
        ) as told:
            locate_model(path)
        assert repr(path) in str(told.value)
    with pytest.raises(BrokenModel, match=r"config\.json is missing"):
        _load(tmp_path)


def test_a_longer_context_than_the_model_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len 513 is beyond the model's 512"):
        load_runner(tiny_llama(), tmp_path, max_model_len=513)
    runner = load_runner(tiny_llama(), tmp_path, max_model_len=100)
    assert runner.capabilities.max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len 101 is beyond this worker's 100"):
        runner.open(Geometry(16, 8, 64, 101, 2))


def test_the_pool_is_sized_by_blocks_or_by_bytes(tmp_path: Path) -> None:
    model = tiny_llama()
    geometry = Geometry(16, 8, 64, 128, 2)
    assert load_runner(model, tmp_path, num_blocks=37).open(geometry) == 37
    # 3 layers x K and V x 16 slots x 2 heads x 16 x 4 bytes = 12,288 bytes a block.
    assert load_runner(model, tmp_path, num_blocks=None, kv_memory=123_000).open(geometry) == 10
    assert load_runner(model, tmp_path, num_blocks=None, kv_memory=123_000, dtype="bfloat16").open(geometry) == 20
    assert load_runner(model, tmp_path, num_blocks=None).open(geometry) == (1 << 30) // 12288
    with pytest.raises(ValueError, match="2 are needed"):
        load_runner(model, tmp_path, num_blocks=None, kv_memory=12_288).open(geometry)


def _limit_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(num_bytes, "the limit of a test"))


def test_what_a_cpu_cannot_hold_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    _limit_memory(monkeypatch, 4 << 30)
    said = r"\(dtype = float32\) \+ 999 GiB of KV cache \(kv_memory\).* may use 4 GiB \(the limit of a test\)"
    with pytest.raises(NotEnoughMemory, match=said):
        ModelRunner.load(Settings(str(tmp_path), num_blocks=None, kv_memory=999 << 30))
    with pytest.raises(NotEnoughMemory, match=r"num_blocks = 1000000000 of one token or more\).*lower num_blocks"):
        ModelRunner.load(Settings(str(tmp_path), num_blocks=1_000_000_000))


def test_weights_count_as_they_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path)
    weights = num_weights(read_model_config(tmp_path)[1])
    held = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    # The norms are folded into what follows them.
    assert held - 6 * 64 == weights
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        fits = weights * size + 12_345 + ALLOWANCE_BYTES
        settings = Settings(str(tmp_path), dtype=dtype, num_blocks=None, kv_memory=12_345)
        _limit_memory(monkeypatch, fits)
        ModelRunner.load(settings)
        _limit_memory(monkeypatch, fits - 1)
        with pytest.raises(NotEnoughMemory, match=rf"dtype = {dtype}"):
            ModelRunner.load(settings)


def test_blocks_that_do_not_fit_at_the_schedulers_block_size_are_refused_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit_memory(monkeypatch, ALLOWANCE_BYTES + (64 << 20))
    # 768 bytes a token: 7.3 MiB in blocks of 1, 117 MiB in blocks of 16.
    runner = load_runner(tiny_llama(), tmp_path, num_blocks=10_000)
    assert runner.open(Geometry(1, 8, 64, 128, 2)) == 10_000
    with pytest.raises(ValueError, match=r"117\.2 MiB of KV cache \(num_blocks = 10000 of 16 tokens\)"):
        runner.open(Geometry(16, 8, 64, 128, 2))
