"""When a sampled token ends its request, in the order of the reference: min_tokens, EOS, stop ids, length."""

from __future__ import annotations

from scheduler_svc.core.events import EndReason
from scheduler_svc.core.request import Request


def check(request: Request, token: int) -> tuple[EndReason, int | None] | None:
    """Judge the request right after `token` was appended: (reason, the id that stopped it), or None to go on.

    A stop id on the last allowed token is a stop, not a length. Submission clips min_tokens, so that it never outlasts
    length."""
    if request.num_tokens < request.min_length:
        return None
    if token in request.stops:
        return EndReason.STOP, token
    if request.num_tokens >= request.limit:
        return EndReason.LENGTH, None
    return None
