"""Qwen 2 and 2.5: a Llama with biases of queries, keys and values, and optionally a window in the upper layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from worker_svc.models.base import Architecture, Biases, LayerSpec, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_layer_types, read_model, with_window
from worker_svc.models.fields import ConfigFields

DEFAULTS: Final[dict[str, Any]] = {
    **COMMON_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def layers_with_windows(fields: ConfigFields, layer: LayerSpec) -> list[LayerSpec]:
    """num_hidden_layers of it. With use_sliding_window, those that layer_types names, else those from
    max_window_layers on, have a window."""
    used, window = fields.flag("use_sliding_window"), fields.optional_positive("sliding_window")
    first = fields.value("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.broken("max_window_layers", "a number of layers")
    window = window if used else None
    sliding = read_layer_types(fields, lambda index: window is not None and index >= first)
    if any(sliding) and window is None:
        raise fields.broken("use_sliding_window" if not used else "sliding_window", "what layer_types asks for")
    return [with_window(layer, window if is_sliding else None) for is_sliding in sliding]


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    layer = replace(read_layer(fields), biases=Biases(qkv=True))
    return read_model(fields, ARCHITECTURE.names[0], layers_with_windows(fields, layer))


ARCHITECTURE: Final = Architecture(
    names=("Qwen2ForCausalLM",), model_type="qwen2", parse=parse, build=Decoder, defaults=DEFAULTS
)
