"""Client streams that arrive over time, some of which leave early, and what each of them must get.

The measure is the scripted worker's text: one request has one text, whatever happens on the way. So every stream is
compared with its cold run, token for token, whoever was killed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from stepfence.v1 import generation_service_pb2 as pb
from stepfence.v1 import usage_pb2
from tests.e2e.client import Refusal, refusal, sampling
from worker_svc.runner.scripted import complete
from worker_svc.sampling import Sampling

# Of one call. Far beyond what any trouble here may cost, so that a lost request fails the test and not the test run.
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Order:
    """A request to be made: when, and after how many tokens its client leaves (None: it stays)."""

    index: int
    arrives_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    leaves_after: int | None

    def cold_run(self) -> list[int]:
        """The output that an undisturbed worker gives."""
        drawn = Sampling() if self.seed is None else Sampling(temperature=1.0, seed=self.seed)
        return complete(self.prompt, self.max_tokens, drawn)

    def request(self) -> pb.GenerateRequest:
        chosen = sampling(max_tokens=self.max_tokens, ignore_eos=True)
        if self.seed is not None:
            chosen.temperature, chosen.seed = 1.0, self.seed
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=self.prompt), sampling=chosen)


@dataclass(slots=True)
class Outcome:
    """What a client saw. Times are those of time.monotonic()."""

    order: Order
    started_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float = 0.0
    longest_gap_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    failure: Refusal | None = None
    has_left: bool = False

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


def orders(num: int, over_s: float, rng: random.Random, *, num_tokens: tuple[int, int] = (50, 300)) -> list[Order]:
    """So many requests over so many seconds: a tenth leaves, half is sampled, many share the beginning of a prompt."""
    families = [[rng.randrange(256) for _ in range(48)] for _ in range(6)]
    arrivals = sorted(rng.uniform(0.0, over_s) for _ in range(num))
    leavers = set(rng.sample(range(num), num // 10))
    made = []
    for index, arrives_s in enumerate(arrivals):
        shared = rng.choice(families)[: rng.choice((0, 16, 33, 48))]
        own = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        max_tokens = rng.randrange(num_tokens[0], num_tokens[1] + 1)
        made.append(
            Order(
                index,
                arrives_s,
                (*shared, *own),
                max_tokens,
                seed=rng.getrandbits(32) if rng.random() < 0.5 else None,
                leaves_after=rng.randrange(max_tokens) if index in leavers else None,
            )
        )
    return made


async def run_order(stub: Any, order: Order, outcome: Outcome | None = None) -> Outcome:
    """One client, from its arrival to its end."""
    outcome = outcome or Outcome(order)
    outcome.started_at = last = time.monotonic()
    call = stub.Generate(order.request(), timeout=DEADLINE_S)
    try:
        async for response in call:
            kind = response.WhichOneof("event")
            assert outcome.finished is None, f"{kind} after the end"
            if kind == "finished":
                outcome.finished = response.finished
            elif kind == "delta":
                now = time.monotonic()
                if outcome.first_token_at is None:
                    outcome.first_token_at = now
                else:
                    outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
                last = now
                outcome.token_ids += response.delta.token_ids
            if order.leaves_after is not None and len(outcome.token_ids) >= order.leaves_after:
                outcome.has_left = True
                call.cancel()
                break
    except grpc.RpcError as error:
        outcome.failure = refusal(error)
    outcome.ended_at = time.monotonic()
    return outcome


async def run_all(stub: Any, wanted: Sequence[Order]) -> list[Outcome]:
    """All of them at their times; returns when the last has ended."""
    began = time.monotonic()

    async def arrive(order: Order) -> Outcome:
        await asyncio.sleep(max(0.0, began + order.arrives_s - time.monotonic()))
        return await run_order(stub, order)

    return list(await asyncio.gather(*(arrive(order) for order in wanted)))


def check(outcomes: Sequence[Outcome]) -> None:
    """Every stream that stayed ended OK with the tokens of its cold run; whoever left had the beginning of it."""
    for outcome in outcomes:
        order, cold = outcome.order, outcome.order.cold_run()
        assert outcome.failure is None, f"stream {order.index}: {outcome.failure}"
        if outcome.has_left:
            assert outcome.token_ids == cold[: len(outcome.token_ids)], f"stream {order.index}, which left"
            continue
        assert outcome.finished is not None, f"stream {order.index} just ended"
        assert outcome.token_ids == cold, f"stream {order.index}"
        assert outcome.finished.reason == usage_pb2.FINISH_REASON_LENGTH
        assert outcome.finished.usage.num_completion_tokens == order.max_tokens


def summary(outcomes: Sequence[Outcome], **counts: int) -> str:
    """One line for docs/operations.md."""
    stayed = [outcome for outcome in outcomes if not outcome.has_left]
    first = [o.first_token_at - o.started_at for o in stayed if o.first_token_at is not None]
    facts = {
        "streams": len(outcomes),
        "left early": len(outcomes) - len(stayed),
        "tokens": sum(len(outcome.token_ids) for outcome in outcomes),
        **counts,
        "worst pause s": round(max(outcome.longest_gap_s for outcome in stayed), 2),
        "worst first token s": round(max(first), 2),
    }
    return "chaos: " + ", ".join(f"{name} {value}" for name, value in facts.items())


async def again_and_again(
    blow: Callable[[], Awaitable[None]], busy: asyncio.Task[Any], until_s: float, *, at_least: int
) -> None:
    """Deal blow after blow for so many seconds, or until there is nobody left to suffer; but so many at least."""
    ends_at = time.monotonic() + until_s
    num = 0
    while num < at_least or (time.monotonic() < ends_at and not busy.done()):
        await blow()
        num += 1
