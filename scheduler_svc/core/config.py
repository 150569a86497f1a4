"""Settings of the core, validated once, frozen ever after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from scheduler_svc.core.rules import DEFAULT, VLLM_0_25_1, SchedulingRules


class Policy(str, Enum):
    """Order of the waiting queue and choice of the victim."""

    FCFS = "fcfs"
    PRIORITY = "priority"


# Stands for each tenant that is not named.
EVERYONE = "*"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How much of the deployment one tenant may have; None: any amount. tenant "*": each tenant that is not named."""

    tenant: str
    # Requests running at once, over all ranks.
    max_running: int | None = None
    # Requests accepted that do not run, preempted ones included; a new one is refused beyond it.
    max_queued: int | None = None
    # Prompt and output tokens. A request is charged what it may take at most when it is accepted, and given back at its
    # end what it has not taken.
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queued", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of tenant {self.tenant!r} must be at least 1, not {value}")


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
    # Share of all blocks kept free at admission while something runs, so that running requests can grow: the value with
    # the most output in docs/preemption-study.md.
    watermark: float = 0.02
    # Steps sent and not yet acknowledged, per rank.
    max_inflight_steps: int = 2
    # Drafts per row proposed by the scheduler's n-gram proposer; 0 = off.
    num_speculative_tokens: int = 0
    # Slots allocated beyond the scheduled tokens (draft models); reference cases only.
    num_lookahead_slots: int = 0
    prefill_schedule_interval: int = 1
    # Victims preempted this often are spared while another exists; None = off.
    max_preemptions: int | None = 3
    rules: SchedulingRules = DEFAULT

    # Epochs in a row that may end under a request without a token before it fails; 0 = off.
    max_fruitless_epochs: int = 3
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    no_worker_grace_s: float = 30.0
    tenants: tuple[TenantLimits, ...] = ()

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.max_num_batched_tokens < self.max_num_seqs and self.rules.refuse_infeasible:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
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
        """Whether the scheduler proposes drafts. Its requests then need each result before their next row: drafts
        continue the last known token."""
        return self.num_speculative_tokens > 0 and self.rules.proposes_drafts

    def with_rules(self, **changes: object) -> SchedulerConfig:
        """The same settings with some rules changed."""
        return replace(self, rules=replace(self.rules, **changes))  # type: ignore[arg-type]

    @classmethod
    def reference(cls, **settings: object) -> SchedulerConfig:
        """Settings under which the core decides as vLLM 0.25.1 (D10): its rules, and none of the limits that it does
        not have."""
        base = cls(
            rules=VLLM_0_25_1,
            watermark=0.0,
            max_preemptions=None,
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
