"""Reading config.json and generation_config.json: what the families have in common, and what is wrong with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_svc.models.base import RopeScaling
from worker_svc.runner.base import GenerationDefaults


class UnsupportedModel(ValueError):
    """The files are readable and describe something this worker cannot run; the message says what and what it can."""


class BrokenModel(ValueError):
    """The files are missing, truncated or contradict each other; the message names the file."""


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
    if raw.get("quantization_config"):
        raise UnsupportedModel(
            f"{where}: quantised weights; supported: float32, float16 and bfloat16 safetensors, or GGUF"
        )


def positive(raw: Mapping[str, Any], key: str, where: str) -> int:
    """A positive integer. Raises BrokenModel."""
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise BrokenModel(f"{where}: {key} is {value!r}, a positive integer is needed")
    return value


def rope_parameters(raw: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions. Raises UnsupportedModel for a kind that is not known here."""
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


def eos_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id either file calls an end, in ascending order."""
    ids: set[int] = set()
    for source in (raw, generation):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(int(v) for v in value)
    return tuple(sorted(ids))


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
