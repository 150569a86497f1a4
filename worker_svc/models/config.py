"""Reading the JSON files of a model, whatever its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_svc.models.fields import BrokenModel, UnsupportedModel
from worker_svc.runner.base import GenerationDefaults

__all__ = ["BrokenModel", "UnsupportedModel", "generation_defaults", "read_json", "refuse_quantised", "write_json"]


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


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedModel for a checkpoint that says it is quantised."""
    for key in ("quantization_config", "compression_config", "quantization"):
        if raw.get(key):
            raise UnsupportedModel(
                f"{where}: {key}: quantised weights; supported: float32, float16 and bfloat16 safetensors, or GGUF"
            )


def generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """What generation_config.json recommends."""

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
