"""What OpenAI's clients read: answers, the parts of a stream, errors. As JSON values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scheduler_svc.frontend.calls import Delta, Finished, FinishReason
from scheduler_svc.frontend.errors import Code, RequestError
from scheduler_svc.frontend.openai.choices import total
from scheduler_svc.frontend.openai.requests import renamed
from scheduler_svc.frontend.usage import Usage

Json = dict[str, Any]

END_OF_STREAM: Final = b"data: [DONE]\n\n"
# Proxies and clients count on something to come now and then.
KEEP_ALIVE: Final = b": the answer is still being made\n\n"

_STATUSES: Final[Mapping[int, int]] = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
}
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# Codes that programs around OpenAI's API look for; every other one is our reason in small letters.
_CODES: Final[Mapping[str, str]] = {"PROMPT_TOO_LONG": "context_length_exceeded"}
_FINISH_REASONS: Final[Mapping[FinishReason, str]] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that is an error."""

    status: int
    body: Json
    retry_after_s: int | None = None


def problem(status: int, reason: str, message: str, param: str | None = None) -> Problem:
    """An error of the door itself."""
    return Problem(status, {"error": _error_body(status, reason, message, param)})


def problem_of(error: RequestError, names: Mapping[str, str]) -> Problem:
    """An error of the front end. names: see `requests.Wanted`. What the request cost until then is in it."""
    failure = error.failure
    status = _STATUSES.get(failure.code, 500)
    param, message = renamed(error, names)
    body = _error_body(status, failure.reason, message, param)
    body["metadata"] = dict(failure.metadata)
    if error.usage is not None:
        body["usage"] = usage_json(error.usage)
    retry_after_s = None if failure.retry_after_s is None else max(1, math.ceil(failure.retry_after_s))
    return Problem(status, {"error": body}, retry_after_s)


def _error_body(status: int, reason: str, message: str, param: str | None) -> Json:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = _CODES.get(reason, reason.lower())
    return {"message": message, "type": kind, "param": param, "code": code, "reason": reason}


def usage_json(usage: Usage) -> Json:
    """Tokens as OpenAI counts them, and what preemption did to the request."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "stepfence": {
            "num_preemptions": usage.num_preemptions,
            "num_recomputed_tokens": usage.num_recomputed_tokens,
            "queued_ms": round(usage.queued_ns / 1e6, 3),
            "preempted_ms": round(usage.preempted_ns / 1e6, 3),
        },
    }


def event(value: Json) -> bytes:
    """One event of a stream."""
    return b"data: " + encoded(value) + b"\n\n"


def encoded(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between the answers of chats and of completions."""

    whole: str
    part: str
    choice: Callable[[str], Json]
    delta: Callable[[str], Json]


CHAT: Final = Kind(
    whole="chat.completion",
    part="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
)
COMPLETION: Final = Kind(
    whole="text_completion",
    part="text_completion",
    choice=lambda text: {"text": text},
    delta=lambda text: {"text": text},
)


@dataclass
class Answer:
    """An answer that is being made, whole or as the parts of a stream."""

    kind: Kind
    request_id: str
    model: str
    num_choices: int
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self._finished: dict[int, Finished] = {}

    # --- a stream ---

    def first_part(self, index: int) -> bytes | None:
        """What comes before the text of a choice."""
        if self.kind is not CHAT:
            return None
        return event(
            self._part([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        )

    def text_part(self, index: int, delta: Delta) -> bytes | None:
        """None: nothing to show; ids without text are part of characters that are not complete yet."""
        if not delta.text:
            return None
        return event(
            self._part([{"index": index, **self.kind.delta(delta.text), "logprobs": None, "finish_reason": None}])
        )

    def last_part(self, index: int, finished: Finished) -> bytes:
        self._finished[index] = finished
        return event(self._part([{"index": index, **self.kind.delta(""), "logprobs": None, **_end(finished)}]))

    def usage_part(self) -> bytes:
        return event({**self._part([]), "usage": usage_json(self.usage)})

    # --- the whole ---

    def add(self, index: int, happened: Delta | Finished) -> None:
        if isinstance(happened, Delta):
            self._texts[index].append(happened.text)
        else:
            self._finished[index] = happened

    def whole(self) -> Iterator[bytes]:
        """When every choice has finished: the answer in pieces, of which none takes long to make."""
        head = encoded({**self._head(self.kind.whole), "usage": usage_json(self.usage)})
        yield head[:-1] + b',"choices":['
        for index, parts in enumerate(self._texts):
            text, parts[:] = "".join(parts), ()
            choice = {"index": index, **self.kind.choice(text), "logprobs": None, **_end(self._finished[index])}
            yield (b"," if index else b"") + encoded(choice)
        yield b"]}"

    @property
    def usage(self) -> Usage:
        """Of the choices that have finished."""
        return total([finished.usage for finished in self._finished.values()])

    def _head(self, kind: str) -> Json:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}

    def _part(self, choices: list[Json]) -> Json:
        return {**self._head(self.kind.part), "choices": choices}


def _end(finished: Finished) -> Json:
    """stop_reason: the stop string, or the id of the token, that ended it; null when the length did."""
    stop_reason = finished.stop_string if finished.stop_string is not None else finished.stop_token_id
    return {"finish_reason": _FINISH_REASONS[finished.reason], "stop_reason": stop_reason}
