"""What a further family of models needs: a file with an Architecture, and a line in the registry. Here the file is this
one: Qwen3's norms of queries and keys, written as a user of the registry would, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.oracle import assert_greedy_equal, greedy_entry
from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import Settings
from worker_svc.attention.base import AttentionSpec, RaggedBatch
from worker_svc.attention.select import select_backend
from worker_svc.models import llama, registry
from worker_svc.models.base import Activation, Architecture, ForwardInput, LayerSpec, ModelConfig, RopeSpec
from worker_svc.models.config import UnsupportedModel
from worker_svc.models.decoder import Decoder
from worker_svc.runner.base import GenerationDefaults
from worker_svc.runner.model_runner import ModelRunner


def parse_qwen3(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """A Llama whose queries and keys are normed."""
    config = llama.parse(raw, generation, where)
    return replace(config, layers=tuple(replace(layer, has_qk_norms=True) for layer in config.layers))


QWEN3 = Architecture(names=("Qwen3ForCausalLM",), model_type="qwen3", parse=parse_qwen3, build=Decoder)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the registry."""
    monkeypatch.setattr(registry, "ARCHITECTURES", (*registry.ARCHITECTURES, QWEN3))


def _tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("budget", [2048, 7])
def test_a_family_in_one_file_gives_transformers_tokens(tmp_path: Path, budget: int) -> None:
    model = _tiny_qwen3()
    model.save_pretrained(tmp_path)
    runner = ModelRunner.load(Settings(str(tmp_path)))
    loop = StepLoop(runner, block_size=8, budget=budget, max_model_len=256)
    requests = [loop.add(prompt, 20) for prompt in ([5, 77, 30, 201, 8, 8, 130], [9], [i * 7 % 290 for i in range(60)])]
    loop.run()
    for request in requests:
        assert_greedy_equal(request.outputs, greedy_entry(model, request.prompt, 20))


def test_without_its_line_a_family_is_refused_by_name(tmp_path: Path) -> None:
    _tiny_qwen3().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM; supported: LlamaForCausalLM"):
        ModelRunner.load(Settings(str(tmp_path)))


# --- what a LayerSpec may ask for, against a decoder written out in full --------------------------------------------


def _spec(**changes: Any) -> LayerSpec:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
    return replace(LayerSpec(attention, RopeSpec(10000.0, 8), intermediate_size=24), **changes)


_SPECS = {
    "plain": _spec(),
    "norms of queries and keys": _spec(has_qk_norms=True),
    "norms behind": _spec(has_post_norms=True),
    "gelu": _spec(activation=Activation.GELU_TANH),
    "scale": _spec(attention=AttentionSpec(4, 2, 8, scale=0.5)),
    "another base": _spec(rope=RopeSpec(500.0, 8)),
}


@pytest.mark.parametrize("embedding_scale, norm_offset", [(1.0, 0.0), (4.0, 1.0)])
@pytest.mark.parametrize("kinds", [("plain", kind) for kind in _SPECS])
def test_a_decoder_does_what_its_layers_say(kinds: tuple[str, str], embedding_scale: float, norm_offset: float) -> None:
    """Layers of two kinds in one model."""
    config = ModelConfig(
        architecture="test",
        vocab_size=50,
        hidden_size=32,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        layers=tuple(_SPECS[kind] for kind in kinds),
        tie_word_embeddings=True,
        eos_token_ids=(),
        generation_defaults=GenerationDefaults(),
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
    )
    weights: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weights[name] = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        return weights[name]

    cpu = torch.device("cpu")
    with torch.inference_mode():
        model = Decoder(config, take, max_len=64, dtype=torch.float32, device=cpu)
        tokens = torch.tensor([3, 17, 42, 8, 8, 31, 2])
        attention = select_backend(config.attention_specs, torch.float32, cpu)
        got = _run(model, attention, tokens)
        assert torch.allclose(got, _written_out(config, weights, tokens), atol=2e-4)


def _run(model: Decoder, attention: Any, tokens: torch.Tensor) -> torch.Tensor:
    num = len(tokens)
    kv = attention.new_kv(model.config.kv_shape(4, torch.float32), 4)
    batch = RaggedBatch(np.array([0, num], np.int32), np.array([num], np.int32), np.array([[1, 2]], np.int32))
    positions = torch.arange(num)
    step = ForwardInput(tokens, positions, positions + 4, positions, attention.plan(batch, 4))
    return model.forward(step, kv, attention)


def _written_out(config: ModelConfig, weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return scaled * (weights[f"{name}.weight"] + config.norm_offset)

    x = weights["model.embed_tokens.weight"][tokens] * config.embedding_scale
    for index, spec in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        maps = {name.rsplit(".", 2)[-2]: w.T for name, w in weights.items() if f"{prefix}." in name and w.dim() == 2}
        x = x + _attention(spec, maps, norm(x, f"{prefix}.input_layernorm"), norm, prefix)
        before = "pre_feedforward_layernorm" if spec.has_post_norms else "post_attention_layernorm"
        y = norm(x, f"{prefix}.{before}")
        gate = y @ maps["gate_proj"]
        is_silu = spec.activation is Activation.SILU
        gate = torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")
        y = (gate * (y @ maps["up_proj"])) @ maps["down_proj"]
        x = x + (norm(y, f"{prefix}.post_feedforward_layernorm") if spec.has_post_norms else y)
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


def _attention(spec: LayerSpec, maps: Mapping[str, torch.Tensor], x: torch.Tensor, norm: Any, prefix: str) -> Any:
    heads, kv_heads, size = spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim
    q = (x @ maps["q_proj"]).view(-1, heads, size)
    k = (x @ maps["k_proj"]).view(-1, kv_heads, size)
    v = (x @ maps["v_proj"]).view(-1, kv_heads, size)
    if spec.has_qk_norms:
        q, k = norm(q, f"{prefix}.self_attn.q_norm"), norm(k, f"{prefix}.self_attn.k_norm")
    q, k = _rotated(spec.rope, q), _rotated(spec.rope, k)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.attention.scale
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    y = mixed.reshape(len(x), heads * size) @ maps["o_proj"]
    return norm(y, f"{prefix}.post_attention_layernorm") if spec.has_post_norms else y


def _rotated(rope: RopeSpec, x: torch.Tensor) -> torch.Tensor:
    half = rope.head_dim // 2
    frequencies = rope.theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)
