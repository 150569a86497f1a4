"""The default configuration against the reference's settings when KV memory runs short, in numbers.

    python -m scheduler_svc.simulation.study --out docs/plots [--seeds 5] [--traces bursty,backlog] [--variants ...]

For every trace and seed the *joint need* is measured first: the most blocks that are in use at once when the pool is
never short. Then the same trace runs on pools of 100 to 40 % of it under each variant. Tables go to standard output as
Markdown, plots (they need matplotlib) into the folder; every number is the median over the seeds. Nothing here is
random but the traces: the same command gives the same numbers."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rules import Fence
from scheduler_svc.simulation.cost_model import CostModel
from scheduler_svc.simulation.virtual_run import RequestLog, VirtualRun
from scheduler_svc.simulation.workload import Workload

_BASE = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 4096, "block_size": 16}
_DEFAULT = SchedulerConfig(**_BASE)  # type: ignore[arg-type]
_REFERENCE = SchedulerConfig.reference(**_BASE)

VARIANTS: dict[str, SchedulerConfig] = {
    "default": _DEFAULT,
    "reference": _REFERENCE,
    # What the reference does where freed blocks must wait for their fence.
    "reference, fenced": _REFERENCE.with_rules(fence=Fence.ALWAYS),
    # One decision taken away or added each.
    "default, not fenced": _DEFAULT.with_rules(fence=Fence.TRANSFERS),
    "default, no cap": replace(_DEFAULT, max_preemptions=None),
    # The default has 2 %.
    "default, watermark 0": replace(_DEFAULT, watermark=0.0),
    "default, watermark 1 %": replace(_DEFAULT, watermark=0.01),
    "default, watermark 5 %": replace(_DEFAULT, watermark=0.05),
    "default, watermark 10 %": replace(_DEFAULT, watermark=0.1),
}
COMPARED = ("default", "reference", "reference, fenced")

TRACES: dict[str, Workload] = {
    # Bursts above what the worker can do, calm in between.
    "bursty": Workload(num_requests=600, rate=20.0),
    # Everything at once: as many run as the pool holds, to the end.
    "backlog": Workload(num_requests=400, rate=0.0),
}

POOLS = (100, 90, 80, 70, 60, 50, 40)
# Blocks of a pool that is never short.
_PLENTY = 1 << 17


@dataclass(frozen=True, slots=True)
class Measures:
    """One run in numbers. Times in seconds, None when no request is of the kind."""

    # Output tokens delivered per second, from the first arrival to the last end.
    goodput: float
    # Share of dispatched tokens that had been dispatched before.
    recomputed: float
    preemptions: float
    # Of the request that was preempted most often.
    most_preemptions: float
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    # Of requests that were preempted, and of those that never were.
    ttft_p99_preempted: float | None
    ttft_p99_untouched: float | None
    gap_p99_preempted: float | None
    gap_p99_untouched: float | None
    # Longest gap of each such request.
    pause_p99_preempted: float | None
    pause_p99_untouched: float | None


def measure(run: VirtualRun) -> Measures:
    """The numbers of a run that is over."""
    logs, totals = run.logs, run.totals
    preempted = [log for log in logs if log.num_preemptions]
    untouched = [log for log in logs if not log.num_preemptions]
    return Measures(
        goodput=sum(log.num_tokens for log in logs) / run.end_s,
        recomputed=totals.num_recomputed_tokens / totals.num_computed_tokens,
        preemptions=totals.num_preemptions / len(logs),
        most_preemptions=max(log.num_preemptions for log in logs),
        ttft_p50=quantile(_ttfts(logs), 50),
        ttft_p99=quantile(_ttfts(logs), 99),
        gap_p50=quantile(_gaps(logs), 50),
        gap_p99=quantile(_gaps(logs), 99),
        ttft_p99_preempted=quantile(_ttfts(preempted), 99),
        ttft_p99_untouched=quantile(_ttfts(untouched), 99),
        gap_p99_preempted=quantile(_gaps(preempted), 99),
        gap_p99_untouched=quantile(_gaps(untouched), 99),
        pause_p99_preempted=quantile(_pauses(preempted), 99),
        pause_p99_untouched=quantile(_pauses(untouched), 99),
    )


def _ttfts(logs: list[RequestLog]) -> list[float]:
    return [log.first_token_s - log.arrival_s for log in logs if log.first_token_s is not None]


def _gaps(logs: list[RequestLog]) -> list[float]:
    return [gap for log in logs for gap in log.gaps_s]


def _pauses(logs: list[RequestLog]) -> list[float]:
    return [max(log.gaps_s) for log in logs if log.gaps_s]


def quantile(values: list[float], percent: int) -> float | None:
    """The smallest value that `percent` of the values do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def joint_need(workload: Workload, seed: int, cost: CostModel) -> int:
    """The most blocks in use at once when the pool is never short."""
    run = VirtualRun(_DEFAULT, _PLENTY, workload.trace(seed), cost)
    run.run()
    return run.most_held


@dataclass(frozen=True, slots=True)
class Row:
    """One variant on one size of pool: medians over the seeds."""

    variant: str
    pool: int
    measures: Measures


def study(workload: Workload, variants: list[str], pools: tuple[int, ...], seeds: int) -> Iterator[Row]:
    """Every variant on every pool."""
    cost = CostModel()
    needs = {seed: joint_need(workload, seed, cost) for seed in range(seeds)}
    for pool in pools:
        for variant in variants:
            measured = []
            for seed, need in needs.items():
                run = VirtualRun(VARIANTS[variant], need * pool // 100, workload.trace(seed), cost)
                run.run()
                measured.append(measure(run))
            yield Row(variant, pool, median_of(measured))


def median_of(measured: list[Measures]) -> Measures:
    """Field by field, of those that have a value."""
    medians: dict[str, float | None] = {}
    for name in (f.name for f in fields(Measures)):
        values = [value for m in measured if (value := getattr(m, name)) is not None]
        medians[name] = statistics.median(values) if values else None
    return Measures(**medians)  # type: ignore[arg-type]


# --- telling ------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "pool",
    "configuration",
    "tokens/s",
    "recomputed",
    "preemptions per request (most)",
    "TTFT p50 / p99",
    "gap p50 / p99",
    "TTFT p99 preempted / untouched",
    "gap p99 preempted / untouched",
    "longest gap of a request, p99, preempted / untouched",
)


def table(rows: list[Row]) -> str:
    """Markdown. TTFT in seconds, gaps between tokens in milliseconds."""
    lines = [" | ".join(_COLUMNS), " | ".join("---" for _ in _COLUMNS)]
    for row in rows:
        m = row.measures
        cells = (
            f"{row.pool} %",
            row.variant,
            f"{m.goodput:,.0f}",
            f"{100 * m.recomputed:.1f} %",
            f"{m.preemptions:.2f} ({m.most_preemptions:.0f})",
            f"{_seconds(m.ttft_p50)} / {_seconds(m.ttft_p99)}",
            f"{_milliseconds(m.gap_p50)} / {_milliseconds(m.gap_p99)}",
            f"{_seconds(m.ttft_p99_preempted)} / {_seconds(m.ttft_p99_untouched)}",
            f"{_milliseconds(m.gap_p99_preempted)} / {_milliseconds(m.gap_p99_untouched)}",
            f"{_milliseconds(m.pause_p99_preempted)} / {_milliseconds(m.pause_p99_untouched)}",
        )
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.0f}"


# Field of Measures, title, factor.
_PANELS = (
    ("goodput", "output tokens per second", 1.0),
    ("recomputed", "recomputed / computed tokens, %", 100.0),
    ("preemptions", "preemptions per request", 1.0),
    ("ttft_p99", "time to first token, p99, s", 1.0),
    ("gap_p99", "between tokens, p99, ms", 1000.0),
    ("pause_p99_preempted", "longest gap of a preempted request, p99, ms", 1000.0),
)
_MARKERS = "osd^v"


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Six panels over the size of the pool."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    variants = list(dict.fromkeys(row.variant for row in rows))
    for axes, (name, label, factor) in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        for variant, marker in zip(variants, _MARKERS, strict=False):
            points = [(row.pool, getattr(row.measures, name)) for row in rows if row.variant == variant]
            points = [(pool, value * factor) for pool, value in points if value is not None]
            axes.plot([p for p, _ in points], [v for _, v in points], marker=marker, label=variant, markersize=4)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("pool, % of joint need", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=9, loc="lower left")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the plots")
    parser.add_argument("--seeds", type=int, default=5, help="traces of each kind")
    parser.add_argument("--traces", default=",".join(TRACES), help="which, with commas")
    parser.add_argument("--variants", default=";".join(COMPARED), help="which configurations, with semicolons")
    parser.add_argument("--pools", default=",".join(map(str, POOLS)), help="percent of the joint need, with commas")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    pools = tuple(map(int, options.pools.split(",")))
    for name in options.traces.split(","):
        rows = list(study(TRACES[name], options.variants.split(";"), pools, options.seeds))
        print(f"\n### {name}\n\n{table(rows)}", flush=True)
        plot(rows, f"{name} trace, medians of {options.seeds} seeds", options.out / f"preemption-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
