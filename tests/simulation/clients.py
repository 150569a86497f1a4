"""Clients in the simulation: what each wants, what it must get, and what it got."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.frontend.calls import Accepted, Delta, FinishReason, GenerateCall, IdsPrompt, Sampling, TextPrompt
from scheduler_svc.frontend.calls import Finished as FinishedEvent
from scheduler_svc.frontend.errors import Failure, RequestError
from tests.simulation.frontend import FrontEndProcess
from worker_svc.runner.scripted import EOS_TOKEN_ID, complete
from worker_svc.sampling import Sampling as WorkerSampling


@dataclass(frozen=True, slots=True)
class Wish:
    """One request. leaves_s, aborts_s, deadline_s: so long after its start; pause_s: between two things it reads."""

    index: int
    at_s: float
    prompt: bytes
    max_tokens: int
    min_tokens: int = 0
    seed: int | None = None
    stop_id: int | None = None
    stop_string: str | None = None
    priority: int = 0
    salt: str = ""
    request_id: str = ""
    leaves_s: float | None = None
    aborts_s: float | None = None
    deadline_s: float | None = None
    pause_s: float = 0.0
    as_text: bool = False

    def call(self) -> GenerateCall:
        sampling = Sampling(
            temperature=0.0 if self.seed is None else 1.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens or None,
            seed=self.seed,
            stop=() if self.stop_string is None else (self.stop_string,),
            stop_token_ids=() if self.stop_id is None else (self.stop_id,),
        )
        prompt = TextPrompt(self.prompt.decode()) if self.as_text else IdsPrompt(array("I", list(self.prompt)))
        return GenerateCall(
            prompt,
            self.request_id,
            sampling,
            priority=self.priority,
            cache_salt=self.salt,
        )

    def due(self) -> Due:
        """What an undisturbed run gives."""
        masked = (EOS_TOKEN_ID,) if self.stop_id is None else (self.stop_id, EOS_TOKEN_ID)
        sampling = WorkerSampling(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed or 0,
            min_tokens=self.min_tokens,
            masked_token_ids=masked,
        )
        tokens = complete(list(self.prompt), self.max_tokens, sampling)
        if self.stop_id is not None and self.stop_id in tokens[self.min_tokens :]:
            at = tokens.index(self.stop_id, self.min_tokens)
            return Due(tokens[:at], at + 1, FinishReason.STOP)
        if self.stop_string is not None and (at := bytes(tokens).find(self.stop_string.encode())) >= 0:
            return Due(tokens[:at], at + len(self.stop_string), FinishReason.STOP)
        return Due(tokens, len(tokens), FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Due:
    """Tokens to be delivered (each a character), tokens billed, and why it ends."""

    tokens: list[int]
    num_billed: int
    reason: FinishReason


@dataclass(slots=True)
class Client:
    """What happened to one wish. `accuse` hears what must not."""

    wish: Wish
    front_end: FrontEndProcess
    now: Callable[[], float]
    accuse: Callable[[str], None]
    started_at: float = 0.0
    ended_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    due: Due | None = None
    failure: Failure | None = None
    finished: FinishedEvent | None = None
    # It, or what it was connected to, is gone.
    is_gone: bool = False
    was_aborted: bool = False
    was_accepted: bool = False
    # At some time between its start and its failure.
    was_without_scheduler: bool = False
    # Its front end was not ready.
    came_too_early: bool = False
    request_id: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def run(self) -> None:
        """From its start to its end, in its front end's process."""
        self.started_at = self.now()
        self.due = self.wish.due()
        self.came_too_early = self.front_end.session.not_ready_cause is not None
        engine = self.front_end.front_end
        knows_model = self.front_end.session._known is not None
        try:
            with engine.stream(), await engine.start(self.wish.call(), self._time_left) as generation:
                self.request_id = generation.request_id
                while (event := await generation.next()) is not None:
                    self._take(event)
                    if self.wish.pause_s:
                        await asyncio.sleep(self.wish.pause_s)
        except RequestError as error:
            self.failure = error.failure
            self.was_without_scheduler = self.front_end.gave_up_since(self.started_at) or not knows_model
        except asyncio.CancelledError:
            self.is_gone = True
            raise
        finally:
            self.ended_at = self.now()

    def _time_left(self) -> float | None:
        if self.wish.deadline_s is None:
            return None
        return self.started_at + self.wish.deadline_s - self.now()

    def _take(self, event: Accepted | Delta | FinishedEvent) -> None:
        assert self.due is not None
        if self.finished is not None:
            self.accuse(f"client {self.wish.index} hears {event} after the end")
        self.was_accepted = True
        if isinstance(event, Delta):
            if bytes(event.token_ids).decode() != event.text:
                self.accuse(f"client {self.wish.index}: text and ids of {event} differ")
            start = len(self.tokens)
            self.tokens += event.token_ids
            if self.tokens[start:] != self.due.tokens[start : len(self.tokens)]:
                self.accuse(
                    f"client {self.wish.index}: tokens {start} to {len(self.tokens) - 1} are {self.tokens[start:]}, "
                    f"not {self.due.tokens[start : len(self.tokens)]}"
                )
        elif isinstance(event, FinishedEvent):
            self.finished = event
            self._check_end(event)

    def _check_end(self, event: FinishedEvent) -> None:
        assert self.due is not None
        got = (self.tokens, event.usage.num_completion_tokens, event.reason)
        if got != (self.due.tokens, self.due.num_billed, self.due.reason):
            self.accuse(f"client {self.wish.index} ended with {got}, not {self.due}")


_WORDS: Final = ("ab", "e", "Q7", "~", " z", "xyz")


def make_wishes(
    rng: random.Random, num: int, over_s: float, *, max_len: int, is_priority: bool, num_ids: int
) -> list[Wish]:
    """Requests of every kind, some with the beginnings of others. num_ids: from how few names some choose theirs."""
    families = [bytes(rng.randrange(32, 127) for _ in range(max_len // 2)) for _ in range(4)]
    wishes = []
    for index in range(num):
        shared = rng.choice(families)[: rng.randrange(max_len // 2)]
        own = bytes(rng.randrange(32, 127) for _ in range(rng.randrange(1, 12)))
        prompt = (shared + own)[: max_len - 8]
        max_tokens = rng.randrange(1, max_len - len(prompt))
        stop = rng.random()
        wishes.append(
            Wish(
                index,
                at_s=rng.uniform(0.0, over_s),
                prompt=prompt,
                max_tokens=max_tokens,
                min_tokens=rng.randrange(max_tokens) if stop < 0.25 and rng.random() < 0.5 else 0,
                seed=rng.getrandbits(40) if rng.random() < 0.5 else None,
                stop_id=rng.randrange(32, 127) if stop < 0.25 else None,
                stop_string=rng.choice(_WORDS) if 0.25 <= stop < 0.45 else None,
                priority=rng.randrange(-2, 3) if is_priority else 0,
                salt=rng.choice(("", "", "", "tenant")),
                request_id=f"id-{rng.randrange(num_ids)}" if rng.random() < 0.2 else "",
                leaves_s=rng.expovariate(2.0) if rng.random() < 0.1 else None,
                aborts_s=rng.expovariate(2.0) if rng.random() < 0.05 else None,
                deadline_s=rng.uniform(0.05, 8.0) if rng.random() < 0.06 else None,
                pause_s=rng.uniform(0.0, 0.2) if rng.random() < 0.1 else 0.0,
                as_text=rng.random() < 0.3,
            )
        )
    return wishes
