"""Qwen 3: norms of queries and keys per head instead of Qwen 2's biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models import qwen2
from worker_svc.models.base import Architecture, Biases, LayerSpec, ModelConfig, QkNorm
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import read_layer, read_model
from worker_svc.models.fields import ConfigFields


def read_qwen3_layer(fields: ConfigFields) -> LayerSpec:
    """A layer without its window."""
    bias = fields.flag("attention_bias")
    return replace(read_layer(fields), qk_norm=QkNorm.PER_HEAD, biases=Biases(qkv=bias, out=bias))


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    return read_model(fields, ARCHITECTURE.names[0], qwen2.layers_with_windows(fields, read_qwen3_layer(fields)))


ARCHITECTURE: Final = Architecture(
    names=("Qwen3ForCausalLM",),
    model_type="qwen3",
    parse=parse,
    build=Decoder,
    defaults={**qwen2.DEFAULTS, "head_dim": 128},
)
