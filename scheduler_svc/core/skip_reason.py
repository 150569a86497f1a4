"""Why a request got nothing in a step (R4): every non-decision has one of these."""

from __future__ import annotations

from enum import Enum


class SkipReason(Enum):
    """The value is a sentence for a person."""

    # Running.
    LAST_TOKEN_IN_FLIGHT = "its last allowed token is in flight"
    AWAITING_RESULT = "the result of its last row is awaited first"
    LENGTH_REACHED = "no position is left to compute"
    PREFILL_DEFERRED = "prefills are deferred in this step"
    WAITING_FOR_FENCE = "blocks it needs return when a step in flight is acknowledged"
    NO_BUDGET = "the step's tokens are spent"
    PREEMPTED = "it was preempted, and no step has looked at it since"
    BEHIND_PREEMPTION = "the request before it preempted itself, which ends the step"
    # Waiting.
    SEQUENCE_LIMIT = "max_num_seqs requests are running"
    NO_BLOCKS = "too few KV blocks are free"
    PROMPT_EXCEEDS_STEP = "without chunked prefill the whole prompt must fit in the step"
    DRAFTS_EXCEED_STEP = "its padded drafts do not fit in the step"
    STEP_PREEMPTS = "a step that preempts admits nobody"
    FENCE_AWAITED = "a running request waits for returning blocks: nobody is admitted meanwhile"
    RESULT_IN_FLIGHT = "results of its earlier run are still in flight"
    PASSED_OVER = "another rank holds a longer cached prefix of it"
    NEVER_FITS_HERE = "this rank's pool can never hold it"
    SUSPECT_RUNS_ALONE = "a request suspected of ending epochs runs alone"
    BEHIND = "the request before it cannot be admitted"
    GRAMMAR_NOT_READY = "its grammar is being compiled"
    # Nothing was tried.
    PAUSED = "scheduling is paused"
    RANK_DRAINING = "the rank is draining"
    WINDOW_FULL = "max_inflight_steps steps await their acknowledgement"
    NO_RANK = "no rank is up"
    NOT_EXAMINED = "no step was planned since it came"
