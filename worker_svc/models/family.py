"""What the families of decoders read from config.json in the same way. A family's file puts these together and adds
what is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from worker_svc.attention.base import AttentionSpec
from worker_svc.models.base import Activation, ExpertsSpec, LayerSpec, ModelConfig, RopeKind, RopeSpec
from worker_svc.models.fields import BrokenModel, ConfigFields
from worker_svc.models.rope_config import read_rope

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}

# Values that transformers' configuration classes of most families have for fields that config.json leaves out.
COMMON_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

# Names in layer_types.
SLIDING, FULL = "sliding_attention", "full_attention"


def read_attention(fields: ConfigFields) -> AttentionSpec:
    """Heads, KV heads (as many when null) and their width (hidden_size / heads when null); scaled by its root."""
    num_heads, hidden_size = fields.positive("num_attention_heads"), fields.positive("hidden_size")
    num_kv_heads = fields.optional_positive("num_key_value_heads") or num_heads
    head_dim = fields.optional_positive("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise BrokenModel(
                f"{fields.where}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
            )
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise BrokenModel(
            f"{fields.where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise BrokenModel(f"{fields.where}: head_dim is {head_dim}, an even number is needed")
    return AttentionSpec(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)


def read_layer(
    fields: ConfigFields, *, rope: RopeSpec | None = None, activation: str = "hidden_act", intermediate: str = ""
) -> LayerSpec:
    """A plain layer: grouped attention, rotary positions (read unless given), a gated MLP. activation, intermediate:
    fields with the activation and the width of the MLP."""
    attention = read_attention(fields)
    return LayerSpec(
        attention=attention,
        rope=rope or read_rope(fields, attention.head_dim),
        intermediate_size=fields.positive(intermediate or "intermediate_size"),
        activation=fields.choice(activation, ACTIVATIONS),
    )


def read_experts(fields: ConfigFields, *, intermediate: str, normalised: bool) -> ExpertsSpec:
    """The experts of a layer. intermediate: the field with their width. Their number is `num_local_experts`, or
    `num_experts` as older files of some families call it."""
    key = "num_experts" if "num_experts" in fields and "num_local_experts" not in fields else "num_local_experts"
    num_experts, per_token = fields.positive(key), fields.positive("num_experts_per_tok")
    if per_token > num_experts:
        raise BrokenModel(f"{fields.where}: num_experts_per_tok is {per_token}, but {key} is {num_experts}")
    return ExpertsSpec(num_experts, per_token, fields.positive(intermediate), normalised)


def read_window(fields: ConfigFields, sliding: Sequence[bool]) -> int | None:
    """The size of windows; null only where no layer has one."""
    return fields.positive("sliding_window") if any(sliding) else fields.optional_positive("sliding_window")


def with_window(layer: LayerSpec, window: int | None) -> LayerSpec:
    """The layer with a sliding window, None: without."""
    return replace(layer, attention=replace(layer.attention, window=window))


def read_layer_types(fields: ConfigFields, is_sliding: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers have a sliding window, from `layer_types`; is_sliding: the rule by a layer's number without it."""
    num_layers = fields.positive("num_hidden_layers")
    if fields.value("layer_types") is None:
        return tuple(is_sliding(index) for index in range(num_layers))
    return tuple(one == SLIDING for one in fields.names("layer_types", num_layers, (FULL, SLIDING)))


def read_model(fields: ConfigFields, architecture: str, layers: Sequence[LayerSpec] | LayerSpec) -> ModelConfig:
    """The configuration around the layers; one LayerSpec stands for num_hidden_layers equal ones."""
    if isinstance(layers, LayerSpec):
        layers = (layers,) * fields.positive("num_hidden_layers")
    stated = fields.positive("max_position_embeddings")
    context, longest = _lengths(stated, layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        max_position_embeddings=context,
        max_extended_len=longest,
        rms_norm_eps=fields.number("rms_norm_eps"),
        layers=tuple(layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


def _lengths(stated: int, layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """The context, and how far rope scaling reaches beyond it: see ModelConfig."""
    context = longest = stated
    for scaling in {layer.rope.scaling for layer in layers if layer.rope.scaling is not None}:
        original = scaling.original_max_position_embeddings
        if scaling.kind is RopeKind.LONGROPE:
            context = min(context, original)
        elif scaling.kind in (RopeKind.DYNAMIC, RopeKind.YARN):
            longest = max(longest, int(original * scaling.factor))
    return context, longest
