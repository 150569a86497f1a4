"""May this request ever run, and within which limits? Asked once, when it arrives (D11 feasibility, D30)."""

from __future__ import annotations

from array import array

import numpy as np

from scheduler_svc.core.events import RefusalReason, RequestArrived, RequestRefused
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import Limits
from scheduler_svc.core.state import CoreState

# Larger than any sequence: "as many as fit".
_UNBOUNDED = 1 << 31


def judge(state: CoreState, event: RequestArrived) -> Limits | RequestRefused:
    """Limits for an acceptable request, else the refusal. Changes nothing."""
    verdict = _refusal_before_sizes(state, event) or _fit(state, event)
    if isinstance(verdict, RequestRefused):
        return verdict
    return state.resources.refusal(event, verdict, state.now) or verdict


def duplicate(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    """The refusal of a request whose id is live."""
    if event.request_id not in state.requests:
        return None
    return refuse(
        event,
        RefusalReason.DUPLICATE_REQUEST_ID,
        f"Request id {event.request_id!r} is live; use another one, or wait for its end.",
    )


def refuse(event: RequestArrived, reason: RefusalReason, message: str, **metadata: object) -> RequestRefused:
    return RequestRefused(
        event.handle, event.request_id, reason, message, {name: str(value) for name, value in metadata.items()}
    )


def _refusal_before_sizes(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    if state.is_draining:
        return refuse(event, RefusalReason.DRAINING, "The scheduler is shutting down; send the request again.")
    if (refusal := duplicate(state, event)) is not None:
        return refusal
    if not state.config.rules.refuse_infeasible:
        return None
    if event.priority and not state.policy.accepts_priority:
        return refuse(
            event,
            RefusalReason.PRIORITY_NOT_SUPPORTED,
            f"Priority {event.priority} needs the scheduler to run with --policy priority; "
            f"it runs {state.config.policy.value}.",
        )
    if (reason := _no_worker(state)) is not None:
        return refuse(event, RefusalReason.NO_WORKER, reason)
    return _missing_feature(state, event) or bad_tokens(state, event) or _full_queue(state, event)


def _no_worker(state: CoreState) -> str | None:
    if state.ranks:
        return None
    if state.no_rank_since is None:
        return "No worker has joined yet; start one, or wait until the service is ready."
    if state.now - state.no_rank_since >= state.config.no_worker_grace_s:
        return f"No worker has been up for {state.now - state.no_rank_since:.0f} s; try again later."
    return None


def _able_ranks(state: CoreState, event: RequestArrived) -> list[RankState]:
    return [rank for rank in state.ranks.values() if rank.features.issuperset(event.features)]


def _missing_feature(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    """While no rank lives, it is not known what the next one has: the request waits as one that no rank can hold."""
    if not state.ranks or _able_ranks(state, event):
        return None
    names = ", ".join(sorted(event.features))
    return refuse(
        event,
        RefusalReason.FEATURE_NOT_SUPPORTED,
        f"No worker that is up has {names}, which this request needs.",
        features=names,
    )


def bad_tokens(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    """The refusal of a request that no model of this vocabulary can run."""
    if not event.prompt:
        return refuse(event, RefusalReason.EMPTY_PROMPT, "The prompt has no tokens; send at least one.")
    if event.max_tokens < 0 or event.min_tokens < 0 or (event.max_tokens and event.min_tokens > event.max_tokens):
        return refuse(
            event,
            RefusalReason.INVALID_PARAMETER,
            f"max_tokens {event.max_tokens} and min_tokens {event.min_tokens} must be 0 <= min_tokens <= max_tokens.",
        )
    vocab_size = state.vocab_size
    if vocab_size is not None and largest_id(event.prompt) >= vocab_size:
        return refuse(
            event,
            RefusalReason.INVALID_PARAMETER,
            f"Prompt token ids must be 0 to {vocab_size - 1}.",
            vocab_size=vocab_size,
        )
    return None


def largest_id(prompt: array[int]) -> int:
    """Of a prompt's ids, negative ones counting as larger than any. A long prompt must not hold up the loop: Python's
    own min and max take a millisecond for 32,768 ids."""
    return int(np.frombuffer(prompt, dtype=np.uint32).max())


def _full_queue(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    config, queue = state.config, state.queue
    num_tokens = queue.num_prompt_tokens + len(event.prompt)
    # A prompt longer than the limit may wait alone: it could never be accepted otherwise.
    has_room = num_tokens <= config.max_queued_tokens or not queue.num_prompt_tokens
    if len(queue) < config.max_queued_requests and has_room:
        return None
    return RequestRefused(
        event.handle,
        event.request_id,
        RefusalReason.QUEUE_FULL,
        f"{len(queue)} requests with {queue.num_prompt_tokens} prompt tokens are waiting; try again later.",
        {"max_queued_requests": str(config.max_queued_requests), "max_queued_tokens": str(config.max_queued_tokens)},
        retry_after_s=_time_for_room(state),
    )


def _time_for_room(state: CoreState) -> float:
    """Seconds in which, at the pace of the last ends, an eighth of the queue will have left: callers that come back
    then do not all meet a full queue again."""
    ends = state.recent_ends
    if len(ends) < 2 or state.now <= ends[0]:
        return 1.0
    pace = len(ends) / (state.now - ends[0])
    return min(60.0, max(0.1, (len(state.queue) / 8 + 1) / pace))


def _largest_pool(state: CoreState, event: RequestArrived) -> int:
    """Usable blocks of the largest rank that has what the request needs."""
    if not event.features:
        return state.largest_pool
    return max((rank.kv.num_usable for rank in _able_ranks(state, event)), default=state.largest_pool)


def too_long(state: CoreState, event: RequestArrived) -> RequestRefused | None:
    """The refusal of a prompt that leaves no room for an output token."""
    num_prompt, longest = len(event.prompt), state.max_model_len
    if num_prompt < longest:
        return None
    return refuse(
        event,
        RefusalReason.PROMPT_TOO_LONG,
        f"The prompt has {num_prompt} tokens; with at least one to generate, {longest - 1} are the most.",
        num_prompt_tokens=num_prompt,
        max_model_len=longest,
    )


def _fit(state: CoreState, event: RequestArrived) -> Limits | RequestRefused:
    """Clip to the model's length and to what the largest pool can hold."""
    num_prompt, longest = len(event.prompt), state.max_model_len
    if not state.config.rules.refuse_infeasible:
        max_tokens = event.max_tokens or longest
        limit = min(num_prompt + max_tokens, longest)
        return Limits(max_tokens, event.min_tokens, limit, longest - 1)
    if (refusal := too_long(state, event)) is not None:
        return refusal
    max_tokens = min(event.max_tokens or _UNBOUNDED, longest - num_prompt)
    available = _largest_pool(state, event) * state.config.block_size
    needed = num_prompt + (max_tokens if event.max_tokens else 1) - 1
    if needed > available:
        return refuse(
            event,
            RefusalReason.EXCEEDS_KV_CAPACITY,
            f"Prompt and max_tokens need {needed} KV slots; the largest worker has {available}. "
            "Ask for fewer tokens, or give the worker more KV memory.",
            needed_tokens=needed,
            available_tokens=available,
        )
    max_tokens = min(max_tokens, available - num_prompt + 1)
    limit = num_prompt + max_tokens
    return Limits(max_tokens, min(event.min_tokens, max_tokens), limit, limit - 1)
