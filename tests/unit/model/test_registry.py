"""The registry, and what a LayerSpec may ask for, against a decoder written out in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.model.tiny import Settings, tiny_llama
from worker_svc.attention.base import AttentionSpec, RaggedBatch
from worker_svc.attention.select import select_backend
from worker_svc.models import llama, registry
from worker_svc.models.base import (
    Activation,
    Biases,
    ExpertsSpec,
    ForwardInput,
    LayerNames,
    LayerSpec,
    ModelConfig,
    QkNorm,
    RopeSpec,
)
from worker_svc.models.config import UnsupportedModel
from worker_svc.models.decoder import Decoder, num_weights
from worker_svc.runner.base import GenerationDefaults
from worker_svc.runner.model_runner import ModelRunner


def test_without_its_line_a_family_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path)
    others = tuple(one for one in registry.ARCHITECTURES if one is not llama.ARCHITECTURE)
    monkeypatch.setattr(registry, "ARCHITECTURES", others)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM; supported: MistralForCausalLM, Qwen2ForCausalLM"):
        ModelRunner.load(Settings(str(tmp_path)))


def test_every_family_has_its_line() -> None:
    """A module with an ARCHITECTURE that the registry does not list would be refused without a reason."""
    folder = Path(registry.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "\nARCHITECTURE: Final" in path.read_text()}
    assert modules == set(registry._FAMILIES)


def test_no_two_families_have_one_name() -> None:
    names = [name for one in registry.ARCHITECTURES for name in (*one.names, one.model_type)]
    assert len(set(names)) == len(names)


# --- what a LayerSpec may ask for -----------------------------------------------------------------------------------


def _spec(**changes: Any) -> LayerSpec:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
    return replace(LayerSpec(attention, RopeSpec(10000.0, 8), intermediate_size=24), **changes)


_BEHIND = LayerNames(
    norm_behind_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_behind_mlp="post_feedforward_layernorm",
)
_SPECS = {
    "plain": _spec(),
    "norms of queries and keys": _spec(qk_norm=QkNorm.PER_HEAD),
    "one norm over all queries": _spec(qk_norm=QkNorm.WHOLE),
    "norms before and behind": _spec(names=_BEHIND),
    "norms behind only": _spec(names=replace(_BEHIND, norm_before_attention=None, norm_before_mlp=None)),
    "maps stored as one": _spec(names=LayerNames(qkv=("self_attn.qkv",), gate_up=("mlp.gate_up",))),
    "biases of queries, keys and values": _spec(biases=Biases(qkv=True)),
    "biases of all else": _spec(biases=Biases(out=True, gate_up=True, down=True)),
    "residual": _spec(residual_scale=0.5, biases=Biases(out=True, down=True)),
    "residual behind norms": _spec(residual_scale=0.5, names=_BEHIND),
    "experts": _spec(experts=ExpertsSpec(5, 2, 12, normalised=False)),
    "experts of weight one": _spec(experts=ExpertsSpec(3, 3, 12, normalised=True), residual_scale=0.5),
    "gelu by tanh": _spec(activation=Activation.GELU_TANH),
    "gelu": _spec(activation=Activation.GELU),
    "window": _spec(attention=AttentionSpec(4, 2, 8, scale=8**-0.5, window=3)),
    "soft cap": _spec(attention=AttentionSpec(4, 2, 8, scale=8**-0.5, soft_cap=0.7)),
    "scale": _spec(attention=AttentionSpec(4, 2, 8, scale=0.5)),
    "another base": _spec(rope=RopeSpec(500.0, 8)),
    "partly rotated": _spec(rope=RopeSpec(10000.0, 8, rotary_dim=4)),
}


class _RandomWeights:
    """Whatever a model asks for."""

    def __init__(self) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(1)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.given:
            values = torch.randn(shape, generator=self._generator)
            self.given[name] = values * (0.3 if len(shape) > 1 else 0.2) + ("norm" in name)
        return self.given[name].clone()

    def lend(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])


_MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"embedding_scale": 4.0, "norm_offset": 1.0, "logit_scale": 0.25, "logit_soft_cap": 2.0},
}


@pytest.mark.parametrize("around", _MODELS)
@pytest.mark.parametrize("kinds", [("plain", kind) for kind in _SPECS])
def test_a_decoder_does_what_its_layers_say(kinds: tuple[str, str], around: str) -> None:
    """Layers of two kinds in one model."""
    config = ModelConfig(
        architecture="test",
        vocab_size=50,
        hidden_size=32,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        layers=tuple(_SPECS[kind] for kind in kinds),
        tie_word_embeddings=True,
        generation_defaults=GenerationDefaults(),
        **_MODELS[around],
    )
    random = _RandomWeights()
    weights = random.given
    cpu = torch.device("cpu")
    with torch.inference_mode():
        model = Decoder(config, random, max_len=64, dtype=torch.float32, device=cpu)
        tokens = torch.tensor([3, 17, 42, 8, 8, 31, 2])
        attention = select_backend(config.attention_specs, torch.float32, cpu)
        got = _run(model, attention, tokens)
        assert torch.allclose(got, _WrittenOut(config, weights).logits(tokens), atol=2e-4)
    held = sum(w.numel() for name, w in weights.items() if w.dim() == 2) + weights["model.embed_tokens.weight"].numel()
    assert num_weights(config) == held + config.hidden_size


def _run(model: Decoder, attention: Any, tokens: torch.Tensor) -> torch.Tensor:
    num = len(tokens)
    kv = attention.new_kv(model.config.kv_shape(4, torch.float32), 4)
    batch = RaggedBatch(np.array([0, num], np.int32), np.array([num], np.int32), np.array([[1, 2]], np.int32))
    positions = torch.arange(num)
    step = ForwardInput(tokens, positions, positions + 4, positions, attention.plan(batch, 4))
    return model.forward(step, kv, attention)


class _WrittenOut:
    """The same network without any of the decoder's shortcuts: nothing folded or joined, one expert after the other."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._weights = weights

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        config = self._config
        x = self._weights["model.embed_tokens.weight"][tokens] * config.embedding_scale
        for index, spec in enumerate(config.layers):
            prefix, names = f"model.layers.{index}.", spec.names
            before = self._norm(x, prefix, names.norm_before_attention)
            attended = self._norm(self._attention(spec, prefix, before), prefix, names.norm_behind_attention)
            x = x + spec.residual_scale * attended
            before = self._norm(x, prefix, names.norm_before_mlp)
            x = x + spec.residual_scale * self._norm(self._mlp(spec, prefix, before), prefix, names.norm_behind_mlp)
        logits = self._norm(x, "model.", "norm") @ self._weights["model.embed_tokens.weight"].T * config.logit_scale
        cap = config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _norm(self, x: torch.Tensor, prefix: str, name: str | None) -> torch.Tensor:
        if name is None:
            return x
        scaled = x / (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        return scaled * (self._weights[f"{prefix}{name}.weight"] + self._config.norm_offset)

    def _map(self, prefix: str, names: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
        parts = []
        for name in names:
            y = x @ self._weights[f"{prefix}{name}.weight"].T
            bias = self._weights.get(f"{prefix}{name}.bias")
            parts.append(y if bias is None else y + bias)
        return torch.cat(parts, dim=-1)

    def _gated(self, spec: LayerSpec, prefix: str, gate_up: tuple[str, ...], down: str, x: torch.Tensor) -> Any:
        gate, up = self._map(prefix, gate_up, x).chunk(2, dim=-1)
        functional = torch.nn.functional
        if spec.activation is Activation.SILU:
            gate = functional.silu(gate)
        else:
            gate = functional.gelu(gate, approximate="tanh" if spec.activation is Activation.GELU_TANH else "none")
        return self._map(prefix, (down,), gate * up)

    def _mlp(self, spec: LayerSpec, prefix: str, x: torch.Tensor) -> Any:
        names, experts = spec.names, spec.experts
        if experts is None:
            return self._gated(spec, prefix, names.gate_up, names.down, x)
        rows = []
        for token in x:
            shares = torch.softmax(self._map(prefix, (names.router,), token), dim=-1)
            best = shares.argsort(descending=True)[: experts.num_per_token].tolist()
            total = sum(float(shares[one]) for one in best) if experts.normalised else 1.0
            y = torch.zeros_like(token)
            for one in best:
                gate_up = tuple(name.format(one) for name in names.expert_gate_up)
                share = float(shares[one]) / total
                y = y + share * self._gated(spec, prefix, gate_up, names.expert_down.format(one), token)
            rows.append(y)
        return torch.stack(rows)

    def _attention(self, spec: LayerSpec, prefix: str, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, size = spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim
        qkv = self._map(prefix, spec.names.qkv, x)
        q, k, v = qkv[:, : spec.q_size], qkv[:, spec.q_size : -spec.kv_size], qkv[:, -spec.kv_size :]
        if spec.qk_norm is QkNorm.WHOLE:
            q, k = self._norm(q, prefix, spec.names.q_norm), self._norm(k, prefix, spec.names.k_norm)
        q, k, v = q.view(-1, heads, size), k.view(-1, kv_heads, size), v.reshape(-1, kv_heads, size)
        if spec.qk_norm is QkNorm.PER_HEAD:
            q, k = self._norm(q, prefix, spec.names.q_norm), self._norm(k, prefix, spec.names.k_norm)
        q, k = _rotated(spec.rope, q), _rotated(spec.rope, k)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.attention.scale
        if spec.attention.soft_cap is not None:
            scores = spec.attention.soft_cap * torch.tanh(scores / spec.attention.soft_cap)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        if spec.attention.window is not None:
            hidden |= torch.ones(len(x), len(x), dtype=torch.bool).tril(-spec.attention.window)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self._map(prefix, (spec.names.out,), mixed.reshape(len(x), heads * size))


def _rotated(rope: RopeSpec, x: torch.Tensor) -> torch.Tensor:
    half = rope.num_rotated // 2
    frequencies = rope.theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), rest), -1
    )
