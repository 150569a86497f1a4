"""What a step takes on a worker, as a sum of four terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds. The defaults are roughly a model of 8 billion parameters in 16 bits on one accelerator of 400 usable
    TFLOP/s and 3 TB/s: `fixed` reads the weights, a prefill token is 2 x 8e9 operations, a context token is 128 KiB of
    KV read by each row that attends to it."""

    fixed_s: float = 5e-3
    per_prefill_token_s: float = 40e-6
    per_decode_row_s: float = 10e-6
    per_context_token_s: float = 0.04e-6
    # From the scheduler to the worker, and back.
    link_s: float = 0.1e-3

    def step_s(self, num_prefill_tokens: int, num_decode_rows: int, num_context_tokens: int) -> float:
        """How long a step runs. num_context_tokens: the KV slots its rows read, over all rows."""
        return (
            self.fixed_s
            + self.per_prefill_token_s * num_prefill_tokens
            + self.per_decode_row_s * num_decode_rows
            + self.per_context_token_s * num_context_tokens
        )
