"""The core under any sequence of events: Hypothesis looks for one that breaks a rule, and shortens it.

`CheckedCore` looks through everything after every event; the machine only chooses events."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import AbortCause, PauseState, RequestArrived
from scheduler_svc.core.rules import Fence
from scheduler_svc.simulation.checked_core import CheckedCore
from scheduler_svc.simulation.simulated_worker import REPETITIVE

MAX_MODEL_LEN = 20
# Which of those that are there.
PICK = st.integers(0, 7)


@st.composite
def configurations(draw: st.DrawFn) -> SchedulerConfig:
    """Small settings, so that every limit is met; our own defaults or the reference's."""
    num_drafts = draw(st.sampled_from((0, 0, 2)))
    settings: dict[str, object] = {
        "block_size": draw(st.sampled_from((1, 2, 4))),
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.sampled_from((4, 7, 20))),
        "max_model_len": MAX_MODEL_LEN,
        "policy": draw(st.sampled_from(Policy)),
        "enable_prefix_caching": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from((0, 0, 3))),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from((0.0, 0.2))),
        "max_inflight_steps": draw(st.integers(1, 4)),
        "num_speculative_tokens": num_drafts,
        "prefill_schedule_interval": draw(st.sampled_from((1, 1, 3))),
        "max_queued_requests": draw(st.sampled_from((3, 1024))),
        "no_worker_grace_s": 5.0,
    }
    # Drafts proposed by the scheduler, or by a rule below.
    proposes = draw(st.booleans())
    rules: dict[str, object] = {"proposes_drafts": proposes, "results_first": num_drafts > 0 and not proposes}
    if draw(st.booleans()):
        rules["fence"] = draw(st.sampled_from(Fence))
        settings |= {
            "max_preemptions": draw(st.sampled_from((None, 0, 1, 3))),
            "max_fruitless_epochs": draw(st.sampled_from((0, 2, 3))),
        }
    return SchedulerConfig(**settings).with_rules(**rules)  # type: ignore[arg-type]


class CoreMachine(RuleBasedStateMachine):
    """Everything that can happen to a core with up to three ranks."""

    core: CheckedCore
    pools: dict[str, int]

    @initialize(config=configurations(), pools=st.lists(st.integers(3, 12), min_size=1, max_size=3))
    def start(self, config: SchedulerConfig, pools: list[int]) -> None:
        self.core = CheckedCore(config)
        self.pools = {f"r{index}": num_blocks + 1 for index, num_blocks in enumerate(pools)}
        self.next_handle = 1
        for name in self.pools:
            self.join(name)

    def join(self, name: str) -> None:
        self.core.join(name, self.pools[name], MAX_MODEL_LEN)

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(
        name=st.integers(0, 9),
        stream=st.integers(0, 2),
        num_prompt_tokens=st.integers(1, MAX_MODEL_LEN),
        max_tokens=st.integers(0, 8),
        min_tokens=st.sampled_from((0, 0, 2)),
        priority=st.integers(-1, 1),
        stops=st.sets(st.integers(0, 7), max_size=2),
        style=st.sampled_from((b"h", REPETITIVE, b"hs")),
        patience=st.sampled_from((None, None, None, 2.0)),
        awaits_grammar=st.sampled_from((False, False, False, True)),
        eos=st.sets(st.integers(0, 7), max_size=1),
        skips_cache=st.sampled_from((False, False, False, True)),
    )
    def arrive(
        self,
        name: int,
        stream: int,
        num_prompt_tokens: int,
        max_tokens: int,
        min_tokens: int,
        priority: int,
        stops: set[int],
        style: bytes,
        patience: float | None,
        awaits_grammar: bool,
        eos: set[int],
        skips_cache: bool,
    ) -> None:
        handle = self.next_handle
        self.next_handle += 1
        event = RequestArrived(
            request_id=f"q{name}",
            handle=handle,
            prompt=array("i", [stream + i % 5 for i in range(num_prompt_tokens)]),
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=tuple(sorted(stops)),
            eos_token_ids=tuple(sorted(eos)),
            skip_prefix_cache=skips_cache,
            priority=priority if self.core.config.policy is Policy.PRIORITY else 0,
            sampling=style,
            cache_salt=style[1:].decode(),
            deadline=None if patience is None else self.core.now + patience,
            awaits_grammar=awaits_grammar,
        )
        self.core.arrive(event)

    def live(self, pick: int) -> str:
        return list(self.core.clients)[pick % len(self.core.clients)]

    @precondition(lambda self: self.core.clients)
    @rule(pick=PICK, cause=st.sampled_from((AbortCause.ABORTED, AbortCause.SLOW_READER)))
    def abort(self, pick: int, cause: AbortCause) -> None:
        self.core.abort(self.live(pick), cause)

    @precondition(lambda self: any(client.outputs for client in self.core.clients.values()))
    @rule(pick=PICK, cut=PICK)
    def end_text(self, pick: int, cut: int) -> None:
        clients = [client for client in self.core.clients.values() if client.outputs]
        client = clients[pick % len(clients)]
        self.core.end_text(client.event.request_id, 1 + cut % len(client.outputs))

    @precondition(lambda self: self.core.clients)
    @rule(pick=PICK)
    def compile_grammar(self, pick: int) -> None:
        self.core.compile_grammar(self.live(pick))

    @rule(seconds=st.sampled_from((0.5, 3.0)))
    def tick(self, seconds: float) -> None:
        self.core.tick(seconds)

    # --- steps --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.links)
    @rule(pick=PICK)
    def schedule_one(self, pick: int) -> None:
        self.core.schedule(self.rank(pick))

    @rule()
    def schedule_all(self) -> None:
        self.core.schedule_all()

    def rank(self, pick: int) -> str:
        return list(self.core.links)[pick % len(self.core.links)]

    def busy(self) -> list[str]:
        return [name for name, link in self.core.links.items() if link.worker.num_waiting]

    @precondition(lambda self: self.busy())
    @rule(pick=PICK, then_schedule=st.booleans(), right=st.lists(st.booleans(), min_size=2, max_size=2))
    def acknowledge(self, pick: int, then_schedule: bool, right: list[bool]) -> None:
        busy = self.busy()
        name = busy[pick % len(busy)]
        self.core.acknowledge(name)
        if self.awaits_drafts:
            self.propose(name, pick, right)
        if then_schedule:
            self.core.schedule_all()

    # --- ranks --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.links)
    @rule(pick=PICK, graceful=st.booleans(), num_executed=st.integers(0, 2))
    def lose(self, pick: int, graceful: bool, num_executed: int) -> None:
        self.core.lose(self.rank(pick), graceful=graceful, num_executed=num_executed)

    @precondition(lambda self: len(self.core.links) < len(self.pools))
    @rule(pick=PICK)
    def rejoin(self, pick: int) -> None:
        away = [name for name in self.pools if name not in self.core.links]
        self.join(away[pick % len(away)])

    @precondition(lambda self: self.core.links)
    @rule(pick=PICK)
    def drain_rank(self, pick: int) -> None:
        self.core.drain_rank(self.rank(pick))

    @precondition(lambda self: self.core.late_results)
    @rule()
    def deliver_late(self) -> None:
        self.core.deliver_late()

    @precondition(lambda self: self.core.links)
    @rule(pick=PICK, which=PICK)
    def deliver_wrong(self, pick: int, which: int) -> None:
        name = self.rank(pick)
        if wrong := self.core.wrong_results(name):
            kind, event = wrong[which % len(wrong)]
            self.core.deliver_wrong(name, event, kind)

    def propose(self, name: str, which: int, right: list[bool]) -> None:
        """Drafts from outside, some of them right, for somebody whose results are in."""
        requests = [run.request for run in self.core.scheduler.state.ranks[name].running]
        running = [request for request in requests if not request.awaited]
        if running:
            client = self.core.clients[running[which % len(running)].request_id]
            drafts = [client.source.next_token() if is_right else 0 for is_right in right]
            self.core.propose_drafts(name, {client.event.request_id: drafts})

    @property
    def awaits_drafts(self) -> bool:
        """Whether drafts come from outside."""
        return self.core.config.num_speculative_tokens > 0 and not self.core.config.rules.proposes_drafts

    # --- operators ----------------------------------------------------------------------------------------------------

    @rule(state=st.sampled_from(PauseState))
    def pause(self, state: PauseState) -> None:
        self.core.pause(state)

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running: bool) -> None:
        self.core.reset_prefix_cache(preempt_running=preempt_running)

    # Late and seldom, since nothing new is accepted afterwards.
    @precondition(lambda self: self.next_handle > 8)
    @rule(chance=st.integers(0, 3))
    def drain(self, chance: int) -> None:
        if chance == 3:
            self.core.drain()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.run_to_the_end(self.pools, lambda names: names[0])


class LongCoreMachine(CoreMachine):
    """The same, for as long as `make test-long` has."""


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=500, stateful_step_count=80)

TestCoreForLong = pytest.mark.long(LongCoreMachine.TestCase)
TestCoreForLong.settings = settings(max_examples=5000, stateful_step_count=120)
