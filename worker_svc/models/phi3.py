"""Phi 3 and 4 (the dense ones): a Llama whose maps are stored joined, with longrope and partly rotated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, LayerNames, ModelConfig, RopeSpec
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_attention, read_layer, read_model, with_window
from worker_svc.models.fields import BrokenModel, ConfigFields
from worker_svc.models.rope_config import rope_from, rope_object

_NAMES = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
# Older files say su or yarn and mean longrope.
_ALIASES = {"su": "longrope", "yarn": "longrope"}


def _read_rope(fields: ConfigFields) -> RopeSpec:
    head_dim, theta = read_attention(fields).head_dim, fields.number("rope_theta")
    fields.positive("original_max_position_embeddings")  # preferred to the one in the object
    parameters = rope_object(fields)
    holder = parameters if parameters is not None and "partial_rotary_factor" in parameters else fields
    part = holder.number("partial_rotary_factor")
    fields.value("partial_rotary_factor")  # read in either case
    rotary_dim = int(head_dim * part)
    if part > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise BrokenModel(
            f"{fields.where}: partial_rotary_factor {part} rotates {rotary_dim} of a head's {head_dim} numbers, an "
            "even number is needed"
        )
    if parameters is None:
        return RopeSpec(theta, head_dim, None, rotary_dim)
    return rope_from(
        parameters,
        fields,
        head_dim,
        theta,
        rotary_dim=rotary_dim,
        aliases=_ALIASES,
        supported=("default", "longrope"),
    )


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    layer = replace(read_layer(fields, rope=_read_rope(fields)), names=_NAMES)
    return read_model(fields, ARCHITECTURE.names[0], with_window(layer, fields.optional_positive("sliding_window")))


ARCHITECTURE: Final = Architecture(
    names=("Phi3ForCausalLM",),
    model_type="phi3",
    parse=parse,
    build=Decoder,
    defaults={
        **COMMON_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
)
