"""Mixtral: a Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, LayerNames, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_experts, read_layer, read_model, with_window
from worker_svc.models.fields import ConfigFields

_NAMES = LayerNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    experts = read_experts(fields, intermediate="intermediate_size", normalised=True)
    layer = replace(read_layer(fields), experts=experts, names=_NAMES)
    return read_model(fields, ARCHITECTURE.names[0], with_window(layer, fields.optional_positive("sliding_window")))


ARCHITECTURE: Final = Architecture(
    names=("MixtralForCausalLM",),
    model_type="mixtral",
    parse=parse,
    build=Decoder,
    defaults={
        **COMMON_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
