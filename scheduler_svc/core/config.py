"""Settings of the core, validated once, frozen ever after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Policy(str, Enum):
    """Order of the waiting queue and choice of the victim."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class Fence(str, Enum):
    """Which frees wait for the acknowledgement of the newest step: every one, none, or (reference) those beside
    transfers."""

    ALWAYS = "always"
    TRANSFERS = "transfers"


class PreemptFenced(str, Enum):
    """Whether to preempt when blocks that wait for their fence would cover the need."""

    NEVER = "never"
    ALLOWED = "allowed"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything the core may be told. Token counts in tokens, times in seconds; defaults are decision D11 and the
    table in `docs/operations.md`."""

    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    # Budget of one step when lower than max_num_batched_tokens (room for drafts); None: the same.
    max_num_scheduled_tokens: int | None = None
    # Longest sequence; clipped to the model's when a rank joins.
    max_model_len: int = 8192
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    # Rows longer than this are cut to it; 0 = off.
    long_prefill_token_threshold: int = 0
    # Admit only when the whole sequence known so far fits.
    scheduler_reserve_full_isl: bool = True
    # Share of all blocks kept free at admission while something runs.
    watermark: float = 0.0
    # Steps sent and not yet acknowledged, per rank.
    max_inflight_steps: int = 2
    # Drafts per row proposed by the scheduler's n-gram proposer; 0 = off.
    num_speculative_tokens: int = 0
    # Slots allocated beyond the scheduled tokens (draft models); reference cases only.
    num_lookahead_slots: int = 0
    # The scheduler's own order of late results (semantics section 16). False: drafts come from outside, after each
    # result.
    async_scheduling: bool = True
    prefill_schedule_interval: int = 1

    # Tell the worker of finished requests it never had (the reference does).
    announce_unsent: bool = False
    # Propose drafts here; otherwise they come from outside (DraftsProposed).
    internal_proposer: bool = True

    fence: Fence = Fence.ALWAYS
    preempt_fenced: PreemptFenced = PreemptFenced.NEVER
    # Victims preempted this often are spared while another exists; None = off.
    max_preemptions: int | None = 3
    # Refuse what can never run (True) or accept it as the reference does.
    refuse_infeasible: bool = True
    resume_settled: bool = True
    # A row that must yield a token and yields none is a wrong answer (contract rule 9); the reference takes its drafts
    # for rejected and computes it again.
    refuse_empty_rows: bool = True

    # Epochs in a row that may end under a request without a token before it fails; 0 = off.
    max_fruitless_epochs: int = 3
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    no_worker_grace_s: float = 30.0

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.max_num_batched_tokens < self.max_num_seqs and self.refuse_infeasible:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )
        if self.proposes_drafts and self.async_scheduling:
            raise ValueError(
                "num_speculative_tokens needs async_scheduling off: drafts continue the last known token, "
                "so a row with drafts waits for the result before it"
            )
        if not self.enable_chunked_prefill and self.step_budget < self.max_model_len:
            raise ValueError(
                f"without chunked prefill the tokens of a step ({self.step_budget}) must be at least max_model_len "
                f"({self.max_model_len}): a prompt is computed in one step or never"
            )

    def _check_ranges(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")

    @property
    def step_budget(self) -> int:
        """Tokens one step may hold."""
        return self.max_num_batched_tokens if self.max_num_scheduled_tokens is None else self.max_num_scheduled_tokens

    @property
    def num_rows(self) -> int:
        """Rows of a worker's batch: enough that admission never waits for the acknowledgement that frees one."""
        return self.max_num_seqs * (self.max_inflight_steps + 1)

    @property
    def proposes_drafts(self) -> bool:
        return self.num_speculative_tokens > 0 and self.internal_proposer

    @property
    def drafts_are_placeholders(self) -> bool:
        return self.num_speculative_tokens > 0 and not self.internal_proposer and self.async_scheduling

    @classmethod
    def reference(cls, **settings: object) -> SchedulerConfig:
        """The settings that reproduce the reference's decisions (D10)."""
        base = cls(
            fence=Fence.TRANSFERS,
            preempt_fenced=PreemptFenced.ALLOWED,
            max_preemptions=None,
            refuse_infeasible=False,
            resume_settled=False,
            refuse_empty_rows=False,
            announce_unsent=True,
            internal_proposer=False,
            max_fruitless_epochs=0,
            max_queued_requests=1 << 60,
            max_queued_tokens=1 << 60,
        )
        return replace(base, **settings)  # type: ignore[arg-type]


_LEAST = {
    "block_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_scheduled_tokens": 1,
    "max_model_len": 1,
    "max_inflight_steps": 1,
    "long_prefill_token_threshold": 0,
    "num_speculative_tokens": 0,
    "num_lookahead_slots": 0,
    "prefill_schedule_interval": 1,
    "max_preemptions": 0,
    "max_fruitless_epochs": 0,
    "max_queued_requests": 0,
    "max_queued_tokens": 0,
    "no_worker_grace_s": 0,
}
