"""The fields of a config.json: typed, checked as they are read, and none that changes the numbers left unread.

A family reads the fields that it knows how to compute. `refuse_unread` then refuses every other field that is known to
change what some model computes, so that a checkpoint either runs as its configuration says or does not start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

_T = TypeVar("_T")

_MAX_INTEGER: Final = 2**31 - 1


class UnsupportedModel(ValueError):
    """The files are readable and describe something this worker cannot run; the message says what and what it can."""


class BrokenModel(ValueError):
    """The files are missing, truncated or contradict each other; the message names the file."""


def _is(*neutral: object) -> Callable[[Any], bool]:
    return lambda value: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _are_all_full(value: Any) -> bool:
    return isinstance(value, list) and all(one == "full_attention" for one in value)


# Fields that change what a model computes in at least one family, with a test for values that change nothing. None,
# False and empty values never do. A family that computes a field reads it, and then this table is not asked.
_CHANGES_THE_NUMBERS: Final[Mapping[str, Callable[[Any], bool]]] = {
    # Linear maps and norms.
    "attention_bias": _is(),
    "attention_in_bias": _is(),
    "attention_out_bias": _is(),
    "mlp_bias": _is(),
    "use_bias": _is(),
    "use_qkv_bias": _is(),
    "qkv_bias": _is(),
    "lm_head_bias": _is(),
    "add_bias_linear": _is(),
    "qk_layernorm": _is(),
    "qk_norm": _is(),
    "use_qk_norm": _is(),
    "clip_qkv": _is(),
    "norm_after": _is(),
    "use_post_norm": _is(),
    # Positions and who sees whom.
    "partial_rotary_factor": _is(1),
    "rotary_pct": _is(1),
    "rotary_dim": _is(),
    "rotary_emb_fraction": _is(1),
    "rope_interleaved": _is(),
    "rope_interleave": _is(),
    "use_mrope": _is(),
    "rope_local_base_freq": _is(),
    "rope_freq_factors": _is(),
    "original_max_position_embeddings": _is(),
    "no_rope_layers": lambda value: isinstance(value, list) and all(value),
    "no_rope_layer_interval": _is(),
    "nope_layer_interval": _is(),
    "alibi": _is(),
    "position_embedding_type": _is("rope", "absolute"),
    "sliding_window": _is(),
    "use_sliding_window": _is(),
    "sliding_window_pattern": _is(),
    "layer_types": _are_all_full,
    "attention_chunk_size": _is(),
    "use_bidirectional_attention": _is(),
    "is_causal": lambda value: value is True,
    "attn_temperature_tuning": _is(),
    # Scales and caps.
    "attn_logit_softcapping": _is(),
    "final_logit_softcapping": _is(),
    "query_pre_attn_scalar": _is(),
    "attention_multiplier": _is(),
    "embedding_multiplier": _is(1),
    "residual_multiplier": _is(1),
    "logits_scaling": _is(1),
    "logit_scale": _is(1),
    "scale_emb": _is(1),
    "scale_depth": _is(),
    "dim_model_base": _is(),
    "mup_enabled": _is(),
    "hidden_activation": _is("silu"),
    # Mixtures of experts and other shapes of layers.
    "num_experts": _is(0),
    "num_local_experts": _is(0),
    "n_routed_experts": _is(0),
    "num_experts_per_tok": _is(0),
    "moe_intermediate_size": _is(),
    "n_shared_experts": _is(0),
    "num_shared_experts": _is(0),
    "shared_expert_intermediate_size": _is(0),
    "shared_intermediate_size": _is(0),
    "mlp_only_layers": _is(),
    "norm_topk_prob": _is(),
    "kv_lora_rank": _is(),
    "q_lora_rank": _is(),
    "num_kv_shared_layers": _is(0),
    "use_parallel_residual": _is(),
    "parallel_attn": _is(),
}


class ConfigFields:
    """One JSON object of a file. Each method reads one field and raises BrokenModel for a value it cannot have, or
    UnsupportedModel for one that is not computed here; the message names file and field.

    defaults: values of fields that are left out. prefix: what stands before a field's name in messages, for an object
    within the file.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, *, defaults: Mapping[str, Any] | None = None, prefix: str = ""
    ) -> None:
        self.where = where
        self._raw = raw
        self._defaults = defaults or {}
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the file has the field, with any value but null."""
        return self._raw.get(key) is not None

    def has_read(self, key: str) -> bool:
        """Whether the family has asked for the field."""
        return key in self._read

    def value(self, key: str) -> Any:
        """Whatever the field holds, its default where it is left out; None without either."""
        self._read.add(key)
        return self._raw[key] if key in self._raw else self._defaults.get(key)

    def broken(self, key: str, needed: str) -> BrokenModel:
        """The error of a value that the field cannot have."""
        return BrokenModel(f"{self.where}: {self._prefix}{key} is {_shown(self.value(key))}, {needed} is needed")

    def unsupported(self, key: str, supported: str) -> UnsupportedModel:
        """The error of a value that is not computed here."""
        return UnsupportedModel(f"{self.where}: {self._prefix}{key} {_shown(self.value(key))}; supported: {supported}")

    def positive(self, key: str) -> int:
        """A positive integer."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_INTEGER:
            raise self.broken(key, "a positive integer")
        return value

    def optional_positive(self, key: str) -> int | None:
        """A positive integer, or None for null."""
        return None if self.value(key) is None else self.positive(key)

    def number(self, key: str) -> float:
        """A finite number above zero."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.broken(key, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above zero, or None for null."""
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """true or false; false for null."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise self.broken(key, "true or false")
        return bool(value)

    def choice(self, key: str, choices: Mapping[str, _T]) -> _T:
        """One of the named values."""
        value = self.value(key)
        if not isinstance(value, str) or value not in choices:
            raise self.unsupported(key, ", ".join(choices))
        return choices[value]

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above zero."""
        value = self.value(key)
        if not _is_list_of_numbers(value) or len(value) != length:
            raise self.broken(key, f"a list of {length} numbers above 0")
        return tuple(float(one) for one in value)

    def names(self, key: str, length: int, allowed: Sequence[str]) -> tuple[str, ...]:
        """A list of `length` of the allowed names."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.broken(key, f"a list of {length} names, one for each layer,")
        unknown = next((one for one in value if one not in allowed), None)
        if unknown is not None:
            raise UnsupportedModel(
                f"{self.where}: {self._prefix}{key} holds {_shown(unknown)}; supported: {', '.join(allowed)}"
            )
        return tuple(value)

    def indices(self, key: str) -> frozenset[int]:
        """A list of integers; empty for null."""
        value = self.value(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise self.broken(key, "a list of integers")
        return frozenset(value)

    def part(self, key: str) -> ConfigFields | None:
        """An object within this one, or None for null and for an empty one."""
        value = self.value(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.broken(key, "a JSON object")
        return ConfigFields(value, self.where, prefix=f"{self._prefix}{key}.")

    def refuse_unread(self) -> None:
        """Raises UnsupportedModel for a field that changes the numbers, has a value that does, and was not read."""
        for key, changes_nothing in _CHANGES_THE_NUMBERS.items():
            value = self._raw.get(key)
            if key in self._read or value is None or value is False or value in ([], {}, "") or changes_nothing(value):
                continue
            raise UnsupportedModel(
                f"{self.where}: {self._prefix}{key} is {_shown(value)}, which changes what the model computes and is "
                "not supported for this architecture"
            )

    def refuse_others(self, known: Sequence[str]) -> None:
        """Raises UnsupportedModel for any field that is not among the known ones, unless it is null."""
        for key, value in self._raw.items():
            if key not in known and value is not None:
                raise UnsupportedModel(f"{self.where}: {self._prefix}{key} is {_shown(value)}, a field unknown here")


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf for one in value
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
