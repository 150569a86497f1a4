"""The scheduler core with simulated workers behind it and an eye on everything it says: the one harness of the random
simulation, the state machine and the small worlds.

One method an event. Each hands the event to the core, follows the effects (every request answered once, its tokens the
true ones, its end the right one, its usage what was seen to happen), passes steps to the workers, which check them, and
at every `stride`-th event looks through the core's state and judges the step just planned. Violations are raised as
AssertionErrors (InvariantViolation, WorkerViolation, CoreViolation)."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    DraftsProposed,
    DrainStarted,
    Effect,
    EndReason,
    Event,
    GrammarReady,
    PauseRequested,
    PauseState,
    PrefixCacheReset,
    PrefixCacheResetRequested,
    RankDraining,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    RowFailed,
    StepAcked,
    TextEnded,
    Tick,
    TokensProduced,
    UsageChanged,
    WorkerProtocolError,
)
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.request import Request, Run, Status
from scheduler_svc.core.resources.grammar import Grammar
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stats import Usage
from scheduler_svc.simulation import step_rules
from scheduler_svc.simulation.emulation import placeholders
from scheduler_svc.simulation.simulated_worker import VOCAB_SIZE, SimulatedWorker, StepResult, TokenSource
from scheduler_svc.simulation.snapshot import snapshot
from scheduler_svc.simulation.step_rules import Before, PlannedStep

# Far above what the largest world needs.
_MAX_CLOSING_ROUNDS = 20_000
_LONGER_THAN_ANY_DEADLINE_S = 1e6


class CoreViolation(AssertionError):
    """The core said or did something it must not."""


@dataclass(slots=True)
class Client:
    """What the outside knows of one request that was accepted and has not ended."""

    event: RequestArrived
    max_tokens: int
    source: TokenSource
    arrived_at: float
    outputs: list[int] = field(default_factory=list)
    # Its last output token ends it, for this reason.
    due: EndReason | None = None
    # The text ended at this many tokens.
    text_ended_at: int | None = None
    # Where it was last sent to.
    link: RankLink | None = None
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    # Next position to compute, as far as dispatched; the highest one of earlier runs; and up to where computing is
    # recomputing: known tokens only, since lost decodes are simply decoded again.
    position: int = 0
    high_water: int = 0
    recomputed_below: int = 0
    num_recomputed_tokens: int = 0
    # What the core said last of its cost, before its end.
    usage: Usage | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.event.prompt, *self.outputs]


@dataclass(slots=True, eq=False)
class RankLink:
    """One epoch of one rank, seen from outside."""

    name: str
    epoch: int
    worker: SimulatedWorker
    # To be told with the next step, in this order.
    preempted_ids: list[str] = field(default_factory=list)
    # Whose ids those are: an id may have been used again since.
    preempted_clients: list[Client] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    rows: dict[int, Client] = field(default_factory=dict)
    # By row: its blocks. By block: slots of it, from its first, that steps sent so far fill.
    tables: dict[int, list[int]] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    # Ids preempted by a reset or a drain since the last step: these may be resumed by the very step that says so.
    taken_off_ids: set[str] = field(default_factory=set)
    last_result: StepResult | None = None
    acked_step: int = 0
    # Some request there computes what is not finite; and one that did has ended before that was noticed.
    has_poison: bool = False
    # Its failure was noticed; the last step that may show it once more.
    poisoned_until: int | None = None
    was_not_noticed: bool = False


class CheckedCore:
    """See the module. `stride`: 1 checks everything after every event; n at every n-th, the rest always."""

    def __init__(self, config: SchedulerConfig, *, stride: int = 1) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.stride = stride
        self.now = 0.0
        self.links: dict[str, RankLink] = {}
        self.clients: dict[str, Client] = {}
        # How often what was reached; see core_simulation for those that must be.
        self.reached: Counter[str] = Counter()
        self.late_results: list[tuple[str, StepResult]] = []
        # Takes in every effect and every step, when somebody wants to compare runs.
        self.transcript: Callable[[str], None] | None = None
        self._by_handle: dict[int, Client] = {}
        self._num_events = 0
        self._num_epochs: Counter[str] = Counter()
        # Those that ended well a short while ago: their ends may be lost with the scheduler.
        self._ended_well: deque[Client] = deque(maxlen=4)
        self._awaiting_answer: int | None = None
        self._half_progress = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._handle(Tick(self.now))
        overdue = [c for c in self.clients.values() if c.event.deadline is not None and c.event.deadline <= self.now]
        _demand(not overdue, f"deadlines of {[c.event.request_id for c in overdue]} have passed")

    def arrive(self, event: RequestArrived) -> bool:
        """Whether it was accepted."""
        self._awaiting_answer = event.handle
        was_live = event.request_id in self.clients
        effects = self._handle(event)
        _demand(self._awaiting_answer is None, f"{event.request_id} got no answer")
        if isinstance(effects[-1], RequestRefused):
            self.reached[f"refused {effects[-1].reason.value}"] += 1
            is_duplicate = effects[-1].reason.value == "DUPLICATE_REQUEST_ID"
            _demand(is_duplicate == was_live or self.scheduler.state.is_draining, f"{effects[-1]}, live: {was_live}")
            return False
        accepted = effects[-1]
        assert isinstance(accepted, RequestAccepted)
        _demand(not was_live, f"{event.request_id} was accepted twice")
        client = Client(event, accepted.max_tokens, TokenSource(event.sampling, list(event.prompt)), self.now)
        self._check_limits(client)
        self.clients[event.request_id] = self._by_handle[event.handle] = client
        self._look()
        return True

    def restart(self, num_lost: Callable[[], int]) -> None:
        """The scheduler is lost with all its ranks, and another one takes over without any. Every request is submitted
        again with the outputs that came, all but the last `num_lost()` of them; so is one whose end was lost."""
        self.reached["scheduler lost"] += 1
        clients = [*self.clients.values()]
        ended = [client for client in self._ended_well if client.event.request_id not in self.clients]
        self._ended_well.clear()
        self.scheduler = Scheduler(self.config)
        self.links, self.clients, self._by_handle, self.late_results = {}, {}, {}, []
        self.tick(0)
        # Front ends come back in any order; the one whose end was lost first.
        for client in [*ended[:1], *reversed(clients)]:
            self._submit_again(client, 0 if client.due else num_lost())
        if self.config.policy.value == "fcfs":
            arrivals = [request.arrival for request in self.scheduler.state.queue.waiting]
            _demand(arrivals == sorted(arrivals), f"the queue is not in the order of arrival: {arrivals}")

    def _submit_again(self, old: Client, num_lost: int) -> None:
        outputs = old.outputs[: max(0, len(old.outputs) - num_lost)]
        event = replace(
            old.event,
            max_tokens=old.max_tokens,
            min_tokens=min(old.event.min_tokens, old.max_tokens),
            arrival=old.arrived_at,
            output_tokens=array("i", outputs),
        )
        source = TokenSource(event.sampling, [*event.prompt, *outputs])
        client = Client(event, old.max_tokens, source, old.arrived_at, outputs=outputs, due=old.due)
        if outputs:
            client.num_cached_tokens = 0
            client.high_water = len(event.prompt) + len(outputs) - 1
        self.clients[event.request_id] = self._by_handle[event.handle] = client
        self._awaiting_answer = event.handle
        effects = self._handle(event)
        _demand(self._awaiting_answer is None, f"{event.request_id} got no answer")
        _demand(isinstance(effects[0], RequestAccepted), f"{effects[0]}, although it was accepted before")
        self.reached["submitted again"] += 1
        self.reached["submitted again with outputs"] += bool(outputs)
        if client.due is not None:
            _demand(event.request_id not in self.clients, f"{event.request_id} goes on behind its end")
            self.reached["end of a request lost with the scheduler"] += 1

    def abort(self, request_id: str, cause: AbortCause = AbortCause.ABORTED) -> None:
        client = self.clients.get(request_id)
        if client is not None:
            self._count_place(request_id, "aborted")
        self._handle(RequestAborted(request_id, cause))
        _demand(request_id not in self.clients, f"{request_id} survives its abort")

    def end_text(self, request_id: str, num_tokens: int) -> None:
        """A stop string ended within the first num_tokens outputs."""
        client = self.clients.get(request_id)
        if client is not None:
            client.text_ended_at = num_tokens
            self._count_place(request_id, "text ended")
        self._handle(TextEnded(request_id, num_tokens))
        _demand(request_id not in self.clients, f"{request_id} survives the end of its text")

    def compile_grammar(self, request_id: str) -> None:
        self._handle(GrammarReady(request_id))

    def propose_drafts(self, name: str, drafts: dict[str, list[int]]) -> None:
        self._handle(DraftsProposed(name, drafts))

    # --- ranks --------------------------------------------------------------------------------------------------------

    def join(self, name: str, num_blocks: int, max_model_len: int) -> None:
        """A rank opens its next epoch."""
        config = self.config
        self._num_epochs[name] += 1
        epoch = self._num_epochs[name]
        worker = SimulatedWorker(
            num_blocks, config.block_size, config.num_rows, spoil_early=config.rules.fence is Fence.ALWAYS
        )
        self.links[name] = RankLink(name, epoch, worker)
        self.reached["rank joined" if epoch == 1 else "rank joined again"] += 1
        self._handle(RankJoined(name, epoch, num_blocks, max_model_len, VOCAB_SIZE))

    def lose(self, name: str, *, graceful: bool = False, num_executed: int = 0) -> None:
        """The rank's epoch ends. `num_executed` of its steps were computed; their results come late, if at all."""
        link = self.links.pop(name)
        self.reached["rank lost"] += 1
        self.reached["rank lost with steps in flight"] += link.worker.num_waiting > 0
        for _ in range(min(num_executed, link.worker.num_waiting)):
            self.late_results.append((name, link.worker.execute()))
        state = self.scheduler.state
        running = [run.request.request_id for run in state.ranks[name].running]
        before = set(self.clients)
        self._handle(RankLost(name, "simulated", graceful))
        self.reached["requests orphaned"] += len(running)
        queued = [r for r in state.queue if r.request_id in running]
        _demand({r.request_id for r in queued} == set(running) & set(self.clients), f"{running} were not all put back")
        if self.config.policy.value == "fcfs":
            head = [r.request_id for r in state.queue.waiting][: len(queued)]
            _demand(head == [i for i in running if i in self.clients], f"{running} are not at the head: {head}")
        self.reached["request failed in quarantine"] += len(before - set(self.clients))

    def drain_rank(self, name: str) -> None:
        self.reached["rank draining"] += 1
        self.links[name].taken_off_ids |= {run.request.request_id for run in self.scheduler.state.ranks[name].running}
        self._handle(RankDraining(name))

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(self, name: str) -> SchedulerOutput | None:
        """Plan and dispatch one step of a rank."""
        rank = self.scheduler.state.ranks[name]
        if rank.window.is_full:
            _demand(self.scheduler.schedule(name) is None, f"{name} got a step beyond its window")
            return None
        deep = self._is_deep()
        before = Before.of(self.scheduler, rank) if deep else None
        running = [run.request.request_id for run in rank.running]
        output = self.scheduler.schedule(name)
        effects = self.scheduler.take_effects()
        if self.transcript is not None:
            self.transcript(f"{output!r} {effects!r}")
        self._follow(effects)
        link = self.links[name]
        if output is not None:
            self._send(link, output)
        self._count_step(running, rank.running, output, effects)
        if output is not None and self.drafts_are_placeholders:
            self.scheduler.handle(placeholders(name, rank.window.records[-1], self.config.num_speculative_tokens))
        if before is not None:
            problems = step_rules.violations(PlannedStep(self.scheduler, rank, before, output, tuple(effects)))
            _demand(not problems, "; ".join(problems))
            self._check_cached(link)
            invariants.check(self.scheduler.state)
        return output

    def schedule_all(self) -> int:
        """Ask every rank for steps until none has any more. Returns the tokens dispatched."""
        idle = self._nothing_in_flight()
        could_run = idle and self.work_that_can_run()
        num_preemptions = self.scheduler.totals.num_preemptions
        total = 0
        for name in list(self.links):
            while (output := self.schedule(name)) is not None:
                total += output.total_num_tokens
        if could_run and not total:
            preempted = self.scheduler.totals.num_preemptions > num_preemptions
            _demand(preempted and not self._half_progress, f"nothing runs although it could: {self.describe()}")
            self._half_progress = True
        elif total:
            self._half_progress = False
        if self._is_deep():
            problems = step_rules.queued_without_reason(self.scheduler)
            _demand(not problems, "; ".join(problems))
        return total

    def acknowledge(self, name: str) -> None:
        """Execute the oldest step of a rank and hand in its result."""
        link = self.links[name]
        result = link.worker.execute()
        self._check_order(link)
        if result.failed_rows:
            # Whatever shares a block with such a row is preempted, and may be resumed by the very step that says so.
            link.taken_off_ids |= {run.request.request_id for run in self.scheduler.state.ranks[name].running}
        self._handle(_acked(name, result), keeps_half=True)
        if result.failed_rows:
            self._check_that_nothing_poisoned_is_used(link)
            # Rows of the same request may be in flight, which fail, too.
            link.poisoned_until = result.step_seq + len(self.scheduler.state.ranks[name].window)
        if link.poisoned_until is not None and result.step_seq >= link.poisoned_until:
            link.has_poison, link.poisoned_until = False, None
        link.last_result = result
        link.acked_step = result.step_seq

    def poison(self, request_id: str) -> bool:
        """The next row of a running request computes what is not finite. False where an earlier one is not noticed yet,
        or never will be, since its request ended for another reason."""
        client = self.clients[request_id]
        link = client.link
        if link is None or self.links.get(link.name) is not link or link.has_poison:
            return False
        link.worker.poison(request_id)
        link.has_poison = True
        return True

    def _check_that_nothing_poisoned_is_used(self, link: RankLink) -> None:
        """After a row failed alone: no cached block, and no block of a running request, holds what is not finite. Where
        blocks are reused without a fence, one that does may belong to a row that will overwrite it: not looked at."""
        self.reached["row failed alone"] += 1
        if link.was_not_noticed or self.config.rules.fence is not Fence.ALWAYS:
            return
        rank, size = self.scheduler.state.ranks[link.name], self.config.block_size
        poisoned = {slot // size for slot in link.worker.poisoned}
        cached = {block for _, blocks in rank.kv.pool.index.entries() for block in blocks}
        _demand(poisoned.isdisjoint(cached), f"poisoned blocks {sorted(poisoned & cached)} of {link.name} are cached")
        for run in rank.running:
            _demand(poisoned.isdisjoint(run.blocks), f"{run.request.request_id} uses poisoned blocks")

    def deliver_late(self) -> None:
        """A result of an epoch that is over: nothing may change."""
        name, result = self.late_results.pop(0)
        before = self._frozen()
        effects = self.scheduler.handle(_acked(name, result))
        _demand(not effects and self._frozen() == before, "a late result of an ended epoch changed something")
        self.reached["late result refused"] += 1

    def deliver_wrong(self, name: str, event: StepAcked, kind: str) -> None:
        """A result that does not fit: WorkerProtocolError, and nothing may change."""
        before = self._frozen()
        try:
            self.scheduler.handle(event)
        except WorkerProtocolError:
            _demand(self._frozen() == before, f"a wrong result ({kind}) changed something")
            self.reached[f"wrong result refused: {kind}"] += 1
        else:
            raise CoreViolation(f"a wrong result of {name} ({kind}) was accepted: {event}")

    def wrong_results(self, name: str) -> list[tuple[str, StepAcked]]:
        """Answers that a faulty worker might give now."""
        link = self.links[name]
        rank = self.scheduler.state.ranks[name]
        wrong: list[tuple[str, StepAcked]] = []
        if link.last_result is not None:
            wrong.append(("repeated", _acked(name, link.last_result)))
        if (record := rank.window.oldest) is not None:
            sampled = [0] * record.num_sampling
            wrong.append(("not oldest", StepAcked(name, link.epoch, record.step_seq + 1, sampled)))
            unknown = StepAcked(
                name, link.epoch, record.step_seq, [], [0] * len(record.expected), (RowFailed(1 << 20, ""),)
            )
            wrong.append(("unknown row failed", unknown))
            if record.runs:
                failed = (RowFailed(record.runs[0].row, ""),)
                uncounted = StepAcked(name, link.epoch, record.step_seq, sampled, None, failed)
                wrong.append(("row failed without a count", uncounted))
            wrong.append(("one token too many", StepAcked(name, link.epoch, record.step_seq, [*sampled, 0])))
            if sampled:
                wrong.append(("row missing", StepAcked(name, link.epoch, record.step_seq, sampled[:-1])))
                out_of_range = [*sampled[:-1], VOCAB_SIZE]
                wrong.append(("token out of range", StepAcked(name, link.epoch, record.step_seq, out_of_range)))
                if self.config.rules.refuse_empty_rows:
                    nothing = StepAcked(name, link.epoch, record.step_seq, [], [0] * len(record.expected))
                    wrong.append(("rows without a token", nothing))
            counts = [most + 1 for most in record.expected]
            if counts:
                tokens = [0] * sum(counts)
                wrong.append(("too many in a row", StepAcked(name, link.epoch, record.step_seq, tokens, counts)))
        return wrong

    # --- operators ----------------------------------------------------------------------------------------------------

    def pause(self, state: PauseState) -> None:
        self.reached[f"pause {state.value}"] += 1
        self._handle(PauseRequested(state))

    def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        for link in self.links.values():
            if preempt_running:
                link.taken_off_ids |= {run.request.request_id for run in self.scheduler.state.ranks[link.name].running}
        effects = self._handle(PrefixCacheResetRequested(preempt_running))
        answers = [e for e in effects if isinstance(e, PrefixCacheReset)]
        _demand(len(answers) == 1, f"a reset got {len(answers)} answers")
        ranks = self.scheduler.state.ranks.values()
        held = any(run.blocks for rank in ranks for run in rank.running)
        if not self.config.rules.reset_over_parked:
            held = held or any(rank.kv.parked for rank in ranks)
        _demand(answers[0].success is not held, f"reset says {answers[0].success}, blocks held: {held}")
        is_sure = preempt_running and self.config.rules.reset_over_parked
        _demand(answers[0].success or not is_sure, "a reset that preempts was refused")
        left = sum(len(r.kv.pool.index) for r in ranks)
        _demand(not (answers[0].success and left), f"{left} block hashes survive a reset")
        self.reached[f"reset {'done' if answers[0].success else 'refused'}"] += 1

    def drain(self) -> None:
        self.reached["drain"] += 1
        self._handle(DrainStarted())

    @property
    def drafts_are_placeholders(self) -> bool:
        """Whether drafts come from outside before the result that they follow is in (vLLM 0.25.1, asynchronous)."""
        rules = self.config.rules
        return self.config.num_speculative_tokens > 0 and not (rules.proposes_drafts or rules.results_first)

    def run_to_the_end(self, pools: dict[str, int], choose: Callable[[Sequence[str]], str]) -> None:
        """Nothing arrives any more, every rank of `pools` is up and nothing is paused: everything ends, and nothing is
        left (23, I10). `choose` says whose acknowledgement comes next."""
        self.pause(PauseState.UNPAUSED)
        for request in list(self.scheduler.state.queue):
            self.compile_grammar(request.request_id)
        for name, num_blocks in pools.items():
            if name in self.links and self.scheduler.state.ranks[name].is_draining:
                self.lose(name, graceful=True)
            if name not in self.links:
                self.join(name, num_blocks, self.config.max_model_len)
        for _ in range(_MAX_CLOSING_ROUNDS):
            self._plan_closing_steps()
            busy = [name for name, link in self.links.items() if link.worker.num_waiting]
            if busy:
                self.acknowledge(choose(busy))
            elif not self.clients:
                break
            else:
                # Nothing can run: only time can help.
                self.tick(self.config.no_worker_grace_s)
        self.tick(_LONGER_THAN_ANY_DEADLINE_S)
        self.check_idle()
        workers = [link.worker for link in self.links.values()]
        self.reached["drafts accepted"] += sum(w.num_drafts_accepted for w in workers)
        self.reached["drafts rejected"] += sum(w.num_drafts_rejected for w in workers)

    def _plan_closing_steps(self) -> None:
        """Fill the windows. Where the scheduler preempts although blocks wait for a fence (the reference, with a
        fence) that may go on for ever: every shortage empties the whole rank, whose prefills then start again together.
        There, one step at a time."""
        if self.config.rules.fence is Fence.ALWAYS and not self.config.rules.waits_for_fence:
            for name, link in self.links.items():
                if not link.worker.num_waiting:
                    self.schedule(name)
        else:
            self.schedule_all()

    # --- questions ----------------------------------------------------------------------------------------------------

    def work_that_can_run(self) -> bool:
        """Whether some request has no excuse for not running when nothing is in flight."""
        state = self.scheduler.state
        if state.pause is PauseState.PAUSED_ALL:
            return False
        if any(rank.running for rank in state.ranks.values()):
            return True
        if state.pause is not PauseState.UNPAUSED:
            return False
        return any(self._has_a_rank(r) for r in state.queue if not self._awaits_grammar(r))

    def _awaits_grammar(self, request: Request) -> bool:
        grammar = self.scheduler.state.resources.find(Grammar)
        return grammar is not None and grammar.is_pending(request)

    def _has_a_rank(self, request: Request) -> bool:
        state = self.scheduler.state
        able = [rank for rank in state.ranks.values() if state.can_hold(rank, request)]
        # A rank that drains finishes what it has begun and nobody else can hold.
        return any(not rank.is_draining for rank in able) or any(
            state.draining.takes_back(rank, request, lambda _: False) for rank in able
        )

    def check_idle(self) -> None:
        """With no live request and all steps acknowledged: nothing is left of anybody (I10)."""
        state = self.scheduler.state
        _demand(not self.clients and not state.requests and not len(state.queue), "requests are left")
        _demand(not state.unholdable_since and not state.deadlines, "times of ended requests are left")
        _demand(state.queue.num_prompt_tokens == 0, "the queue counts tokens of nobody")
        for name, rank in state.ranks.items():
            _demand(len(rank.window) == 0 and not rank.running, f"{name} still runs")
            _demand(rank.kv.pool.num_free == rank.kv.num_usable and not rank.kv.parked, f"{name} lost blocks")
            _demand(len(rank.free_rows) == self.config.num_rows and not rank.released_rows, f"{name} lost rows")
            _demand(not rank.has_news and rank.reservation is None and rank.num_decodes == 0, f"{name} is not idle")
            held = self.links[name].worker.held_ids
            _demand(not held, f"the worker of {name} holds {held}")
        totals = state.totals
        ended = totals.num_finished + totals.num_failed + totals.num_aborted
        _demand(ended == totals.num_accepted, f"{totals.num_accepted} accepted, {ended} ended")
        invariants.check(state)
        self.reached["idle, nothing left"] += 1

    def describe(self) -> str:
        """The state in one line a rank and one for the queue."""
        state = self.scheduler.state
        lines = [f"queue {list(state.queue)}, pause {state.pause.value}"]
        for rank in state.ranks.values():
            lines.append(
                f"{rank.name}: running {rank.running}, {rank.kv.pool.num_free} free + {rank.kv.pool.num_parked} "
                f"parked of {rank.kv.num_usable}, {len(rank.window)} in flight, draining {rank.is_draining}, "
                f"reserved for {rank.reservation}"
            )
        return "; ".join(lines)

    # --- following the core -------------------------------------------------------------------------------------------

    def _handle(self, event: Event, *, keeps_half: bool = False) -> list[Effect]:
        if not keeps_half:
            self._half_progress = False
        effects = self.scheduler.handle(event)
        if self.transcript is not None:
            self.transcript(repr(effects))
        self._follow(effects)
        if not isinstance(event, RequestArrived):
            self._look()
        return effects

    def _is_deep(self) -> bool:
        self._num_events += 1
        return self._num_events % self.stride == 0

    def _look(self) -> None:
        live = self.scheduler.state.requests
        _demand(live.keys() == self.clients.keys(), f"live are {list(live)}, known outside {list(self.clients)}")
        if self._is_deep():
            invariants.check(self.scheduler.state)

    def _frozen(self) -> object:
        return snapshot(self.scheduler.state), repr(self.scheduler.totals)

    def _nothing_in_flight(self) -> bool:
        return all(len(rank.window) == 0 for rank in self.scheduler.state.ranks.values())

    def _follow(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case TokensProduced():
                    self._produced(effect)
                case RequestEnded():
                    self._ended(effect)
                case RequestPreempted():
                    self._preempted(effect)
                case UsageChanged():
                    self._by_handle[effect.handle].usage = effect.usage
                case RequestAccepted() | RequestRefused():
                    _demand(effect.handle == self._awaiting_answer, f"no request asked for {effect}")
                    self._awaiting_answer = None
                case PrefixCacheReset():
                    # Judged where the reset is asked for.
                    pass
                case _:
                    assert_never(effect)
        overdue = [c.event.request_id for c in self.clients.values() if c.due] if self.stride == 1 else ()
        _demand(not overdue, f"{overdue} did not end at their last token")

    def _check_limits(self, client: Client) -> None:
        """Accepted max_tokens are what was asked for, or what fits (D11)."""
        event, longest = client.event, self.scheduler.state.max_model_len
        if not self.config.rules.refuse_infeasible:
            return
        room = min(longest, self.scheduler.state.largest_pool * self.config.block_size + 1) - len(event.prompt)
        expected = min(event.max_tokens or room, longest - len(event.prompt))
        _demand(1 <= client.max_tokens == expected <= room, f"max_tokens {client.max_tokens}, expected {expected}")

    def _produced(self, effect: TokensProduced) -> None:
        counts = [1] * len(effect.handles) if effect.counts is None else effect.counts
        _demand(sum(counts) == len(effect.tokens) and min(counts, default=1) > 0, f"columns of {effect} differ")
        at = 0
        for handle, count in zip(effect.handles, counts, strict=True):
            client = self._by_handle.get(handle)
            if client is None:
                raise CoreViolation(f"tokens for {handle}, which is not live")
            for token in effect.tokens[at : at + count]:
                self._append(client, token)
            at += count

    def _append(self, client: Client, token: int) -> None:
        event = client.event
        expected = client.source.sample()
        _demand(token == expected, f"{event.request_id} got {token} as output {len(client.outputs)}, not {expected}")
        _demand(client.due is None, f"{event.request_id} goes on behind its end")
        client.outputs.append(token)
        num_outputs = len(client.outputs)
        if num_outputs < min(event.min_tokens, client.max_tokens):
            return
        if token in event.eos_token_ids or token in event.stop_token_ids:
            client.due = EndReason.STOP
        elif num_outputs >= client.max_tokens or len(event.prompt) + num_outputs >= self.scheduler.state.max_model_len:
            client.due = EndReason.LENGTH
        live = self.scheduler.state.requests.get(event.request_id)
        if live is not None and live.handle == event.handle and live.status is not Status.RUNNING:
            self.reached["token of an earlier run kept"] += 1

    def _preempted(self, effect: RequestPreempted) -> None:
        client = self.clients[effect.victim]
        _demand(effect.num_preemptions_before == client.num_preemptions, f"{effect} after {client.num_preemptions}")
        client.num_preemptions += 1
        client.high_water = max(client.high_water, client.position)
        client.position = 0
        self.reached[f"preempted: {effect.cause}"] += 1
        self.reached["preempted itself"] += effect.beneficiary == effect.victim
        if effect.cause != "rank_lost":
            self.links[effect.rank].preempted_ids.append(effect.victim)
            self.links[effect.rank].preempted_clients.append(client)

    def _ended(self, effect: RequestEnded) -> None:
        client = self._by_handle.get(effect.handle)
        if client is None or client.event.request_id != effect.request_id:
            raise CoreViolation(f"{effect} is about nobody")
        _check_end(client, effect)
        self._check_poison(client, effect)
        self._check_usage(client, effect.usage)
        del self.clients[effect.request_id], self._by_handle[effect.handle]
        if client.due is not None and client.text_ended_at is None:
            self._ended_well.append(client)
        cause = "" if effect.cause is None else f" {effect.cause.value}"
        self.reached[f"ended: {effect.reason.value}{cause}"] += 1
        link = client.link
        if link is not None and self.links.get(link.name) is link:
            link.finished_ids.append(effect.request_id)

    def _check_poison(self, client: Client, effect: RequestEnded) -> None:
        """A request fails for its output only if it has had to do with such a row. Where one that has ends for another
        reason, nothing can be said of that rank any more."""
        request_id = effect.request_id
        tainted = [link for link in self.links.values() if request_id in link.worker.tainted_ids]
        if effect.reason is EndReason.MODEL_OUTPUT_INVALID:
            _demand(bool(tainted), f"{request_id} fails for its output, which was right")
        else:
            for link in tainted:
                link.was_not_noticed = True

    def _check_usage(self, client: Client, usage: Usage) -> None:
        num_outputs = len(client.outputs) if client.text_ended_at is None else client.text_ended_at
        expected = (len(client.event.prompt), num_outputs, client.num_cached_tokens or 0, client.num_preemptions)
        told = (
            usage.num_prompt_tokens,
            usage.num_completion_tokens,
            usage.num_cached_tokens,
            usage.num_preemptions,
        )
        _demand(told == expected, f"usage of {client.event.request_id} is {told}, not {expected}")
        position_is_known = not self.config.num_speculative_tokens and self.config.rules.resume_settled
        if position_is_known:
            again = usage.num_recomputed_tokens
            seen = client.num_recomputed_tokens
            _demand(again == seen, f"{client.event.request_id} recomputed {seen}, usage says {again}")
        if client.usage is not None:
            known, last = client.usage, (usage.num_cached_tokens, usage.num_preemptions)
            _demand((known.num_cached_tokens, known.num_preemptions) == last, f"{known} was the last before {usage}")
            is_settled = position_is_known and client.position >= client.recomputed_below
            _demand(
                not is_settled or known.num_recomputed_tokens == usage.num_recomputed_tokens,
                f"{known} was the last before {usage}",
            )
        total = self.now - client.arrived_at + 1e-6
        times_fit = min(usage.queued_s, usage.preempted_s) >= 0 and usage.queued_s + usage.preempted_s <= total
        _demand(times_fit, f"{usage} within {total} s")

    # --- following a step ---------------------------------------------------------------------------------------------

    def _send(self, link: RankLink, output: SchedulerOutput) -> None:
        told = (list(output.preempted_request_ids), list(output.finished_request_ids))
        expected = (link.preempted_ids, link.finished_ids)
        _demand(told == expected, f"step {output.step_seq} of {link.name} tells {told}, not {expected}")
        _demand(output.epoch == link.epoch and output.processed_step_seq == link.acked_step, f"numbers of {output}")
        gone = set(link.preempted_ids) | set(link.finished_ids)
        preempted = link.preempted_clients
        link.preempted_ids, link.preempted_clients, link.finished_ids = [], [], []
        for number in [n for n, c in link.rows.items() if c.event.request_id in gone]:
            del link.rows[number], link.tables[number]
        self._enter(link, output, preempted)
        for row, block in zip(output.appended_rows, output.appended_blocks, strict=True):
            link.tables[row].append(block)
            link.filled[block] = 0
        for row, n in zip(output.rows, output.num_tokens, strict=True):
            client = link.rows[row]
            # With drafts in flight only the core knows how far it counts.
            end = self.scheduler.state.requests[client.event.request_id].computed
            self._fill(link, row, end - n, end)
            again = min(client.position + n, client.recomputed_below) - client.position
            client.num_recomputed_tokens += max(again, 0)
            client.position += n
        link.worker.dispatch(output)

    def _enter(self, link: RankLink, output: SchedulerOutput, preempted: list[Client]) -> None:
        """Rows that are new to the worker's batch."""
        for new in output.new_requests:
            client = self.clients[new.request_id]
            _demand(new.token_ids.tolist() == client.tokens, f"{new.request_id} is sent with wrong tokens")
            _demand(new.num_prompt_tokens == len(client.event.prompt), f"{new.request_id} is sent with another prompt")
            _demand(
                new.request_id in link.taken_off_ids or not any(client is one for one in preempted),
                f"{new.request_id} is preempted and resumed in one step",
            )
            client.link = link
            client.position = new.num_computed_tokens
            client.recomputed_below = min(client.high_water, len(new.token_ids))
            if client.num_cached_tokens is None:
                client.num_cached_tokens = new.num_computed_tokens
            link.rows[new.row] = client
            link.tables[new.row] = table = new.block_table.tolist()
            link.filled.update(dict.fromkeys(table[new.num_computed_tokens // self.config.block_size :], 0))
        link.taken_off_ids.clear()

    def _fill(self, link: RankLink, row: int, start: int, end: int) -> None:
        size, table, filled = self.config.block_size, link.tables[row], link.filled
        for index in range(start // size, -(-end // size)):
            filled[table[index]] = max(filled[table[index]], min(end - index * size, size))

    def _check_cached(self, link: RankLink) -> None:
        """Every block in the prefix index was, or will be, computed by a step that was really sent (28)."""
        for _, blocks in self.scheduler.state.ranks[link.name].kv.pool.index.entries():
            for block in blocks:
                full = link.filled.get(block) == self.config.block_size
                _demand(full, f"block {block} of {link.name} is cached, but no step computes it")

    def _check_order(self, link: RankLink) -> None:
        rank = self.scheduler.state.ranks[link.name]
        _demand(len(rank.window) == link.worker.num_waiting + 1, f"window of {link.name} and worker differ")

    def _count_step(
        self, before: list[str], running: Iterable[Run], output: SchedulerOutput | None, effects: Sequence[Effect]
    ) -> None:
        reached = self.reached
        if output is None:
            return
        reached["steps"] += 1
        reached["steps without tokens"] += output.total_num_tokens == 0
        reached["rows"] += len(output.rows)
        reached["requests resumed"] += sum(self.clients[n.request_id].num_preemptions > 0 for n in output.new_requests)
        if self.scheduler.state.ranks[output.rank].is_draining:
            reached["taken back by a draining rank"] += len(output.new_requests)
        reached["prefix hits"] += sum(n.num_computed_tokens > 0 for n in output.new_requests)
        reached["frees deferred"] += len(output.deferred_frees)
        reached["rows with drafts"] += 0 if output.num_drafts is None else sum(k > 0 for k in output.num_drafts)
        for run in running:
            if (reason := run.request.account.skip_reason) is not None:
                reached[f"skipped: {reason.name}"] += 1
        victims = [e for e in effects if isinstance(e, RequestPreempted)]
        reached["victim ahead of the beneficiary"] += sum(
            before.index(e.victim) < before.index(e.beneficiary) for e in victims
        )

    def _count_place(self, request_id: str, what: str) -> None:
        request = self.scheduler.state.requests[request_id]
        place = request.status.name.lower()
        if request.has_rows_in_flight:
            place += ", rows in flight"
        self.reached[f"{what} while {place}"] += 1


def _acked(name: str, result: StepResult) -> StepAcked:
    errors = tuple(RowFailed(row, "not finite") for row in result.failed_rows)
    return StepAcked(name, result.epoch, result.step_seq, list(result.sampled), result.counts, errors)


def _check_end(client: Client, effect: RequestEnded) -> None:
    request_id = client.event.request_id
    if effect.reason in (EndReason.STOP, EndReason.LENGTH) and client.text_ended_at is None and effect.cause is None:
        _demand(effect.reason is client.due, f"{request_id} ends with {effect.reason}, due: {client.due}")
        stop = client.outputs[-1] if effect.reason is EndReason.STOP else None
        _demand(effect.stop_token_id == stop, f"{request_id} stopped at {effect.stop_token_id}, not {stop}")
    elif effect.reason is EndReason.STOP:
        _demand(client.text_ended_at is not None, f"{request_id} just stops")
    elif effect.reason is EndReason.ABORTED:
        _demand(effect.cause is not None, f"{request_id} is aborted without a cause")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise CoreViolation(message)
