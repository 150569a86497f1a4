"""Facts the core counts: what one request cost, and what the scheduler did so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.reasons import SkipReason


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


@dataclass(slots=True)
class PrefixStats:
    """Look-ups and hits in tokens since the start; those of preempted requests apart. Every attempt counts."""

    num_requests: int = 0
    num_queries: int = 0
    num_hits: int = 0
    num_preempted_requests: int = 0
    num_preempted_queries: int = 0
    num_preempted_hits: int = 0

    def count(self, queries: int, hits: int, *, preempted: bool) -> None:
        if preempted:
            self.num_preempted_requests += 1
            self.num_preempted_queries += queries
            self.num_preempted_hits += hits
        else:
            self.num_requests += 1
            self.num_queries += queries
            self.num_hits += hits


@dataclass(slots=True)
class Totals:
    """Counts since the start. Tokens computed and recomputed are those dispatched."""

    num_accepted: int = 0
    num_refused: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    # By the scheduler's own choice; for want of blocks, or by a reset of the prefix cache.
    num_preemptions: int = 0
    num_requeued_after_worker_loss: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_deferring_steps: int = 0
    num_row_errors: int = 0
    # Recomputed tokens by what made it necessary, and how often a pass gave a request nothing, by reason.
    recomputed_by_cause: dict[str, int] = field(default_factory=dict)
    skips: dict[SkipReason, int] = field(default_factory=dict)
    # Look-ups of all ranks that ever lived.
    prefix: PrefixStats = field(default_factory=PrefixStats)
