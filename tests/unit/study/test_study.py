"""The study of preemption: its traces, its clock and its sums."""

from __future__ import annotations

from array import array
from dataclasses import fields
from pathlib import Path

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.simulation import study
from scheduler_svc.simulation.cost_model import CostModel
from scheduler_svc.simulation.study import Measures, joint_need, measure, median_of, quantile
from scheduler_svc.simulation.virtual_run import VirtualRun
from scheduler_svc.simulation.workload import END_TOKEN, TracedRequest, Workload, output_token

SMALL = Workload(num_requests=60, rate=40.0, period_s=1.0, prompt_median=60, output_median=40, output_max=200)
COST = CostModel()


def run(config: SchedulerConfig, num_blocks: int, trace: list[TracedRequest]) -> VirtualRun:
    virtual = VirtualRun(config, num_blocks, trace, COST)
    virtual.run()
    return virtual


# --- traces -------------------------------------------------------------------------------------------------------


def test_a_seed_gives_a_trace_and_another_seed_another() -> None:
    assert SMALL.trace(1) == SMALL.trace(1)
    assert SMALL.trace(1) != SMALL.trace(2)


def test_traces_keep_their_bounds_and_medians() -> None:
    workload = Workload(num_requests=2000)
    trace = workload.trace(5)
    outputs = sorted(request.num_output for request in trace)
    assert workload.output_median * 0.8 < outputs[1000] < workload.output_median * 1.2
    assert outputs[0] >= 1 and outputs[-1] <= workload.output_max
    prompts = [len(request.prompt) for request in trace]
    assert min(prompts) >= 1 and max(prompts) <= workload.prompt_max + workload.prefix_tokens
    assert all(END_TOKEN not in request.prompt for request in trace)


def test_a_share_of_the_prompts_begins_alike() -> None:
    workload = Workload(num_requests=1000)
    starts = [request.prompt[:50].tobytes() for request in workload.trace(3) if len(request.prompt) >= 256]
    common = [start for start in set(starts) if starts.count(start) > 1]
    assert len(common) == workload.num_prefixes
    assert 400 < sum(starts.count(start) for start in common) < 600


def test_arrivals_keep_the_rate_and_crowd_in_the_bursts() -> None:
    workload = Workload(num_requests=4000, rate=20.0)
    arrivals = [request.arrival_s for request in workload.trace(7)]
    assert arrivals == sorted(arrivals)
    assert 180 < arrivals[-1] < 220
    in_bursts = sum(at % workload.period_s >= 8.0 for at in arrivals)
    # A fifth of the time at three times the calm rate: 3 of 7.
    assert 0.38 < in_bursts / len(arrivals) < 0.48
    assert {request.arrival_s for request in Workload(rate=0.0, num_requests=9).trace(1)} == {0.0}


def test_no_output_token_ends_a_request() -> None:
    assert END_TOKEN not in {output_token(number, index) for number in range(50) for index in range(500)}


# --- virtual time -------------------------------------------------------------------------------------------------


def lone_request(num_prompt: int, num_output: int) -> list[TracedRequest]:
    return [TracedRequest("r0", 1.0, array("i", range(100, 100 + num_prompt)), num_output, 100)]


def test_a_lone_request_sees_exactly_what_its_steps_take() -> None:
    virtual = run(SchedulerConfig(), 1000, lone_request(40, 3))
    log = virtual.logs[0]
    prefill_s = COST.step_s(40, 0, 40)
    assert log.first_token_s == pytest.approx(1.0 + prefill_s + 2 * COST.link_s)
    # Two steps are in flight: a step begins when the one before ends, whatever the link takes.
    assert log.gaps_s == pytest.approx([COST.step_s(0, 1, 41 + i) for i in range(3)])
    assert log.num_tokens == 4
    assert log.ended_s == log.last_token_s


def test_with_one_step_in_flight_every_gap_holds_the_way_there_and_back() -> None:
    virtual = run(SchedulerConfig(max_inflight_steps=1), 1000, lone_request(40, 3))
    assert virtual.logs[0].gaps_s == pytest.approx([COST.step_s(0, 1, 41 + i) + 2 * COST.link_s for i in range(3)])


def test_the_terms_of_the_cost_model_add_up() -> None:
    cost = CostModel(fixed_s=1.0, per_prefill_token_s=0.1, per_decode_row_s=0.01, per_context_token_s=0.001, link_s=9.0)
    assert cost.step_s(3, 4, 5) == pytest.approx(1.345)


@pytest.mark.parametrize("variant", study.VARIANTS)
def test_every_client_gets_all_its_tokens_whatever_the_pool(variant: str) -> None:
    trace = SMALL.trace(4)
    need = joint_need(SMALL, 4, COST)
    virtual = run(study.VARIANTS[variant], need // 2, trace)
    for log, request in zip(virtual.logs, trace, strict=True):
        assert log.num_tokens == min(request.num_output + 1, request.max_tokens)
        assert log.ended_s is not None
        assert log.first_token_s is not None
        assert log.arrival_s < log.first_token_s <= log.last_token_s
    assert virtual.scheduler.state.ranks["rank"].kv.pool.num_free == need // 2


def test_a_refused_request_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="r0 was refused"):
        run(SchedulerConfig(), 3, lone_request(40, 3))


# --- sums ---------------------------------------------------------------------------------------------------------


def test_the_joint_need_is_just_enough() -> None:
    need = joint_need(SMALL, 4, COST)
    assert run(study.VARIANTS["default"], need, SMALL.trace(4)).totals.num_preemptions == 0
    assert run(study.VARIANTS["default"], need * 8 // 10, SMALL.trace(4)).totals.num_preemptions > 0


def test_waiting_for_the_fence_preempts_less_than_not_waiting() -> None:
    pool = joint_need(SMALL, 4, COST) // 2
    ours = measure(run(study.VARIANTS["default"], pool, SMALL.trace(4)))
    cascading = measure(run(study.VARIANTS["reference, fenced"], pool, SMALL.trace(4)))
    assert 0 < ours.preemptions < cascading.preemptions / 3
    assert ours.recomputed < cascading.recomputed
    assert ours.most_preemptions <= 3


@pytest.mark.parametrize("percent,expected", [(1, 1.0), (50, 5.0), (51, 6.0), (99, 10.0), (100, 10.0)])
def test_quantiles(percent: int, expected: float) -> None:
    assert quantile([float(v) for v in (3, 1, 2, 10, 9, 8, 7, 6, 5, 4)], percent) == expected


def test_the_quantile_of_nothing_is_none() -> None:
    assert quantile([], 50) is None


def test_medians_are_of_the_seeds_that_have_a_value() -> None:
    def measures(value: float | None) -> Measures:
        return Measures(**{f.name: value for f in fields(Measures)})  # type: ignore[arg-type]

    medians = median_of([measures(None), measures(1.0), measures(5.0), measures(2.0)])
    assert {getattr(medians, f.name) for f in fields(Measures)} == {2.0}
    assert median_of([measures(None)]).goodput is None


def test_the_command_writes_plots_and_tells_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(study.TRACES, "small", SMALL)
    arguments = ["--out", str(tmp_path / "plots"), "--traces", "small", "--seeds", "2", "--pools", "100,50"]
    assert study.main(arguments) == 0
    told = capsys.readouterr().out
    assert (tmp_path / "plots" / "preemption-small.png").read_bytes().startswith(b"\x89PNG")
    rows = [line for line in told.splitlines() if line.startswith("| 100 %") or line.startswith("| 50 %")]
    assert len(rows) == 2 * len(study.COMPARED)
    assert all(len(row.split("|")) == len(told.splitlines()[3].split("|")) for row in rows)
    assert study.main(arguments) == 0
    assert capsys.readouterr().out == told
