"""A worker without a model, quick enough for millions of steps, that believes nothing the scheduler says.

Every slot of its memory holds the digest of the whole prefix that ends there, so a slot is right only if the token, its
position, everything before it and the owner of the cache salt are right. The next token is a function of that digest
(or, for repetitive text, of the last token): a request gets the same text wherever, however often and beside whomever
it runs. What is checked, and raised as `WorkerViolation`:

- contract rule 1, 4: steps come in order; ids are dropped before rows are added and blocks appended;
- rule 5: a block that somebody new will write is overwritten when the step is *dispatched*, as a transfer would. Steps
  are executed as late as the caller likes, so whatever still reads the block then finds it spoilt;
- rule 11: all rows write first, then every row finds its prefix in its table, complete, from position 0;
- a row may be made to compute what is not finite (`poison`): every row that reads a slot of it then fails too, when it
  samples, and spreads it to what it writes;
- rows are reused only after the step that dropped them was acknowledged, blocks are written by one row at a time, row
  lengths stay within known tokens and within the table.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from scheduler_svc.core.output import NewRow, SchedulerOutput

VOCAB_SIZE = 64
# Digests are polynomials of the tokens modulo this prime.
_PRIME = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51
_MIX = 0x15794AC5D1F3B0E7
# No digest of anything.
_SPOILT = -1
# First byte of `sampling` for text that repeats itself, which makes drafts come true. The rest says whose KV it may
# share: salt and tenant.
REPETITIVE = b"r"


class WorkerViolation(AssertionError):
    """The scheduler sent something that a worker would compute wrongly, or must refuse."""


class TokenSource:
    """The one true text of a request: its next token, given all tokens so far."""

    __slots__ = ("_is_repetitive", "_last", "digest")

    def __init__(self, sampling: bytes, tokens: list[int]) -> None:
        # The first byte is the style; the rest is the cache salt, behind which prefixes must not be shared.
        self.digest = int.from_bytes(sampling[1:], "little") % _PRIME + 1
        self._is_repetitive = sampling[:1] == REPETITIVE
        self._last = 0
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> list[int]:
        """Append tokens; the digests after each of them."""
        digest = self.digest
        chain = []
        for token in tokens:
            digest = (digest * _BASE + token + 1) % _PRIME
            chain.append(digest)
        if tokens:
            self.digest = digest
            self._last = tokens[-1]
        return chain

    def next_token(self) -> int:
        if self._is_repetitive:
            return (self._last * 5 + 1) % 8
        return self.digest * _MIX % _PRIME % VOCAB_SIZE

    def sample(self) -> int:
        """The next token, appended."""
        token = self._last = self.next_token()
        self.digest = (self.digest * _BASE + token + 1) % _PRIME
        return token


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a worker answers: as in StepAcked."""

    epoch: int
    step_seq: int
    sampled: list[int]
    counts: list[int] | None
    failed_rows: tuple[int, ...] = ()


class _Row:
    __slots__ = ("chain", "num_computed", "request_id", "source", "table", "tokens")

    def __init__(self, new: NewRow) -> None:
        self.request_id = new.request_id
        self.tokens = new.token_ids.tolist()
        self.source = TokenSource(new.sampling, [])
        # Digest after each token.
        self.chain = self.source.extend(self.tokens)
        self.table = new.block_table.tolist()
        self.num_computed = new.num_computed_tokens


class SimulatedWorker:
    """One epoch of one rank. `dispatch` hands it a step, `execute` runs the oldest one that waits.

    spoil_early: overwrite claimed blocks at dispatch (rule 5 holds, fence `always`); otherwise when the step runs.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, *, spoil_early: bool) -> None:
        self._block_size = block_size
        self._num_rows = num_rows
        self._num_blocks = num_blocks
        self._spoil_early = spoil_early
        self._memory = [_SPOILT] * (num_blocks * block_size)
        self._holders = [0] * num_blocks
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[str, int] = {}
        # Step that dropped the request of a row.
        self._dropped_in = [0] * num_rows
        self._waiting: deque[SchedulerOutput] = deque()
        self._last_step = self._last_fence = 0
        self.num_drafts_accepted = self.num_drafts_rejected = 0
        # Slots whose contents are not finite, requests that are to write such next, and those that wrote such.
        self.poisoned: set[int] = set()
        self._to_poison: set[str] = set()
        self.tainted_ids: set[str] = set()

    def poison(self, request_id: str) -> None:
        """The next row of this request computes what is not finite, without noticing before it samples."""
        self._to_poison.add(request_id)

    @property
    def num_waiting(self) -> int:
        """Steps not executed yet."""
        return len(self._waiting)

    @property
    def held_ids(self) -> list[str]:
        """Requests in its batch, as of the last executed step."""
        return list(self._row_of)

    def dispatch(self, output: SchedulerOutput) -> None:
        """Take in a step. Raises WorkerViolation when its numbers are wrong."""
        fence = self._last_fence + (output.total_num_tokens > 0)
        if output.step_seq != self._last_step + 1 or output.fence_seq != fence:
            raise WorkerViolation(
                f"step {output.step_seq} with fence {output.fence_seq} after step {self._last_step} with fence "
                f"{self._last_fence}"
            )
        self._last_step, self._last_fence = output.step_seq, output.fence_seq
        self._waiting.append(output)
        if self._spoil_early:
            for block in self._claimed(output):
                self._spoil(block)

    def execute(self) -> StepResult:
        """Run the oldest step that waits. Raises WorkerViolation when a row would be computed wrongly."""
        output = self._waiting.popleft()
        for request_id in (*output.preempted_request_ids, *output.finished_request_ids):
            self._drop(request_id, output.step_seq)
        for new in output.new_requests:
            self._drop(new.request_id, output.step_seq)
        # Before anybody shares them: a row may hit blocks that another one is given in the same step.
        for block in self._claimed(output):
            self._claim(block)
        for new in output.new_requests:
            self._add(new, output)
        for number, block in zip(output.appended_rows, output.appended_blocks, strict=True):
            self._row(number).table.append(block)
        return self._run(output)

    # --- the batch --------------------------------------------------------------------------------------------------

    def _claimed(self, output: SchedulerOutput) -> list[int]:
        """Blocks that this step gives to somebody to write."""
        claimed = output.appended_blocks.tolist()
        for new in output.new_requests:
            claimed += new.block_table[new.num_computed_tokens // self._block_size :]
        return claimed

    def _spoil(self, block: int) -> None:
        if not 0 < block < self._num_blocks:
            raise WorkerViolation(f"block {block} of {self._num_blocks} is given out")
        start = block * self._block_size
        self._memory[start : start + self._block_size] = [_SPOILT] * self._block_size
        if self.poisoned:
            self.poisoned.difference_update(range(start, start + self._block_size))

    def _claim(self, block: int) -> None:
        if self._holders[block]:
            raise WorkerViolation(f"block {block} is given out while {self._holders[block]} rows hold it")
        self._holders[block] += 1
        if not self._spoil_early:
            self._spoil(block)

    def _row(self, number: int) -> _Row:
        row = self._rows.get(number)
        if row is None:
            raise WorkerViolation(f"row {number} holds nothing")
        return row

    def _drop(self, request_id: str, step_seq: int) -> None:
        number = self._row_of.pop(request_id, None)
        if number is not None:
            for block in self._rows.pop(number).table:
                self._holders[block] -= 1
            self._dropped_in[number] = step_seq

    def _add(self, new: NewRow, output: SchedulerOutput) -> None:
        if not 0 <= new.row < self._num_rows or new.row in self._rows:
            raise WorkerViolation(f"row {new.row} for {new.request_id} is taken or unknown")
        if self._dropped_in[new.row] > output.processed_step_seq:
            raise WorkerViolation(
                f"row {new.row} is reused in step {output.step_seq} before step {self._dropped_in[new.row]}, which "
                "dropped it, was acknowledged"
            )
        num_shared, rest = divmod(new.num_computed_tokens, self._block_size)
        if rest or new.num_computed_tokens >= len(new.token_ids):
            raise WorkerViolation(f"{new.request_id} starts with {new.num_computed_tokens} of {len(new.token_ids)}")
        row = _Row(new)
        for block in row.table[:num_shared]:
            self._holders[block] += 1
        self._rows[new.row] = row
        self._row_of[new.request_id] = new.row

    # --- a step -----------------------------------------------------------------------------------------------------

    def _run(self, output: SchedulerOutput) -> StepResult:
        if len(set(output.rows)) != len(output.rows) or sum(output.num_tokens) != output.total_num_tokens:
            raise WorkerViolation(f"step {output.step_seq} has a row twice, or the wrong sum of tokens")
        num_drafts = [0] * len(output.rows) if output.num_drafts is None else output.num_drafts.tolist()
        drafts_at = 0
        work: list[tuple[_Row, int, list[int]]] = []
        for number, n, k in zip(output.rows, output.num_tokens, num_drafts, strict=True):
            row = self._row(number)
            work.append((row, n, self._guesses(row, output.draft_token_ids[drafts_at : drafts_at + k].tolist())))
            drafts_at += k
        for row, n, drafts in work:
            self._write(row, n, drafts)
        tainted = self._spread(work) if self.poisoned or self._to_poison else set()
        sampled: list[int] = []
        counts: list[int] = []
        failed: list[int] = []
        for number, (row, n, drafts) in zip(output.rows, work, strict=True):
            self._verify(row, row.num_computed + n - len(drafts))
            outputs = self._advance(row, n, drafts)
            if outputs and row.request_id in tainted:
                failed.append(number)
                outputs = []
            sampled += outputs
            counts.append(len(outputs))
        is_plain = output.num_drafts is None and not failed
        return StepResult(output.epoch, output.step_seq, sampled, None if is_plain else counts, tuple(failed))

    def _spread(self, work: list[tuple[_Row, int, list[int]]]) -> set[str]:
        """Which requests of this step compute what is not finite: those that are to, and those that read a slot of one;
        also in the same step, since all rows write before any reads."""
        slots = {row.request_id: self._slots(row, n) for row, n, _ in work}
        for row, _, _ in work:
            self.poisoned.difference_update(slots[row.request_id][row.num_computed :])
        tainted: set[str] = set()
        while True:
            found = {
                request_id
                for request_id, read in slots.items()
                if request_id in self._to_poison or not self.poisoned.isdisjoint(read)
            } - tainted
            if not found:
                break
            tainted |= found
            for row, _, _ in work:
                if row.request_id in found:
                    self.poisoned.update(slots[row.request_id][row.num_computed :])
        self._to_poison -= slots.keys()
        self.tainted_ids |= tainted
        return tainted

    def _slots(self, row: _Row, n: int) -> list[int]:
        """Slots of all positions below the end of this step's tokens."""
        size = self._block_size
        return [row.table[at // size] * size + at % size for at in range(row.num_computed + n)]

    @staticmethod
    def _guesses(row: _Row, drafts: list[int]) -> list[int]:
        """Negative ids stand for drafts that only the worker knows: here the next token, rightly foreseen or not."""
        if drafts and drafts[0] < 0:
            right = row.source.next_token()
            return [right if right % 2 else 0] * len(drafts)
        return drafts

    def _write(self, row: _Row, n: int, drafts: list[int]) -> None:
        start, size = row.num_computed, self._block_size
        end = start + n - len(drafts)
        if n - len(drafts) < 1 or end > len(row.tokens) or (drafts and end != len(row.tokens)):
            raise WorkerViolation(
                f"{row.request_id}: {n} tokens with {len(drafts)} drafts from {start} of {len(row.tokens)} known"
            )
        if start + n > len(row.table) * size:
            raise WorkerViolation(f"{row.request_id}: {start + n} slots in {len(row.table)} blocks")
        digests = row.chain[start:end]
        digest = digests[-1]
        for draft in drafts:
            digest = (digest * _BASE + draft + 1) % _PRIME
            digests.append(digest)
        memory, table = self._memory, row.table
        for position, digest in enumerate(digests, start):
            memory[table[position // size] * size + position % size] = digest

    def _verify(self, row: _Row, end: int) -> None:
        """All slots below `end` hold the row's own prefix."""
        memory, size, chain = self._memory, self._block_size, row.chain
        for index in range(end // size):
            at = row.table[index] * size
            if memory[at : at + size] != chain[index * size : index * size + size]:
                raise self._mismatch(row, end)
        start = end // size * size
        if start < end:
            at = row.table[end // size] * size
            if memory[at : at + end - start] != chain[start:end]:
                raise self._mismatch(row, end)

    def _mismatch(self, row: _Row, end: int) -> WorkerViolation:
        size = self._block_size
        for position in range(end):
            block = row.table[position // size]
            found = self._memory[block * size + position % size]
            if found != row.chain[position]:
                what = "spoilt" if found == _SPOILT else "of another prefix"
                return WorkerViolation(f"{row.request_id}: position {position} in block {block} is {what}")
        raise AssertionError("no mismatch")

    def _advance(self, row: _Row, n: int, drafts: list[int]) -> list[int]:
        end = row.num_computed + n - len(drafts)
        row.num_computed = end
        if end < len(row.tokens):
            return []
        source = row.source
        outputs: list[int] = []
        for draft in (*drafts, None):
            token = source.sample()
            outputs.append(token)
            row.tokens.append(token)
            row.chain.append(source.digest)
            if token != draft:
                break
        row.num_computed += len(outputs) - 1
        self.num_drafts_accepted += len(outputs) - 1
        self.num_drafts_rejected += len(drafts) - (len(outputs) - 1)
        return outputs
