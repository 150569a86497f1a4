"""What the scheduler exports to Prometheus, and how it counts.

Names with the prefix `vllm:` are those dashboards and autoscalers of this field already read; those with `stepfence_`
are ours. The sink is told facts on the event loop and keeps plain numbers; the registry reads them, and the core, on
that loop too, when somebody scrapes. So a scrape sees one moment, and every counter equals what happened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from scheduler_svc.core.events import (
    Effect,
    EndReason,
    PrefixCacheReset,
    RequestAccepted,
    RequestEnded,
    RequestPreempted,
    RequestRefused,
    TokensProduced,
    UsageChanged,
)
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.request import Status
from scheduler_svc.core.scheduler import Scheduler

_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)
_LONG_SECONDS: Final = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_STEP_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_TOKENS: Final = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_FEW: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)


class Histogram:
    """Bucket counts and a sum; `bounds` are upper ends, ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        cumulative, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(cumulative)))
        return found


@dataclass(slots=True)
class _Timing:
    """When a live request arrived and got its tokens; seconds of the event loop's clock."""

    accepted_at: float
    num_prompt_tokens: int
    first_token_at: float | None = None
    last_token_at: float = 0.0


@dataclass(slots=True)
class _Rank:
    state: str = "connecting"
    epoch: int = 0


@dataclass(slots=True)
class Facts:
    """Everything the sink counted."""

    ranks: dict[str, _Rank] = field(default_factory=dict)
    live: dict[int, _Timing] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    # Not by rank: a worker that comes back often has another address.
    losses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("lost", "left"), 0))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(_LONG_SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(_LONG_SECONDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(_LONG_SECONDS))
    decode: Histogram = field(default_factory=lambda: Histogram(_LONG_SECONDS))
    preempted_time: Histogram = field(default_factory=lambda: Histogram(_LONG_SECONDS))
    request_preemptions: Histogram = field(default_factory=lambda: Histogram(_FEW))
    step_rtt: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    step_execute: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))


class PrometheusMetrics:
    """A MetricsSink. `clock` is the event loop's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.facts = Facts()
        self._clock = clock

    # --- MetricsSink ---

    def step_sent(self, output: SchedulerOutput) -> None:
        """See MetricsSink."""
        if output.total_num_tokens:
            self.facts.iteration_tokens.observe(output.total_num_tokens)

    def step_acked(self, rank: str, step_seq: int, rtt_s: float, staged_s: float, executed_s: float) -> None:
        """See MetricsSink."""
        self.facts.step_rtt.observe(rtt_s)
        self.facts.step_execute.observe(executed_s)

    def effect(self, effect: Effect) -> None:
        """See MetricsSink."""
        match effect:
            case TokensProduced():
                self._tokens(effect)
            case RequestAccepted():
                self._accepted(effect)
            case RequestRefused():
                self._refused(effect)
            case RequestEnded():
                self._ended(effect)
            case RequestPreempted():
                self._preempted(effect)
            case UsageChanged():
                # Counted from the totals of the core.
                pass
            case PrefixCacheReset():
                # Not a number of its own: the operator who asked gets the answer.
                pass
            case _:
                assert_never(effect)

    def refused_at_the_door(self, reason: str) -> None:
        """See MetricsSink."""
        _count(self.facts.rejected, reason)

    def rank_changed(self, rank: str, state: str, epoch: int) -> None:
        """See MetricsSink."""
        known = self._rank(rank)
        known.state, known.epoch = state, epoch

    def epoch_ended(self, rank: str, graceful: bool) -> None:
        """See MetricsSink."""
        _count(self.facts.losses, "left" if graceful else "lost")

    def turn(self, num_events: int, duration_s: float) -> None:
        """See MetricsSink."""

    def keep_ranks(self, names: Iterable[str]) -> None:
        """Forget all other ranks: addresses that were given up would pile up as series for ever."""
        self.facts.ranks = {name: self._rank(name) for name in names}

    # --- effects ---

    def _accepted(self, effect: RequestAccepted) -> None:
        self.facts.live[effect.handle] = _Timing(self._clock(), effect.num_prompt_tokens)

    def _refused(self, effect: RequestRefused) -> None:
        _count(self.facts.rejected, effect.reason.value)

    def _tokens(self, effect: TokensProduced) -> None:
        facts, now = self.facts, self._clock()
        live, observe = facts.live, facts.inter_token.observe
        facts.num_generation_tokens += len(effect.tokens)
        for index, handle in enumerate(effect.handles):
            timing = live[handle]
            if timing.first_token_at is None:
                timing.first_token_at = now
                facts.num_prompt_tokens += timing.num_prompt_tokens
                facts.time_to_first_token.observe(now - timing.accepted_at)
            else:
                observe(now - timing.last_token_at)
            timing.last_token_at = now
            if effect.counts is not None:
                for _ in range(effect.counts[index] - 1):
                    observe(0.0)

    def _ended(self, effect: RequestEnded) -> None:
        facts, usage, now = self.facts, effect.usage, self._clock()
        timing = facts.live.pop(effect.handle)
        _count(facts.ended, effect.reason.value)
        facts.request_preemptions.observe(usage.num_preemptions)
        if usage.num_preemptions:
            facts.preempted_time.observe(usage.preempted_s)
        facts.queue.observe(usage.queued_s)
        facts.e2e.observe(now - timing.accepted_at)
        if timing.first_token_at is not None:
            facts.prefill.observe(max(0.0, timing.first_token_at - timing.accepted_at - usage.queued_s))
            facts.decode.observe(now - timing.first_token_at)

    def _preempted(self, effect: RequestPreempted) -> None:
        _count(self.facts.preemptions, effect.cause)

    def _rank(self, name: str) -> _Rank:
        return self.facts.ranks.setdefault(name, _Rank())


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


# --- export -------------------------------------------------------------------------------------------------------

_SUCCESS: Final = {EndReason.STOP.value: "stop", EndReason.LENGTH.value: "length"}
_FAILURE: Final = {
    EndReason.ABORTED.value: "abort",
    EndReason.WORKER_FAULT.value: "error",
    EndReason.NO_WORKER.value: "error",
    EndReason.MODEL_OUTPUT_INVALID.value: "error",
}


def collect(core: Scheduler, sink: PrometheusMetrics, model_name: str) -> list[Metric]:
    """All metrics at this moment. Runs on the event loop."""
    metrics = [*_request_metrics(core, sink.facts), *_kv_metrics(core), *_cost_metrics(core, sink.facts)]
    metrics += _rank_metrics(core, sink.facts)
    for metric in metrics:
        if metric.name.startswith("vllm:"):
            metric.samples = [s._replace(labels={"model_name": model_name, **s.labels}) for s in metric.samples]
    return metrics


def _request_metrics(core: Scheduler, facts: Facts) -> list[Metric]:
    blocked = sum(1 for request in core.state.queue.skipped if request.status is Status.BLOCKED)
    deferred = core.num_skipped
    by_reason = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Requests that wait, by what for.", labels=["reason"]
    )
    by_reason.add_metric(["capacity"], core.num_waiting)
    by_reason.add_metric(["deferred"], deferred)
    by_reason.add_metric(["blocked"], blocked)
    ended = CounterMetricFamily("vllm:request_success", "Requests that ended, by how.", labels=["finished_reason"])
    counts: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason, count in facts.ended.items():
        counts[_SUCCESS.get(reason) or _FAILURE[reason]] += count
    for label, count in counts.items():
        ended.add_metric([label], count)
    return [
        GaugeMetricFamily("vllm:num_requests_running", "Requests in the workers' batches.", core.num_running),
        GaugeMetricFamily("vllm:num_requests_waiting", "Requests in the queue.", core.num_waiting + core.num_skipped),
        by_reason,
        ended,
        CounterMetricFamily(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a token.", facts.num_prompt_tokens
        ),
        CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", facts.num_generation_tokens),
        _histogram("vllm:iteration_tokens_total", "Tokens of a step.", facts.iteration_tokens),
        _histogram(
            "vllm:time_to_first_token_seconds", "From acceptance to the first token.", facts.time_to_first_token
        ),
        _histogram("vllm:inter_token_latency_seconds", "Between tokens of a request.", facts.inter_token),
        _histogram("vllm:e2e_request_latency_seconds", "From acceptance to the end.", facts.e2e),
        _histogram("vllm:request_queue_time_seconds", "From acceptance to the first admission.", facts.queue),
        _histogram("vllm:request_prefill_time_seconds", "From the first admission to the first token.", facts.prefill),
        _histogram("vllm:request_decode_time_seconds", "From the first token to the end.", facts.decode),
    ]


def _kv_metrics(core: Scheduler) -> list[Metric]:
    ranks = core.state.ranks.values()
    usable = sum(rank.kv.num_usable for rank in ranks)
    free = sum(rank.kv.pool.num_free for rank in ranks)
    config, prefix = core.config, core.totals.prefix
    info = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Settings of the KV cache; the value is always 1.",
        labels=["block_size", "enable_prefix_caching", "num_gpu_blocks"],
    )
    num_blocks = sum(rank.kv.pool.num_blocks for rank in ranks)
    info.add_metric([str(config.block_size), str(config.enable_prefix_caching), str(num_blocks)], 1)
    headroom = GaugeMetricFamily(
        "stepfence_admission_headroom_blocks", "Free blocks above the watermark.", labels=["rank"]
    )
    deferred = GaugeMetricFamily("stepfence_deferred_free_blocks", "Blocks that wait for their fence.", labels=["rank"])
    for rank in ranks:
        headroom.add_metric([rank.name], rank.kv.pool.num_free - rank.kv.watermark_blocks)
        deferred.add_metric([rank.name], rank.kv.pool.num_parked)
    return [
        GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", 1 - free / usable if usable else 0.0
        ),
        info,
        CounterMetricFamily("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", prefix.num_queries),
        CounterMetricFamily("vllm:prefix_cache_hits", "Tokens found there.", prefix.num_hits),
        headroom,
        deferred,
    ]


def _cost_metrics(core: Scheduler, facts: Facts) -> list[Metric]:
    totals = core.totals
    preemptions = _by_label("stepfence_preemptions", "Requests taken off a rank, by cause.", "cause", facts.preemptions)
    recomputed = _by_label(
        "stepfence_recomputed_tokens", "Tokens computed again, by cause.", "cause", totals.recomputed_by_cause
    )
    skips = _by_label(
        "stepfence_skips",
        "Requests a step examined and left out, by reason.",
        "reason",
        {reason.name.lower(): count for reason, count in totals.skips.items()},
    )
    rejected = _by_label("stepfence_requests_rejected", "Requests refused, by reason.", "reason", facts.rejected)
    deferring = _by_label(
        "stepfence_prefill_deferred_steps",
        "Steps that left prefills out, by reason.",
        "reason",
        {"throttle": totals.num_deferring_steps},
    )
    return [
        CounterMetricFamily(
            "vllm:num_preemptions", "Preemptions by the scheduler's own choice.", totals.num_preemptions
        ),
        _histogram("vllm:request_num_preemptions", "Preemptions of a request.", facts.request_preemptions),
        preemptions,
        recomputed,
        CounterMetricFamily(
            "stepfence_row_errors", "Rows that failed alone: the model gave no usable output.", totals.num_row_errors
        ),
        CounterMetricFamily("stepfence_computed_tokens", "Tokens sent to be computed.", totals.num_computed_tokens),
        CounterMetricFamily(
            "stepfence_requeued_after_worker_loss",
            "Requests that went back to the queue because their worker was lost or drained.",
            totals.num_requeued_after_worker_loss,
        ),
        _histogram("stepfence_request_preempted_seconds", "Time a preempted request waited.", facts.preempted_time),
        skips,
        rejected,
        deferring,
    ]


def _rank_metrics(core: Scheduler, facts: Facts) -> list[Metric]:
    up = GaugeMetricFamily("stepfence_worker_up", "1 while the worker serves.", labels=["rank"])
    epoch = GaugeMetricFamily("stepfence_worker_epoch", "Epoch of the worker's session.", labels=["rank"])
    lag = GaugeMetricFamily("stepfence_fence_lag_steps", "Steps sent and not acknowledged.", labels=["rank"])
    for name, rank in facts.ranks.items():
        up.add_metric([name], 1 if rank.state in ("up", "draining") else 0)
        epoch.add_metric([name], rank.epoch)
        view = core.rank_view(name)
        lag.add_metric([name], 0 if view is None else view.sent_step_seq - view.acked_step_seq)
    return [
        up,
        epoch,
        lag,
        _by_label("stepfence_worker_losses", "Epochs of workers that ended, by cause.", "cause", facts.losses),
        _histogram("stepfence_step_rtt_seconds", "From sending a step to its result.", facts.step_rtt),
        _histogram("stepfence_step_execute_seconds", "A step's execution, as the worker says.", facts.step_execute),
    ]


def _by_label(name: str, text: str, label: str, counts: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
