"""Where scheduling differs from vLLM 0.25.1: one field for each decision, and the two sets of them (D10, D11)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fence(str, Enum):
    """Which frees wait for the acknowledgement of the newest step: every one, or (vLLM 0.25.1) only those beside KV
    transfers, of which there are none yet."""

    ALWAYS = "always"
    TRANSFERS = "transfers"


@dataclass(frozen=True, slots=True)
class SchedulingRules:
    """Decisions that are not settings: a service runs with DEFAULT. The default of each field is ours."""

    fence: Fence = Fence.ALWAYS
    # Blocks that wait for their fence would cover the need: True waits for them, False preempts.
    waits_for_fence: bool = True
    # Refuse on arrival what can never run, and clip lengths to what fits. False accepts it.
    refuse_infeasible: bool = True
    # A preempted request is admitted again only when the results of its earlier run are in.
    resume_settled: bool = True
    # A row that must yield a token and yields none is a wrong answer (contract rule 9). False takes its drafts for
    # rejected and computes it again.
    refuse_empty_rows: bool = True
    # A reset of the prefix cache succeeds although blocks wait for their fence, since no request holds them.
    reset_over_parked: bool = True
    # Requests that are set aside on a rank are tried there before the head of the queue: else a head that does not fit
    # waits for ever for the blocks that they hold (F46).
    serve_loaded_first: bool = True
    # Drafts are proposed by the scheduler. False: they come as DraftsProposed, and an admission of one token beside
    # decodes is padded to their width.
    proposes_drafts: bool = True
    # No row of a request before the result of its last one is in, and a block that a sampled token fills is cached when
    # the next row is scheduled. Else rows run ahead of results, and such a block is cached with the result.
    results_first: bool = False


DEFAULT = SchedulingRules()

# Known defects of that version are not copied. Its two modes differ in results_first: True is its synchronous one.
VLLM_0_25_1 = SchedulingRules(
    fence=Fence.TRANSFERS,
    waits_for_fence=False,
    refuse_infeasible=False,
    resume_settled=False,
    refuse_empty_rows=False,
    reset_over_parked=False,
    serve_loaded_first=False,
    proposes_drafts=False,
)
