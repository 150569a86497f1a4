"""The Llama family: Llama, SmolLM2 and what else names LlamaForCausalLM. Grouped-query attention with rotary positions,
SwiGLU, norms before attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker_svc.models.base import Architecture, Biases, GgufArchitecture, ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.family import COMMON_DEFAULTS, read_layer, read_model
from worker_svc.models.fields import ConfigFields


def parse(fields: ConfigFields) -> ModelConfig:
    """See Architecture.parse."""
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    biases = Biases(qkv=attention_bias, out=attention_bias, gate_up=mlp_bias, down=mlp_bias)
    return read_model(fields, ARCHITECTURE.names[0], replace(read_layer(fields), biases=biases))


GGUF: Final = GgufArchitecture(
    name="llama",
    layer_tensors={
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q.bias": "self_attn.q_proj.bias",
        "attn_k.bias": "self_attn.k_proj.bias",
        "attn_v.bias": "self_attn.v_proj.bias",
        "attn_output.bias": "self_attn.o_proj.bias",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    },
    model_tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    interleaved={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
)

ARCHITECTURE: Final = Architecture(
    names=("LlamaForCausalLM",),
    model_type="llama",
    parse=parse,
    build=Decoder,
    defaults=COMMON_DEFAULTS,
    gguf=GGUF,
)
