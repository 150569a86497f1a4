"""The rotary positions that a config.json describes.

transformers 5 writes one object `rope_parameters`; older files have `rope_theta` and `rope_scaling` apart. Both are
read, with the precedence that transformers gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from worker_svc.models.base import RopeKind, RopeScaling, RopeSpec
from worker_svc.models.fields import ConfigFields, UnsupportedModel

# What a rope object may hold, whatever its type. "finetuned" and "name" say something to people only.
_KNOWN: Final = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
    *("finetuned", "name"),
)


def rope_object(fields: ConfigFields) -> ConfigFields | None:
    """The object that describes the rotary positions, or None for the plain ones."""
    return fields.part("rope_scaling") or fields.part("rope_parameters")


def read_rope(fields: ConfigFields, head_dim: int) -> RopeSpec:
    """The rotary positions that all layers share. Raises UnsupportedModel for a type that is not known."""
    parameters = rope_object(fields)
    theta = fields.number("rope_theta")
    if parameters is None:
        return RopeSpec(theta, head_dim, _stored_factors(fields, head_dim))
    rope = rope_from(parameters, fields, head_dim, theta)
    if rope.scaling is None:
        return RopeSpec(rope.theta, head_dim, _stored_factors(fields, head_dim))
    return rope


def rope_from(
    parameters: ConfigFields,
    fields: ConfigFields,
    head_dim: int,
    theta: float,
    *,
    rotary_dim: int | None = None,
    aliases: Mapping[str, str] | None = None,
    supported: Sequence[str] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope"),
) -> RopeSpec:
    """A RopeSpec from one rope object. theta: the base when the object names none. rotary_dim: rotated numbers of a
    head, None: all. aliases: other names that a family gives to types. supported: types that it has."""
    parameters.refuse_others(_KNOWN)
    if "rope_theta" in parameters:
        theta = parameters.number("rope_theta")
    if theta <= 1:
        raise (parameters if "rope_theta" in parameters else fields).broken("rope_theta", "a number above 1")
    key = "rope_type" if "rope_type" in parameters else "type"
    named = parameters.value(key)
    kind = "default" if named is None else (aliases or {}).get(str(named), named)
    if kind not in supported:
        raise parameters.unsupported(key, ", ".join(supported))
    if rotary_dim is None and parameters.value("partial_rotary_factor") not in (None, 1):
        raise parameters.unsupported("partial_rotary_factor", "1")
    num_rotated = head_dim if rotary_dim is None else rotary_dim
    if kind == "default":
        return RopeSpec(theta, head_dim, None, rotary_dim)
    return RopeSpec(theta, head_dim, _READERS[kind](parameters, fields, num_rotated), rotary_dim)


def _stored_factors(fields: ConfigFields, head_dim: int) -> RopeScaling | None:
    """One factor for each frequency, as converted GGUF files have them."""
    if not fields.value("rope_freq_factors"):
        return None
    return RopeScaling(RopeKind.FACTORS, short_factors=fields.numbers("rope_freq_factors", head_dim // 2))


def _linear(parameters: ConfigFields, fields: ConfigFields, num_rotated: int) -> RopeScaling:
    return RopeScaling(RopeKind.LINEAR, factor=parameters.number("factor"))


def _dynamic(parameters: ConfigFields, fields: ConfigFields, num_rotated: int) -> RopeScaling:
    if num_rotated <= 2:
        raise UnsupportedModel(f"{fields.where}: rope type dynamic with {num_rotated} rotated numbers; more are needed")
    return RopeScaling(
        RopeKind.DYNAMIC,
        factor=parameters.number("factor"),
        original_max_position_embeddings=fields.positive("max_position_embeddings"),
    )


def _llama3(parameters: ConfigFields, fields: ConfigFields, num_rotated: int) -> RopeScaling:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low == high:
        raise parameters.broken("high_freq_factor", "another value than low_freq_factor")
    return RopeScaling(
        RopeKind.LLAMA3,
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original(parameters, fields),
    )


def _yarn(parameters: ConfigFields, fields: ConfigFields, num_rotated: int) -> RopeScaling:
    original, factor = _original_and_factor(parameters, fields)
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(
            factor, parameters.optional_number("mscale"), parameters.optional_number("mscale_all_dim")
        )
    return RopeScaling(
        RopeKind.YARN,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=parameters.optional_number("beta_fast") or 32.0,
        beta_slow=parameters.optional_number("beta_slow") or 1.0,
        truncate=parameters.value("truncate") is None or parameters.flag("truncate"),
    )


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale is not None and mscale_all_dim is not None:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)


def _longrope(parameters: ConfigFields, fields: ConfigFields, num_rotated: int) -> RopeScaling:
    original, factor = _original_and_factor(parameters, fields)
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    for key in ("short_mscale", "long_mscale"):
        if key in parameters:
            raise parameters.unsupported(key, "none (attention_factor instead)")
    return RopeScaling(
        RopeKind.LONGROPE,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factors=parameters.numbers("short_factor", num_rotated // 2),
        long_factors=parameters.numbers("long_factor", num_rotated // 2),
    )


def _original_and_factor(parameters: ConfigFields, fields: ConfigFields) -> tuple[int, float]:
    """Without a factor, it is how much longer the model's context is than the original one."""
    original = _original(parameters, fields)
    if original < 2:
        raise UnsupportedModel(f"{fields.where}: original_max_position_embeddings is {original}, 2 or more are needed")
    if "factor" in parameters:
        return original, parameters.number("factor")
    return original, fields.positive("max_position_embeddings") / original


def _original(parameters: ConfigFields, fields: ConfigFields) -> int:
    """The context that the frequencies were trained for. A family that reads a field of that name beside the object
    prefers it."""
    if fields.has_read("original_max_position_embeddings"):
        return fields.positive("original_max_position_embeddings")
    if "original_max_position_embeddings" in parameters:
        return parameters.positive("original_max_position_embeddings")
    return fields.positive("max_position_embeddings")


_READERS: Final[Mapping[str, Callable[[ConfigFields, ConfigFields, int], RopeScaling]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
