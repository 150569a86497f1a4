"""What travels inside the front end: a client's call, what is submitted for it, and what comes back. No protobuf
here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler_svc.frontend.errors import Failure
from scheduler_svc.frontend.usage import Usage


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The served model, as a worker describes it. Lengths in tokens."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    # Empty: the model has no tokenizer.
    tokenizer_digest: str = ""
    # Under which clients may ask for it, too.
    other_names: tuple[str, ...] = ()


# --- a client's call ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """token_ids: may be a view of the client's message, whose length and slices cost little and whose elements do
    not."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """As the client wrote it; None: the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One Generate or Complete. prompt None: the client gave none."""

    prompt: Prompt | None
    request_id: str = ""
    sampling: Sampling = Sampling()
    priority: int = 0
    cache_salt: str = ""
    model: str = ""
    # From the caller's credentials; "": none.
    tenant: str = ""
    # The port it came to: "grpc" or "openai".
    api: str = "grpc"


# --- what is submitted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Every default resolved (D34). Zero values mean what they say; max_tokens 0 = as many as fit."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the scheduler sees it. timeout_s: time left until the client's deadline; None: none."""

    request_id: str
    prompt_token_ids: array[int]
    sampling: ResolvedSampling
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    tenant: str = ""


class CancelReason(Enum):
    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    SLOW_READER = "slow_reader"
    DRAINED = "drained"


# --- what comes back ------------------------------------------------------------------------------------------------


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Ended:
    """The scheduler's last word on a request: reason on success, failure otherwise. usage None: it told none."""

    reason: FinishReason | None
    stop_token_id: int | None
    failure: Failure | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and the ids it was decoded from. Either may be empty, not both."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Success. At most one of stop_token_id and stop_string is set, and only with STOP."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_string: str | None = None
