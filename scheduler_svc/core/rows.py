"""How long a row is: the only place that decides it, for running requests and for those that are admitted."""

from __future__ import annotations

from scheduler_svc.core import reasons
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import SkipReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import CoreState


def size_row(
    state: CoreState, plan: StepPlan, request: Request, start: int, known: int, *, admitting: bool
) -> int | SkipReason:
    """Tokens of the row that computes `request` from position `start` on, at least 1; or why there is no row. Changes
    nothing.

    known: tokens that are known, or awaited from a row in flight. The row adds what resources want beside them and is
    then cut to the threshold for long prefills, to what the step has left, for a running request to the end of its
    sequence, and by resources. vLLM 0.25.1 does not cut an admission to the end of the sequence."""
    config, resources = state.config, state.resources
    n = known - start
    for want in resources.wants:
        extra = want(plan, request, start, known)
        if isinstance(extra, SkipReason):
            return extra
        n += extra
    if 0 < config.long_prefill_token_threshold < n:
        n = config.long_prefill_token_threshold
    if admitting:
        if not config.enable_chunked_prefill and n > plan.tokens_left:
            return reasons.PROMPT_EXCEEDS_STEP
        n = min(n, plan.tokens_left)
    else:
        n = min(n, plan.tokens_left, request.row_limit - start)
    if n <= 0:
        return reasons.LENGTH_REACHED if request.row_limit <= start else reasons.AWAITING_RESULT
    for clip in resources.clips:
        clipped = clip(plan, request, start, n)
        if isinstance(clipped, SkipReason):
            return clipped
        n = clipped
    return n
