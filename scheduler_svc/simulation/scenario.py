"""Run scheduler scenarios (tests/conformance/README.md has the format) and tell what was decided, one JSON result a
line.

A scenario names a configuration and a list of operations; the runner plays the worker. Steps are planned exactly when
the scenario says so, with `SchedulerConfig.reference()`."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from scheduler_svc.core import invariants
from scheduler_svc.core.config import Policy, SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    DraftsProposed,
    Effect,
    Event,
    GrammarReady,
    PauseRequested,
    PauseState,
    PrefixCacheReset,
    PrefixCacheResetRequested,
    RankJoined,
    RequestAborted,
    RequestAccepted,
    RequestArrived,
    RequestEnded,
    RequestRefused,
    StepAcked,
    TextEnded,
    TokensProduced,
    WorkerProtocolError,
)
from scheduler_svc.core.inflight import StepRecord
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.request import LIVE, Request
from scheduler_svc.core.resources.grammar import GRAMMAR_NOT_READY
from scheduler_svc.core.resources.speculation import Speculation
from scheduler_svc.core.rules import Fence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulation.emulation import ScriptedThrottle, placeholders

Json = dict[str, Any]
_RANK = "rank"
_VOCAB_SIZE = 1 << 30
_EXPECTED = (
    "not a file of scenarios: it must hold one JSON object with name, config and ops, a list of such, or, as .jsonl, "
    "one a line (each may be gzipped as .gz)"
)
# Failures that are told one by one.
_MAX_TOLD = 5
_CONFIG_DEFAULTS: Json = {
    "num_blocks": 1000,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 8192,
    "max_num_scheduled_tokens": None,
    "max_model_len": 8192,
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "async_scheduling": False,
    "num_speculative_tokens": 0,
    "spec_method": "ngram",
    "force_defer_block_free": None,
    "dump_free_order": False,
    "use_v2_model_runner": True,
}
# Known to the format, but only at the value that means "off" (later features).
_ONLY_OFF: Json = {
    "pp_size": 1,
    "encoder_compute_budget": 0,
    "encoder_cache_size": 0,
    "disable_chunked_mm_input": False,
    "kv_connector": None,
    "max_loras": None,
    "sliding_window": None,
}
_SCENARIO_KEYS = frozenset({"name", "title", "why", "config", "ops"})
_ANSWER_KEYS = frozenset({"tokens", "accept"})
# Keys of each op, beside "op" itself.
_OP_KEYS: dict[str, frozenset[str]] = {
    "add": frozenset(
        {"id", "prompt_len", "fill", "prompt", "max_tokens", "min_tokens", "priority", "arrival", "eos", "stop"}
        | {"cache_salt", "skip_prefix_cache", "grammar"}
    ),
    "schedule": frozenset({"throttle"}),
    "update": _ANSWER_KEYS,
    "step": _ANSWER_KEYS | {"throttle"},
    "run": _ANSWER_KEYS | {"throttle", "max_steps", "depth"},
    "draft": frozenset({"tokens"}),
    "abort": frozenset({"ids"}),
    "finish": frozenset({"ids", "status"}),
    "grammar_ready": frozenset({"id"}),
    "pause": frozenset({"state"}),
    "reset_prefix_cache": frozenset({"running"}),
    "state": frozenset(),
}
_BLOCKED_NAMES = {GRAMMAR_NOT_READY: "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"}
_FINISH_NAMES = {"stop": "STOP", "length": "LENGTH", "aborted": "ABORT"}


class ScenarioError(Exception):
    """The scenario asks for something that is unknown or not supported."""


# What a scenario can cause that is its own fault: other things asked for than exist, values that do not fit, answers
# no worker could give.
_CANNOT_BE_RUN = (
    ScenarioError,
    WorkerProtocolError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    IndexError,
)


def window_depth(ops: list[Json]) -> int:
    """Steps that a scenario may have in flight: it plans whether or not the results are in."""
    num_planned = sum(1 for op in ops if op.get("op") == "schedule")
    return 2 + num_planned + max((int(op.get("depth", 1)) for op in ops if op.get("op") == "run"), default=0)


def core_config(settings: Json, ops: list[Json]) -> SchedulerConfig:
    """The core's configuration for a scenario's `config` and `ops`; unknown keys of the former are errors."""
    for name, value in settings.items():
        if name in _ONLY_OFF:
            if value != _ONLY_OFF[name]:
                raise ScenarioError(f"config {name}={value!r} is not supported")
        elif name not in _CONFIG_DEFAULTS:
            raise ScenarioError(f"unknown config key {name!r}")
    s = {**_CONFIG_DEFAULTS, **settings}
    if not s["use_v2_model_runner"]:
        raise ScenarioError("use_v2_model_runner=false is not supported")
    draft_model = s["spec_method"] in ("eagle", "draft_model")
    if s["spec_method"] == "eagle" and s["num_speculative_tokens"] and s["enable_prefix_caching"]:
        raise ScenarioError("spec_method 'eagle' beside the prefix cache is not supported")
    return SchedulerConfig.reference(
        block_size=s["block_size"],
        max_num_seqs=s["max_num_seqs"],
        max_num_batched_tokens=s["max_num_batched_tokens"],
        max_num_scheduled_tokens=s["max_num_scheduled_tokens"],
        max_model_len=s["max_model_len"],
        policy=Policy(s["policy"]),
        enable_prefix_caching=s["enable_prefix_caching"],
        enable_chunked_prefill=s["enable_chunked_prefill"],
        long_prefill_token_threshold=s["long_prefill_token_threshold"],
        scheduler_reserve_full_isl=s["scheduler_reserve_full_isl"],
        watermark=s["watermark"],
        max_inflight_steps=window_depth(ops),
        num_speculative_tokens=s["num_speculative_tokens"],
        num_lookahead_slots=s["num_speculative_tokens"] if draft_model else 0,
    ).with_rules(
        fence=Fence.ALWAYS if s["force_defer_block_free"] else Fence.TRANSFERS,
        results_first=not s["async_scheduling"],
    )


class ScenarioRun:
    """One scenario in progress."""

    def __init__(self, config: Json, ops: list[Json], *, check_invariants: bool = False) -> None:
        self.scheduler = Scheduler(core_config(config, ops))
        self._script = ops
        self._check = check_invariants
        self._dump_free_order = bool(config.get("dump_free_order"))
        self._plans: deque[StepRecord | None] = deque()
        self._requests: dict[str, Request] = {}
        self._eos: dict[str, int | None] = {}
        self._num_adds = 0
        self._op = 0
        # Ended requests that the worker never had: the reference announces their end all the same.
        self._unsent_ids: list[str] = []
        num_blocks = int(config.get("num_blocks", 1000))
        self._handle(RankJoined(_RANK, 1, num_blocks, self.scheduler.config.max_model_len, _VOCAB_SIZE))
        self._ops: dict[str, Callable[[Json], Iterable[Json]]] = {
            "add": self._add,
            "schedule": self._schedule_op,
            "update": self._update_op,
            "step": self._step,
            "run": self._run,
            "draft": self._draft,
            "abort": self._abort,
            "finish": self._finish,
            "grammar_ready": self._grammar_ready,
            "pause": self._pause,
            "reset_prefix_cache": self._reset,
            "state": lambda op: [{}],
        }

    def records(self) -> Iterator[Json]:
        for index, op in enumerate(self._script):
            self._op = index
            kind = op["op"]
            if kind not in self._ops:
                raise ScenarioError(f"op {kind!r} is unknown or not supported")
            if unknown := set(op) - _OP_KEYS[kind] - {"op"}:
                raise ScenarioError(f"{kind}: {sorted(unknown)} unknown or not supported")
            for record in self._ops[kind](op):
                yield {"op": self._op, "kind": kind, **record, "state": self._state()}

    # --- ops ------------------------------------------------------------------------------------------------------

    def _add(self, op: Json) -> Iterable[Json]:
        self._num_adds += 1
        prompt = op.get("prompt")
        if prompt is None:
            prompt = [op.get("fill", self._num_adds)] * op["prompt_len"]
        effects = self._handle(
            RequestArrived(
                request_id=op["id"],
                handle=self._num_adds,
                prompt=array("i", prompt),
                max_tokens=op.get("max_tokens", 16),
                min_tokens=op.get("min_tokens", 0),
                eos_token_ids=() if op.get("eos") is None else (op["eos"],),
                stop_token_ids=tuple(op.get("stop") or ()),
                priority=op.get("priority", 0),
                cache_salt=op.get("cache_salt") or "",
                arrival=float(op.get("arrival", self._op)),
                skip_prefix_cache=bool(op.get("skip_prefix_cache")),
                awaits_grammar=bool(op.get("grammar")),
            )
        )
        if isinstance(effects[0], RequestRefused):
            raise ScenarioError(f"add {op['id']}: {effects[0].message}")
        assert isinstance(effects[0], RequestAccepted)
        self._requests[op["id"]] = self.scheduler.state.requests[op["id"]]
        self._eos[op["id"]] = op.get("eos")
        return [{}]

    def _schedule_op(self, op: Json) -> Iterable[Json]:
        return [{"schedule": self._schedule(op)}]

    def _update_op(self, op: Json) -> Iterable[Json]:
        return [{"update": self._update(op)}]

    def _step(self, op: Json) -> Iterable[Json]:
        schedule = self._schedule(op)
        mid = self._state()
        return [{"schedule": schedule, "state_mid": mid, "update": self._update(op)}]

    def _run(self, op: Json) -> Iterator[Json]:
        idle = True
        for _ in range(op["max_steps"]):
            record: Json = {}
            scheduled = self._has_requests()
            if scheduled:
                record["schedule"] = self._schedule(op)
                record["state_mid"] = self._state()
            if self._plans and (len(self._plans) >= op.get("depth", 1) or not scheduled):
                record["update"] = self._update(op)
            if not record:
                break
            idle = False
            yield record
        if idle:
            yield {"run": "idle"}

    def _draft(self, op: Json) -> Iterable[Json]:
        self._handle(DraftsProposed(_RANK, op["tokens"]))
        return [{}]

    def _abort(self, op: Json) -> Iterable[Json]:
        return [{"finished": self._end(op.get("ids"), is_stop=False)}]

    def _finish(self, op: Json) -> Iterable[Json]:
        if op["status"] not in ("FINISHED_STOPPED", "FINISHED_ABORTED"):
            raise ScenarioError(f"finish with status {op['status']} is not supported")
        return [{"finished": self._end(op.get("ids"), is_stop=op["status"] == "FINISHED_STOPPED")}]

    def _end(self, ids: list[str] | None, *, is_stop: bool) -> list[str]:
        ended: list[str] = []
        live = self.scheduler.state.requests
        for request_id in list(live) if ids is None else ids:
            request = live.get(request_id)
            if request is None:
                continue
            if is_stop:
                effects = self._handle(TextEnded(request_id, request.num_output_tokens))
            else:
                effects = self._handle(RequestAborted(request_id, AbortCause.ABORTED))
            ended += [e.request_id for e in effects if isinstance(e, RequestEnded)]
            if request.account.first_admitted_at is None:
                self._unsent_ids.append(request_id)
        return ended

    def _grammar_ready(self, op: Json) -> Iterable[Json]:
        self._handle(GrammarReady(op["id"]))
        return [{}]

    def _pause(self, op: Json) -> Iterable[Json]:
        self._handle(PauseRequested(PauseState(op["state"])))
        return [{}]

    def _reset(self, op: Json) -> Iterable[Json]:
        effects = self._handle(PrefixCacheResetRequested(bool(op.get("running"))))
        return [{"result": next(e.success for e in effects if isinstance(e, PrefixCacheReset))}]

    # --- the worker's part ----------------------------------------------------------------------------------------

    def _schedule(self, op: Json) -> Json:
        ScriptedThrottle.of(self._rank).is_on = bool(op.get("throttle"))
        output = self.scheduler.schedule(_RANK)
        # Preemptions are part of the record; they do not answer the next event.
        self.scheduler.take_effects()
        self._verify()
        unsent, self._unsent_ids = self._unsent_ids, []
        if output is None:
            self._plans.append(None)
            return _describe_nothing(unsent)
        record = self._rank.window.records[-1]
        self._plans.append(record)
        described = _describe(output, record, unsent)
        config = self.scheduler.config
        if config.num_speculative_tokens and not config.rules.results_first:
            self._handle(placeholders(_RANK, record, config.num_speculative_tokens))
        return described

    def _update(self, op: Json) -> Json:
        record = self._plans.popleft()
        if record is None:
            return {"outputs": []}
        sampled: list[int] = []
        counts: list[int] = []
        for request, expected in zip(record.requests, record.expected, strict=True):
            row = self._sample(op, request, expected)
            sampled += row
            counts.append(len(row))
        plain = counts == [min(expected, 1) for expected in record.expected] and not record.yields_more
        effects = self._handle(StepAcked(_RANK, 1, record.step_seq, sampled, None if plain else counts))
        return {"outputs": self._outputs(record, effects)}

    def _sample(self, op: Json, request: Request, expected: int) -> list[int]:
        if not expected:
            return []
        given = (op.get("tokens") or {}).get(request.request_id)
        if given is not None:
            return list(given)
        accepted = (op.get("accept") or {}).get(request.request_id, 0)
        first = 1000 + request.num_output_tokens
        return [first + i for i in range(min(1 + accepted, expected))]

    def _outputs(self, record: StepRecord, effects: list[Effect]) -> list[Json]:
        by_handle: dict[int, Json] = {}
        for effect in effects:
            if isinstance(effect, TokensProduced):
                at = 0
                for index, handle in enumerate(effect.handles):
                    count = 1 if effect.counts is None else effect.counts[index]
                    by_handle[handle] = {"tokens": effect.tokens[at : at + count], "finish": None, "stop_reason": None}
                    at += count
            elif isinstance(effect, RequestEnded):
                output = by_handle.setdefault(effect.handle, {"tokens": []})
                stop = effect.stop_token_id
                output["finish"] = _FINISH_NAMES[effect.reason.value]
                output["stop_reason"] = None if stop == self._eos[effect.request_id] else stop
        return [{"id": r.request_id, **by_handle[r.handle]} for r in record.requests if r.handle in by_handle]

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> Any:
        return self.scheduler.state.ranks[_RANK]

    def _has_requests(self) -> bool:
        state = self.scheduler.state
        if self._rank.has_news or self._unsent_ids:
            return True
        if state.pause is PauseState.PAUSED_ALL:
            return False
        return bool(self._rank.running) or (state.pause is PauseState.UNPAUSED and len(state.queue) > 0)

    def _handle(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event)
        self._verify()
        return effects

    def _verify(self) -> None:
        if self._check:
            invariants.check(self.scheduler.state)

    def _state(self) -> Json:
        state, rank = self.scheduler.state, self._rank
        speculation = state.resources.find(Speculation)
        described: Json = {
            "free_blocks": rank.kv.pool.num_free,
            "running": [run.request.request_id for run in rank.running],
            "waiting": [r.request_id for r in state.queue.waiting],
            "skipped": [r.request_id for r in state.queue.skipped],
            "capacity_bound": rank.throttle.capacity_bound,
            "deferred": [[free.fence, list(free.blocks)] for free in rank.kv.parked],
            "requests": {
                r.request_id: {
                    "status": _status_name(r),
                    "computed": r.computed,
                    "tokens": r.num_tokens,
                    "outputs": r.num_output_tokens,
                    "spec": [] if speculation is None else list(speculation.drafts.get(r, ())),
                    "preemptions": r.account.num_preemptions,
                    "blocks": [] if r.run is None else list(r.run.blocks),
                }
                for r in self._requests.values()
                if r.status in LIVE
            },
        }
        if self._dump_free_order:
            described["free_order"] = rank.kv.pool.free_order()
        return described


def _status_name(request: Request) -> str:
    """What the reference calls it."""
    blocked_by = request.ticket.blocked_by
    return request.status.value if blocked_by is None else _BLOCKED_NAMES[blocked_by]


def _describe_nothing(unsent_ids: list[str]) -> Json:
    nothing: Json = {"scheduled": [], "total": 0, "new": [], "cached": [], "spec": {}, "encoder": {}}
    return {**nothing, "preempted": [], "finished": sorted(unsent_ids), "freed_mm": []}


def _describe(output: SchedulerOutput, record: StepRecord, unsent_ids: list[str]) -> Json:
    new_ids = {new.request_id for new in output.new_requests}
    grown: dict[int, list[int]] = {}
    for row, block in zip(output.appended_rows, output.appended_blocks, strict=True):
        grown.setdefault(row, []).append(block)
    cached: list[Json] = []
    spec: dict[str, list[int]] = {}
    drafts = iter(output.draft_token_ids)
    num_drafts = output.num_drafts or [0] * len(record.requests)
    rows = zip(record.runs, record.num_tokens, record.expected, num_drafts, strict=True)
    for run, n, expected, count in rows:
        request = run.request
        if count:
            spec[request.request_id] = [next(drafts) for _ in range(count)]
        if request.request_id not in new_ids:
            cached.append(
                {
                    "id": request.request_id,
                    "new_blocks": grown.get(run.row),
                    "computed": request.computed - n,
                    "outputs": request.num_output_tokens + request.awaited - expected,
                }
            )
    return {
        "scheduled": [[r.request_id, n] for r, n in zip(record.requests, record.num_tokens, strict=True)],
        "total": output.total_num_tokens,
        "new": [
            {"id": new.request_id, "computed": new.num_computed_tokens, "blocks": list(new.block_table)}
            for new in output.new_requests
        ],
        "cached": cached,
        "spec": spec,
        "encoder": {},
        "preempted": sorted(output.preempted_request_ids),
        "finished": sorted((*output.finished_request_ids, *unsent_ids)),
        "freed_mm": [],
    }


def run_scenario(scenario: Json, *, check_invariants: bool = False) -> Json:
    """The result of one scenario; one that cannot be run says so in `error`."""
    records: list[Json] = []
    try:
        if unknown := set(scenario) - _SCENARIO_KEYS:
            raise ScenarioError(f"unknown scenario key {sorted(unknown)}")
        run = ScenarioRun(scenario.get("config", {}), scenario["ops"], check_invariants=check_invariants)
        records.extend(run.records())
    except _CANNOT_BE_RUN as error:
        message = f"{type(error).__name__}: {error}"
        return {"name": scenario.get("name"), "ok": False, "error": message, "records": records}
    return {"name": scenario.get("name"), "ok": True, "error": None, "records": records}


class ScenarioFileError(Exception):
    """A file that holds no scenarios; the text names it and says what it should hold."""


def read_scenarios(path: Path) -> list[Json]:
    """Scenarios of a .json (one, or a list) or .jsonl (one a line) file, either with .gz. Raises ScenarioFileError."""
    try:
        scenarios = _parse(path)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ScenarioFileError(f"{path}: {_EXPECTED}: {error}") from None
    if not all(isinstance(scenario, dict) for scenario in scenarios):
        raise ScenarioFileError(f"{path}: {_EXPECTED}: it holds something that is not a JSON object")
    return scenarios


def _parse(path: Path) -> list[Json]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        text = file.read()
    if ".jsonl" in path.name:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    scenarios = json.loads(text)
    return scenarios if isinstance(scenarios, list) else [scenarios]


def main(paths: Iterable[str | Path], out: TextIO | None = None) -> int:
    """Print one result a line, each as soon as it is known. Exit status 0 all were run, 1 some could not be (how many
    and why is told on stderr), 2 a file holds no scenarios."""
    count, failures = 0, []
    for path in paths:
        try:
            scenarios = read_scenarios(Path(path))
        except ScenarioFileError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for scenario in scenarios:
            result = run_scenario(scenario)
            count += 1
            if not result["ok"]:
                failures.append(f"{path}: {result['name'] or f'scenario {count}'}: {result['error']}")
            print(json.dumps(result, separators=(",", ":")), file=sys.stdout if out is None else out, flush=True)
    if failures:
        _tell(failures, count)
    return int(bool(failures))


def _tell(failures: list[str], count: int) -> None:
    print(f"error: {len(failures)} of {count} scenarios could not be run:", file=sys.stderr)
    for failure in failures[:_MAX_TOLD]:
        print(f"  {failure}", file=sys.stderr)
    if len(failures) > _MAX_TOLD:
        print(f"  and {len(failures) - _MAX_TOLD} more; each result on stdout has its error", file=sys.stderr)
