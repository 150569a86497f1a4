"""Which models can be loaded: one line for each architecture, whose file says the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from worker_svc.models import llama
from worker_svc.models.base import Architecture, ModelConfig
from worker_svc.models.config import UnsupportedModel, read_json

ARCHITECTURES: Final[tuple[Architecture, ...]] = (llama.ARCHITECTURE,)


def supported_names() -> str:
    """Every architecture's names, for messages."""
    return ", ".join(name for architecture in ARCHITECTURES for name in architecture.names)


def find_architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a config.json names. Raises UnsupportedModel."""
    named = raw.get("architectures") or ()
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
    """Read config.json and, when present, generation_config.json.

    Raises UnsupportedModel (architecture, activation, quantisation, rope type) or BrokenModel (missing or absurd
    values).
    """
    where = str(directory / "config.json")
    raw = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    architecture = find_architecture(raw, where)
    config = architecture.parse(raw, generation, where)
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in config.layers}
    if len(shapes) != 1:
        raise UnsupportedModel(f"{where}: layers with different KV heads; supported: the same in every layer")
    return architecture, config
