"""Which models can be loaded: one line for each architecture, whose file says the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from worker_svc.models.base import Architecture, ModelConfig
from worker_svc.models.config import generation_defaults, read_json, refuse_quantised
from worker_svc.models.ends import end_ids
from worker_svc.models.fields import BrokenModel, ConfigFields, UnsupportedModel

# Modules of this package, one a family, each with an ARCHITECTURE.
_FAMILIES: Final = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    "granite",
)

ARCHITECTURES: Final[tuple[Architecture, ...]] = tuple(
    import_module(f"{__package__}.{family}").ARCHITECTURE for family in _FAMILIES
)


def supported_names() -> str:
    """Every architecture's names, for messages."""
    return ", ".join(name for architecture in ARCHITECTURES for name in architecture.names)


def find_architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a config.json names. Raises UnsupportedModel or BrokenModel."""
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise BrokenModel(f"{where}: architectures is {named!r}, a list of names is needed")
    for architecture in ARCHITECTURES:
        if any(name in architecture.names for name in named):
            return architecture
        if not named and raw.get("model_type") == architecture.model_type:
            return architecture
    asked = ", ".join(map(str, named)) or raw.get("model_type") or "nothing"
    raise UnsupportedModel(f"{where} names {asked}; supported: {supported_names()}")


def find_gguf(name: str) -> Architecture | None:
    """The architecture that GGUF files call by this name."""
    return next((one for one in ARCHITECTURES if one.gguf is not None and one.gguf.name == name), None)


def read_model_config(directory: Path) -> tuple[Architecture, ModelConfig]:
    """Read config.json and, when present, generation_config.json and the tokenizer's end of sequence.

    Raises UnsupportedModel (architecture, quantisation, a field that changes the numbers and is not computed here) or
    BrokenModel (missing or absurd values). The message names the file and the field.
    """
    where = str(directory / "config.json")
    raw = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    refuse_quantised(raw, where)
    architecture = find_architecture(raw, where)
    fields = ConfigFields(raw, where, defaults=architecture.defaults)
    config = architecture.parse(fields)
    fields.refuse_unread()
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in config.layers}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{where}: layers with different KV heads; supported: the same in every layer")
    ends = end_ids(directory, raw, generation, config.vocab_size)
    return architecture, replace(config, eos_token_ids=ends, generation_defaults=generation_defaults(generation))
