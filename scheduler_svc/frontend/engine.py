"""The front end without its server: takes decoded calls, gives back running generations. Knows every live request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from scheduler_svc.frontend.callers import ANYONE, Caller
from scheduler_svc.frontend.calls import (
    ChatPrompt,
    GenerateCall,
    IdsPrompt,
    ModelDescription,
    ResolvedSampling,
    Submission,
    TextPrompt,
)
from scheduler_svc.frontend.containment import contained
from scheduler_svc.frontend.errors import (
    ABORT_NOT_ALLOWED,
    DEADLINE,
    DRAINING,
    ChatError,
    Code,
    Failure,
    RequestError,
    Violation,
    invalid,
    quoted,
)
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.limits import Limits
from scheduler_svc.frontend.output_text import OutputAssembler
from scheduler_svc.frontend.prompt_lanes import Lane, PromptLanes
from scheduler_svc.frontend.resolve import (
    check_model,
    check_parameters,
    check_prompt_bytes,
    check_prompt_ids,
    check_prompt_length,
    resolve_sampling,
)
from scheduler_svc.frontend.session_client import ServedModel, SessionClient
from scheduler_svc.frontend.stops import StopMatcher
from scheduler_svc.frontend.template_process import Piece
from scheduler_svc.frontend.text import Tokenizer
from scheduler_svc.frontend.usage import Usage
from scheduler_svc.frontend.usage_log import UsageRecord
from scheduler_svc.rpc.tenants import qualified

T = TypeVar("T")

# Ids that this server draws: 128 random bits.
_DRAWN_PREFIX: Final = "gen-"
_DRAWN_ID: Final = re.compile(_DRAWN_PREFIX + "[0-9a-f]{32}")


class FrontEnd:
    """Starts, finds and ends the requests of this front end.

    lanes: where chats are rendered and long texts tokenized; None: on the spot (for simulations, where threads would be
    chance). record: takes what each accepted request has cost, when it has ended.
    """

    def __init__(
        self,
        session: SessionClient,
        *,
        limits: Limits,
        rng: random.Random,
        lanes: PromptLanes | None = None,
        record: Callable[[UsageRecord], None] | None = None,
    ) -> None:
        self._session = session
        self.limits = limits
        self._rng = rng
        self._lanes = lanes
        # By the ids that stand for them beside those of other tenants; see `qualified`.
        self._live: dict[str, Generation] = {}
        self._record = record
        # Those whose cost may not be recorded yet. The session holds them until the scheduler has ended them.
        self._unsettled: weakref.WeakSet[Generation] = weakref.WeakSet()
        # Those of these ids that their clients chose.
        self._chosen_ids: set[str] = set()
        # Events that were taken to be delivered to clients, of all calls.
        self.num_events_taken = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- what holds now ---

    @property
    def num_live(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._live)

    @property
    def num_streams(self) -> int:
        """Client calls now open."""
        return self._session.num_live_streams

    @property
    def not_ready_cause(self) -> str | None:
        return "the front end is draining" if self._draining else self._session.not_ready_cause

    @property
    def model(self) -> ModelDescription:
        """The served model. Raises RequestError UNAVAILABLE."""
        return self._session.model.description

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Around every client call."""
        self._session.num_live_streams += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._session.num_live_streams -= 1
            if not self._session.num_live_streams:
                self._idle.set()
                self._session.no_stream_left()

    # --- requests ---

    async def start(self, call: GenerateCall, time_left: Callable[[], float | None]) -> Generation:
        """Check, tokenize, resolve, submit. time_left: seconds until the client's deadline, None without one.

        Raises RequestError. The result must be entered (`with`) without awaiting anything in between.
        """
        self._check_open()
        served = self._session.model
        check_model(call, served.description)
        check_parameters(call, served.description, self.limits, accepts_priority=self._session.accepts_priority)
        self._check_id(call)
        token_ids = await self._prompt_token_ids(call, served)
        sampling = resolve_sampling(call.sampling, served.description, self._rng)
        output = self._output(call, served, sampling, token_ids)
        # Tokenizing may have taken a while.
        self._check_open()
        self._check_id(call)
        timeout_s = self._timeout(time_left())
        submission = Submission(
            request_id=call.request_id or f"{_DRAWN_PREFIX}{self._rng.getrandbits(128):032x}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            priority=call.priority,
            cache_salt=call.cache_salt,
            timeout_s=timeout_s,
            tenant=call.tenant,
        )
        generation = self._submit(submission, output)
        if self._record is not None:
            self._watch_cost(generation, call, served.description.name, self._record)
        if call.request_id:
            self._chosen_ids.add(qualified(call.tenant, call.request_id))
        return generation

    def abort(self, request_id: str, caller: Caller = ANYONE) -> None:
        """End a request. An operator may end every one, by its id beside those of other tenants (`qualified`); a tenant
        its own. Callers without a name may end only by ids that this server drew, which cannot be guessed; an id that a
        client chose could be another client's.

        Raises RequestError: NOT_FOUND when it is not live here, PERMISSION_DENIED for an id that was not drawn here,
        whether it is live or not.
        """
        live_id = request_id if caller.is_operator else qualified(caller.tenant, request_id)
        generation = self._live.get(live_id)
        is_trusted = caller.is_operator or caller.tenant
        if not is_trusted and not (_DRAWN_ID.fullmatch(request_id) and live_id not in self._chosen_ids):
            raise RequestError(ABORT_NOT_ALLOWED)
        if generation is None:
            message = f"no live request {quoted(request_id)} at this front end; it may have ended"
            raise RequestError(Failure(Code.NOT_FOUND, "REQUEST_NOT_FOUND", message))
        generation.abort()

    def _timeout(self, time_left_s: float | None) -> float | None:
        """Ends a little before the client's deadline, so that the usage reaches a client that is still listening."""
        if time_left_s is None:
            return None
        if time_left_s <= 0:
            raise RequestError(DEADLINE)
        margin_s = self.limits.deadline_margin_s + self.limits.deadline_margin_part * time_left_s
        return time_left_s - min(margin_s, time_left_s / 10)

    def _submit(self, submission: Submission, output: OutputAssembler) -> Generation:
        request_id = submission.request_id
        live_id = qualified(submission.tenant, request_id)
        generation = Generation(request_id, len(submission.prompt_token_ids), output, self._session, self.limits)
        generation.submitted(self._session.submit(submission, generation))
        generation.on_end = lambda: self._forget(live_id)
        self._live[live_id] = generation
        return generation

    def _watch_cost(
        self, generation: Generation, call: GenerateCall, model: str, record: Callable[[UsageRecord], None]
    ) -> None:
        clock = asyncio.get_running_loop().time
        began, request_id = clock(), generation.request_id

        def settled(finish: str, usage: Usage, first_token_at: float | None) -> None:
            first_s = None if first_token_at is None else first_token_at - began
            record(UsageRecord(request_id, call.tenant, model, call.api, finish, usage, first_s, clock() - began))

        self._unsettled.add(generation)
        generation.on_settled = settled

    def _forget(self, live_id: str) -> None:
        del self._live[live_id]
        self._chosen_ids.discard(live_id)

    def _check_open(self) -> None:
        if self._draining:
            raise RequestError(DRAINING)

    def _check_id(self, call: GenerateCall) -> None:
        if call.request_id and qualified(call.tenant, call.request_id) in self._live:
            message = f"a request with the id {quoted(call.request_id)} is live; its id is free again when it has ended"
            raise RequestError(Failure(Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", message))

    def _output(
        self, call: GenerateCall, served: ServedModel, sampling: ResolvedSampling, token_ids: array[int]
    ) -> OutputAssembler:
        stop = call.sampling.stop
        if stop:
            _needed(served.tokenizer, "sampling.stop")
        tokenizer = served.tokenizer
        return OutputAssembler(
            None if tokenizer is None else contained(lambda: tokenizer.decoder(token_ids)),
            StopMatcher(stop) if stop else None,
            stop_ids=frozenset(sampling.eos_token_ids) | frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
        )

    # --- prompts ---

    async def _prompt_token_ids(self, call: GenerateCall, served: ServedModel) -> array[int]:
        prompt = call.prompt
        if isinstance(prompt, IdsPrompt):
            return await self._copied_ids(prompt.token_ids, served.description)
        if isinstance(prompt, TextPrompt) and prompt.text:
            return await self._encode_text(prompt.text, served)
        if isinstance(prompt, ChatPrompt):
            return await self._encode_chat(prompt, served)
        return self._checked([], served.description)

    async def _copied_ids(self, given: Sequence[int], model: ModelDescription) -> array[int]:
        # The length first: it bounds the work. The rest in parts, between which others get their turn.
        check_prompt_length(len(given), model, self.limits)
        size = self.limits.max_ids_at_once
        token_ids = self._checked(given[:size], model)
        for start in range(size, len(given), size):
            await asyncio.sleep(0)
            token_ids += self._checked(given[start : start + size], model)
        return token_ids

    async def _encode_text(self, text: str, served: ServedModel) -> array[int]:
        tokenizer, model = _needed(served.tokenizer, "text"), served.description
        num_bytes = len(text.encode())
        self._check_size(num_bytes, "text")
        check_prompt_bytes(num_bytes, tokenizer.fewest_tokens(num_bytes, is_chat=False), model)
        return await self._tokenized(num_bytes, lambda: self._checked(tokenizer.encode_text(text), model))

    async def _encode_chat(self, prompt: ChatPrompt, served: ServedModel) -> array[int]:
        tokenizer, model = _needed(served.tokenizer, "chat"), served.description
        num_bytes = sum(len(m.role.encode()) + len(m.content.encode()) for m in prompt.messages)
        self._check_size(num_bytes, "chat")
        try:
            pieces, num_bytes = await self._beside(Lane.CHATS, num_bytes, lambda: _rendered(tokenizer, prompt))
        except ChatError as error:
            raise invalid((Violation("chat", str(error)),), "INVALID_CHAT") from error
        check_prompt_bytes(num_bytes, tokenizer.fewest_tokens(num_bytes, is_chat=True), model)
        return await self._tokenized(num_bytes, lambda: self._checked(tokenizer.encode_pieces(pieces), model))

    def _checked(self, token_ids: Sequence[int], model: ModelDescription) -> array[int]:
        """The ids of a prompt as int32, once they are known to fit into the model. Raises RequestError."""
        check_prompt_ids(len(token_ids), max(token_ids, default=0), model, self.limits)
        return array("i", token_ids)

    def _check_size(self, num_bytes: int, field: str) -> None:
        limit = self.limits.max_prompt_bytes
        if num_bytes > limit:
            violation = Violation(field, f"has {num_bytes} bytes; at most {limit}")
            raise invalid((violation,), "PROMPT_TOO_LARGE", num_bytes=num_bytes, max_bytes=limit)

    async def _tokenized(self, num_bytes: int, work: Callable[[], T]) -> T:
        if self._lanes is None or num_bytes <= self.limits.max_inline_text_bytes:
            return contained(work, kept=(RequestError,))
        return await self._beside(self._lanes.lane_for(num_bytes), num_bytes, work)

    async def _beside(self, lane: Lane, num_bytes: int, work: Callable[[], T]) -> T:
        def safe() -> T:
            return contained(work, kept=(ChatError, RequestError))

        return safe() if self._lanes is None else await self._lanes.run(lane, num_bytes, safe)

    # --- the end ---

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True
        self._session.on_change()

    async def wait_idle(self) -> None:
        """Until no client call is open."""
        await self._idle.wait()

    def cut_all(self) -> int:
        """End what is live: DRAINING, with the usage the scheduler still tells. The number of requests."""
        generations = list(self._live.values())
        for generation in generations:
            generation.cut(DRAINING)
        return len(generations)

    def give_up_all(self) -> None:
        """The same without waiting for the scheduler."""
        for generation in list(self._live.values()):
            generation.give_up(DRAINING)
        self.settle_all()

    def settle_all(self) -> None:
        """Record what is known of the cost of requests whose clients have left."""
        for generation in list(self._unsettled):
            generation.settle()
        self._unsettled.clear()


def _rendered(tokenizer: Tokenizer, prompt: ChatPrompt) -> tuple[list[Piece], int]:
    """The pieces of a conversation, and their bytes: what a template leaves out does not count."""
    pieces = tokenizer.render_chat(prompt.messages)
    return pieces, sum(len(piece.text.encode()) for piece in pieces)


def _needed(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise invalid((Violation(field, "the model has no tokenizer; send token ids"),), "NO_TOKENIZER")
    return tokenizer
