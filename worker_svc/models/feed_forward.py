"""The second half of a decoder layer: a gated MLP, or a mixture of such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional as F

from worker_svc.models.base import Activation, ExpertsSpec
from worker_svc.models.layers import Linear


class FeedForward(Protocol):
    """A map of tokens [T, hidden], each by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden], a new tensor."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), in one pass where the device can."""


def _gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up for [T, 2 * inner], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.SILU:
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none").mul_(up)


class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self._down(_gated(self._gate_up(x), self._activation))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self._down.add_to(residual, _gated(self._gate_up(x), self._activation))


class Experts:
    """A router and gated MLPs. Tokens are sorted by expert, and each expert that has any runs once on all of its."""

    def __init__(self, spec: ExpertsSpec, router: Linear, experts: Sequence[GatedMlp]) -> None:
        self._spec = spec
        self._router = router
        self._experts = experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        if x.shape[0] == 0:  # behind the last attention of a step in which no row samples
            return torch.empty_like(x)
        weights, chosen = self._route(x)
        per_token = self._spec.num_per_token
        by_expert = chosen.flatten()
        order = by_expert.argsort(stable=True)
        rows = x.index_select(0, order // per_token)
        counts = torch.bincount(by_expert, minlength=self._spec.num_experts).tolist()
        parts, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                parts.append(self._experts[expert](rows[start : start + count]))
                start += count
        # Back to the order of tokens, and each token's experts added in the order of their choice: the sum does not
        # depend on which other tokens are in the step.
        mixed = torch.empty_like(rows).index_copy_(0, order, torch.cat(parts))
        return (mixed.view(x.shape[0], per_token, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(dim=1)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See FeedForward."""
        return self(x).add_(residual)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and numbers of each token's experts, [T, num_per_token] both."""
        shares = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = shares.topk(self._spec.num_per_token, dim=-1)
        if self._spec.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen
