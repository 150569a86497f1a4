"""A decoder composed from its LayerSpecs: weights in, one ragged forward pass out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.paged_kv import PagedKv
from worker_svc.models.base import ForwardInput, LayerSpec, ModelConfig, QkNorm, Weights
from worker_svc.models.feed_forward import Experts, FeedForward, GatedMlp
from worker_svc.models.layers import Linear, rms_scale
from worker_svc.models.rope import RopeTable


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    qkv: Linear
    out: Linear
    feed_forward: FeedForward
    # Weights of the norms that cannot be folded into a map, or None without them: of queries and keys ([2, head_dim]
    # for all heads, or one vector over all heads, queries first), and [hidden] each behind attention and MLP.
    qk_norms: torch.Tensor | None
    norm_behind_attention: torch.Tensor | None
    norm_behind_mlp: torch.Tensor | None


def num_weights(config: ModelConfig) -> int:
    """How many numbers a decoder on a CPU holds, at most: the output weights are held in a layout of their own, also
    when they are the embedding's."""
    hidden = config.hidden_size
    return sum(spec.num_weights(hidden) for spec in config.layers) + 2 * config.vocab_size * hidden + hidden


class Decoder:
    """See Model. Query, key and value are one map, and so are gate and up; the weights of the norms before a map are
    folded into it."""

    def __init__(
        self, config: ModelConfig, weights: Weights, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._ropes = {
            spec: RopeTable(spec, max_len, dtype, device) for spec in dict.fromkeys(s.rope for s in config.layers)
        }
        embedding = self._on_device(weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)))
        self._embedding = embedding
        self._layers = [self._load_layer(f"model.layers.{i}.", spec) for i, spec in enumerate(config.layers)]
        self._final_norm = self._norm("model.norm", config.hidden_size)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._on_device(weights.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        self._head = Linear(head)
        del self._weights

    # --- loading ---

    def _on_device(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype).to(self.device)

    def _norm(self, name: str, size: int, scale: float = 1.0) -> torch.Tensor:
        weight = self._weights.take(f"{name}.weight", (size,))
        weight = weight + self.config.norm_offset if self.config.norm_offset else weight
        return self._on_device(weight if scale == 1.0 else weight.float() * scale)

    def _linear(
        self,
        prefix: str,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        bias: bool = False,
        norm: str | None = None,
        scale: float = 1.0,
    ) -> Linear:
        """The maps of these names as one, their rows joined. sizes: rows of each. norm: folded in. scale: of the
        output."""
        weight = self._weights.lend([f"{prefix}{name}.weight" for name in names], [(size, width) for size in sizes])
        if norm is not None:
            # Folded in float32 and rounded once: (x * n) W^T = x (W * n)^T.
            stored = self._weights.take(f"{prefix}{norm}.weight", (width,)).float() + self.config.norm_offset
            weight = weight.float().mul_(stored)
        joined = None
        if bias:
            take = self._weights.take
            joined = torch.cat([take(f"{prefix}{name}.bias", (size,)) for name, size in zip(names, sizes, strict=True)])
        if scale != 1.0:
            weight, joined = weight.float().mul_(scale), None if joined is None else joined.float().mul_(scale)
        kept = self._on_device(weight)
        is_lent = kept.data_ptr() == weight.data_ptr()
        return Linear(kept, None if joined is None else self._on_device(joined), copy=is_lent)

    def _load_layer(self, prefix: str, spec: LayerSpec) -> _Layer:
        hidden, names, scale = self.config.hidden_size, spec.names, spec.residual_scale
        behind_attention, behind_mlp = (
            None if name is None else self._norm(f"{prefix}{name}", hidden, scale)
            for name in (names.norm_behind_attention, names.norm_behind_mlp)
        )
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        return _Layer(
            spec=spec,
            qkv=self._linear(
                prefix,
                names.qkv,
                sizes if len(names.qkv) == len(sizes) else (sum(sizes),),
                hidden,
                bias=spec.biases.qkv,
                norm=names.norm_before_attention,
            ),
            out=self._linear(
                prefix,
                (names.out,),
                (hidden,),
                spec.q_size,
                bias=spec.biases.out,
                scale=scale if behind_attention is None else 1.0,
            ),
            feed_forward=self._load_feed_forward(prefix, spec, scale if behind_mlp is None else 1.0),
            qk_norms=self._load_qk_norms(prefix, spec),
            norm_behind_attention=behind_attention,
            norm_behind_mlp=behind_mlp,
        )

    def _load_qk_norms(self, prefix: str, spec: LayerSpec) -> torch.Tensor | None:
        q_norm, k_norm = f"{prefix}{spec.names.q_norm}", f"{prefix}{spec.names.k_norm}"
        if spec.qk_norm is QkNorm.NONE:
            return None
        if spec.qk_norm is QkNorm.PER_HEAD:
            return torch.stack([self._norm(name, spec.attention.head_dim) for name in (q_norm, k_norm)])
        return torch.cat([self._norm(q_norm, spec.q_size), self._norm(k_norm, spec.kv_size)])

    def _load_feed_forward(self, prefix: str, spec: LayerSpec, scale: float) -> FeedForward:
        names, experts, hidden = spec.names, spec.experts, self.config.hidden_size
        if experts is None:
            return self._load_mlp(prefix, spec, names.gate_up, names.down, spec.intermediate_size, scale)
        norm = names.norm_before_mlp
        router = self._linear(prefix, (names.router,), (experts.num_experts,), hidden, norm=norm)
        maps = []
        for number in range(experts.num_experts):
            gate_up = [name.format(number) for name in names.expert_gate_up]
            down = names.expert_down.format(number)
            maps.append(self._load_mlp(prefix, spec, gate_up, down, experts.intermediate_size, scale))
        return Experts(experts, router, maps)

    def _load_mlp(
        self, prefix: str, spec: LayerSpec, gate_up: Sequence[str], down: str, inner: int, scale: float
    ) -> GatedMlp:
        hidden, biases = self.config.hidden_size, spec.biases
        sizes = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
        return GatedMlp(
            self._linear(prefix, gate_up, sizes, hidden, bias=biases.gate_up, norm=spec.names.norm_before_mlp),
            self._linear(prefix, (down,), (hidden,), inner, bias=biases.down, scale=scale),
            spec.activation,
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
            normed = self._scaled(x, layer.spec.names.norm_before_mlp)
            x = self._add(layer.feed_forward, x, normed, layer.norm_behind_mlp)
        return self._logits(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        x = rms_scale(x, config.rms_norm_eps).mul_(self._final_norm)
        logits: torch.Tensor = self._head(x).float()
        if config.logit_scale != 1.0:
            logits.mul_(config.logit_scale)
        if config.logit_soft_cap is not None:
            logits.div_(config.logit_soft_cap).tanh_().mul_(config.logit_soft_cap)
        return logits

    def _scaled(self, x: torch.Tensor, norm: str | None) -> torch.Tensor:
        """x as the map behind that norm takes it: the norm's weight is part of the map."""
        return x if norm is None else rms_scale(x, self.config.rms_norm_eps)

    def _add(
        self, part: Linear | FeedForward, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + part(x), normed in between where the layer does that."""
        if norm is None:
            return part.add_to(residual, x)
        return rms_scale(part(x), self.config.rms_norm_eps).mul_(norm).add_(residual)

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
        qkv = layer.qkv(self._scaled(x, layer.spec.names.norm_before_attention))
        qk = self._normed(layer, qkv[:, : num_rotated * spec.head_dim])
        qk = self._ropes[layer.spec.rope].rotate(qk, *rotation)
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        v = qkv[:, num_rotated * spec.head_dim :]
        attention.write(kv, index, step.slots, qk.view(num_tokens, -1)[:, layer.spec.q_size :], v)
        fresh = (k, v.view(num_tokens, spec.num_kv_heads, spec.head_dim))
        return attention.attend(step.attention_plan, spec, q, kv, index, fresh)

    def _normed(self, layer: _Layer, qk: torch.Tensor) -> torch.Tensor:
        """Queries and keys [T, width of both] as [T, heads, head_dim], normed where the layer does that."""
        spec, eps, weights = layer.spec.attention, self.config.rms_norm_eps, layer.qk_norms
        by_head = (qk.shape[0], -1, spec.head_dim)
        if weights is None:
            return qk.view(by_head)
        if layer.spec.qk_norm is QkNorm.WHOLE:
            q, k = qk[:, : layer.spec.q_size], qk[:, layer.spec.q_size :]
            return torch.cat((rms_scale(q, eps), rms_scale(k, eps)), dim=-1).mul_(weights).view(by_head)
        normed = rms_scale(qk.view(by_head), eps)
        normed[:, : spec.num_heads].mul_(weights[0])
        normed[:, spec.num_heads :].mul_(weights[1])
        return normed
