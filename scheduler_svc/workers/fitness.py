"""Which workers may join: every limit that a worker declares is held against what its session would need."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.step_bytes import columns_bytes, largest_row_bytes
from scheduler_svc.errors import RankUnfit
from scheduler_svc.rpc.wire import PROTOCOL_REVISION, works_with
from scheduler_svc.workers.codec import WorkerCapabilities, WorkerFeature


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
    if not works_with(capabilities.protocol_revision):
        raise RankUnfit(
            f"it speaks protocol revision {capabilities.protocol_revision}, this scheduler revision "
            f"{PROTOCOL_REVISION}: bring both to releases whose revisions differ by one at most"
        )
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
    if config.num_speculative_tokens > capabilities.max_num_drafts:
        raise RankUnfit(
            f"it verifies at most {capabilities.max_num_drafts} draft tokens a row, --num-speculative-tokens is "
            f"{config.num_speculative_tokens}"
        )
    if missing := sorted(required_features(config) - capabilities.features):
        names = ", ".join(feature.name for feature in missing)
        raise RankUnfit(f"it does not have {names}, which --num-speculative-tokens needs: set it to 0")
    model = capabilities.model
    if model.max_model_len < 2 or model.vocab_size < 1:
        raise RankUnfit(
            f"its model has a vocabulary of {model.vocab_size} and takes {model.max_model_len} tokens: nothing can be "
            "generated with it"
        )
    longest = min(config.max_model_len, capabilities.model.max_model_len)
    needed = largest_row_bytes(longest, config.block_size) + columns_bytes(
        config.num_rows, config.max_num_batched_tokens
    )
    if needed > capabilities.max_message_bytes:
        raise RankUnfit(
            f"it takes messages of at most {capabilities.max_message_bytes} bytes, the longest request may need "
            f"{needed}: lower --max-model-len"
        )


def required_features(config: SessionConfig) -> frozenset[WorkerFeature]:
    """What the steps of a session may use."""
    if config.num_speculative_tokens:
        return frozenset({WorkerFeature.DRAFTS, WorkerFeature.SAMPLED_DRAFTS})
    return frozenset()
