"""The faults: each is a small change of one file of the core, made where its anchor stands.

An anchor must occur exactly once. When the core changes under one, `test_faults.py` says so: move the fault along.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CORE = Path("scheduler_svc/core")


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `anchor` in `file` (relative to the core) by `mutation`."""

    name: str
    file: str
    anchor: str
    mutation: str


FAULTS: tuple[Fault, ...] = (
    # --- fences ---
    Fault(
        "the fence is ignored",
        "kv/manager.py",
        "if self.deferring and request.last_fence > acked_fence:",
        "if False:",
    ),
    Fault(
        "a fence opens a step too early",
        "kv/manager.py",
        "self.parked.pop_due(acked_fence)",
        "self.parked.pop_due(acked_fence + 1)",
    ),
    Fault(
        "the fence is the request's own last step",
        "kv/manager.py",
        "ParkedFree(newest_fence, ",
        "ParkedFree(request.last_fence, ",
    ),
    Fault(
        "a victim is taken although enough is returning",
        "running.py",
        "if config.preempt_fenced is PreemptFenced.NEVER and need <=",
        "if False and need <=",
    ),
    Fault(
        "blocks someone waits for are given to others",
        "draft.py",
        "return self.rank.kv.pool.num_free - self.reserved_free",
        "return self.rank.kv.pool.num_free",
    ),
    Fault(
        "returning blocks are promised twice",
        "draft.py",
        "return self.rank.kv.pool.num_parked - self.reserved_parked",
        "return self.rank.kv.pool.num_parked",
    ),
    Fault(
        "a withdrawn victim keeps its claim on returning blocks",
        "draft.py",
        "self.reserved_parked -= parked",
        "pass",
    ),
    Fault(
        "somebody is admitted while another one waits for its fence",
        "scheduler.py",
        "if draft.preempted or draft.awaits_fence:",
        "if draft.preempted:",
    ),
    Fault("blocks are freed twice", "kv/manager.py", "self.pool.park(blocks)", "self.pool.release(blocks)"),
    Fault(
        "a parked block held by the living is counted as returning",
        "kv/block_pool.py",
        "            elif parked and parked.get(block) == count:\n                self.num_parked -= 1",
        "            elif False:\n                self.num_parked -= 1",
    ),
    # --- victims ---
    Fault("the first in running is the victim", "policy.py", "return running[-1]", "return running[0]"),
    Fault(
        "of equal victims the last one goes",
        "policy.py",
        "return max(running, key=_priority_key)",
        "return max(reversed(running), key=_priority_key)",
    ),
    Fault(
        "max_preemptions is ignored",
        "policy.py",
        "if max_preemptions is None or victim.num_shortage_preemptions < max_preemptions:",
        "if True:",
    ),
    Fault(
        "the needy request is another victim",
        "policy.py",
        "if r.num_shortage_preemptions < max_preemptions and r is not needy]",
        "if r.num_shortage_preemptions < max_preemptions]",
    ),
    Fault(
        "a victim goes to the end of the queue",
        "running.py",
        "state.queue.prepend(victim)",
        "state.queue.append(victim)",
    ),
    Fault("every skip ends the walk", "running.py", "_END_OF_WALK = -1", "_END_OF_WALK = 0"),
    Fault(
        "self-preemption does not end the step",
        "running.py",
        "return 0 if request.status is Status.RUNNING else _END_OF_WALK",
        "return 0",
    ),
    Fault(
        "watermark without the null block",
        "kv/manager.py",
        "int(watermark * num_blocks)",
        "int(watermark * (num_blocks - 1))",
    ),
    Fault(
        "only the first EOS id stops",
        "request.py",
        "frozenset((*event.eos_token_ids, *event.stop_token_ids))",
        "frozenset((*event.eos_token_ids[:1], *event.stop_token_ids))",
    ),
    Fault("passes are never given back", "admission.py", "request.num_passes = 0", "pass"),
    Fault(
        "a step that preempts admits somebody",
        "scheduler.py",
        "if draft.preempted or draft.awaits_fence:",
        "if draft.awaits_fence:",
    ),
    Fault(
        "withdraw forgets the digests",
        "draft.py",
        "self.rank.kv.unpublish(victim, self._published_before.pop(victim))",
        "self._published_before.pop(victim)",
    ),
    Fault("withdraw forgets the budget", "draft.py", "self.budget += self.num_tokens[index]", "pass"),
    Fault("withdraw forgets the drafts", "draft.py", "self.drafts.pop(victim, None)", "pass"),
    # --- queues ---
    Fault(
        "requests put aside come back in reverse",
        "queues.py",
        "for request in reversed(list(requests)):",
        "for request in list(requests):",
    ),
    Fault(
        "the waiting lane is served before the skipped one",
        "queues.py",
        "return self.waiting.head() if skipped is None else skipped",
        "return self.waiting.head() or skipped",
    ),
    # --- gates and limits ---
    Fault(
        "a row may start one slot beyond its table",
        "running.py",
        "if slots > request.capacity and",
        "if slots > request.capacity + 1 and",
    ),
    Fault(
        "a decode may run one slot beyond its table",
        "running.py",
        "and end + lookahead <= request.capacity",
        "and end + lookahead <= request.capacity + 1",
    ),
    Fault(
        "what exactly fits is refused a block",
        "kv/manager.py",
        "return max(0, self.blocks_for(num_slots) - len(hits)) <= room",
        "return max(0, self.blocks_for(num_slots) - len(hits)) < room",
    ),
    Fault(
        "free hits cost nothing",
        "kv/manager.py",
        "room = pool.num_free - pool.count_free(hits) -",
        "room = pool.num_free -",
    ),
    Fault(
        "the watermark holds up the first request",
        "kv/manager.py",
        "(self.watermark_blocks if others_run else 0)",
        "self.watermark_blocks",
    ),
    Fault(
        "feasibility counts a slot for the last token",
        "submission.py",
        "if needed > available:",
        "if needed >= available:",
    ),
    Fault(
        "feasibility forgets a slot",
        "submission.py",
        "max_tokens = min(max_tokens, available - num_prompt + 1)",
        "max_tokens = min(max_tokens, available - num_prompt + 2)",
    ),
    Fault(
        "length ends one token late",
        "stopping.py",
        "if request.num_tokens >= request.limit:",
        "if request.num_tokens > request.limit:",
    ),
    Fault("min_tokens is ignored", "stopping.py", "if request.num_tokens < request.min_length:", "if False:"),
    Fault(
        "a row is sent whose output nobody can use",
        "running.py",
        "if request.num_tokens + request.awaited - request.awaited_drafts >= request.limit:",
        "if False:",
    ),
    Fault(
        "a request too large for the rank is admitted",
        "admission.py",
        "if must_fit and state.blocks_needed(request) > rank.kv.num_usable:",
        "if False:",
    ),
    # --- prefix cache ---
    Fault(
        "a block is published before it is full",
        "kv/manager.py",
        "first, full = request.num_published, num_tokens // self.block_size",
        "first, full = request.num_published, (num_tokens + 1) // self.block_size",
    ),
    Fault(
        "a whole prompt may be hit",
        "kv/manager.py",
        "for index in range((request.num_tokens - 1) // self.block_size):",
        "for index in range(request.num_tokens // self.block_size):",
    ),
    Fault("the salt is not hashed", "kv/prefix_index.py", '(b"salt", cache_salt.encode())', '(b"salt", b"")'),
    Fault(
        "the parent is not hashed",
        "kv/prefix_index.py",
        "sha256(parent + tokens[start : start + size].tobytes())",
        "sha256(tokens[start : start + size].tobytes())",
    ),
    Fault(
        "a reused block keeps its digest",
        "kv/block_pool.py",
        "                self.index.remove(block)\n",
        "",
    ),
    Fault(
        "the head of a chain is evicted before its tail",
        "kv/block_pool.py",
        "for block in reversed(table):",
        "for block in table:",
    ),
    Fault(
        "a reset leaves the digests of parked blocks",
        "kv/block_pool.py",
        "        self.index.clear()\n",
        "        for block in self._cached:\n            self.index.remove(block)\n",
    ),
    Fault(
        "an empty answer leaves its block published",
        "settlement.py",
        "if expected and not row:",
        "if False:",
    ),
    # --- results ---
    Fault(
        "a late result counts as progress",
        "settlement.py",
        "        if request.run != run:\n            if expected:",
        "        if request.run != run and request.status in FINISHED:\n            if expected:",
    ),
    Fault(
        "a late result stays awaited",
        "settlement.py",
        "    request.awaited -= expected\n    request.awaited_drafts -= expected - 1\n    for index",
        "    for index",
    ),
    Fault(
        "rejected drafts count as computed",
        "settlement.py",
        "request.settled += n - (expected - len(row))",
        "request.settled += n",
    ),
    Fault(
        "results from before a reset are kept",
        "scheduler.py",
        "request.reset_mark = request.run",
        "pass",
    ),
    Fault(
        "results of an ended epoch are taken",
        "settlement.py",
        "if rank is None or rank.epoch != event.epoch:",
        "if rank is None:",
    ),
    Fault(
        "a step may be answered out of order",
        "settlement.py",
        "if record is None or record.step_seq != event.step_seq:",
        "if record is None:",
    ),
    Fault(
        "a row that must yield a token may yield none",
        "settlement.py",
        "least=1 if state.config.refuse_empty_rows else 0",
        "least=0",
    ),
    Fault(
        "a request resumes while its results are in flight",
        "admission.py",
        "if state.config.resume_settled and",
        "if False and",
    ),
    Fault(
        "a row is reused at once",
        "rank.py",
        "self.released_rows.append(request.row)",
        "self.free_rows.append(request.row)",
    ),
    Fault(
        "the window is one step too deep",
        "inflight.py",
        "return len(self._records) >= self.depth",
        "return len(self._records) > self.depth",
    ),
    # --- throttle, ranks, time ---
    Fault(
        "the capacity flag is inverted",
        "admission.py",
        "rank.capacity_bound = len(queue.waiting) > 0",
        "rank.capacity_bound = len(queue.waiting) == 0",
    ),
    Fault(
        "a deferring step touches the capacity flag",
        "admission.py",
        "    if not defer_prefills:\n        rank.capacity_bound",
        "    if True:\n        rank.capacity_bound",
    ),
    Fault("the throttle starves chunks alone", "throttle.py", "and num_decodes > 0", ""),
    Fault(
        "a request is passed over for ever",
        "admission.py",
        "request.num_passes += 1",
        "pass",
    ),
    Fault(
        "a request is left to a rank that cannot hold it",
        "admission.py",
        "and state.blocks_needed(request) <= other.kv.num_usable",
        "",
    ),
    Fault(
        "a draining rank takes nobody back",
        "scheduler.py",
        "(not rank.is_draining or bool(rank.returning))",
        "not rank.is_draining",
    ),
    Fault(
        "an empty rank leaves a suspect to the one that waits for it",
        "admission.py",
        "        if keeper is not None:\n            keeper.reserved_for = None\n        return False",
        "        return keeper is not None",
    ),
    Fault("suspects run beside others", "request.py", "return self.fruitless_epochs >= 2 and", "return False and"),
    Fault(
        "every lost epoch is held against a request",
        "settlement.py",
        "request.fruitless_epochs + 1 if request.num_tokens == request.tokens_at_loss else 1",
        "request.fruitless_epochs + 1",
    ),
    Fault(
        "orphans come back in reverse", "settlement.py", "for request in reversed(orphans):", "for request in orphans:"
    ),
    Fault(
        "a lost rank leaves its results awaited",
        "settlement.py",
        "    for request in touched:\n        request.awaited = request.awaited_drafts = 0\n",
        "",
    ),
    Fault(
        "time lost with a worker counts from when it is noticed",
        "lifecycle.py",
        'max(rank.quiet_since, victim.run_since) if cause == "rank_lost" else state.now',
        "state.now",
    ),
    Fault(
        "a deadline passes one tick late",
        "scheduler.py",
        "is not None and first <= state.now:",
        "is not None and first < state.now:",
    ),
    Fault("a live id is accepted again", "submission.py", "if event.request_id in state.requests:", "if False:"),
)
