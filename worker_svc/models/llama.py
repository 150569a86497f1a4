"""The Llama family: Llama, SmolLM2 and what else names LlamaForCausalLM. Grouped-query attention with rotary positions,
SwiGLU, norms before attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from worker_svc.attention.base import AttentionSpec
from worker_svc.models.base import Architecture, Biases, GgufArchitecture, LayerSpec, ModelConfig, RopeSpec
from worker_svc.models.config import (
    BrokenModel,
    UnsupportedModel,
    eos_token_ids,
    generation_defaults,
    positive,
    refuse_quantised,
    rope_parameters,
)
from worker_svc.models.decoder import Decoder


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """See Architecture.parse."""
    refuse_quantised(raw, where)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {activation!r}; supported: silu")
    num_heads = positive(raw, "num_attention_heads", where)
    hidden_size = positive(raw, "hidden_size", where)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise BrokenModel(f"{where}: {num_heads} heads over {num_kv_heads} KV heads of {head_dim} do not fit together")
    theta, scaling = rope_parameters(raw, where)
    attention_bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    layer = LayerSpec(
        attention=AttentionSpec(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        rope=RopeSpec(theta, head_dim, scaling),
        intermediate_size=positive(raw, "intermediate_size", where),
        biases=Biases(qkv=attention_bias, out=attention_bias, gate_up=mlp_bias, down=mlp_bias),
    )
    return ModelConfig(
        architecture=ARCHITECTURE.names[0],
        vocab_size=positive(raw, "vocab_size", where),
        hidden_size=hidden_size,
        max_position_embeddings=int(raw.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        layers=(layer,) * positive(raw, "num_hidden_layers", where),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids(raw, generation),
        generation_defaults=generation_defaults(generation),
    )


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
    names=("LlamaForCausalLM",), model_type="llama", parse=parse, build=Decoder, gguf=GGUF
)
