"""Which workers may join: every limit that a worker declares is held against what its session would need."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc import codec
from scheduler_svc.codec import WorkerCapabilities
from scheduler_svc.errors import RankUnfit


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What an epoch is opened with. max_model_len is the configured one; the worker's own may be smaller.
    num_speculative_tokens: drafts that a row may have."""

    block_size: int
    num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    max_inflight_steps: int
    num_speculative_tokens: int = 0


class RankRegister:
    """What must hold across sessions, and across their lives: one worker process is not two ranks because two addresses
    lead to it, and a rank's epochs never start over."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        self._epochs: dict[str, int] = {}

    def next_epoch(self, rank: str) -> int:
        """From 1."""
        epoch = self._epochs[rank] = self._epochs.get(rank, 0) + 1
        return epoch

    def claim(self, worker_incarnation: int, rank: str) -> None:
        """Raises RankUnfit when another rank holds it."""
        holder = self._ranks.setdefault(worker_incarnation, rank)
        if holder != rank:
            raise RankUnfit(f"the same worker process is rank {holder} already")

    def release(self, worker_incarnation: int, rank: str) -> None:
        """The rank's epoch is over, or was not opened."""
        if self._ranks.get(worker_incarnation) == rank:
            del self._ranks[worker_incarnation]


def check_limits(capabilities: WorkerCapabilities, config: SessionConfig) -> None:
    """Hold every limit that a worker declares against what its sessions would need. Raises RankUnfit, which names the
    setting to change."""
    if capabilities.protocol_revision < codec.PROTOCOL_REVISION:
        raise RankUnfit(f"it speaks protocol revision {capabilities.protocol_revision}, not {codec.PROTOCOL_REVISION}")
    if config.block_size % capabilities.block_size_multiple:
        raise RankUnfit(
            f"the block size must be a multiple of {capabilities.block_size_multiple} for it, --block-size is "
            f"{config.block_size}"
        )
    if config.num_rows > capabilities.max_num_rows:
        raise RankUnfit(
            f"it has at most {capabilities.max_num_rows} rows, {config.num_rows} are needed: lower --max-num-seqs or "
            "--max-inflight-steps"
        )
    if config.max_num_batched_tokens > capabilities.max_num_batched_tokens:
        raise RankUnfit(
            f"it takes at most {capabilities.max_num_batched_tokens} tokens a step, --max-num-batched-tokens is "
            f"{config.max_num_batched_tokens}"
        )
    _check_drafts(capabilities, config.num_speculative_tokens)
    longest = min(config.max_model_len, capabilities.model.max_model_len)
    needed = codec.largest_row_bytes(longest, config.block_size) + codec.columns_bytes(
        config.num_rows, config.max_num_batched_tokens
    )
    if needed > capabilities.max_message_bytes:
        raise RankUnfit(
            f"it takes messages of at most {capabilities.max_message_bytes} bytes, the longest request may need "
            f"{needed}: lower --max-model-len"
        )


def _check_drafts(capabilities: WorkerCapabilities, num_speculative_tokens: int) -> None:
    if num_speculative_tokens > capabilities.max_num_drafts:
        raise RankUnfit(
            f"it verifies at most {capabilities.max_num_drafts} draft tokens a row, --num-speculative-tokens is "
            f"{num_speculative_tokens}"
        )
    if num_speculative_tokens and not capabilities.verifies_sampled_drafts:
        raise RankUnfit("it verifies drafts of greedy requests only: set --num-speculative-tokens 0")
