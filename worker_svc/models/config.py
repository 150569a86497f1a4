"""What a model directory says about the network, in one frozen object. Reads config.json and generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_svc.runner.base import GenerationDefaults

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


class UnsupportedModel(ValueError):
    """The files are readable and describe something this worker cannot run; the message says what and what it can."""


class BrokenModel(ValueError):
    """The files are missing, truncated or contradict each other; the message names the file."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotation frequencies are stretched beyond the base: `kind` is "linear", "llama3" or "factors".

    linear: every frequency divided by factor. llama3: long wavelengths divided by factor, short ones kept, a ramp
    between. factors: frequency i divided by factors[i] (how GGUF stores the llama3 rule, already evaluated).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises BrokenModel, naming the file, when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModel(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} does not hold a JSON object")
    return value


def read_model_config(directory: Path) -> ModelConfig:
    """Read config.json and, when present, generation_config.json.

    Raises UnsupportedModel (architecture, activation, quantisation, rope type) or BrokenModel (missing or absurd
    values).
    """
    raw = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation, where=str(directory / "config.json"))


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The same from parsed JSON; `where` names the source in messages."""
    architecture = _architecture(raw, where)
    _refuse_what_is_not_llama(raw, where)
    num_heads = _positive(raw, "num_attention_heads", where)
    hidden_size = _positive(raw, "hidden_size", where)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise BrokenModel(f"{where}: {num_heads} heads over {num_kv_heads} KV heads of {head_dim} do not fit together")
    theta, scaling = _rope(raw, where)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size", where),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size", where),
        num_layers=_positive(raw, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=int(raw.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=_eos_token_ids(raw, generation),
        generation_defaults=_generation_defaults(generation),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    named = raw.get("architectures") or ()
    for name in named:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    if not named and raw.get("model_type") == "llama":
        return "LlamaForCausalLM"
    asked = ", ".join(map(str, named)) or raw.get("model_type") or "nothing"
    raise UnsupportedModel(f"{where} names {asked}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_what_is_not_llama(raw: Mapping[str, Any], where: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {activation!r}; supported: silu")
    if raw.get("quantization_config"):
        raise UnsupportedModel(
            f"{where}: quantised weights; supported: float32, float16 and bfloat16 safetensors, or GGUF"
        )


def _positive(raw: Mapping[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise BrokenModel(f"{where}: {key} is {value!r}, a positive integer is needed")
    return value


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes one rope_parameters object; older files have rope_theta and rope_scaling apart.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        factors = tuple(float(f) for f in raw.get("rope_freq_factors") or ())
        return theta, RopeScaling("factors", factors=factors) if factors else None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=float(parameters["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"{where}: rope type {kind!r}; supported: default, linear, llama3")


def _eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id either file calls an end, in ascending order."""
    ids: set[int] = set()
    for source in (raw, generation):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(int(v) for v in value)
    return tuple(sorted(ids))


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    def number(key: str) -> float | None:
        value = generation.get(key)
        return float(value) if isinstance(value, int | float) else None

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
    )
