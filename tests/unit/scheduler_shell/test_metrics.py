"""Every counter equals what happened: a run with known counts, read back through HTTP."""

from __future__ import annotations

import asyncio
import urllib.request
from array import array

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import (
    AbortCause,
    Event,
    PrefixCacheResetRequested,
    RankJoined,
    RankLost,
    RequestAborted,
    RequestArrived,
    StepAcked,
    Tick,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.metrics import Histogram, PrometheusMetrics, collect
from scheduler_svc.metrics_server import MetricsServer

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Run:
    """A core on one rank and the sink that hears of it, with time in the test's hand."""

    def __init__(self, usable: int, *, max_num_seqs: int = 4) -> None:
        self.now = 0.0
        self.sink = PrometheusMetrics(lambda: self.now)
        self.core = Scheduler(
            SchedulerConfig(
                block_size=4,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=32,
                max_model_len=64,
                max_queued_requests=8,
            )
        )
        self.num_steps = 0
        self.handle(RankJoined("r", 1, usable + 1, 64, 1000))
        self.sink.rank_changed("r", "up", 1)

    def handle(self, event: Event) -> None:
        for effect in self.core.handle(event):
            self.sink.effect(effect)

    def arrive(self, name: str, handle: int, num_prompt: int, max_tokens: int, first: int = 0) -> None:
        prompt = array("i", range(first, first + num_prompt))
        self.handle(RequestArrived(name, handle, prompt, max_tokens=max_tokens))

    def step(self) -> None:
        """One step, one tenth of a second, answered."""
        output = self.core.schedule("r")
        if output is None:
            return
        self.num_steps += 1
        self.sink.step_sent(output)
        record = self.core.state.ranks["r"].window.oldest
        assert record is not None
        self.now += 0.1
        self.handle(Tick(self.now))
        self.sink.step_acked("r", record.step_seq, 0.1, 0.0, 0.09)
        self.handle(StepAcked("r", 1, record.step_seq, [7] * record.num_sampling))

    def drain(self) -> None:
        while self.core.num_live_requests:
            self.step()
        self.step()

    def samples(self) -> Samples:
        found: Samples = {}
        for family in collect(self.core, self.sink, "tiny"):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                found[sample.name, tuple(sorted(labels.items()))] = sample.value
        return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_requests_and_tokens_are_counted_exactly() -> None:
    run = Run(usable=16)
    run.arrive("a", 1, 5, 3)
    run.arrive("b", 2, 6, 2, first=100)
    run.drain()
    samples = run.samples()
    assert value(samples, "vllm:prompt_tokens_total") == 11
    assert value(samples, "vllm:generation_tokens_total") == 5
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 2
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 2
    # a: 2 intervals, b: 1.
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 3
    assert value(samples, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.3 + 0.2)
    assert value(samples, "vllm:iteration_tokens_total_sum") == 11 + 2 + 1
    assert value(samples, "vllm:num_requests_running") == 0
    assert value(samples, "vllm:num_requests_waiting") == 0
    assert value(samples, "vllm:kv_cache_usage_perc") == 0
    assert value(samples, "stepfence_worker_up", rank="r") == 1
    assert value(samples, "stepfence_fence_lag_steps", rank="r") == 0
    assert value(samples, "stepfence_step_rtt_seconds_count") == run.num_steps
    assert value(samples, "stepfence_admission_headroom_blocks", rank="r") == 16


def test_preemptions_and_what_they_cost_are_counted_exactly() -> None:
    # Two requests that grow to 4 blocks each in a pool of 6: the later one must go once.
    run = Run(usable=6)
    run.arrive("a", 1, 7, 10)
    run.arrive("b", 2, 7, 10, first=100)
    run.drain()
    samples = run.samples()
    preemptions = run.core.totals.num_preemptions
    assert preemptions >= 1
    assert value(samples, "vllm:num_preemptions_total") == preemptions
    assert value(samples, "stepfence_preemptions_total", cause="blocks") == preemptions
    assert value(samples, "stepfence_recomputed_tokens_total", cause="blocks") == run.core.totals.num_recomputed_tokens
    assert run.core.totals.num_recomputed_tokens > 0
    assert value(samples, "stepfence_request_preempted_seconds_count") == 1
    assert value(samples, "vllm:request_num_preemptions_sum") == preemptions
    # b waits for room, and each of them once for its last token.
    assert value(samples, "stepfence_skips_total", reason="no_blocks") >= 1
    for reason, count in run.core.totals.skips.items():
        assert value(samples, "stepfence_skips_total", reason=reason.name.lower()) == count


def test_refusals_aborts_and_losses_are_counted_by_reason() -> None:
    run = Run(usable=16)
    run.arrive("a", 1, 5, 3)
    run.arrive("a", 2, 5, 3)
    run.sink.refused_at_the_door("INVALID_PARAMETER")
    run.step()
    run.handle(RequestAborted("a", AbortCause.CLIENT_GONE))
    run.arrive("b", 3, 5, 3)
    run.step()
    run.handle(RankLost("r", "gone"))
    run.sink.rank_changed("r", "lost", 1)
    samples = run.samples()
    assert value(samples, "stepfence_requests_rejected_total", reason="DUPLICATE_REQUEST_ID") == 1
    assert value(samples, "stepfence_requests_rejected_total", reason="INVALID_PARAMETER") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(samples, "stepfence_requeued_after_worker_loss_total") == 1
    assert value(samples, "stepfence_preemptions_total", cause="rank_lost") == 1
    assert value(samples, "vllm:num_preemptions_total") == 0
    assert value(samples, "vllm:num_requests_waiting") == 1
    assert value(samples, "stepfence_worker_up", rank="r") == 0


def test_prefix_cache_counters_outlive_the_rank() -> None:
    run = Run(usable=16)
    for handle in (1, 2):
        run.arrive(f"r{handle}", handle, 9, 1)
        run.drain()
    assert value(run.samples(), "vllm:prefix_cache_hits_total") == 8
    run.handle(RankLost("r", "gone"))
    samples = run.samples()
    assert value(samples, "vllm:prefix_cache_hits_total") == 8
    assert value(samples, "vllm:prefix_cache_queries_total") == 18


def test_prompts_count_with_their_first_token_and_look_ups_before_any_preemption() -> None:
    run = Run(usable=16)
    run.arrive("a", 1, 9, 6)
    run.step()
    samples = run.samples()
    assert value(samples, "vllm:prompt_tokens_total") == 9
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 0
    run.handle(PrefixCacheResetRequested(preempt_running=True))
    run.drain()
    samples = run.samples()
    assert value(samples, "vllm:prompt_tokens_total") == 9
    assert value(samples, "vllm:prefix_cache_queries_total") == 9
    assert run.core.totals.prefix.num_preempted_queries > 0


def test_a_rank_that_was_given_up_leaves_no_series() -> None:
    run = Run(usable=16)
    run.sink.rank_changed("gone", "lost", 3)
    run.sink.keep_ranks(["r", "new"])
    ranks = {labels for name, labels in run.samples() if name == "stepfence_worker_up"}
    assert ranks == {(("rank", "r"),), (("rank", "new"),)}


def test_losses_are_there_from_the_start_and_outlive_the_rank() -> None:
    run = Run(usable=16)
    assert [value(run.samples(), "stepfence_worker_losses_total", cause=cause) for cause in ("lost", "left")] == [0, 0]
    for graceful in (False, True, False):
        run.sink.epoch_ended("r", graceful)
    run.sink.keep_ranks([])
    assert [value(run.samples(), "stepfence_worker_losses_total", cause=cause) for cause in ("lost", "left")] == [2, 1]


def test_a_histogram_counts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(observed)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(14.0)


async def test_a_scrape_reads_the_loop_and_parses() -> None:
    run = Run(usable=16)
    run.arrive("a", 1, 5, 3)
    run.drain()
    server = MetricsServer(lambda: collect(run.core, run.sink, "tiny"))
    await server.start("127.0.0.1:0")
    try:
        url = f"http://{server.address}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    finally:
        await server.close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = families["vllm:generation_tokens"].samples
    assert (sample.value, sample.labels) == (3.0, {"model_name": "tiny"})
    assert families["stepfence_step_rtt_seconds"].type == "histogram"
