"""The two layers everything is made of: a linear map that picks the fastest form the device has, and the root mean
square."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# Rows the packed weight is laid out for. Measured: the layout chosen for 32 is within noise of the best at 1 to 512.
_PACK_ROWS = 32


class Linear:
    """y = x W^T + b for x [T, in], as a plain object.

    On a CPU the weight is kept in oneDNN's blocked layout, which spares every call a reordering of the weight (measured
    1.1-1.5x in bfloat16 and 2-3x in float32 on AVX-512). Those operators are private to torch: they are checked once
    against F.linear on the actual weight, and F.linear is used when they are missing or disagree.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True, copy: bool = False
    ) -> None:
        """copy: the weight's memory is the caller's and may change afterwards."""
        self._bias = bias
        self._packed = _pack(weight, bias) if pack and weight.device.type == "cpu" else None
        self._weight = None
        if self._packed is None:
            self._weight = weight.clone() if copy else weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b."""
        if self._packed is not None:
            return _packed_linear(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        assert self._weight is not None
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b, in one pass where the device can."""
        if self._packed is not None:
            return _packed_linear.binary(x, residual, self._packed, self._bias, "add")  # type: ignore[no-any-return]
        return self(x).add_(residual)

    @property
    def is_packed(self) -> bool:
        """Whether the oneDNN form is in use."""
        return self._packed is not None


def _load_op(name: str) -> Any:
    try:
        return getattr(torch.ops.mkldnn, name)
    except AttributeError:
        return None


_packed_linear: Any = _load_op("_linear_pointwise")
_reorder: Callable[..., torch.Tensor] | None = _load_op("_reorder_linear_weight")


def _pack(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None when that does not work here or gives other numbers than F.linear."""
    if _packed_linear is None or _reorder is None:
        return None
    try:
        packed = _reorder(weight, _PACK_ROWS)
        probe = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=torch.float32).reshape(2, -1).to(weight.dtype)
        residual = torch.ones(2, weight.shape[0], dtype=weight.dtype)
        expected = F.linear(probe.float(), weight.float(), None if bias is None else bias.float())
        plain = _packed_linear(probe, packed, bias, "none", [], "")
        added = _packed_linear.binary(probe, residual, packed, bias, "add")
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.debug("oneDNN packing is unavailable: %s", error)
        return None
    tolerance = (2e-2 if weight.dtype == torch.bfloat16 else 1e-4) * max(1.0, float(expected.abs().max()))
    agrees = torch.allclose(plain.float(), expected, rtol=0, atol=tolerance) and torch.allclose(
        added.float(), expected + 1, rtol=0, atol=tolerance
    )
    return packed if agrees else None


def rms_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, computed in float32, in x's dtype. The norm's weight is not
    applied: the model folds it into the linear map that follows."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))).to(x.dtype)
