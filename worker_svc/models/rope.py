"""Rotary position tables, computed once in float32 and kept in the model's dtype.

The rotation of a token's key and query depends on its position alone: keys that were cached by one request are then
right for every other, however either was cut into chunks. Two kinds of scaling depend on the length of the whole
sequence in transformers, and depend on the position here:

* dynamic: transformers computes the base anew for every forward pass beyond the original context, for all tokens of
  that pass. Here each position has the base of a sequence that ends with it, which is what transformers does when the
  tokens beyond the original context come one at a time.
* longrope: transformers takes the long factors for a sequence beyond the original context and the short ones for all
  others. Here the longest sequence of this worker decides for all: see `length_warning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from worker_svc.models.base import ModelConfig, RopeKind, RopeScaling, RopeSpec


def inverse_frequencies(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """Rotation per position of each of the rotated pairs, [num_rotated / 2] float32, scaling applied. max_len: the
    longest sequence, in tokens.

    Same arithmetic, in float32, as transformers' rope initialisers, so that positions agree to the last bit.
    """
    exponents = _exponents(spec)
    scaling = spec.scaling
    if scaling is not None and scaling.kind is RopeKind.LONGROPE:
        is_long = max_len > scaling.original_max_position_embeddings
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    if scaling is not None and scaling.kind is RopeKind.YARN:
        return _yarn(spec, scaling)
    inv_freq = 1.0 / (spec.theta**exponents)
    return inv_freq if scaling is None else _SCALED[scaling.kind](inv_freq, scaling)


def _exponents(spec: RopeSpec) -> torch.Tensor:
    return torch.arange(0, spec.num_rotated, 2, dtype=torch.int64).float() / spec.num_rotated


def _linear(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    return inv_freq / scaling.factor


def _unscaled(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Of the dynamic kind, within the original context."""
    return inv_freq


def _stored(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    return inv_freq / torch.tensor(scaling.short_factors, dtype=torch.float32)


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Wavelengths longer than the original context / low factor are stretched, those shorter than context / high factor
    kept, those between blended."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > original / scaling.low_freq_factor, inv_freq / scaling.factor, inv_freq)
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = (wavelength >= original / scaling.high_freq_factor) & (wavelength <= original / scaling.low_freq_factor)
    return torch.where(between, blended, stretched)


def _yarn(spec: RopeSpec, scaling: RopeScaling) -> torch.Tensor:
    """Dimensions that turn often within the original context keep their frequency, those that turn less than once are
    stretched, those between blended."""
    dim = spec.num_rotated
    powers = spec.theta ** _exponents(spec)

    def dimension_with(num_turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return (dim * math.log(original / (num_turns * 2 * math.pi))) / (2 * math.log(spec.theta))

    low, high = dimension_with(scaling.beta_fast), dimension_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


_SCALED: Final[Mapping[RopeKind, Callable[[torch.Tensor, RopeScaling], torch.Tensor]]] = {
    RopeKind.LINEAR: _linear,
    RopeKind.DYNAMIC: _unscaled,
    RopeKind.LLAMA3: _llama3,
    RopeKind.FACTORS: _stored,
}


def _angles(spec: RopeSpec, max_len: int) -> torch.Tensor:
    """Rotation of every position, [max_len, num_rotated / 2] float32."""
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, max_len))
    scaling = spec.scaling
    if scaling is not None and scaling.kind is RopeKind.DYNAMIC and max_len > scaling.original_max_position_embeddings:
        original, factor = scaling.original_max_position_embeddings, scaling.factor
        beyond = torch.arange(original + 1, max_len + 1)[:, None]  # lengths of the sequences that end there
        growth = (factor * beyond / original) - (factor - 1)
        base = spec.theta * growth ** (spec.num_rotated / (spec.num_rotated - 2))
        angles[original:] = positions[original:, None] * (1.0 / base ** _exponents(spec))
    return angles


def length_warning(config: ModelConfig, max_len: int) -> str | None:
    """What an operator should know of a context of max_len tokens; None for most models."""
    scalings = {layer.rope.scaling for layer in config.layers if layer.rope.scaling is not None}
    if any(one.kind is RopeKind.LONGROPE and max_len > one.original_max_position_embeddings for one in scalings):
        return (
            f"max_model_len {max_len} is beyond the model's original_max_position_embeddings "
            f"{config.max_position_embeddings}: every sequence is computed with long_factor, also a short one, for "
            "which transformers uses short_factor"
        )
    if any(one.kind is RopeKind.LONGROPE for one in scalings) and config.max_len > max_len:
        return (
            f"the context is {max_len} tokens, for which short_factor is right; max_model_len may be up to "
            f"{config.max_len}, and then every sequence is computed with long_factor"
        )
    return None


class RopeTable:
    """cos and sin for every position up to max_len, [max_len, num_rotated / 2] each.

    rows() gives both halves of a head: the first half of sin is negated, so rotating is x * cos + swap_halves(x) * sin.
    """

    def __init__(self, spec: RopeSpec, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = _angles(spec, max_len)
        factor = 1.0 if spec.scaling is None else spec.scaling.attention_factor
        self._half, self._end = spec.num_rotated // 2, spec.num_rotated
        self._num_kept = spec.head_dim - spec.num_rotated
        self._cos = angles.cos().mul_(factor).to(dtype).to(device)
        self._sin = angles.sin_().mul_(factor).to(dtype).to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, head_dim] (1 behind the rotated numbers) and signed sin [T, 1, num_rotated] of a step's positions
        [T]: gathered once a step, used by every layer."""
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        parts = [cos, cos]
        if self._num_kept:
            parts.append(cos.new_ones(len(cos), self._num_kept))
        return torch.cat(parts, dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] (any strides) rotated, as a new contiguous tensor."""
        half, end = self._half, self._end
        out = x * cos
        out[..., :half].addcmul_(x[..., half:end], sin[..., :half])
        out[..., half:end].addcmul_(x[..., :half], sin[..., half:])
        return out
