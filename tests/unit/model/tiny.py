"""Small random Llamas, as transformers writes them and as a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker_svc.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Settings:
    """What ModelRunner.load reads."""

    model: str
    dtype: str = "float32"
    device: str = "cpu"
    num_blocks: int | None = 256
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    threads: int | None = 1


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random model whose logits are spread far enough that greedy choices are clear."""
    torch.manual_seed(changes.pop("seed", 1))
    shape: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(shape | changes)))
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def load_runner(model: LlamaForCausalLM, directory: Path, **settings: Any) -> ModelRunner:
    """The model written to a directory and loaded from there."""
    model.save_pretrained(directory)
    return ModelRunner.load(Settings(str(directory), **settings))


def byte_level_alphabet() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary, sorted as GPT-2 has them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    quantise: gguf.GGMLQuantizationType | None = None,
    pre: str = "smollm",
    tokenizer_model: str = "gpt2",
    rope_factors: list[float] | None = None,
) -> None:
    """`model` as llama.cpp would store it: q and k rows interleaved, matrices optionally quantised."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, config.vocab_size, tokenizer_model, pre)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if "q_proj" in name:
            values = _interleave(values, config.num_attention_heads)
        if "k_proj" in name:
            values = _interleave(values, config.num_key_value_heads)
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, model: str, pre: str) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_level_alphabet(), "Ġ1", "12"]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    while len(tokens) < vocab_size:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(1)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _interleave(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    for ours, theirs in (
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        rest = rest.replace(ours, theirs)
    return f"blk.{layer}.{rest}"
