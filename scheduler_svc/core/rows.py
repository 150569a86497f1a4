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

    known: tokens that are known, or awaited from a row in flight. The row adds drafts to them and is then cut to the
    threshold for long prefills, to what the step has left and, for a running request, to the end of its sequence. The
    reference does not cut an admission to the end of the sequence (A20)."""
    config = state.config
    extra = _padding(state, plan, start, known) if admitting else len(request.drafts)
    if isinstance(extra, SkipReason):
        return extra
    n = known - start + extra
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
    return n


def _padding(state: CoreState, plan: StepPlan, start: int, known: int) -> int | SkipReason:
    """Placeholders for drafts that a one-token admission carries beside decodes that carry drafts, so that all rows of
    the step have the same width. They must fit whole."""
    config = state.config
    pads = (
        known - start == 1
        and config.num_speculative_tokens > 0
        and not config.rules.proposes_drafts
        and len(plan.runs) > len(plan.admitted)
        and not plan.prefill_scheduled
    )
    if not pads:
        return 0
    count = config.num_speculative_tokens
    if 1 + count > plan.tokens_left or start + 1 + count > state.max_model_len:
        return reasons.DRAFTS_EXCEED_STEP
    return count
