"""The step trace of docs/architecture.md is what the core does."""

from __future__ import annotations

from array import array
from pathlib import Path

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import AbortCause, RankJoined, RequestAborted, RequestArrived, StepAcked, Tick
from scheduler_svc.core.output import SchedulerOutput
from scheduler_svc.core.scheduler import Scheduler

_DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"
_RANK = "worker"


def _describe(step: SchedulerOutput) -> str:
    parts = []
    for new in step.new_requests:
        blocks = " ".join(map(str, new.block_table))
        parts.append(f"new {new.request_id} in row {new.row} with {len(new.token_ids)} tokens and blocks {blocks}")
    tokens = " tokens" if step.num_tokens else ""
    parts.append(f"rows {list(step.rows)} compute {list(step.num_tokens)}{tokens}")
    parts += [f"finished {request_id}" for request_id in step.finished_request_ids]
    for free in step.deferred_frees:
        parts.append(f"parked {' '.join(map(str, free.block_ids))} behind fence {free.fence_seq}")
    return f"  step {step.step_seq}, fence {step.fence_seq}: " + "; ".join(parts)


def _play() -> list[str]:
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64))
    scheduler.handle(Tick(0.0))
    scheduler.handle(RankJoined(_RANK, epoch=1, num_blocks=8, max_model_len=64, vocab_size=1000))
    lines: list[str] = []

    def steps() -> None:
        while (step := scheduler.schedule(_RANK)) is not None:
            lines.append(_describe(step))

    def result(step_seq: int, *sampled: int) -> None:
        lines.append(f"result of step {step_seq}: {' '.join(map(str, sampled)) or 'nothing sampled'}")
        scheduler.handle(StepAcked(_RANK, 1, step_seq, list(sampled)))
        steps()

    lines.append("A arrives with 9 tokens")
    scheduler.handle(RequestArrived("A", 1, array("i", range(9)), max_tokens=10))
    steps()
    result(1, 17)
    lines.append("A's client leaves")
    scheduler.handle(RequestAborted("A", AbortCause.CLIENT_GONE))
    steps()
    result(2, 52)
    result(3, 60)
    result(4)
    return lines


def test_the_trace_of_the_architecture_document_is_what_happens() -> None:
    text = _DOCUMENT.read_text(encoding="utf-8")
    told = text.split("<!-- trace:start -->\n```\n")[1].split("```\n<!-- trace:end -->")[0]
    assert told.splitlines() == _play()
