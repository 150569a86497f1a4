"""Gemma 2: norms before and behind attention and MLP, soft-capped scores and logits, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from worker_svc.models.base import Architecture, Biases, LayerNames, LayerSpec, ModelConfig, RopeSpec
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_layer_types, read_model, read_window, with_window
from worker_svc.models.fields import ConfigFields

DEFAULTS: Final[dict[str, Any]] = {
    **COMMON_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

_NAMES = LayerNames(
    norm_behind_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_behind_mlp="post_feedforward_layernorm",
)


def read_gemma_layer(fields: ConfigFields, rope: RopeSpec | None = None) -> LayerSpec:
    """A layer without its window and soft cap. rope: read from the file unless given."""
    layer = read_layer(fields, rope=rope, activation="hidden_activation")
    bias = fields.flag("attention_bias")
    attention = replace(layer.attention, scale=fields.number("query_pre_attn_scalar") ** -0.5)
    return replace(layer, attention=attention, biases=Biases(qkv=bias, out=bias), names=_NAMES)


def read_gemma_model(fields: ConfigFields, architecture: str, layers: list[LayerSpec]) -> ModelConfig:
    """The configuration around the layers: stored norms lack 1, tokens are scaled by the root of their width."""
    config = read_model(fields, architecture, layers)
    return replace(
        config,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    layer = read_gemma_layer(fields)
    capped = replace(layer.attention, soft_cap=fields.optional_number("attn_logit_softcapping"))
    layer = replace(layer, attention=capped)
    sliding = read_layer_types(fields, lambda index: index % 2 == 0)
    window = read_window(fields, sliding)
    layers = [with_window(layer, window if is_sliding else None) for is_sliding in sliding]
    return read_gemma_model(fields, ARCHITECTURE.names[0], layers)


ARCHITECTURE: Final = Architecture(
    names=("Gemma2ForCausalLM",), model_type="gemma2", parse=parse, build=Decoder, defaults=DEFAULTS
)
