"""OLMo 2: a Llama with norms behind attention and MLP instead of before them, and one norm over all heads of queries
and one over those of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, Biases, LayerNames, ModelConfig, QkNorm
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_model
from worker_svc.models.fields import ConfigFields

_NAMES = LayerNames(
    norm_before_attention=None,
    norm_behind_attention="post_attention_layernorm",
    norm_before_mlp=None,
    norm_behind_mlp="post_feedforward_layernorm",
)


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    bias = fields.flag("attention_bias")
    layer = replace(read_layer(fields), qk_norm=QkNorm.WHOLE, biases=Biases(qkv=bias, out=bias), names=_NAMES)
    return read_model(fields, ARCHITECTURE.names[0], layer)


ARCHITECTURE: Final = Architecture(
    names=("Olmo2ForCausalLM",),
    model_type="olmo2",
    parse=parse,
    build=Decoder,
    defaults={**COMMON_DEFAULTS, "rms_norm_eps": 1e-5},
)
