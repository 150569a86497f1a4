"""Random search for a schedule that the core gets wrong: seeded worlds of one to four ranks, full of arrivals, aborts,
deadlines, lost ranks, late results and whatever else can happen.

    python -m scheduler_svc.simulation.core_simulation --steps 1000000 --seed 1

One world is a configuration, drawn around the defaults or around the reference's settings, and some thousand events; it
ends with everything running to its end, after which nothing may be left. The seed of a world reproduces it; a world
that fails prints its seed, its configuration and its last events."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random

from scheduler_svc.core.config import Policy, SchedulerConfig, TenantLimits
from scheduler_svc.core.events import AbortCause, PauseState, RequestArrived
from scheduler_svc.core.resources.grammar import GRAMMAR_NOT_READY
from scheduler_svc.core.rules import DEFAULT, VLLM_0_25_1, Fence
from scheduler_svc.simulation.checked_core import CheckedCore, Client
from scheduler_svc.simulation.simulated_worker import REPETITIVE

# Counts that a run of at least MUST_REACH_STEPS steps must have raised above 0: else the simulation does not search
# where it says it does.
MUST_REACH_STEPS = 50_000
MUST_REACH = (
    "steps",
    "steps without tokens",
    "requests resumed",
    "prefix hits",
    "frees deferred",
    "rows with drafts",
    "drafts accepted",
    "drafts rejected",
    "preempted: blocks",
    "preempted: rank_lost",
    "preempted: reset",
    "preempted itself",
    "victim ahead of the beneficiary",
    "token of an earlier run kept",
    "rank lost",
    "rank lost with steps in flight",
    "rank joined again",
    "rank draining",
    "taken back by a draining rank",
    "late result refused",
    "wrong result refused: repeated",
    "wrong result refused: not oldest",
    "wrong result refused: row missing",
    "wrong result refused: token out of range",
    "wrong result refused: one token too many",
    "wrong result refused: too many in a row",
    "wrong result refused: rows without a token",
    "wrong result refused: unknown row failed",
    "wrong result refused: row failed without a count",
    "aborted while waiting",
    "aborted while running, rows in flight",
    "aborted while preempted",
    "aborted while preempted, rows in flight",
    "text ended while running, rows in flight",
    "text ended while preempted",
    "ended: stop",
    "ended: length",
    "ended: aborted deadline",
    "ended: worker_fault",
    "ended: no_worker",
    "ended: model_output_invalid",
    "preempted: row_error",
    "row failed alone",
    "id reused",
    "id reused while its old rows are in flight",
    "refused DUPLICATE_REQUEST_ID",
    "refused EXCEEDS_KV_CAPACITY",
    "refused PROMPT_TOO_LONG",
    "refused QUEUE_FULL",
    "refused TENANT_LIMIT",
    "refused NO_WORKER",
    "refused DRAINING",
    "pause PAUSED_NEW",
    "pause PAUSED_ALL",
    "reset done",
    "reset refused",
    "skipped: WAITING_FOR_FENCE",
    "skipped: PREFILL_DEFERRED",
    "skipped: LAST_TOKEN_IN_FLIGHT",
    "skipped: AWAITING_RESULT",
    "queued: RESULT_IN_FLIGHT",
    "queued: TENANT_LIMIT",
    "queued: PASSED_OVER",
    "queued: NEVER_FITS_HERE",
    "queued: QUARANTINED",
    "queued: RANK_QUARANTINED",
    "queued: NO_BLOCKS",
    "queued: FENCE_AWAITED",
    "queued: STEP_PREEMPTS",
    "queued: GRAMMAR_NOT_READY",
    "idle, nothing left",
    "scheduler lost",
    "submitted again with outputs",
    "end of a request lost with the scheduler",
)
_SHARE_OF_CROWDED = 0.25
_TRACE_LENGTH = 60
_NUM_STREAMS = 4


class SimulationFailure(AssertionError):
    """A world broke a rule. `trace` says how it came there."""

    def __init__(self, world: World, num_events: int, trace: list[str], problem: BaseException) -> None:
        self.trace = trace
        lines = [
            f"world {world.seed} breaks after event {num_events}: {type(problem).__name__}: {problem}",
            f"  configuration {world.config}",
            f"  pools {world.pools}, rank losses {world.loss_rate}",
            *(f"  {line}" for line in trace),
            f"  again: python -m scheduler_svc.simulation.core_simulation --world {world.seed}",
        ]
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class World:
    """Everything about one world that is drawn before it starts."""

    seed: int
    config: SchedulerConfig
    # Blocks of each rank; changed when it joins again if `resizes`.
    pools: tuple[int, ...]
    resizes: bool
    max_live: int
    max_prompt: int
    max_tokens: int
    # Chances per event.
    loss_rate: float
    abort_rate: float
    operator_rate: float
    # Share of requests with a deadline, with repetitive text, with a salt, that await a grammar.
    deadline_share: float
    repetitive_share: float
    salt_share: float
    grammar_share: float
    # Chance that a result comes before the next steps are planned.
    eagerness: float
    drains: bool
    # Chance per event that the scheduler is lost.
    restart_rate: float

    @property
    def is_crowded(self) -> bool:
        """See _crowd."""
        config = self.config
        return config.policy is Policy.PRIORITY and config.max_num_seqs == 10 and not config.scheduler_reserve_full_isl

    @classmethod
    def draw(cls, seed: int) -> World:
        random = Random(seed)
        is_reference = random.random() < 0.3
        config = _reference_config(random) if is_reference else _default_config(random)
        num_ranks = random.choice((1, 1, 2, 2, 3, 4))
        if not config.rules.resume_settled:
            num_ranks = 1
        pools = _draw_pools(random, num_ranks, config, is_reference)
        if not is_reference:
            config = replace(config, tenants=_draw_tenants(Random(seed ^ 0x7E4A)))
        return cls(
            seed=seed,
            config=config,
            pools=pools,
            resizes=not is_reference and random.random() < 0.3,
            max_live=random.choice((4, 10, 20)),
            max_prompt=random.choice((6, 12, 24)),
            max_tokens=random.choice((4, 16, 32)),
            loss_rate=random.choice((0.0, 0.003, 0.02, 0.15)),
            abort_rate=random.choice((0.0, 0.02, 0.1)),
            operator_rate=random.choice((0.0, 0.005, 0.03)),
            deadline_share=random.choice((0.0, 0.1)),
            repetitive_share=random.choice((0.0, 0.5, 1.0)) if config.num_speculative_tokens else 0.1,
            salt_share=random.choice((0.0, 0.2)),
            grammar_share=random.choice((0.0, 0.1)),
            eagerness=random.choice((0.1, 0.5, 0.9)),
            drains=random.random() < 0.2,
            # From a source of its own, so that older worlds stay as they were.
            restart_rate=0.0 if is_reference else Random(~seed).choice((0.0, 0.0, 0.0, 0.02)),
        )


def _common_settings(random: Random) -> dict[str, object]:
    max_model_len = random.choice((24, 40, 64))
    max_num_seqs = random.choice((1, 3, 6, 10))
    chunked = random.random() < 0.85
    budget = max(max_num_seqs, random.choice((4, 8, 16, 64)))
    drafts = random.choice((0, 0, 0, 1, 3))
    return {
        "block_size": random.choice((1, 2, 4, 4)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget if chunked else max(budget, max_model_len),
        "max_model_len": max_model_len,
        "policy": random.choice((Policy.FCFS, Policy.PRIORITY)),
        "enable_prefix_caching": random.random() < 0.8,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": random.choice((0, 0, 0, 3, 7)),
        "scheduler_reserve_full_isl": random.random() < 0.7,
        "watermark": random.choice((0.0, 0.0, 0.1, 0.3)),
        "num_speculative_tokens": drafts,
        "prefill_schedule_interval": random.choice((1, 1, 1, 2, 4)),
        "max_inflight_steps": random.choice((1, 2, 2, 3, 4)),
    }


def _crowd(random: Random, settings: dict[str, object]) -> dict[str, object]:
    """Many half-computed prompts beside each other, the later ones often the more urgent: who runs is preempted by whom
    comes behind it in the same step, after having been given tokens and blocks."""
    return settings | {
        "block_size": random.choice((1, 2)),
        "max_num_seqs": 10,
        "max_num_batched_tokens": random.choice((10, 24)) if settings["enable_chunked_prefill"] else 64,
        "policy": Policy.PRIORITY,
        "enable_prefix_caching": True,
        "long_prefill_token_threshold": random.choice((2, 3, 5)),
        "scheduler_reserve_full_isl": False,
        "watermark": 0.0,
    }


def _default_config(random: Random) -> SchedulerConfig:
    settings = _common_settings(random)
    if random.random() < _SHARE_OF_CROWDED:
        settings = _crowd(random, settings)
    return SchedulerConfig(
        **settings,  # type: ignore[arg-type]
        rules=replace(
            DEFAULT,
            fence=random.choice((Fence.ALWAYS, Fence.ALWAYS, Fence.TRANSFERS)),
            waits_for_fence=random.choice((True, True, False)),
        ),
        max_preemptions=random.choice((3, 3, 0, 1, None)),
        max_fruitless_epochs=random.choice((3, 3, 0)),
        max_queued_requests=random.choice((6, 1024)),
        max_queued_tokens=random.choice((100, 4_000_000)),
        no_worker_grace_s=5.0,
    )


def _reference_config(random: Random) -> SchedulerConfig:
    """The reference's settings, with those of ours that may be mixed in. Results of an earlier run may come after a
    resume only within a window of two, which is why deeper ones keep resume_settled."""
    settings = _common_settings(random)
    if random.random() < _SHARE_OF_CROWDED:
        settings = _crowd(random, settings)
    depth = settings["max_inflight_steps"]
    assert isinstance(depth, int)
    proposes = bool(settings["num_speculative_tokens"]) and random.random() < 0.3
    results_first = proposes or random.random() >= 0.7
    settings["max_num_batched_tokens"] = max(int(str(settings["max_num_batched_tokens"])), 8)
    return SchedulerConfig.reference(
        **settings,
        rules=replace(
            VLLM_0_25_1,
            fence=random.choice((Fence.ALWAYS, Fence.TRANSFERS)),
            resume_settled=depth > 2 or random.random() < 0.5,
            proposes_drafts=proposes,
            results_first=results_first,
        ),
    )


def _draw_tenants(random: Random) -> tuple[TenantLimits, ...]:
    """From a source of their own, so that older worlds stay as they were."""
    if random.random() >= 0.3:
        return ()
    return tuple(
        TenantLimits(
            tenant,
            max_running=random.choice((None, 1, 2)),
            max_queued=random.choice((None, 1, 4)),
            tokens_per_minute=random.choice((None, 60, 2000)),
        )
        for tenant in random.sample(("", "a", "b", "*"), 2)
    )


def _draw_pools(random: Random, num_ranks: int, config: SchedulerConfig, is_reference: bool) -> tuple[int, ...]:
    """Pools from barely enough for one sequence to plenty. The reference hangs on what does not fit: there every pool
    holds the longest sequence."""
    longest = -(-config.max_model_len // config.block_size)
    smallest = longest if is_reference else max(2, longest // 3)
    return tuple(
        1 + random.choice((smallest, longest, longest + 1, longest + 3, 2 * longest)) for _ in range(num_ranks)
    )


class Simulation:
    """One world, event by event."""

    def __init__(self, world: World, *, stride: int) -> None:
        self.world = world
        self.random = Random(world.seed ^ 0x5F3759DF)
        self._tenants = Random(world.seed ^ 0x51A7)
        self.core = CheckedCore(world.config, stride=stride)
        self.trace: deque[str] = deque(maxlen=_TRACE_LENGTH)
        self.num_events = 0
        self._next_handle = 1
        self._ended_ids: list[str] = []
        self._last_texts: deque[list[int]] = deque(maxlen=8)
        self._streams = [[self.random.randrange(32) for _ in range(64)] for _ in range(_NUM_STREAMS)]
        loss = world.loss_rate
        operator = world.operator_rate
        moves: list[tuple[float, Callable[[], None]]] = [
            (0.7, self._arrive),
            (0.9, self._acknowledge),
            (0.15, self._tick),
            (world.abort_rate, self._abort),
            (world.abort_rate / 4, self._end_text),
            (loss, self._lose),
            (loss / 8, self._drain_rank),
            (world.restart_rate, self._restart),
            (3 * loss + 0.02, self._join),
            (loss, self._deliver_late),
            (0.01, self._deliver_wrong),
            (0.02, self._poison),
            (operator, self._pause),
            (operator, self._reset),
            (0.05 if world.grammar_share else 0.0, self._compile_grammar),
            (0.2 if self._drafts_from_outside else 0.0, self._propose),
        ]
        self._moves = [move for chance, move in moves if chance > 0]
        self._chances = [chance for chance, _ in moves if chance > 0]

    @property
    def _drafts_from_outside(self) -> bool:
        config = self.world.config
        return bool(config.num_speculative_tokens) and not config.rules.proposes_drafts and config.rules.results_first

    def run(self, num_events: int) -> Counter[str]:
        """Play the world to its end. Returns what was reached; raises SimulationFailure."""
        try:
            for index in range(len(self.world.pools)):
                self._join_rank(f"r{index}")
            for _ in range(num_events):
                self._event(self.random.choices(self._moves, self._chances)[0])
            self._close()
        except Exception as problem:
            raise SimulationFailure(self.world, self.num_events, list(self.trace), problem) from problem
        return self.core.reached

    def _event(self, move: Callable[[], None]) -> None:
        self.num_events += 1
        move()
        if self.random.random() < 0.9:
            self.core.schedule_all()
            self._count_queue()
        elif self.core.links:
            # A loop that is behind: one step of one rank.
            self.core.schedule(self.random.choice(list(self.core.links)))

    def _close(self) -> None:
        """No more arrivals and no more losses: everything ends, and nothing is left."""
        core = self.core
        if self.world.drains:
            self._note("drain")
            core.drain()
            self._arrive()
        self._note("closing")
        pools = {f"r{index}": num_blocks for index, num_blocks in enumerate(self.world.pools)}
        core.run_to_the_end(pools, self.random.choice)

    # --- moves --------------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.num_events}: {text}")

    def _arrive(self) -> None:
        random, world = self.random, self.world
        if len(self.core.clients) >= world.max_live and random.random() < 0.9:
            self._acknowledge()
            return
        event = self._request()
        self._note(
            f"arrive {event.request_id} {len(event.prompt)}+{event.max_tokens} tokens, priority {event.priority}, "
            f"at {event.arrival}"
        )
        old = self._old_rows(event.request_id)
        if self.core.arrive(event) and event.request_id in self._ended_ids:
            self.core.reached["id reused"] += 1
            self.core.reached["id reused while its old rows are in flight"] += old
        self._ended_ids.append(event.request_id)

    def _old_rows(self, request_id: str) -> bool:
        if request_id in self.core.clients:
            return False
        records = [record for rank in self.core.scheduler.state.ranks.values() for record in rank.window.records]
        return any(r.request_id == request_id for record in records for r in record.requests)

    def _request(self) -> RequestArrived:
        random, world = self.random, self.world
        handle = self._next_handle
        self._next_handle += 1
        request_id = f"q{handle}"
        if self._ended_ids and random.random() < 0.15:
            request_id = random.choice(self._ended_ids[-12:])
        prompt = self._prompt()
        most, refuses = world.config.max_model_len, world.config.rules.refuse_infeasible
        max_tokens = random.randint(1, world.max_tokens)
        if refuses:
            max_tokens *= random.random() > 0.05
        else:
            prompt = prompt[: most - 2]
            max_tokens = min(max_tokens, most - len(prompt))
        min_tokens = random.randint(0, max_tokens) if random.random() < 0.3 else 0
        is_repetitive = random.random() < world.repetitive_share
        salt = random.choice("ab") if random.random() < world.salt_share else ""
        tenant = self._tenants.choice(("", "a", "b")) if world.config.tenants else ""
        by_priority = world.config.policy is Policy.PRIORITY
        # Among equals the reference preempts the one admitted first. Without the gate that keeps half-fitting prompts
        # out, two equals can then take each other's place for ever; the service never makes any.
        ties = by_priority and world.config.scheduler_reserve_full_isl and random.random() < 0.5
        return RequestArrived(
            request_id=request_id,
            handle=handle,
            prompt=array("i", prompt),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos_token_ids=(random.randrange(16),) if random.random() < 0.3 else (),
            stop_token_ids=tuple(random.sample(range(8, 64), 2)) if random.random() < 0.3 else (),
            priority=random.randint(-1, 2) if by_priority else 0,
            cache_salt=salt,
            sampling=(REPETITIVE if is_repetitive else b"h") + salt.encode() + tenant.upper().encode(),
            deadline=self.core.now + random.uniform(0, 4) if random.random() < world.deadline_share else None,
            arrival=self._arrival(ties),
            skip_prefix_cache=random.random() < 0.05,
            awaits_grammar=random.random() < world.grammar_share,
            tenant=tenant,
        )

    def _arrival(self, ties: bool) -> float | None:
        if self.world.restart_rate:
            # As the service does: no two are the same.
            return self.core.now + self._next_handle * 1e-9
        return float(self.random.randrange(3)) if ties else None

    def _prompt(self) -> list[int]:
        """A prefix of one of few streams, or of a text seen before, with a tail of its own now and then."""
        random = self.random
        length = random.randint(1, self.world.max_prompt)
        if random.random() < 0.03:
            length = self.world.config.max_model_len + random.randint(-2, 2)
        texts = list(self._last_texts)
        base = random.choice(texts) if texts and random.random() < 0.3 else random.choice(self._streams)
        prompt = base[:length] if random.random() < 0.6 else base[: length // 2]
        return prompt + [random.randrange(32) for _ in range(length - len(prompt))]

    def _acknowledge(self) -> None:
        busy = [name for name, link in self.core.links.items() if link.worker.num_waiting]
        if not busy:
            return
        name = self.random.choice(busy)
        for _ in range(1 if self.random.random() > self.world.eagerness else self.core.links[name].worker.num_waiting):
            self._note(f"ack {name} step {self.core.links[name].acked_step + 1}")
            self.core.acknowledge(name)

    def _tick(self) -> None:
        seconds = self.random.choice((0.01, 0.1, 1.0, 3.0))
        self._note(f"tick {seconds}")
        self.core.tick(seconds)

    def _client(self) -> Client | None:
        return self.random.choice(list(self.core.clients.values())) if self.core.clients else None

    def _abort(self) -> None:
        if (client := self._client()) is not None:
            cause = self.random.choice((AbortCause.ABORTED, AbortCause.CLIENT_GONE, AbortCause.SLOW_READER))
            self._note(f"abort {client.event.request_id}")
            self._last_texts.append(client.tokens)
            self.core.abort(client.event.request_id, cause)

    def _end_text(self) -> None:
        client = self._client()
        if client is not None and client.outputs:
            num_tokens = self.random.randint(1, len(client.outputs))
            self._note(f"text of {client.event.request_id} ends at {num_tokens}")
            self._last_texts.append(client.tokens)
            self.core.end_text(client.event.request_id, num_tokens)

    def _lose(self) -> None:
        if self.core.links:
            name = self.random.choice(list(self.core.links))
            graceful, num_executed = self.random.random() < 0.2, self.random.randint(0, 2)
            self._note(f"lose {name}, graceful {graceful}")
            self.core.lose(name, graceful=graceful, num_executed=num_executed)

    def _restart(self) -> None:
        self._note("restart of the scheduler")
        self.core.restart(lambda: self.random.choice((0, 0, 1, 3)))

    def _drain_rank(self) -> None:
        if self.core.links:
            name = self.random.choice(list(self.core.links))
            self._note(f"drain {name}")
            self.core.drain_rank(name)

    def _join(self) -> None:
        away = [f"r{i}" for i in range(len(self.world.pools)) if f"r{i}" not in self.core.links]
        if away:
            self._join_rank(self.random.choice(away))

    def _join_rank(self, name: str) -> None:
        num_blocks = self.world.pools[int(name[1:])]
        if self.world.resizes and self.random.random() < 0.3:
            num_blocks = max(3, num_blocks // 2)
        self._note(f"join {name} with {num_blocks} blocks")
        self.core.join(name, num_blocks, self.world.config.max_model_len)

    def _deliver_late(self) -> None:
        if self.core.late_results:
            self._note("late result")
            self.core.deliver_late()

    def _deliver_wrong(self) -> None:
        if self.core.links:
            name = self.random.choice(list(self.core.links))
            if wrong := self.core.wrong_results(name):
                kind, event = self.random.choice(wrong)
                self._note(f"wrong result of {name}: {kind}")
                self.core.deliver_wrong(name, event, kind)
                if self.random.random() < 0.3:
                    self.core.lose(name, num_executed=self.random.randint(0, 1))

    def _poison(self) -> None:
        client = self._client()
        if client is not None and self.core.poison(client.event.request_id):
            self._note(f"{client.event.request_id} computes what is not finite")

    def _pause(self) -> None:
        state = self.random.choice((PauseState.UNPAUSED, PauseState.UNPAUSED, *PauseState))
        self._note(f"pause {state.value}")
        self.core.pause(state)

    def _reset(self) -> None:
        preempt_running = self.random.random() < 0.5
        self._note(f"reset, running {preempt_running}")
        self.core.reset_prefix_cache(preempt_running=preempt_running)

    def _compile_grammar(self) -> None:
        queue = self.core.scheduler.state.queue
        waiting = [r.request_id for r in queue if r.ticket.blocked_by is GRAMMAR_NOT_READY]
        if waiting:
            request_id = self.random.choice(waiting)
            self._note(f"grammar of {request_id}")
            self.core.compile_grammar(request_id)

    def _propose(self) -> None:
        rank = self.core.scheduler.state.ranks.get("r0")
        running = [] if rank is None else [run.request for run in rank.running if not run.request.awaited]
        if running:
            client = self.core.clients[self.random.choice(running).request_id]
            right = client.source.next_token()
            drafts = [self.random.choice((right, 0)) for _ in range(self.world.config.num_speculative_tokens)]
            self._note(f"drafts {drafts} for {client.event.request_id}")
            self.core.propose_drafts("r0", {client.event.request_id: drafts})

    def _count_queue(self) -> None:
        for request in self.core.scheduler.state.queue:
            if request.account.skip_reason is not None:
                self.core.reached[f"queued: {request.account.skip_reason.name}"] += 1


# --- the command ------------------------------------------------------------------------------------------------------


def simulate(num_steps: int, seed: int, *, checked_share: float, events_per_world: int = 1200) -> Counter[str]:
    """Worlds `seed`, `seed` + 1, ... until `num_steps` steps were planned. A `checked_share` of the worlds is looked
    through after every event, the others after every 97th. Raises SimulationFailure."""
    total: Counter[str] = Counter()
    world_seed = seed
    while total["steps"] < num_steps:
        total += play(world_seed, is_checked=Random(world_seed).random() < checked_share, num_events=events_per_world)
        world_seed += 1
    return total


def play(seed: int, *, is_checked: bool, num_events: int = 1200) -> Counter[str]:
    """One world. Raises SimulationFailure."""
    reached = Simulation(World.draw(seed), stride=1 if is_checked else 97).run(num_events)
    reached["worlds"] += 1
    reached["worlds checked after every event"] += is_checked
    reached["steps checked after every event"] += reached["steps"] if is_checked else 0
    return reached


def world_digest(seed: int, num_events: int = 1200) -> str:
    """SHA-256 of every effect and every step of a world, in order: the same in every process."""
    digest = sha256()
    simulation = Simulation(World.draw(seed), stride=97)
    simulation.core.transcript = lambda text: digest.update(text.encode())
    simulation.run(num_events)
    return digest.hexdigest()


def not_reached(reached: Counter[str]) -> list[str]:
    """What a long run must have met and this one has not."""
    return [kind for kind in MUST_REACH if not reached[kind]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Search random schedules for a broken rule.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps to plan, all worlds together")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first world; the next one is one more")
    parser.add_argument("--check", choices=("every", "sampled"), default="sampled", help="look after every event, or")
    parser.add_argument("--checked-share", type=float, default=0.3, help="only in this share of the worlds")
    parser.add_argument("--world", type=int, help="play only this world, checking after every event")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    share = 1.0 if options.check == "every" else options.checked_share
    try:
        if options.world is not None:
            reached = play(options.world, is_checked=True)
        else:
            reached = simulate(options.steps, options.seed, checked_share=share)
    except SimulationFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    for kind in sorted(reached):
        print(f"{reached[kind]:>12,}  {kind}")
    print(f"{time.monotonic() - started:.0f} s")
    missing = not_reached(reached) if reached["steps"] >= MUST_REACH_STEPS else []
    if missing:
        print(f"never reached: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
