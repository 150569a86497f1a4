"""The bodies of `/v1/chat/completions` and `/v1/completions`, read into the front end's own calls.

A field is served, or it is refused by its name: a field that was skipped in silence would change the answer without a
word. A field that is not served is accepted with the value that asks for nothing (null, and what NEUTRAL lists).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError, model_validator

from scheduler_svc.frontend.calls import ChatMessage, ChatPrompt, GenerateCall, IdsPrompt, Prompt, Sampling, TextPrompt
from scheduler_svc.frontend.errors import RequestError, Violation, invalid
from scheduler_svc.frontend.limits import Limits

# Output tokens of /v1/completions when the client names no number, as in OpenAI's own service. A chat ends by itself.
DEFAULT_COMPLETION_TOKENS: Final = 16

_MAX_ID: Final = (1 << 31) - 1
_UINT64: Final = 1 << 64
_MAX_PRIORITY: Final = (1 << 31) - 1
# Of a message.
_MAX_PARTS: Final = 4096
# Of a body; and how many of them an error names.
_MAX_FIELDS: Final = 128
_MAX_VIOLATIONS: Final = 8

# Fields of OpenAI's API, and of servers that speak it, that are not served, with the values besides null that ask for
# nothing. `...`: every value, since the field has no influence on an answer.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": (...,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (...,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (...,),
    "prompt_cache_retention": (...,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (...,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "user": (...,),
    "verbosity": (),
    "web_search_options": (),
}

# Fields of an answer's message that may come back with it when they are null or an empty list.
_EMPTY_IN_MESSAGES: Final = frozenset(
    {"annotations", "audio", "function_call", "name", "reasoning", "reasoning_content", "refusal", "tool_calls"}
)

T = TypeVar("T")
# A text or a list. The tags say which of the two is meant, so that an error is about that one.
_OneOrMany = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[T, Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
]

M = TypeVar("M", bound="_Request")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for: one call for each choice of the answer, in the order of their indices.

    names: the paths in GenerateRequest under which the front end reports a fault, and the fields of the body they came
    from.
    """

    calls: tuple[GenerateCall, ...]
    is_stream: bool
    with_usage: bool
    names: Mapping[str, str]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    # Padding against an observer of sizes; there is none without TLS, and a proxy that ends TLS may add it.
    include_obfuscation: bool | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_MAX_ID)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(_UINT64 >> 1), lt=_UINT64)
    stop: _OneOrMany[list[str]] | None = None
    # Beyond OpenAI's own: as in vLLM.
    top_k: int | None = Field(None, ge=-1, le=_MAX_ID)
    min_p: float | None = None
    min_tokens: int | None = Field(None, ge=0, le=_MAX_ID)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = Field(None, ge=-_MAX_PRIORITY - 1, le=_MAX_PRIORITY)
    cache_salt: str | None = None
    request_id: str | None = None


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: _OneOrMany[list[_TextPart]]

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        """Clients send an answer back as they got it, with fields that hold nothing."""
        if not isinstance(value, dict):
            return value
        content = value.get("content")
        if isinstance(content, list) and len(content) > _MAX_PARTS:
            raise ValueError(f"content has {len(content)} parts; at most {_MAX_PARTS} are read")
        return {name: held for name, held in value.items() if name not in _EMPTY_IN_MESSAGES or held not in (None, [])}


class ChatRequest(_Request):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[_Message], FailFast()]
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_ID)


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    prompt: Any


def read_chat(body: bytes, limits: Limits) -> Wanted:
    """The body of a chat. Raises RequestError INVALID_ARGUMENT that names the field."""
    raw = _json_object(body)
    messages = raw.get("messages")
    if isinstance(messages, list) and len(messages) > limits.max_chat_messages:
        description = f"at most {limits.max_chat_messages} messages, not {len(messages)}"
        raise invalid((Violation("messages", description),), "PROMPT_TOO_LARGE")
    request = _validated(ChatRequest, raw, limits)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid((Violation("max_tokens", "give max_completion_tokens or max_tokens, not both"),))
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    prompt = ChatPrompt(tuple(ChatMessage(_role(message.role), _text(message.content)) for message in request.messages))
    length_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return _wanted(
        request, (prompt,), max_tokens, {"chat": "messages", "prompt": "messages", "max_tokens": length_name}
    )


def read_completion(body: bytes, limits: Limits) -> Wanted:
    """The body of a completion: one prompt or a list of them. Raises RequestError INVALID_ARGUMENT that names the
    field."""
    request = _validated(CompletionRequest, _json_object(body), limits)
    prompts = _prompts(request.prompt)
    if len(prompts) > limits.max_prompts_at_once:
        description = f"at most {limits.max_prompts_at_once} prompts, not {len(prompts)}"
        raise invalid((Violation("prompt", description),), "PROMPT_TOO_LARGE")
    if len(prompts) > 1 and request.request_id:
        raise invalid((Violation("request_id", "goes with a single prompt: each prompt is a request of its own"),))
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _wanted(request, prompts, max_tokens, {"text": "prompt", "token_ids.ids": "prompt"})


# --- fields -----------------------------------------------------------------------------------------------------------


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid((Violation("body", f"is not JSON: {error}"),), "INVALID_JSON") from None
    if not isinstance(value, dict):
        raise invalid((Violation("body", "must be a JSON object"),), "INVALID_JSON")
    return value


def _validated(kind: type[M], raw: dict[str, Any], limits: Limits) -> M:
    """The request, once its fields are known, served, and few enough to look at each of them."""
    if len(raw) > _MAX_FIELDS:
        raise invalid((Violation("body", f"has {len(raw)} fields, more than there are"),))
    violations = [violation for name in list(raw) for violation in _not_served(kind, name, raw)]
    violations += _too_many(raw, limits)
    if violations:
        raise invalid(tuple(violations[:_MAX_VIOLATIONS]))
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid(tuple(_violations(error))) from None


def _not_served(kind: type[BaseModel], name: str, raw: dict[str, Any]) -> list[Violation]:
    """Takes a field that asks for nothing out of the body; what is wrong with any other that is not served."""
    if name in kind.model_fields:
        return []
    value = raw[name]
    neutral = NEUTRAL.get(name)
    if neutral is None:
        known = sorted({*kind.model_fields, *NEUTRAL})
        near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        return [Violation(name[:64], f"is not a field that is known here{hint}")]
    if value is None or ... in neutral or any(type(value) is type(one) and value == one for one in _spelled(neutral)):
        del raw[name]
        return []
    return [Violation(name, f"is not served here; leave it out{_accepted(neutral)}")]


def _spelled(neutral: Sequence[Any]) -> list[Any]:
    """The values with the numbers in both spellings of JSON."""
    numbers = [float(value) for value in neutral if type(value) is int]
    return [*neutral, *numbers]


def _accepted(neutral: Sequence[Any]) -> str:
    shown = [pydantic_core.to_json(value).decode() for value in neutral]
    return f", or send {' or '.join(shown)}" if shown else ""


def _too_many(raw: Mapping[str, Any], limits: Limits) -> list[Violation]:
    found = []
    for name, most in (("stop", limits.max_stop_strings), ("stop_token_ids", limits.max_stop_ids)):
        value = raw.get(name)
        if isinstance(value, list) and len(value) > most:
            found.append(Violation(name, f"at most {most}, not {len(value)}"))
    return found


def _violations(error: ValidationError) -> list[Violation]:
    """The fields, and what is wrong with each of them."""
    found: dict[str, str] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        name = ""
        for part in one["loc"]:
            if isinstance(part, int):
                name += f"[{part}]"
            elif part not in _KINDS:
                name += f".{part}" if name else part
        said = str(one["msg"])
        description = said[:1].lower() + said[1:]
        if len(found) < _MAX_VIOLATIONS:
            found.setdefault(name, description)
    return [Violation(name or "body", description) for name, description in found.items()]


# Parts of pydantic's path that stand for the alternatives of a type, and not for fields.
_KINDS: Final = frozenset({"<text>", "<list>"})


# --- prompts ----------------------------------------------------------------------------------------------------------


def _role(role: str) -> str:
    # OpenAI's newer name for the same role; templates know the older one.
    return "system" if role == "developer" else role


def _text(content: str | list[_TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of token ids, or a list of either. Raises RequestError."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if isinstance(value, list) and value:
        if type(value[0]) is int:
            return (_ids(value, "prompt"),)
        return tuple(_one_of_many(one, f"prompt[{index}]") for index, one in enumerate(value))
    raise invalid((Violation("prompt", "must be a text, a list of token ids, or a list of either"),))


def _one_of_many(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, list):
        return _ids(value, name)
    raise invalid((Violation(name, "must be a text or a list of token ids"),))


def _ids(value: list[Any], name: str) -> IdsPrompt:
    for token_id in value:
        if type(token_id) is not int or not 0 <= token_id <= _MAX_ID:
            raise invalid((Violation(name, "must hold token ids only: integers that are not negative"),))
    return IdsPrompt(value)


# --- calls ------------------------------------------------------------------------------------------------------------


def _wanted(request: _Request, prompts: Sequence[Prompt], max_tokens: int | None, names: Mapping[str, str]) -> Wanted:
    if request.stream_options is not None and not request.stream:
        raise invalid((Violation("stream_options", "goes with stream: true only"),))
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    ids = request.stop_token_ids or []
    if any(not 0 <= token_id <= _MAX_ID for token_id in ids):
        raise invalid((Violation("stop_token_ids", "must be integers that are not negative"),))
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        # OpenAI's seeds may be negative.
        seed=None if request.seed is None else request.seed % _UINT64,
        stop=tuple(stop),
        stop_token_ids=tuple(ids),
        ignore_eos=bool(request.ignore_eos),
    )
    calls = tuple(
        GenerateCall(
            prompt=prompt,
            request_id=request.request_id or "",
            sampling=sampling,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            model=request.model or "",
        )
        for prompt in prompts
    )
    options = request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    return Wanted(calls, is_stream=bool(request.stream), with_usage=with_usage, names=names)


def renamed(error: RequestError, names: Mapping[str, str]) -> tuple[str | None, str]:
    """For an error of the front end: the field of the body that it is about, if there is one, and the message with the
    body's names of fields."""
    failure = error.failure
    if not failure.violations:
        return None, failure.message
    said = [(_name(violation.field, names), violation.description) for violation in failure.violations]
    return said[0][0], "; ".join(f"{name}: {description}" for name, description in said)


def _name(path: str, names: Mapping[str, str]) -> str:
    field = path.removeprefix("sampling.")
    return names.get(field, field)
