"""Granite, the dense ones: a Llama with factors of embedding, scores, residual and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models import llama
from worker_svc.models.base import Architecture, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS
from worker_svc.models.fields import ConfigFields


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    plain = llama.parse(fields)
    layer = plain.layers[0]
    layer = replace(
        layer,
        attention=replace(layer.attention, scale=fields.number("attention_multiplier")),
        residual_scale=fields.number("residual_multiplier"),
    )
    return replace(
        plain,
        architecture=ARCHITECTURE.names[0],
        layers=(layer,) * len(plain.layers),
        embedding_scale=fields.number("embedding_multiplier"),
        logit_scale=1.0 / fields.number("logits_scaling"),
    )


ARCHITECTURE: Final = Architecture(
    names=("GraniteForCausalLM",),
    model_type="granite",
    parse=parse,
    build=Decoder,
    defaults={
        **COMMON_DEFAULTS,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)
