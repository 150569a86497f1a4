"""Which attention backend runs: chosen once at load, for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from worker_svc.attention.base import AttentionBackend, AttentionSpec
from worker_svc.attention.sdpa import SdpaAttention

MakeBackend = Callable[[torch.dtype, torch.device], AttentionBackend]

# A new backend is its own file and a line here, the preferred ones first. All run on every device they do not refuse.
BACKENDS: Final[Mapping[str, MakeBackend]] = {
    "sdpa": SdpaAttention,
}


class NoBackend(ValueError):
    """No backend can compute the model's layers; the text says why for each."""


def select_backend(
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    *,
    name: str = "auto",
    backends: Mapping[str, MakeBackend] = BACKENDS,
) -> AttentionBackend:
    """The named backend, or with "auto" the first that can compute every layer. Raises NoBackend."""
    if name != "auto" and name not in backends:
        raise NoBackend(f"attention backend {name!r} is not one of {', '.join(backends)}")
    reasons = []
    for candidate, make in backends.items():
        if name not in ("auto", candidate):
            continue
        backend = make(dtype, device)
        reason = next((why for spec in specs if (why := backend.unsupported(spec)) is not None), None)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise NoBackend(f"no attention backend can compute this model ({'; '.join(reasons)})")
