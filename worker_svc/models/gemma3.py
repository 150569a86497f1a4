"""Gemma 3, its text model: a Gemma 2 with norms of queries and keys, and other rotary positions in windowed layers.

transformers reads `attn_logit_softcapping` and does not use it; here a value is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models import gemma2
from worker_svc.models.base import Architecture, ModelConfig, QkNorm, RopeSpec
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import FULL, SLIDING, read_attention, read_layer_types, read_window, with_window
from worker_svc.models.fields import ConfigFields
from worker_svc.models.rope_config import rope_from


def _read_ropes(fields: ConfigFields) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers that see everything, and of those with a window. Older files scale the former only."""
    head_dim = read_attention(fields).head_dim
    full_theta, local_theta = fields.number("rope_theta"), fields.number("rope_local_base_freq")
    full, local = RopeSpec(full_theta, head_dim), RopeSpec(local_theta, head_dim)
    if (both := fields.part("rope_parameters")) is not None:
        both.refuse_others((FULL, SLIDING))
        if (parameters := both.part(FULL)) is not None:
            full = _rope(parameters, fields, head_dim, full_theta)
        if (parameters := both.part(SLIDING)) is not None:
            local = _rope(parameters, fields, head_dim, local_theta)
    if (scaling := fields.part("rope_scaling")) is not None:
        full = _rope(scaling, fields, head_dim, full.theta)
    return full, local


def _rope(parameters: ConfigFields, fields: ConfigFields, head_dim: int, theta: float) -> RopeSpec:
    if parameters.value("truncate") is False:  # transformers does not look for it in these objects
        raise parameters.unsupported("truncate", "true")
    return rope_from(parameters, fields, head_dim, theta)


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    full_rope, local_rope = _read_ropes(fields)
    layer = replace(gemma2.read_gemma_layer(fields, full_rope), qk_norm=QkNorm.PER_HEAD)
    every = fields.positive("sliding_window_pattern")
    sliding = read_layer_types(fields, lambda index: (index + 1) % every != 0)
    local = with_window(replace(layer, rope=local_rope), read_window(fields, sliding))
    layers = [local if is_sliding else layer for is_sliding in sliding]
    return gemma2.read_gemma_model(fields, ARCHITECTURE.names[0], layers)


ARCHITECTURE: Final = Architecture(
    names=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    parse=parse,
    build=Decoder,
    defaults={
        **gemma2.DEFAULTS,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
)
