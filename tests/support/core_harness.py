"""The core without a process around it: a verifying stub worker, and a world of ranks and clients.

`StubWorker` plays one rank's worker directly on `SchedulerOutput`. It remembers for every KV slot which position and
token it holds, after which prefix, written in which step, and refuses a row whose earlier slots do not hold that row's
own prefix, written in an earlier step or in this one (contract rule 11). The next token is a hash of the true prefix:
a wrong table, a block reused too early, a missing recompute or a stale block hash shows as a failed check and
as another text.

`World` feeds the core: clients, ranks, results that can be held back or never come, time. After every event and every
step all invariants are checked, and what clients see is checked as it comes (nothing after the end, usage fits).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    DraftsProposed,
    Effect,
    EndReason,
    Event,
    PrefixCacheReset,
    PrefixCacheResetRequested,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    StepAcked,
    Tick,
    TokensProduced,
    UsageChanged,
)
from scheduler_svc.core.output import NewRow, SchedulerOutput
from scheduler_svc.core.rank import RankState
from scheduler_svc.core.request import Request, Run
from scheduler_svc.core.resources.base import Resource
from scheduler_svc.core.resources.container import Resources
from scheduler_svc.core.resources.quarantine import Quarantine
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import Usage
from scheduler_svc.simulation.emulation import ScriptedThrottle

VOCAB_SIZE = 50_000
_MASK = (1 << 61) - 1
# Chooses an output token: (hash of the true prefix, index of the output) -> token id.
Sampler = Callable[[int, int], int]


class CheckFailed(AssertionError):
    """The scheduler told the worker something that cannot be right."""


class Stalled(AssertionError):
    """Work waits, nothing is in flight, and no rank gets a step."""


def extend_prefix(prefix: int, token: int) -> int:
    """Hash of a prefix one token longer."""
    return (prefix * 1_000_003 + token + 7) & _MASK


def hashed_token(prefix: int, index: int) -> int:
    """The scripted model: depends on the true prefix and on nothing else."""
    mixed = (prefix ^ (prefix >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed ^ (mixed >> 32)) % VOCAB_SIZE


def expected_tokens(
    prompt: Sequence[int], count: int, *, stops: Iterable[int] = (), sampler: Sampler = hashed_token
) -> list[int]:
    """What a request with this prompt yields when nothing else ever happens: `count` tokens, or fewer when one of
    `stops` comes before."""
    prefix = 0
    for token in prompt:
        prefix = extend_prefix(prefix, token)
    tokens: list[int] = []
    for index in range(count):
        token = sampler(prefix, index)
        tokens.append(token)
        prefix = extend_prefix(prefix, token)
        if token in stops:
            break
    return tokens


@dataclass(slots=True)
class Row:
    """One row of the worker's batch."""

    request_id: str
    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[int]
    # Hash of the prefix that ends with each token.
    prefixes: list[int]


@dataclass(frozen=True, slots=True)
class Slot:
    """KV of one token."""

    position: int
    token: int
    prefix: int
    step_seq: int


@dataclass(frozen=True, slots=True)
class Answer:
    step_seq: int
    sampled: list[int]
    counts: list[int] | None


class StubWorker:
    """Executes steps at once and in order; the world decides when the answers arrive."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, sampler: Sampler) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self.sampler = sampler
        self.rows: dict[int, Row] = {}
        self.slots: dict[int, Slot] = {}
        self.newest_step = self.newest_fence = 0
        # Blocks that steps not yet acknowledged read or write, and rows that they drop.
        self._used: dict[int, set[int]] = {}
        self._dropping: dict[int, int] = {}

    # --- a step ---

    def execute(self, output: SchedulerOutput) -> Answer:
        self._check_numbers(output)
        self._drop(output)
        fresh = [block for new in output.new_requests for block in self._add(new)]
        fresh += self._append(output)
        self._check_fresh(output, fresh)
        drafts = self._drafts(output)
        work = [(self.rows[row], n, d) for row, n, d in zip(output.rows, output.num_tokens, drafts, strict=True)]
        for row, n, row_drafts in work:
            self._write(row, n, row_drafts, output.step_seq)
        for row, n, row_drafts in work:
            self._check_reads(row, row.computed + n, row_drafts)
        self._used[output.step_seq] = {block for row, _, _ in work for block in row.blocks}
        return self._answer(output.step_seq, [self._sample(row, n, d) for row, n, d in work])

    def acknowledged(self, step_seq: int) -> None:
        """The scheduler has read the answer."""
        del self._used[step_seq]
        self._dropping = {row: seq for row, seq in self._dropping.items() if seq > step_seq}

    def _check_numbers(self, output: SchedulerOutput) -> None:
        self._require(output.step_seq == self.newest_step + 1, f"step {output.step_seq} after {self.newest_step}")
        fence = self.newest_fence + (1 if output.rows else 0)
        self._require(output.fence_seq == fence, f"fence {output.fence_seq}, expected {fence}")
        self.newest_step, self.newest_fence = output.step_seq, fence
        self._require(len(set(output.rows)) == len(output.rows), "a row twice in one step")
        self._require(all(n > 0 for n in output.num_tokens), "a row without tokens")
        self._require(len(output.rows) <= self.config.max_num_seqs, "more rows than max_num_seqs")
        total = sum(output.num_tokens)
        self._require(total == output.total_num_tokens <= self.config.step_budget, f"{total} tokens in a step")

    def _drop(self, output: SchedulerOutput) -> None:
        gone = {*output.preempted_request_ids, *output.finished_request_ids}
        for index in [i for i, row in self.rows.items() if row.request_id in gone]:
            del self.rows[index]
            self._dropping[index] = output.step_seq

    def _add(self, new: NewRow) -> list[int]:
        """Enter a request in full. Returns the blocks that it is the first to write."""
        self._require(0 <= new.row < self.config.num_rows, f"row {new.row} does not exist")
        self._require(new.row not in self.rows, f"row {new.row} is in use")
        self._require(new.row not in self._dropping, f"row {new.row} was dropped by a step not yet acknowledged")
        self._require(all(r.request_id != new.request_id for r in self.rows.values()), f"{new.request_id} is here")
        tokens = list(new.token_ids)
        prefixes: list[int] = []
        for token in tokens:
            prefixes.append(extend_prefix(prefixes[-1] if prefixes else 0, token))
        blocks = list(new.block_table)
        self.rows[new.row] = Row(
            new.request_id, tokens, new.num_prompt_tokens, new.num_computed_tokens, blocks, prefixes
        )
        self._require(new.num_computed_tokens < len(tokens), f"{new.request_id} has nothing to compute")
        return blocks[new.num_computed_tokens // self.config.block_size :]

    def _append(self, output: SchedulerOutput) -> list[int]:
        for row, block in zip(output.appended_rows, output.appended_blocks, strict=True):
            self._require(row in self.rows, f"blocks for unknown row {row}")
            self.rows[row].blocks.append(block)
        return list(output.appended_blocks)

    def _check_fresh(self, output: SchedulerOutput, fresh: list[int]) -> None:
        for block in fresh:
            self._require(1 <= block < self.num_blocks, f"block {block} does not exist")
            if self.config.rules.fence is Fence.ALWAYS:
                busy = [seq for seq, used in self._used.items() if block in used]
                self._require(not busy, f"block {block} is handed out while steps {busy} that use it are in flight")

    def _drafts(self, output: SchedulerOutput) -> list[list[int]]:
        if output.num_drafts is None:
            return [[] for _ in output.rows]
        flat = iter(output.draft_token_ids)
        return [[next(flat) for _ in range(count)] for count in output.num_drafts]

    def _write(self, row: Row, n: int, drafts: list[int], step_seq: int) -> None:
        end = row.computed + n
        known = end - len(drafts)
        self._require(known <= len(row.tokens), f"{row.request_id}: {n} tokens, {len(row.tokens) - row.computed} known")
        self._require(not drafts or known == len(row.tokens), f"{row.request_id}: drafts in the middle of its tokens")
        self._require(end <= len(row.blocks) * self.config.block_size, f"{row.request_id}: no slot for token {end - 1}")
        prefix = row.prefixes[row.computed - 1] if row.computed else 0
        for position, token in enumerate([*row.tokens[row.computed : known], *drafts], row.computed):
            prefix = extend_prefix(prefix, token)
            self.slots[self._slot(row, position)] = Slot(position, token, prefix, step_seq)

    def _check_reads(self, row: Row, end: int, drafts: list[int]) -> None:
        """Every slot that attention of this row reads holds this row's own prefix."""
        for position in range(end - len(drafts)):
            slot = self.slots.get(self._slot(row, position))
            if slot is None or slot.position != position or slot.prefix != row.prefixes[position]:
                raise CheckFailed(
                    f"{row.request_id}: slot of position {position} (block {row.blocks[position // self._size]}) "
                    f"holds {slot}, not token {row.tokens[position]}"
                )

    def _sample(self, row: Row, n: int, drafts: list[int]) -> list[int]:
        """Tokens of one row, with drafts verified; none for a partial prefill."""
        end = row.computed + n
        if end < len(row.tokens):
            row.computed = end
            return []
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = self.sampler(row.prefixes[-1], len(row.tokens) - row.num_prompt)
            sampled.append(token)
            row.tokens.append(token)
            row.prefixes.append(extend_prefix(row.prefixes[-1], token))
            if draft != token:
                break
        row.computed = len(row.tokens) - 1
        return sampled

    def _answer(self, step_seq: int, rows: list[list[int]]) -> Answer:
        flat = [token for row in rows for token in row]
        plain = all(len(row) <= 1 for row in rows)
        return Answer(step_seq, flat, None if plain else [len(row) for row in rows])

    # --- slots ---

    @property
    def _size(self) -> int:
        return self.config.block_size

    def _slot(self, row: Row, position: int) -> int:
        return row.blocks[position // self._size] * self._size + position % self._size

    @staticmethod
    def _require(holds: bool, problem: str) -> None:
        if not holds:
            raise CheckFailed(problem)


@dataclass(slots=True, eq=False)
class Client:
    """What one client asked for and saw."""

    request_id: str
    handle: int
    prompt: list[int]
    max_tokens: int
    stops: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    accepted: RequestAccepted | None = None
    refused: RequestRefused | None = None
    ended: RequestEnded | None = None
    # What the core said of its cost, last.
    usage: Usage | None = None

    @property
    def reason(self) -> EndReason | None:
        return None if self.ended is None else self.ended.reason


class World:
    """A scheduler with its ranks and clients. `ranks` maps names to numbers of blocks, the null block included."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        num_blocks: int = 64,
        ranks: dict[str, int] | None = None,
        sampler: Sampler = hashed_token,
        resources: Sequence[Resource] = (),
    ) -> None:
        self.config = SchedulerConfig(block_size=4) if config is None else config
        self.scheduler = Scheduler(self.config)
        if resources:
            self.scheduler.state.resources = Resources([*self.scheduler.state.resources, *resources])
        self.sampler = sampler
        self.workers: dict[str, StubWorker] = {}
        self.epochs: dict[str, int] = {}
        # Answers executed and not delivered, oldest first.
        self.answers: dict[str, deque[Answer]] = {}
        self.clients: list[Client] = []
        self.outputs: list[SchedulerOutput] = []
        self.preemptions: list[RequestPreempted] = []
        self.resets: list[PrefixCacheReset] = []
        for name, blocks in ({"r0": num_blocks} if ranks is None else ranks).items():
            self.join(name, blocks)

    # --- events ---

    def handle(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event)
        self._see(effects)
        self.check()
        return effects

    def join(
        self,
        name: str,
        num_blocks: int,
        *,
        max_model_len: int | None = None,
        max_step_bytes: int | None = None,
        features: tuple[str, ...] = (),
    ) -> None:
        epoch = self.epochs[name] = self.epochs.get(name, 0) + 1
        self.workers[name] = StubWorker(self.config, num_blocks, self.sampler)
        self.answers[name] = deque()
        longest = self.config.max_model_len if max_model_len is None else max_model_len
        self.handle(RankJoined(name, epoch, num_blocks, longest, VOCAB_SIZE, max_step_bytes, features))

    def lose(self, name: str, *, graceful: bool = False) -> None:
        """The worker dies with whatever it had not answered."""
        del self.workers[name], self.answers[name]
        self.handle(RankLost(name, "died", graceful))

    def submit(self, request_id: str, prompt: Sequence[int] | int, max_tokens: int = 4, **fields: Any) -> Client:
        """A new request; a number as prompt stands for that many tokens that no other request has."""
        handle = len(self.clients) + 1
        tokens = [handle * 100 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        stops = (*fields.get("stop_token_ids", ()), *fields.get("eos_token_ids", ()))
        client = Client(request_id, handle, tokens, max_tokens, stops, list(fields.get("output_tokens") or ()))
        self.clients.append(client)
        self.handle(RequestArrived(request_id, handle, array("i", tokens), max_tokens, **fields))
        return client

    def abort(self, request_id: str, cause: AbortCause = AbortCause.ABORTED) -> None:
        self.handle(RequestAborted(request_id, cause))

    def tick(self, now: float) -> None:
        self.handle(Tick(now))

    def reset(self, *, preempt_running: bool = False) -> bool:
        self.handle(PrefixCacheResetRequested(preempt_running))
        return self.resets[-1].success

    def draft(self, drafts: dict[str, list[int]], rank: str = "r0") -> None:
        self.handle(DraftsProposed(rank, drafts))

    # --- steps ---

    def schedule(self, rank: str = "r0", *, throttle: bool | None = None) -> SchedulerOutput | None:
        """The next step, executed by the worker, its answer held back. throttle: instead of the rank's own."""
        if throttle is not None:
            ScriptedThrottle.of(self.rank(rank)).is_on = throttle
        output = self.scheduler.schedule(rank)
        self._see(self.scheduler.take_effects())
        self.check()
        if output is not None:
            self.outputs.append(output)
            self.answers[rank].append(self.workers[rank].execute(output))
        return output

    def ack(self, rank: str = "r0") -> list[Effect]:
        """Deliver the oldest answer."""
        answer = self.answers[rank].popleft()
        effects = self.handle(StepAcked(rank, self.epochs[rank], answer.step_seq, list(answer.sampled), answer.counts))
        self.workers[rank].acknowledged(answer.step_seq)
        return effects

    def step(self, rank: str = "r0", *, throttle: bool | None = None) -> SchedulerOutput | None:
        """Schedule, then deliver the oldest answer."""
        output = self.schedule(rank, throttle=throttle)
        if self.answers[rank]:
            self.ack(rank)
        return output

    def turn(self) -> bool:
        """Fill every window, then deliver one answer of each rank. False: there was nothing to do."""
        busy = False
        for name in list(self.workers):
            while self.schedule(name) is not None:
                busy = True
        for name in list(self.workers):
            if self.answers[name]:
                busy = True
                self.ack(name)
        return busy

    def run(self, max_turns: int = 2000) -> int:
        """Until nobody is live and nothing is in flight. Returns the number of turns; raises Stalled."""
        for turns in range(max_turns):
            if not self.turn():
                if live := list(self.scheduler.state.requests):
                    raise Stalled("; ".join(str(self.scheduler.explain(request_id)) for request_id in live))
                self.check_idle()
                return turns
        raise Stalled(f"not done after {max_turns} turns: {list(self.scheduler.state.requests)}")

    # --- questions ---

    def request(self, request_id: str) -> Request:
        return self.scheduler.state.requests[request_id]

    @property
    def quarantine(self) -> Quarantine:
        return self.scheduler.state.quarantine

    def reserved_for(self, rank: str = "r0") -> str | None:
        """The id of the request for which the rank is reserved."""
        reservation = self.rank(rank).reservation
        return None if reservation is None else reservation.request.request_id

    def run_of(self, request_id: str) -> Run:
        """The latest run of a live request."""
        run = self.request(request_id).run
        assert run is not None
        return run

    def rank(self, name: str = "r0") -> RankState:
        return self.scheduler.state.ranks[name]

    def running(self, name: str = "r0") -> list[str]:
        return [run.request.request_id for run in self.rank(name).running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.state.queue.waiting]

    @property
    def skipped(self) -> list[str]:
        return [request.request_id for request in self.scheduler.state.queue.skipped]

    def free(self, name: str = "r0") -> int:
        return self.rank(name).kv.pool.num_free

    def rows_of(self, output: SchedulerOutput | None) -> list[tuple[str, int]]:
        """(request id, number of tokens) of the step just executed, in its order."""
        if output is None:
            return []
        rows = self.workers[output.rank].rows
        return [(rows[row].request_id, n) for row, n in zip(output.rows, output.num_tokens, strict=True)]

    # --- checks ---

    def check(self) -> None:
        invariants.check(self.scheduler.state)
        for request_id in self.scheduler.state.requests:
            explanation = self.scheduler.explain(request_id)
            assert explanation is not None and explanation.detail

    def check_idle(self) -> None:
        """Nothing is left: blocks, rows, queues, maps (I10)."""
        state = self.scheduler.state
        assert not state.requests and len(state.queue) == 0 and state.queue.num_prompt_tokens == 0
        assert not state.unholdable_since
        for name, rank in state.ranks.items():
            assert not rank.running and not rank.has_news and not len(rank.kv.parked)
            assert rank.kv.pool.num_free == rank.kv.num_usable and rank.kv.pool.num_parked == 0
            assert sorted(rank.free_rows) == list(range(self.config.num_rows)) and rank.num_decodes == 0
            assert not self.workers[name].rows
        totals = state.totals
        assert totals.num_accepted == totals.num_finished + totals.num_aborted + totals.num_failed
        assert all(client.refused or client.ended for client in self.clients)

    def check_texts(self) -> None:
        """What every client saw is what it would have seen alone, or the beginning of it."""
        for client in self.clients:
            count = len(client.tokens)
            whole = expected_tokens(client.prompt, count, stops=client.stops, sampler=self.sampler)
            assert client.tokens == whole, f"{client.request_id}: {client.tokens} instead of {whole}"

    def _see(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokensProduced():
                    self._see_tokens(effect)
                case RequestPreempted():
                    self.preemptions.append(effect)
                case UsageChanged():
                    self._client(effect.handle).usage = effect.usage
                case PrefixCacheReset():
                    self.resets.append(effect)
                case RequestAccepted():
                    self._client(effect.handle).accepted = effect
                case RequestRefused():
                    self._client(effect.handle).refused = effect
                case RequestEnded():
                    self._see_end(effect)
                case _:
                    assert_never(effect)

    def _see_tokens(self, effect: TokensProduced) -> None:
        at = 0
        for index, handle in enumerate(effect.handles):
            count = 1 if effect.counts is None else effect.counts[index]
            client = self._client(handle)
            assert client.accepted and client.ended is None, f"tokens for {client.request_id}, which ended"
            assert count > 0
            client.tokens += effect.tokens[at : at + count]
            at += count
        assert at == len(effect.tokens)

    def _see_end(self, effect: RequestEnded) -> None:
        client = self._client(effect.handle)
        assert client.accepted and client.ended is None, f"{client.request_id} ended twice"
        client.ended = effect
        usage = effect.usage
        assert usage.num_prompt_tokens == len(client.prompt)
        assert usage.num_completion_tokens <= len(client.tokens)
        assert usage.num_cached_tokens < usage.num_prompt_tokens
        assert usage.queued_s >= 0 and usage.preempted_s >= 0
        if effect.reason is EndReason.LENGTH:
            # The reference clips to the model's length without saying so.
            promised = client.accepted.max_tokens
            is_full = len(client.prompt) + len(client.tokens) == self.scheduler.state.max_model_len
            assert (
                is_full
                or len(client.tokens) == promised
                or (not self.config.rules.refuse_infeasible and len(client.tokens) < promised)
            )

    def _client(self, handle: int) -> Client:
        return self.clients[handle - 1]
