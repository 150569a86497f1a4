"""Validation of a client's call, and every default resolved (D34)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TypeVar

from scheduler_svc.frontend.calls import GenerateCall, ModelDescription, ResolvedSampling, Sampling
from scheduler_svc.frontend.errors import Code, Failure, RequestError, Violation, invalid, quoted
from scheduler_svc.frontend.limits import Limits

T = TypeVar("T")


def check_model(call: GenerateCall, model: ModelDescription) -> None:
    """Raises RequestError when the call asks for another model than the served one."""
    names = (model.name, *model.other_names)
    if call.model and call.model not in names:
        served = ", ".join(quoted(name) for name in names)
        message = f"the model {quoted(call.model)} is not served here; served: {served}"
        raise RequestError(Failure(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, {"served": model.name}))


def check_parameters(call: GenerateCall, model: ModelDescription, limits: Limits, *, accepts_priority: bool) -> None:
    """Everything but the prompt, and the counts that decode_call checks. accepts_priority: whether the scheduler does.
    Raises RequestError naming every field that is wrong."""
    violations = (*_identity_violations(call, limits), *_sampling_violations(call.sampling, model, limits))
    if violations:
        raise invalid(violations)
    if call.priority != 0 and not accepts_priority:
        violation = Violation("priority", "must be 0: the scheduler serves in order of arrival")
        raise invalid((violation,), "PRIORITY_NOT_SUPPORTED")


def check_prompt_ids(num_prompt_tokens: int, largest: int, model: ModelDescription, limits: Limits) -> None:
    """largest: the largest id of the prompt. Raises RequestError."""
    if num_prompt_tokens == 0:
        raise invalid((Violation("prompt", "is empty"),), "EMPTY_PROMPT")
    check_prompt_length(num_prompt_tokens, model, limits)
    if largest >= model.vocab_size:
        description = f"token id {largest} is not in the vocabulary (0 to {model.vocab_size - 1})"
        raise invalid((Violation("token_ids.ids", description),))


def check_prompt_bytes(num_bytes: int, fewest_tokens: int, model: ModelDescription) -> None:
    """Refuses, before it is tokenized, a prompt that cannot fit into the model. fewest_tokens: no text of so many bytes
    has fewer. Raises RequestError."""
    if fewest_tokens >= model.max_model_len:
        description = (
            f"has {num_bytes} bytes, which are at least {fewest_tokens} tokens; the model holds {model.max_model_len}, "
            "at least one for output"
        )
        raise invalid(
            (Violation("prompt", description),),
            "PROMPT_TOO_LONG",
            num_bytes=num_bytes,
            fewest_tokens=fewest_tokens,
            max_model_len=model.max_model_len,
        )


def check_prompt_length(num_prompt_tokens: int, model: ModelDescription, limits: Limits) -> None:
    """Raises RequestError."""
    if num_prompt_tokens >= model.max_model_len:
        description = f"has {num_prompt_tokens} tokens; the model holds {model.max_model_len}, at least one for output"
        raise invalid(
            (Violation("prompt", description),),
            "PROMPT_TOO_LONG",
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=model.max_model_len,
        )
    if num_prompt_tokens > limits.max_prompt_tokens:
        description = f"has {num_prompt_tokens} tokens; at most {limits.max_prompt_tokens} fit into one message"
        raise invalid((Violation("prompt", description),), "PROMPT_TOO_LARGE")


def resolve_sampling(sampling: Sampling, model: ModelDescription, rng: random.Random) -> ResolvedSampling:
    """Of a call that passed check_parameters. An unset seed is drawn here, once for the life of the request (D33)."""
    top_k = _first(sampling.top_k, model.top_k, 0)
    return ResolvedSampling(
        temperature=_first(sampling.temperature, model.temperature, 1.0),
        top_p=_first(sampling.top_p, model.top_p, 1.0),
        top_k=min(top_k, model.vocab_size) if top_k > 0 else 0,
        min_p=_first(sampling.min_p, model.min_p, 0.0),
        max_tokens=sampling.max_tokens or 0,
        min_tokens=sampling.min_tokens or 0,
        seed=rng.getrandbits(64) if sampling.seed is None else sampling.seed,
        eos_token_ids=() if sampling.ignore_eos else model.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(sampling.stop_token_ids)),
    )


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _identity_violations(call: GenerateCall, limits: Limits) -> Iterator[Violation]:
    # Inside, the name of the tenant stands before the id.
    most = limits.max_request_id_bytes - (len(call.tenant) + 1 if call.tenant else 0)
    if len(call.request_id.encode()) > most - ("/" in call.request_id and not call.tenant):
        yield Violation("request_id", f"must be at most {most} bytes")
    if len(call.cache_salt.encode()) > limits.max_salt_bytes:
        yield Violation("cache_salt", f"must be at most {limits.max_salt_bytes} bytes")


def _sampling_violations(sampling: Sampling, model: ModelDescription, limits: Limits) -> Iterator[Violation]:
    yield from _number_violations(sampling, limits)
    yield from _length_violations(sampling)
    yield from _stop_violations(sampling, model, limits)


def _number_violations(sampling: Sampling, limits: Limits) -> Iterator[Violation]:
    # Written so that NaN, which compares false with everything, is refused.
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    if temperature is not None and not 0 <= temperature <= limits.max_temperature:
        description = f"must be from 0 to {limits.max_temperature:g}, not {_shown(temperature)}"
        yield Violation("sampling.temperature", description)
    if top_p is not None and not 0 < top_p <= 1:
        yield Violation("sampling.top_p", f"must be above 0 and at most 1, not {_shown(top_p)}")
    if min_p is not None and not 0 <= min_p <= 1:
        yield Violation("sampling.min_p", f"must be from 0 to 1, not {_shown(min_p)}")
    if sampling.top_k is not None and sampling.top_k < -1:
        yield Violation("sampling.top_k", f"must be positive, or 0 or -1 for off, not {sampling.top_k}")


def _shown(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else str(value)


def _length_violations(sampling: Sampling) -> Iterator[Violation]:
    if sampling.max_tokens == 0:
        yield Violation("sampling.max_tokens", "must be at least 1; leave it unset for as many as fit")
    elif sampling.max_tokens is not None and (sampling.min_tokens or 0) > sampling.max_tokens:
        yield Violation(
            "sampling.min_tokens", f"must be at most max_tokens ({sampling.max_tokens}), not {sampling.min_tokens}"
        )


def _stop_violations(sampling: Sampling, model: ModelDescription, limits: Limits) -> Iterator[Violation]:
    if any(not text for text in sampling.stop):
        yield Violation("sampling.stop", "an empty string would stop everything; leave it out")
    if any(len(text.encode()) > limits.max_stop_string_bytes for text in sampling.stop):
        yield Violation("sampling.stop", f"each must be at most {limits.max_stop_string_bytes} bytes")
    if any(token_id >= model.vocab_size for token_id in sampling.stop_token_ids):
        unknown = max(sampling.stop_token_ids)
        yield Violation("sampling.stop_token_ids", f"{unknown} is not in the vocabulary (0 to {model.vocab_size - 1})")
