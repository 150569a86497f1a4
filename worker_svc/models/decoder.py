"""A decoder composed from its LayerSpecs: weights in, one ragged forward pass out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.paged_kv import PagedKv
from worker_svc.models.base import Activation, ForwardInput, LayerSpec, ModelConfig, TakeWeight
from worker_svc.models.layers import Linear, rms_scale
from worker_svc.models.rope import RopeTable

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
# With norms behind attention and MLP, the norm before the MLP has another name.
_NORM_BEFORE_MLP = {False: "post_attention_layernorm", True: "pre_feedforward_layernorm"}
_NORMS_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    # Weights of the norms that cannot be folded into a map, or None without them: [2, head_dim] of queries and keys,
    # and [hidden] each behind attention and MLP.
    qk_norms: torch.Tensor | None
    norm_behind_attention: torch.Tensor | None
    norm_behind_mlp: torch.Tensor | None


def num_weights(config: ModelConfig) -> int:
    """How many numbers a decoder on a CPU holds, at most: the output weights are held in a layout of their own, also
    when they are the embedding's."""
    hidden = config.hidden_size
    layers = sum(hidden * (2 * s.q_size + 2 * s.kv_size + 3 * s.intermediate_size) for s in config.layers)
    return layers + 2 * config.vocab_size * hidden + hidden


class Decoder:
    """See Model. Query, key and value are one map, and so are gate and up; the weights of the norms before a map are
    folded into it."""

    def __init__(
        self, config: ModelConfig, take: TakeWeight, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._take = take
        self._ropes = {
            spec: RopeTable(spec, max_len, dtype, device) for spec in dict.fromkeys(s.rope for s in config.layers)
        }
        embedding = self._on_device(take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)))
        self._embedding = embedding
        self._layers = [self._load_layer(f"model.layers.{i}.", spec) for i, spec in enumerate(config.layers)]
        self._final_norm = self._norm("model.norm.weight", config.hidden_size)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._on_device(take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        self._head = Linear(head)
        del self._take

    # --- loading ---

    def _on_device(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype).to(self.device)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._take(name, (size,))
        return self._on_device(weight + self.config.norm_offset if self.config.norm_offset else weight)

    def _linear(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], width: int, bias: bool, norm: str | None
    ) -> Linear:
        take = self._take
        weight = torch.cat([take(f"{prefix}{n}.weight", (s, width)) for n, s in zip(names, sizes, strict=True)])
        if norm is not None:
            # Folded in float32 and rounded once: (x * n) W^T = x (W * n)^T.
            stored = take(f"{prefix}{norm}.weight", (width,)).float() + self.config.norm_offset
            weight = weight.float() * stored
        joined = None
        if bias:
            joined = self._on_device(
                torch.cat([take(f"{prefix}{n}.bias", (s,)) for n, s in zip(names, sizes, strict=True)])
            )
        return Linear(self._on_device(weight), joined)

    def _load_layer(self, prefix: str, spec: LayerSpec) -> _Layer:
        hidden, inner, biases = self.config.hidden_size, spec.intermediate_size, spec.biases
        before_mlp = _NORM_BEFORE_MLP[spec.has_post_norms]
        qk_norms = behind_attention = behind_mlp = None
        if spec.has_qk_norms:
            names = (f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight")
            qk_norms = torch.stack([self._norm(name, spec.attention.head_dim) for name in names])
        if spec.has_post_norms:
            behind_attention, behind_mlp = (self._norm(f"{prefix}{name}.weight", hidden) for name in _NORMS_BEHIND)
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        return _Layer(
            spec=spec,
            qkv=self._linear(prefix, _QKV, sizes, hidden, biases.qkv, "input_layernorm"),
            out=self._linear(prefix, ("self_attn.o_proj",), (hidden,), spec.q_size, biases.out, None),
            gate_up=self._linear(prefix, _GATE_UP, (inner, inner), hidden, biases.gate_up, before_mlp),
            down=self._linear(prefix, ("mlp.down_proj",), (hidden,), inner, biases.down, None),
            qk_norms=qk_norms,
            norm_behind_attention=behind_attention,
            norm_behind_mlp=behind_mlp,
        )

    # --- one step ---

    def forward(self, step: ForwardInput, kv: PagedKv, attention: AttentionBackend) -> torch.Tensor:
        """See Model."""
        rotations = {spec: table.rows(step.positions) for spec, table in self._ropes.items()}
        x = self._embedding.index_select(0, step.token_ids)
        if self.config.embedding_scale != 1.0:
            # Rounded to the model's dtype first, as the checkpoints were trained.
            x.mul_(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, x, step, rotations[layer.spec.rope], kv, attention)
            if index == last:
                # Behind the last attention only the tokens whose logits are wanted matter.
                x, mixed = x.index_select(0, step.logit_tokens), mixed.index_select(0, step.logit_tokens)
            x = self._add(layer.out, x, mixed, layer.norm_behind_attention)
            x = self._add(layer.down, x, self._gated(layer, x), layer.norm_behind_mlp)
        x = rms_scale(x, self.config.rms_norm_eps).mul_(self._final_norm)
        return self._head(x).float()

    def _add(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """residual + linear(x), normed in between where the layer does that."""
        if norm is None:
            return linear.add_to(residual, x)
        return rms_scale(linear(x), self.config.rms_norm_eps).mul_(norm).add_(residual)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        step: ForwardInput,
        rotation: tuple[torch.Tensor, torch.Tensor],
        kv: PagedKv,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        spec = layer.spec.attention
        num_tokens, num_rotated = x.shape[0], spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(rms_scale(x, self.config.rms_norm_eps))
        qk = qkv[:, : num_rotated * spec.head_dim].view(num_tokens, num_rotated, spec.head_dim)
        if layer.qk_norms is not None:
            qk = rms_scale(qk, self.config.rms_norm_eps)
            qk[:, : spec.num_heads].mul_(layer.qk_norms[0])
            qk[:, spec.num_heads :].mul_(layer.qk_norms[1])
        qk = self._ropes[layer.spec.rope].rotate(qk, *rotation)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        v = qkv[:, num_rotated * spec.head_dim :]
        attention.write(kv, index, step.slots, qk.view(num_tokens, -1)[:, layer.spec.q_size :], v)
        fresh = (k, v.view(num_tokens, spec.num_kv_heads, spec.head_dim))
        return attention.attend(step.attention_plan, spec, q, kv, index, fresh)

    def _gated(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        inner = layer.spec.intermediate_size
        gate_up = layer.gate_up(rms_scale(x, self.config.rms_norm_eps))
        gate, up = gate_up[:, :inner], gate_up[:, inner:]
        if layer.spec.activation is Activation.SILU:
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)
