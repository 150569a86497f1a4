"""Mixtral: a Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, ExpertsSpec, LayerNames, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_model, with_window
from worker_svc.models.fields import BrokenModel, ConfigFields

_NAMES = LayerNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def read_experts(fields: ConfigFields, *, intermediate: str, normalised: bool) -> ExpertsSpec:
    """The experts of a layer. intermediate: the field with their width. Their number is `num_local_experts`, or
    `num_experts` as older files of some families call it."""
    key = "num_experts" if "num_experts" in fields and "num_local_experts" not in fields else "num_local_experts"
    num_experts, per_token = fields.positive(key), fields.positive("num_experts_per_tok")
    if per_token > num_experts:
        raise BrokenModel(f"{fields.where}: num_experts_per_tok is {per_token}, but {key} is {num_experts}")
    return ExpertsSpec(num_experts, per_token, fields.positive(intermediate), normalised)


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
