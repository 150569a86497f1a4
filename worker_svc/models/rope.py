"""Rotary position tables, computed once in float32 and kept in the model's dtype."""

from __future__ import annotations

import math

import torch

from worker_svc.models.base import RopeScaling, RopeSpec


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Rotation per position of each of the head_dim / 2 pairs, [head_dim / 2] float32, scaling applied.

    Same arithmetic, in float32, as transformers' rope initialisers, so that positions agree to the last bit.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inv_freq = 1.0 / (spec.theta**exponents)
    scaling = spec.scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(inv_freq, scaling)


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


class RopeTable:
    """cos and signed sin for every position up to max_len, [max_len, head_dim] each.

    The first half of sin is negated, so rotating is x * cos + swap_halves(x) * sin.
    """

    def __init__(self, spec: RopeSpec, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(spec))
        cos, sin = angles.cos(), angles.sin()
        self._half = spec.head_dim // 2
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype).to(device)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype).to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of a step's positions [T], as [T, 1, head_dim]: gathered once a step, used by every layer."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] (any strides) rotated, as a new contiguous tensor."""
        half = self._half
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half])
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out
