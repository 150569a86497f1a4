"""Facts the core counts: what one request cost, and what the scheduler did so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost (D35). Times in seconds."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    # Hit of the first admission.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    queued_s: float = 0.0
    preempted_s: float = 0.0
