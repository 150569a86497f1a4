"""Why a request got nothing in a step: whenever it gets nothing, one of these is noted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class SkipReason:
    """One reason, compared by identity. A resource that has reasons of its own defines them in its file.

    name: for metrics, unique. text: for a person, the end of a sentence. puts_aside: what the admission pass does when
    it refuses a request for this reason. True: it moves the request to the skipped queue and goes on. False: it stops
    (head-of-line blocking)."""

    name: str
    text: str
    puts_aside: bool = False

    def __repr__(self) -> str:
        return f"<{self.name}>"


# --- running requests ---------------------------------------------------------------------------------------------

LAST_TOKEN_IN_FLIGHT = SkipReason("LAST_TOKEN_IN_FLIGHT", "its last allowed token is in flight")
AWAITING_RESULT = SkipReason("AWAITING_RESULT", "the result of its last row is awaited first")
LENGTH_REACHED = SkipReason("LENGTH_REACHED", "no position is left to compute")
WAITING_FOR_FENCE = SkipReason("WAITING_FOR_FENCE", "blocks it needs return when a step in flight is acknowledged")
PREEMPTED = SkipReason("PREEMPTED", "it was preempted, and no step has looked at it since")
BEHIND_PREEMPTION = SkipReason(
    "BEHIND_PREEMPTION", "the request before it preempted itself, which ends the pass over running requests"
)

# --- both ---------------------------------------------------------------------------------------------------------

PREFILL_DEFERRED = SkipReason("PREFILL_DEFERRED", "prefills are deferred in this step")
NO_BUDGET = SkipReason("NO_BUDGET", "the step's tokens are spent")

# --- waiting requests that stop the pass --------------------------------------------------------------------------

SEQUENCE_LIMIT = SkipReason("SEQUENCE_LIMIT", "max_num_seqs requests are running")
NO_BLOCKS = SkipReason("NO_BLOCKS", "too few KV blocks are free")
STEP_TOO_LARGE = SkipReason("STEP_TOO_LARGE", "the message of the step has no room for it")
PROMPT_EXCEEDS_STEP = SkipReason("PROMPT_EXCEEDS_STEP", "without chunked prefill the whole prompt must fit in the step")
STEP_PREEMPTS = SkipReason("STEP_PREEMPTS", "a step that preempts admits no request")
FENCE_AWAITED = SkipReason(
    "FENCE_AWAITED", "a running request waits for returning blocks: no request is admitted meanwhile"
)
RANK_QUARANTINED = SkipReason(
    "RANK_QUARANTINED", "the rank runs, or is kept for, a request in quarantine, which runs alone"
)

# --- waiting requests that are put aside --------------------------------------------------------------------------

QUARANTINED = SkipReason(
    "QUARANTINED", "workers failed while computing it, so it waits for a rank without other requests", puts_aside=True
)
RESULT_IN_FLIGHT = SkipReason("RESULT_IN_FLIGHT", "results of its earlier run are still in flight", puts_aside=True)
PASSED_OVER = SkipReason("PASSED_OVER", "another rank holds a longer cached prefix of it", puts_aside=True)
HELD_ELSEWHERE = SkipReason("HELD_ELSEWHERE", "another rank holds blocks for it", puts_aside=True)
FEATURE_MISSING_HERE = SkipReason(
    "FEATURE_MISSING_HERE", "this rank's worker does not have a feature that it needs", puts_aside=True
)
NEVER_FITS_HERE = SkipReason("NEVER_FITS_HERE", "this rank's pool can never hold it", puts_aside=True)

# --- nothing was tried --------------------------------------------------------------------------------------------

BEHIND = SkipReason("BEHIND", "the request before it cannot be admitted")
PAUSED = SkipReason("PAUSED", "scheduling is paused")
RANK_DRAINING = SkipReason("RANK_DRAINING", "the rank is draining")
WINDOW_FULL = SkipReason("WINDOW_FULL", "max_inflight_steps steps await their acknowledgement")
NO_RANK = SkipReason("NO_RANK", "no rank is up")
NOT_EXAMINED = SkipReason("NOT_EXAMINED", "no step was planned since it came")

ALL = tuple(value for value in list(vars().values()) if isinstance(value, SkipReason))
