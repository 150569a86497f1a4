"""Requests that were accepted before, on a stream that is lost, and are submitted again with what they have yielded.

They wait as accepted requests do: no limit of the queue, of the pools or of the drain refuses them."""

from __future__ import annotations

from array import array

import numpy as np

from scheduler_svc.core import lifecycle, stopping, submission
from scheduler_svc.core.events import EndReason, RefusalReason, RequestArrived, RequestRefused
from scheduler_svc.core.request import Limits, Request, Status
from scheduler_svc.core.state import CoreState

# What makes their tokens be computed again, in the counters.
CAUSE = "scheduler_lost"

_STATUS_BY_REASON = {EndReason.STOP: Status.FINISHED_STOPPED, EndReason.LENGTH: Status.FINISHED_LENGTH}


def judge(state: CoreState, event: RequestArrived) -> Limits | RequestRefused:
    """Limits of the request, or the refusal of one that is the request of another front end, or can never have been
    accepted for the model served now. Changes nothing."""
    refusal = submission.duplicate(state, event) or submission.bad_tokens(state, event) or _bad_outputs(state, event)
    refusal = refusal or submission.too_long(state, event)
    if refusal is not None:
        return refusal
    most = state.max_model_len - len(event.prompt)
    max_tokens = min(event.max_tokens or most, most)
    limit = len(event.prompt) + max_tokens
    return Limits(max_tokens, min(event.min_tokens, max_tokens), limit, limit - 1)


def _bad_outputs(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    if not event.output_tokens or state.vocab_size is None:
        return None
    if submission.largest_id(event.output_tokens) < state.vocab_size:
        return None
    return submission.refuse(
        event,
        RefusalReason.INVALID_PARAMETER,
        f"Output token ids must be 0 to {state.vocab_size - 1}; another model is served than the one that made them.",
        vocab_size=state.vocab_size,
    )


def restore(state: CoreState, request: Request, event: RequestArrived) -> None:
    """Append the outputs to a request that stands in the queue, and end it where they say so: its end may be what was
    lost."""
    account = request.account
    assert event.output_tokens is not None
    assert event.arrival is not None
    account.arrived_at = min(event.arrival, state.now)
    outputs = event.output_tokens[: _num_outputs(request, event.output_tokens)]
    request.tokens.extend(outputs)
    request.num_tokens += len(outputs)
    verdict = stopping.check(request, outputs[-1]) if outputs else None
    if verdict is not None:
        reason, stop_token_id = verdict
        lifecycle.finish(state, request, _STATUS_BY_REASON[reason], reason, stop_token_id=stop_token_id)
        return
    if outputs:
        # It had run: its wait for the first admission is over, and it stands still until it is admitted here. The last
        # token is not computed before the next one is asked for.
        account.first_admitted_at = account.arrived_at
        account.preempted_at = state.now
        account.preemption_cause = CAUSE
        account.high_water = request.num_tokens - 1


def _num_outputs(request: Request, outputs: array[int]) -> int:
    """How many of the outputs belong to the request: up to the first that ends it. A long history must not hold up the
    loop, so the stop ids are looked for all at once."""
    most = min(len(outputs), request.limit - request.num_prompt_tokens)
    first = max(0, request.min_length - request.num_prompt_tokens - 1)
    if request.stops and first < most:
        ids = np.frombuffer(outputs, dtype=np.int32)[first:most]
        stops = np.flatnonzero(np.isin(ids, sorted(request.stops)))
        if stops.size:
            return first + int(stops[0]) + 1
    return most


def fit_to_model(state: CoreState) -> None:
    """The first worker has joined and the model's length is known: lower the limits of requests that came before, and
    end those that are as long as the model allows."""
    for request in list(state.requests.values()):
        if request.limit <= state.max_model_len:
            continue
        request.limit = max(state.max_model_len, request.num_prompt_tokens + 1)
        request.row_limit = request.limit - 1
        request.min_length = min(request.min_length, request.limit)
        if request.num_tokens < state.max_model_len:
            continue
        if request.num_output_tokens:
            lifecycle.finish(state, request, Status.FINISHED_LENGTH, EndReason.LENGTH)
        else:
            message = f"The prompt has {request.num_prompt_tokens} tokens; the model takes {state.max_model_len - 1}."
            lifecycle.finish(state, request, Status.FINISHED_ERROR, EndReason.NO_WORKER, message=message)
