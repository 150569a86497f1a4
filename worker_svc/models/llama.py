"""Decoders of the Llama family (Llama, SmolLM2): weights in, one ragged forward pass out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from worker_svc.attention.base import AttentionBackend
from worker_svc.kv_cache import KvCache
from worker_svc.models.config import ModelConfig
from worker_svc.models.layers import Linear, rms_scale
from worker_svc.models.rope import RopeTable

# name -> tensor, as stored (any floating dtype). Raises BrokenModel for a missing name or another shape than asked for.
TakeWeight = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step on the device. T tokens, flat; S rows of logits."""

    # [T] int64 each: token, its position in its sequence, and the KV slot it is written to.
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    # [S] int64: tokens whose logits are wanted.
    logit_tokens: torch.Tensor
    attention_plan: Any


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


def num_weights(config: ModelConfig) -> int:
    """How many numbers a Llama on a CPU holds, at most: the output weights are held in a layout of their own, also when
    they are the embedding's."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = hidden * (2 * config.q_size + 2 * config.kv_size + 3 * inner)
    return config.num_layers * layer + 2 * config.vocab_size * hidden + hidden


class Llama:
    """Grouped-query attention with rotary positions, SwiGLU, pre-norm. Query/key/value and gate/up are one map each,
    and the weights of the norms are folded into the map behind them."""

    def __init__(
        self, config: ModelConfig, take: TakeWeight, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._rope = RopeTable(config, max_len, dtype, device)
        embedding = take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)).to(dtype)
        self._embedding = embedding.to(device)
        self._layers = [self._load_layer(f"model.layers.{i}.", take) for i in range(config.num_layers)]
        self._final_norm = take("model.norm.weight", (config.hidden_size,)).to(dtype).to(device)
        head = self._embedding
        if not config.tie_word_embeddings:
            head = take("lm_head.weight", (config.vocab_size, config.hidden_size)).to(dtype).to(device)
        self._head = Linear(head)

    def _load_layer(self, prefix: str, take: TakeWeight) -> _Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(names: tuple[str, ...], sizes: tuple[int, ...], width: int, bias: bool, norm: str | None) -> Linear:
            weight = torch.cat([take(f"{prefix}{n}.weight", (s, width)) for n, s in zip(names, sizes, strict=True)])
            if norm is not None:
                # Folded in float32 and rounded once: (x * n) W^T = x (W * n)^T.
                weight = weight.float() * take(f"{prefix}{norm}.weight", (width,)).float()
            joined = None
            if bias:
                joined = torch.cat([take(f"{prefix}{n}.bias", (s,)) for n, s in zip(names, sizes, strict=True)])
                joined = joined.to(self.dtype).to(self.device)
            return Linear(weight.to(self.dtype).to(self.device), joined)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
        return _Layer(
            qkv=linear(qkv, qkv_sizes, hidden, config.attention_bias, "input_layernorm"),
            out=linear(("self_attn.o_proj",), (hidden,), config.q_size, config.attention_bias, None),
            gate_up=linear(
                ("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias, "post_attention_layernorm"
            ),
            down=linear(("mlp.down_proj",), (hidden,), inner, config.mlp_bias, None),
        )

    def forward(self, step: ForwardInput, kv: KvCache, attention: AttentionBackend) -> torch.Tensor:
        """Run T tokens through the network, writing their KV; logits of step.logit_tokens as float32 [S, vocab]."""
        cos, sin = self._rope.rows(step.positions)
        x = self._embedding.index_select(0, step.token_ids)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, x, step, cos, sin, kv, attention)
            if index == last:
                # Behind the last attention only the tokens whose logits are wanted matter.
                x, mixed = x.index_select(0, step.logit_tokens), mixed.index_select(0, step.logit_tokens)
            x = self._mlp(layer, layer.out.add_to(x, mixed))
        x = rms_scale(x, self.config.rms_norm_eps).mul_(self._final_norm)
        return self._head(x).float()

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        step: ForwardInput,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KvCache,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        num_tokens, rotated = x.shape[0], config.num_heads + config.num_kv_heads
        qkv = layer.qkv(rms_scale(x, config.rms_norm_eps))
        qk = qkv[:, : rotated * config.head_dim].view(num_tokens, rotated, config.head_dim)
        qk = self._rope.rotate(qk, cos, sin)
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        v = qkv[:, rotated * config.head_dim :]
        kv.write(index, step.slots, qk.view(num_tokens, -1)[:, config.q_size :], v)
        fresh = (k, v.view(num_tokens, config.num_kv_heads, config.head_dim))
        return attention.attend(step.attention_plan, q, kv.keys[index], kv.values[index], fresh)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        inner = self.config.intermediate_size
        gate_up = layer.gate_up(rms_scale(x, self.config.rms_norm_eps))
        return layer.down.add_to(x, F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]))
