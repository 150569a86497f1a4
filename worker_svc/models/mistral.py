"""Mistral: a Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Final

from worker_svc.models.base import Architecture, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_model, with_window
from worker_svc.models.fields import ConfigFields


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    layer = with_window(read_layer(fields), fields.optional_positive("sliding_window"))
    return read_model(fields, ARCHITECTURE.names[0], layer)


ARCHITECTURE: Final = Architecture(
    names=("MistralForCausalLM",),
    model_type="mistral",
    parse=parse,
    build=Decoder,
    defaults={
        **COMMON_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
