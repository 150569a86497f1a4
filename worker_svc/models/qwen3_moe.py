"""Qwen 3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_experts, read_model, with_window
from worker_svc.models.fields import ConfigFields
from worker_svc.models.qwen3 import read_qwen3_layer


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    used, window = fields.flag("use_sliding_window"), fields.optional_positive("sliding_window")
    dense = with_window(read_qwen3_layer(fields), window if used else None)
    experts = read_experts(fields, intermediate="moe_intermediate_size", normalised=fields.flag("norm_topk_prob"))
    sparse, step = replace(dense, experts=experts), fields.positive("decoder_sparse_step")
    plain = fields.indices("mlp_only_layers")
    layers = [
        sparse if index not in plain and (index + 1) % step == 0 else dense
        for index in range(fields.positive("num_hidden_layers"))
    ]
    return read_model(fields, ARCHITECTURE.names[0], layers)


ARCHITECTURE: Final = Architecture(
    names=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    parse=parse,
    build=Decoder,
    defaults={
        **COMMON_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
)
