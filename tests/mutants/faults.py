"""The faults: each is a small change of one function of the core.

A fault names its function and the expression or statements that it replaces there, as Python reads them: comments, line
breaks and moves within the function do not matter. The anchor must occur exactly once in the function; where the core
changes so that it does not, `test_faults.py` fails, and the fault must be adapted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `anchor` in `where` by `mutation`.

    where: "module:Class.method" or "module:function", the module relative to the core; "module:" for its top level.
    anchor, mutation: both one expression, or both some statements ("pass" to leave the anchor out)."""

    name: str
    where: str
    anchor: str
    mutation: str


FAULTS: tuple[Fault, ...] = (
    # --- fences ---
    Fault(
        "the fence is ignored",
        "kv.manager:KvManager.free",
        "self.deferring and run.last_fence > acked_fence",
        "False",
    ),
    Fault(
        "a fence opens a step too early",
        "kv.manager:KvManager.release_due",
        "self.parked.pop_due(acked_fence)",
        "self.parked.pop_due(acked_fence + 1)",
    ),
    Fault(
        "the fence is the request's own last step",
        "kv.manager:KvManager.free",
        "newest_fence if waits else 0",
        "run.last_fence if waits else 0",
    ),
    Fault(
        "a victim is taken although enough is returning",
        "running:_make_room",
        "state.config.rules.waits_for_fence",
        "False",
    ),
    Fault(
        "blocks someone waits for are given to others",
        "plan:StepPlan.num_free_blocks",
        "self.rank.kv.pool.num_free - self.reserved_free",
        "self.rank.kv.pool.num_free",
    ),
    Fault(
        "returning blocks are promised twice",
        "plan:StepPlan.num_returning_blocks",
        "self.rank.kv.pool.num_parked - self.reserved_parked",
        "self.rank.kv.pool.num_parked",
    ),
    Fault(
        "a withdrawn victim keeps its claim on returning blocks",
        "plan:StepPlan.withdraw",
        "self.reserved_parked -= parked",
        "pass",
    ),
    Fault(
        "somebody is admitted while another one waits for its fence",
        "scheduler:Scheduler._may_admit",
        "plan.preempted or plan.awaits_fence",
        "plan.preempted",
    ),
    Fault(
        "blocks are freed twice",
        "kv.manager:KvManager._give_back",
        "self.pool.park",
        "self.pool.release",
    ),
    Fault(
        "a parked block held by the living is counted as returning",
        "kv.block_pool:BlockPool.touch",
        "parked and parked.get(block) == count",
        "False",
    ),
    # --- victims ---
    Fault(
        "the first in running is the victim",
        "policies.fcfs:FcfsPolicy.worst",
        "next(reversed(running))",
        "next(iter(running))",
    ),
    Fault(
        "of equal victims the last one goes",
        "policies.priority:PriorityPolicy.worst",
        "max(running, key=_priority_key)",
        "max(reversed(running), key=_priority_key)",
    ),
    Fault(
        "max_preemptions is ignored",
        "policies.base:SchedulingPolicy.victim",
        "most is None or victim.request.account.num_shortage_preemptions < most",
        "True",
    ),
    Fault(
        "the needy request is another victim",
        "policies.base:SchedulingPolicy.victim",
        "r.request.account.num_shortage_preemptions < most and r is not needy",
        "r.request.account.num_shortage_preemptions < most",
    ),
    Fault(
        "a victim goes to the end of the queue",
        "running:_make_room",
        "state.queue.prepend",
        "state.queue.append",
    ),
    Fault(
        "every skip ends the pass",
        "running:run",
        "stops",
        "plan.runs[-1:] != [run]",
    ),
    Fault(
        "self-preemption does not end the step",
        "running:_consider",
        "return run.ended",
        "return False",
    ),
    Fault(
        "watermark without the null block",
        "kv.manager:KvManager.__init__",
        "watermark * num_blocks",
        "watermark * (num_blocks - 1)",
    ),
    Fault(
        "only the first EOS id stops",
        "request:Request.__init__",
        "event.eos_token_ids",
        "event.eos_token_ids[:1]",
    ),
    Fault(
        "passes are never given back",
        "admission:_admit",
        "request.ticket.num_passes = 0",
        "pass",
    ),
    Fault(
        "a step that preempts admits somebody",
        "scheduler:Scheduler._may_admit",
        "plan.preempted or plan.awaits_fence",
        "plan.awaits_fence",
    ),
    Fault(
        "withdraw forgets the block hashes",
        "plan:StepPlan.withdraw",
        "self.rank.kv.uncache_blocks(victim, self._cached_before.pop(victim))",
        "self._cached_before.pop(victim)",
    ),
    Fault(
        "withdraw forgets the budget",
        "plan:StepPlan.withdraw",
        "self.tokens_left += self.num_tokens[index]",
        "pass",
    ),
    Fault(
        "withdraw forgets the resources",
        "plan:StepPlan.withdraw",
        "withdraw(self, victim)",
        "pass",
    ),
    Fault(
        "a policy cannot keep a request out",
        "admission:_refusal_here",
        "return state.policy.gate(plan, request)",
        "return None",
    ),
    Fault(
        "requests behind the end of a pass give an old reason",
        "views:_why_not_scheduled",
        "rank.stopped is not None and not had_row and account.skipped_in_pass != rank.last_pass",
        "False",
    ),
    Fault(
        "a victim keeps the tokens that its row may yield",
        "resources.speculation:Speculation.withdraw",
        "del plan.may_yield[run]",
        "pass",
    ),
    Fault(
        "drafts of a victim are lost when its row is withdrawn",
        "resources.speculation:Speculation.withdraw",
        "self._give(run.request, drafts)",
        "pass",
    ),
    Fault(
        "drafts outlive the run",
        "resources.speculation:Speculation.on_run_end",
        "self.drafts.pop(run.request, None)",
        "pass",
    ),
    Fault(
        "what is withdrawn first was taken first",
        "resources.container:Resources.__init__",
        "self._answers('withdraw')[::-1]",
        "self._answers('withdraw')",
    ),
    Fault(
        "resources are asked about plain decodes only",
        "plan:StepPlan.take",
        "run.special",
        "not run.special",
    ),
    Fault(
        "a resource cannot shorten a row",
        "rows:size_row",
        "n = clipped",
        "pass",
    ),
    Fault(
        "a request starts before its grammar is there",
        "resources.grammar:Grammar.gate",
        "request.request_id in self._pending",
        "False",
    ),
    # --- runs that are set aside, and holds ---
    Fault(
        "blocks are freed although something still writes there",
        "lifecycle:_end_run",
        "keeper is not None",
        "False",
    ),
    Fault(
        "a lost rank leaves requests blocked",
        "lifecycle:abandon",
        "unblock(run.request)",
        "pass",
    ),
    Fault(
        "a draining rank keeps its loads",
        "scheduler:Scheduler._drain_rank",
        "for run in list(rank.set_aside):\n    lifecycle.abandon(state, rank, run, RunEnd.ABANDONED)",
        "pass",
    ),
    Fault(
        "a rank admits what another one holds blocks for",
        "admission:_refusal_here",
        "request.run is not None and request.run.is_set_aside and request.run not in rank.set_aside",
        "False",
    ),
    Fault(
        "a loaded request waits behind the head",
        "admission:run",
        "state.config.rules.serve_loaded_first",
        "False",
    ),
    Fault(
        "a run that got nothing keeps its blocks",
        "admission:_try_admit",
        "run is not None and run.is_set_aside and not run.settled",
        "False",
    ),
    Fault(
        "what was loaded is forgotten at admission",
        "admission:_try_admit",
        "hits, start, extension = (run.blocks, run.settled, None)",
        "hits, start, extension = (run.blocks, 0, None)",
    ),
    Fault(
        "an end is announced to a worker that never had the request",
        "lifecycle:finish",
        "rank is not None and run is not None and run.row >= 0",
        "rank is not None",
    ),
    Fault(
        "a step that only starts a load is not sent",
        "plan:StepPlan.build",
        "self.runs or rank.has_news or self.must_send",
        "self.runs or rank.has_news",
    ),
    Fault(
        "blocks of a hold are free at once",
        "kv.manager:KvManager.let_go",
        "newest_fence if waits else 0",
        "0",
    ),
    Fault(
        "an admission takes blocks that must stay free",
        "admission:_fits",
        "sum((margin(plan, request) for margin in state.resources.margins))",
        "0",
    ),
    # --- queues ---
    Fault(
        "requests put aside come back in reverse",
        "policies.fcfs:FcfsLane.put_back",
        "reversed(list(requests))",
        "list(requests)",
    ),
    Fault(
        "the waiting lane is served before the skipped one",
        "policies.fcfs:FcfsQueue.head",
        "self.waiting.head() if skipped is None else skipped",
        "self.waiting.head() or skipped",
    ),
    # --- gates and limits ---
    Fault(
        "a row may start one slot beyond its table",
        "running:_consider",
        "run.capacity",
        "run.capacity + 1",
    ),
    Fault(
        "a decode may run one slot beyond its table",
        "kv.manager:KvManager.grow",
        "run.capacity - self.lookahead",
        "run.capacity - self.lookahead + 1",
    ),
    Fault(
        "a decode may run beyond the last token",
        "kv.manager:KvManager.grow",
        "run.request.limit - 1",
        "run.request.limit",
    ),
    Fault(
        "drafts do not make a run special",
        "resources.speculation:Speculation._give",
        "run.mark(self.bit)",
        "pass",
    ),
    Fault(
        "a full block is not cached when its row is planned",
        "running:run",
        "end < run.cache_at or run.request.num_tokens < run.cache_at",
        "True",
    ),
    Fault(
        "a run without a table gets a row",
        "kv.manager:KvManager._empty",
        "run.capacity = run.plain_until = 0",
        "run.capacity = 0",
    ),
    Fault(
        "what exactly fits is refused a block",
        "kv.manager:KvManager.fits_admission",
        "max(0, self.blocks_for(num_slots) - len(hits)) <= room - reserved",
        "max(0, self.blocks_for(num_slots) - len(hits)) < room - reserved",
    ),
    Fault(
        "free hits cost nothing",
        "kv.manager:KvManager.fits_admission",
        "pool.num_free - pool.count_free(hits)",
        "pool.num_free",
    ),
    Fault(
        "the watermark holds up the first request",
        "kv.manager:KvManager.fits_admission",
        "self.watermark_blocks if others_run else 0",
        "self.watermark_blocks",
    ),
    Fault(
        "feasibility counts a slot for the last token",
        "submission:_fit",
        "needed > available",
        "needed >= available",
    ),
    Fault(
        "feasibility forgets a slot",
        "submission:_fit",
        "available - num_prompt + 1",
        "available - num_prompt + 2",
    ),
    Fault(
        "length ends one token late",
        "stopping:check",
        "request.num_tokens >= request.limit",
        "request.num_tokens > request.limit",
    ),
    Fault(
        "min_tokens is ignored",
        "stopping:check",
        "request.num_tokens < request.min_length",
        "False",
    ),
    Fault(
        "a row is sent whose output nobody can use",
        "running:_must_wait",
        "request.num_tokens + request.awaited - request.awaited_optional >= request.limit",
        "False",
    ),
    Fault(
        "a request too large for the rank is admitted",
        "admission:_refusal_here",
        "must_fit and state.blocks_needed(request) > rank.kv.num_usable",
        "False",
    ),
    Fault(
        "the threshold for long prefills is ignored",
        "rows:size_row",
        "0 < config.long_prefill_token_threshold < n",
        "False",
    ),
    Fault(
        "a running row may pass the end of its sequence",
        "rows:size_row",
        "min(n, plan.tokens_left, request.row_limit - start)",
        "min(n, plan.tokens_left)",
    ),
    Fault(
        "a prompt is cut although prefills are not chunked",
        "rows:size_row",
        "not config.enable_chunked_prefill and n > plan.tokens_left",
        "False",
    ),
    Fault(
        "a row that stands alone is padded",
        "resources.speculation:Speculation.want",
        "len(plan.runs) > len(plan.admitted)",
        "True",
    ),
    Fault(
        "padded drafts may be cut",
        "resources.speculation:Speculation.want",
        "1 + self._width > plan.tokens_left or start + 1 + self._width > plan.longest",
        "False",
    ),
    Fault(
        "a request that is put aside stops the pass",
        "admission:run",
        "verdict.puts_aside",
        "False",
    ),
    Fault(
        "the message of a step has no limit",
        "plan:StepPlan.has_bytes_for",
        "not self.admitted or self._entry_bytes(request, num_slots) <= self.bytes_left",
        "True",
    ),
    Fault(
        "a request that alone exceeds a message never starts",
        "plan:StepPlan.has_bytes_for",
        "not self.admitted",
        "False",
    ),
    Fault(
        "more ends are announced than a message has room for",
        "rank:RankState.take_dropped",
        "max(0, self.num_rows - len(self.preempted))",
        "len(self.finished)",
    ),
    Fault(
        "an id is used again before its end is announced",
        "plan:StepPlan.has_bytes_for",
        "len(self.rank.preempted) + len(self.rank.finished) > self.rank.num_rows",
        "False",
    ),
    # --- prefix cache ---
    Fault(
        "a block is cached before it is full",
        "kv.manager:KvManager.cache_blocks",
        "num_tokens // self.block_size",
        "(num_tokens + 1) // self.block_size",
    ),
    Fault(
        "a whole prompt may be hit",
        "kv.manager:KvManager.find_hits",
        "request.num_tokens - 1",
        "request.num_tokens",
    ),
    Fault(
        "the salt is not hashed",
        "kv.prefix_index:root_hash",
        "cache_salt.encode()",
        "b''",
    ),
    Fault(
        "the parent is not hashed",
        "kv.prefix_index:HashChain.block_hash",
        "parent + tokens[start:start + size].tobytes()",
        "tokens[start:start + size].tobytes()",
    ),
    Fault(
        "a reused block keeps its block hash",
        "kv.block_pool:BlockPool.take",
        "self.index.remove(block)",
        "pass",
    ),
    Fault(
        "the head of a chain is evicted before its tail",
        "kv.block_pool:BlockPool.release",
        "reversed(table)",
        "table",
    ),
    Fault(
        "a reset leaves the block hashes of parked blocks",
        "kv.block_pool:BlockPool.forget_cached",
        "self.index.clear()",
        "for block in self._cached:\n    self.index.remove(block)",
    ),
    Fault(
        "an empty answer leaves its block cached",
        "settlement:_settle_row",
        "expected and not row",
        "False",
    ),
    Fault(
        "the last block of a request is freed and not cached",
        "settlement:_settle_plain",
        "run.settled >= run.cache_at and caches",
        "run.settled >= run.cache_at and caches and not ends",
    ),
    Fault(
        "tokens behind a stop fill a block",
        "settlement:_settle_row",
        "min(run.settled, request.num_tokens)",
        "run.settled",
    ),
    Fault(
        "a reset over parked blocks is never refused",
        "scheduler:Scheduler._reset_prefix_cache",
        "rank.kv.is_held or (rank.kv.parked and not over_parked)",
        "rank.kv.is_held",
    ),
    Fault(
        "what the KV of a prompt depends on is not hashed",
        "kv.prefix_index:HashChain.__init__",
        "identity.fields",
        "()",
    ),
    Fault(
        "an input counts in its first block only",
        "kv.prefix_index:HashChain._inputs_at",
        "offset < end and offset + length > start",
        "start <= offset < end",
    ),
    Fault(
        "the place of an input does not count",
        "kv.prefix_index:HashChain._inputs_at",
        "offset - start",
        "0",
    ),
    # --- results ---
    Fault(
        "a late result counts as progress",
        "settlement:_settle_plain",
        "run.ended",
        "run.ended and request.status in FINISHED",
    ),
    Fault(
        "a late result stays awaited",
        "settlement:_append_late",
        "request.awaited -= expected\nrequest.awaited_optional -= expected - 1",
        "pass",
    ),
    Fault(
        "rejected drafts count as computed",
        "settlement:_settle_row",
        "n - (expected - len(row))",
        "n",
    ),
    Fault(
        "results of an ended epoch are taken",
        "settlement:acknowledge",
        "rank is None or rank.epoch != event.epoch",
        "rank is None",
    ),
    Fault(
        "a step may be answered out of order",
        "settlement:_checked",
        "record is None or record.step_seq != event.step_seq",
        "record is None",
    ),
    Fault(
        "a row that must yield a token may yield none",
        "settlement:acknowledge",
        "1 if state.config.rules.refuse_empty_rows else 0",
        "0",
    ),
    Fault(
        "a request resumes while its results are in flight",
        "admission:_refusal_here",
        "state.config.rules.resume_settled",
        "False",
    ),
    Fault(
        "a row is reused at once",
        "rank:RankState.remove",
        "self.prefills.pop(run, None)",
        "self.prefills.pop(run, None)\nself.free_rows.append(run.row)",
    ),
    Fault(
        "the window is one step too deep",
        "inflight:InflightWindow.is_full",
        "len(self._records) >= self.depth",
        "len(self._records) > self.depth",
    ),
    # --- throttle, ranks, time ---
    Fault(
        "the capacity flag is inverted",
        "admission:run",
        "len(queue.waiting) > 0",
        "len(queue.waiting) == 0",
    ),
    Fault(
        "a deferring step touches the capacity flag",
        "admission:run",
        "not defer_prefills",
        "True",
    ),
    Fault(
        "the throttle starves chunks alone",
        "throttle:Throttle.defers_prefills",
        "num_decodes > 0",
        "True",
    ),
    Fault(
        "a request is passed over for ever",
        "admission:_better_elsewhere",
        "request.ticket.num_passes += 1",
        "pass",
    ),
    Fault(
        "a request is left to a rank that cannot hold it",
        "admission:_better_elsewhere",
        "state.can_hold(other, request)",
        "True",
    ),
    Fault(
        "a draining rank takes nobody back",
        "scheduler:Scheduler._may_admit",
        "not rank.is_draining or self.state.draining.has_begun(rank)",
        "not rank.is_draining",
    ),
    Fault(
        "an empty rank leaves a request in quarantine to the one that is reserved for it",
        "resources.quarantine:Quarantine.gate",
        "if keeper is not None:\n    self.release(keeper)\nreturn None",
        "return None if keeper is None else reasons.QUARANTINED",
    ),
    Fault(
        "requests in quarantine run beside others",
        "resources.quarantine:Quarantine.holds",
        "num_epochs >= _TOLERATED",
        "False",
    ),
    Fault(
        "others are admitted beside a request in quarantine",
        "resources.quarantine:Quarantine.take",
        "self._reserve(plan.rank, run.request)",
        "pass",
    ),
    Fault(
        "a token does not end the quarantine",
        "resources.quarantine:Quarantine.on_settled",
        "self.release(rank)",
        "pass",
    ),
    Fault(
        "a rank stays reserved for a request that has ended",
        "resources.quarantine:Quarantine.on_finish",
        "self._give_up(request)",
        "pass",
    ),
    Fault(
        "tenants share cached blocks",
        "resources.tenants:Isolation.identity",
        "event.tenant.encode()",
        "b''",
    ),
    Fault(
        "a tenant may have one request more running",
        "resources.tenants:Tenants.gate",
        "len(tenant.running) >= tenant.limits.max_running",
        "len(tenant.running) > tenant.limits.max_running",
    ),
    Fault(
        "a tenant may have one request more waiting",
        "resources.tenants:Tenants.refusal",
        "tenant.num_waiting >= most",
        "tenant.num_waiting > most",
    ),
    Fault(
        "a run that ends still counts against its tenant",
        "resources.tenants:Tenants.on_run_end",
        "tenant.running.pop(run, None)",
        "pass",
    ),
    Fault(
        "what a request has not taken of its tenant's tokens does not come back",
        "resources.tenants:Tenants.on_finish",
        "request.num_tokens - request.limit",
        "0",
    ),
    Fault(
        "requests that were accepted before do not count against their tenant",
        "resources.tenants:Tenants.on_arrive",
        "tenant.bucket.take(request.limit, now)",
        "event.output_tokens is None and tenant.bucket.take(request.limit, now)",
    ),
    Fault(
        "a draining rank forgets what it has begun",
        "resources.draining:Draining.on_run_end",
        "self._begun[run.rank][run.request] = None",
        "pass",
    ),
    Fault(
        "a draining rank takes back what others can hold",
        "resources.draining:Draining.takes_back",
        "not can_stay(request)",
        "True",
    ),
    Fault(
        "every lost epoch is held against a request",
        "resources.quarantine:Quarantine.on_rank_lost",
        "num_epochs + 1 if again else 1",
        "num_epochs + 1",
    ),
    Fault(
        "orphans come back in reverse",
        "settlement:end_epoch",
        "reversed(orphans)",
        "orphans",
    ),
    Fault(
        "a lost rank leaves its results awaited",
        "settlement:_forget_awaited",
        "for request in touched:\n    request.awaited = request.awaited_optional = 0",
        "pass",
    ),
    Fault(
        "time lost with a worker counts from when it is noticed",
        "lifecycle:preempt",
        "max(rank.quiet_since, run.run_since) if cause == 'rank_lost' else state.now",
        "state.now",
    ),
    Fault(
        "a deadline passes one tick late",
        "scheduler:Scheduler._end_overdue",
        "first <= state.now",
        "first < state.now",
    ),
    Fault(
        "a live id is accepted again",
        "submission:duplicate",
        "event.request_id not in state.requests",
        "True",
    ),
    # --- failed rows ---
    Fault(
        "blocks of a failed row stay in the prefix index",
        "kv.manager:KvManager.forget_blocks",
        "index.remove_all_behind(request.chain.hashes[0])",
        "pass",
    ),
    Fault(
        "blocks of a failed row are forgotten, those behind them are not",
        "kv.manager:KvManager.forget_blocks",
        "index.remove_all_behind(request.chain.hashes[0])",
        "[index.remove(block) for block in blocks]",
    ),
    Fault(
        "blocks of a failed run that has ended are not looked for",
        "kv.manager:KvManager.forget_blocks",
        "blocks.update(index.find_all(request.chain.block_hash(number, request.tokens)))",
        "pass",
    ),
    Fault(
        "a request that is set aside keeps blocks of a failed row",
        "untrusted:fail_row",
        "other is run or blocks.isdisjoint(other.blocks)",
        "other is run or other.row < 0 or blocks.isdisjoint(other.blocks)",
    ),
    Fault(
        "a row that failed for another one's sake fails",
        "lifecycle:recompute",
        "run.drops_results = True",
        "pass",
    ),
    Fault(
        "a failed row may have tokens",
        "settlement:_checked",
        "count == 0 if run.row in failed else min(least, most) <= count <= most",
        "run.row in failed or min(least, most) <= count <= most",
    ),
    Fault(
        "an error of a row that the step does not have is taken",
        "settlement:_checked",
        "not failed <= rows",
        "False",
    ),
    # --- features ---
    Fault(
        "a rank takes a request whose feature its worker does not have",
        "admission:_refusal_here",
        "not request.features <= rank.features",
        "False",
    ),
    Fault(
        "a rank without the feature counts as one that can hold the request",
        "state:CoreState.can_hold",
        "request.features <= rank.features",
        "True",
    ),
    Fault(
        "pools of ranks without the feature count",
        "submission:_largest_pool",
        "not event.features",
        "True",
    ),
    # --- requests that are submitted again ---
    Fault(
        "the end that was lost is not looked for",
        "resubmission:restore",
        "verdict is not None",
        "False",
    ),
    Fault(
        "what the lost scheduler makes be computed again is not counted",
        "resubmission:restore",
        "account.high_water = request.num_tokens - 1",
        "pass",
    ),
    Fault(
        "a request that had run waits for its first admission once more",
        "resubmission:restore",
        "account.first_admitted_at = account.arrived_at",
        "pass",
    ),
    Fault(
        "a request that comes back goes to the end of the queue",
        "policies.fcfs:FcfsLane.insert",
        "other.arrival <= request.arrival",
        "True",
    ),
    Fault(
        "a request that comes back and fits nowhere waits for ever",
        "scheduler:Scheduler._arrive",
        "self._note_whether_holdable(request)",
        "pass",
    ),
    Fault(
        "outputs of another vocabulary are taken",
        "resubmission:_bad_outputs",
        "submission.largest_id(event.output_tokens) < state.vocab_size",
        "True",
    ),
    Fault(
        "a request that came before the first worker keeps its length",
        "resubmission:fit_to_model",
        "request.limit <= state.max_model_len",
        "True",
    ),
    Fault(
        "a cost that has changed is not said when all is computed again",
        "plan:StepPlan._count_recomputed",
        "end >= request.account.high_water",
        "False",
    ),
)
