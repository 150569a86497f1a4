"""A worker without a model: made-up text that is always the same, and a strict eye on the scheduler. No torch.

Token ids are the 256 bytes and four special ones. The next token is a hash of the whole true prefix, and for sampled
rows of (seed, choice index, output index) too, as in real sampling: so a request gets the same text on any rank,
beside any other, after any preemption, and every mix-up of requests, blocks or order shows in the text. Beyond that,
`SlotMemory` proves in every step that each row finds its own tokens in the blocks it was given.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from worker_svc.runner.base import DeviceFailed, Geometry, RunnerCapabilities, StepFailed
from worker_svc.runner.script import Fault, FaultKind, FaultPlan, Script
from worker_svc.runner.slot_memory import Fingerprints, SlotMemory, WriteBatch
from worker_svc.sampling import Sampling
from worker_svc.step import AddedRequest, RowFailure, Step, StepAnswer, StepOutput

VOCAB_SIZE: Final = 260
BOS_TOKEN_ID: Final = 256
EOS_TOKEN_ID: Final = 257
PAD_TOKEN_ID: Final = 258
DEFAULT_NUM_BLOCKS: Final = 4096
DEFAULT_MAX_MODEL_LEN: Final = 8192
_MAX_NUM_DRAFTS: Final = 8
# 24 bytes of memory each.
_MAX_NUM_SLOTS: Final = 2**26
_FIRST_PRINTABLE: Final = 32
_NUM_PRINTABLE: Final = 95

TOKENIZER_FILE: Final = "byte_tokenizer.json"
TOKENIZER: Final = {
    "format": "stepfence-byte-tokenizer",
    "version": 1,
    # Ids 0 to 255 are the bytes of UTF-8 text; special ids have no text.
    "vocab_size": VOCAB_SIZE,
    "special_tokens": {"<|bos|>": BOS_TOKEN_ID, "<|eos|>": EOS_TOKEN_ID, "<|pad|>": PAD_TOKEN_ID, "<|reserved|>": 259},
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    # Whether text prompts begin with bos.
    "add_bos_token": False,
    "chat_template": (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
}


class TokenSource:
    """The text of one request: next tokens as a function of all tokens so far. Appending costs the same at any
    length."""

    def __init__(self, token_ids: npt.ArrayLike, num_prompt_tokens: int, sampling: Sampling, script: Script) -> None:
        known = np.asarray(token_ids, "<i4")
        self._prefix = hashlib.blake2b(known.tobytes(), digest_size=8)
        self._output_index = int(known.size) - num_prompt_tokens
        self._sampling: Final = sampling
        self._script: Final = script

    def sample(self) -> int:
        """Sample the next token and append it."""
        token = self._next()
        self._prefix.update(token.to_bytes(4, "little"))
        self._output_index += 1
        return token

    def _next(self) -> int:
        sampling, index = self._sampling, self._output_index
        masked = sampling.masked_token_ids if index < sampling.min_tokens else ()
        if self._script.wants_eos(index) and EOS_TOKEN_ID not in masked:
            return EOS_TOKEN_ID
        digest = self._prefix.copy()
        if sampling.temperature > 0:
            digest.update(struct.pack("<cQQQ", b"s", sampling.seed, sampling.choice_index, index))
        else:
            digest.update(b"g")
        drawn = int.from_bytes(digest.digest(), "little") % _NUM_PRINTABLE
        if not masked:
            return _FIRST_PRINTABLE + drawn
        return _first_unmasked(drawn, masked)


def _first_unmasked(drawn: int, masked: Sequence[int]) -> int:
    """The drawn character, or the next one round the printable ones that is not masked, or any id that is not."""
    candidates = [_FIRST_PRINTABLE + (drawn + step) % _NUM_PRINTABLE for step in range(_NUM_PRINTABLE)]
    candidates += range(VOCAB_SIZE)
    for token in candidates:
        if token not in masked:
            return token
    raise StepFailed("every token id is masked")


def complete(prompt: Sequence[int], num_tokens: int, sampling: Sampling, script: Script | None = None) -> list[int]:
    """The output that a scripted worker gives for this prompt, if it is served rightly; for tests to compare with."""
    source = TokenSource(prompt, len(prompt), sampling, script or Script())
    return [source.sample() for _ in range(num_tokens)]


class _Row:
    """A request in the batch."""

    __slots__ = (
        "fingerprint",
        "is_verified",
        "last_step_seq",
        "num_computed",
        "request_id",
        "source",
        "table",
        "token_ids",
    )

    def __init__(self, request: AddedRequest, script: Script) -> None:
        self.request_id: Final = request.request_id
        # Known ones: given, or sampled here.
        self.token_ids: Final[list[int]] = request.token_ids.tolist()
        self.table: Final[list[int]] = request.block_table.tolist()
        self.num_computed = request.num_computed_tokens
        self.source: Final = TokenSource(request.token_ids, request.num_prompt_tokens, request.sampling, script)
        # Of the computed tokens; right once is_verified.
        self.fingerprint = 0
        # Its earlier slots were checked, and nobody else has written there since.
        self.is_verified = False
        self.last_step_seq = 0


class _Launched:
    """A step that was executed already; what is left is to wait as long as the script says."""

    def __init__(self, output: StepOutput, delay_s: float, stall: Callable[[], object] | None) -> None:
        self._output: Final = output
        self._delay_s: Final = delay_s
        self._stall: Final = stall

    def collect(self) -> StepOutput:
        if self._stall is not None:
            self._stall()
        if self._delay_s:
            time.sleep(self._delay_s)
        return self._output


class ScriptedRunner:
    """The Runner that stands in for a model. Also usable alone, without service and threads.

    `leave` ends the process for the fault "exit"; tests in one process pass their own.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        num_blocks: int = DEFAULT_NUM_BLOCKS,
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._script: Final = script or Script()
        self._num_blocks: Final = num_blocks
        self._leave: Final = leave
        self._faults: Final = FaultPlan(self._script)
        self._released: Final = threading.Event()
        self._capabilities: Final = RunnerCapabilities(
            model_name="scripted",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(EOS_TOKEN_ID,),
            block_size_multiple=1,
            runner="scripted",
            device="cpu",
            dtype="none",
            max_num_drafts=_MAX_NUM_DRAFTS,
            verifies_sampled_drafts=True,
        )
        self._fingerprints: Final = Fingerprints(VOCAB_SIZE, max_model_len + _MAX_NUM_DRAFTS + 1)
        self._rows: dict[int, _Row] = {}
        self._row_of: dict[str, int] = {}
        self._memory = SlotMemory(1, 1, check_fences=True)

    def load(self) -> ScriptedRunner:
        """Itself, after as long as the script says a model takes to load. Raises RuntimeError when the script says
        so."""
        self._released.wait(self._script.load_delay_s)
        if self._script.load_error:
            raise RuntimeError(self._script.load_error)
        return self

    @property
    def capabilities(self) -> RunnerCapabilities:
        return self._capabilities

    def tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        yield TOKENIZER_FILE, json.dumps(TOKENIZER, indent=1).encode()

    def open(self, geometry: Geometry) -> int:
        if self._num_blocks < 2:
            raise ValueError(f"num_blocks is {self._num_blocks}: block 0 is never used, give at least 2")
        if self._num_blocks * geometry.block_size > _MAX_NUM_SLOTS:
            raise ValueError(
                f"{self._num_blocks} blocks of {geometry.block_size} tokens are over {_MAX_NUM_SLOTS} slots: lower "
                "--num-blocks or the block size"
            )
        self._rows, self._row_of = {}, {}
        self._memory = SlotMemory(self._num_blocks, geometry.block_size, check_fences=self._script.check_fences)
        return self._num_blocks

    def launch(self, step: Step) -> _Launched:
        faults = self._faults.take(step.epoch, step.step_seq, self._ids_of(step))
        self._break_if_due(faults, step)
        for request_id in step.dropped_ids:
            self._drop(request_id)
        for request in step.added:
            self._drop(request.request_id)
        # Whoever writes a block claims it before others share it, whatever the order of the message.
        for request in step.added:
            self._enter(request)
            self._memory.claim(self._split_table(request)[1], step.processed_step_seq, self._name(request.row))
        for row, block in zip(step.appended_rows.tolist(), step.appended_blocks.tolist(), strict=True):
            self._memory.claim([block], step.processed_step_seq, self._name(row))
            self._rows[row].table.append(block)
        for request in step.added:
            self._memory.share(self._split_table(request)[0])
        invalid = [fault.request_id or "" for fault in faults if fault.kind is FaultKind.INVALID_ROW]
        output = self._execute(step, invalid)
        for fault in faults:
            output = _falsify(output, fault.kind)
        return _Launched(output, self._script.delay_s(step.epoch, step.step_seq), self._stall_of(faults))

    def close(self) -> None:
        self.release()
        self._rows, self._row_of = {}, {}

    def distort(self, answer: StepAnswer) -> tuple[StepAnswer, ...]:
        """What the service says in place of an answer; called from the event loop."""
        return self._faults.distort(answer)

    def release(self) -> None:
        """End every stall, now and later; from any thread."""
        self._released.set()

    # --- faults -----------------------------------------------------------------------------------------------------

    def _ids_of(self, step: Step) -> Iterator[str]:
        added = {request.row: request.request_id for request in step.added}
        for row in step.rows.tolist():
            if row in added:
                yield added[row]
            elif row in self._rows:
                yield self._rows[row].request_id

    def _break_if_due(self, faults: Sequence[Fault], step: Step) -> None:
        for fault in faults:
            if fault.kind is FaultKind.EXIT:
                self._leave(fault.exit_code)
            if fault.kind is FaultKind.FAIL:
                raise StepFailed(f"step {step.step_seq} fails as scripted")
            if fault.kind is FaultKind.DEVICE:
                raise DeviceFailed(f"the device fails in step {step.step_seq} as scripted")

    def _stall_of(self, faults: Sequence[Fault]) -> Callable[[], object] | None:
        for fault in faults:
            if fault.kind is FaultKind.STALL:
                return partial(self._released.wait, fault.seconds)
        return None

    # --- the batch --------------------------------------------------------------------------------------------------

    def _drop(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            gone = self._rows.pop(row)
            self._memory.release(gone.table, gone.last_step_seq)

    def _enter(self, request: AddedRequest) -> None:
        self._rows[request.row] = _Row(request, self._script)
        self._row_of[request.request_id] = request.row

    def _split_table(self, request: AddedRequest) -> tuple[list[int], list[int]]:
        """The blocks that a new request only reads, and those that it writes."""
        num_shared = request.num_computed_tokens // self._memory.block_size
        table = self._rows[request.row].table
        return table[:num_shared], table[num_shared:]

    def _name(self, row: int) -> str:
        return f"row {row} ({self._rows[row].request_id})"

    def _execute(self, step: Step, invalid: Sequence[str]) -> StepOutput:
        """invalid: rows of requests whose ids start like this fail alone."""
        numbers, num_tokens = step.rows.tolist(), step.num_tokens.tolist()
        drafts = _split(step)
        # All writes come before any reading (rule 11). Fingerprints of shared prefixes are made from the row's own
        # tokens, so that what is in the slots is compared, not copied.
        batch = WriteBatch()
        chains = [
            self._write(batch, self._rows[row], count, draft, step.step_seq)
            for row, count, draft in zip(numbers, num_tokens, drafts, strict=True)
        ]
        self._distrust(batch.store(self._memory, step.step_seq))
        sampled: list[int] = []
        counts: list[int] = []
        errors: list[RowFailure] = []
        for number, count, draft, chain in zip(numbers, num_tokens, drafts, chains, strict=True):
            row = self._rows[number]
            if not row.is_verified or self._script.verify == "full":
                self._verify(number, row)
            outputs = _advance(row, count, draft, chain)
            if any(row.request_id.startswith(prefix) for prefix in invalid):
                errors.append(RowFailure(number, "invalid as scripted"))
                outputs = []
            sampled += outputs
            counts.append(len(outputs))
        return StepOutput(
            sampled_token_ids=np.array(sampled, np.int32),
            sampled_counts=np.array(counts, np.int32) if errors or max(counts, default=0) > 1 else None,
            num_rows_held=len(self._rows),
            row_errors=tuple(errors),
        )

    def _write(self, batch: WriteBatch, row: _Row, count: int, drafts: list[int], step_seq: int) -> list[int]:
        """Write `count` tokens behind the computed ones; the fingerprints after each of them."""
        start, end = row.num_computed, row.num_computed + count
        if not row.is_verified and start and not row.fingerprint:
            row.fingerprint = int(self._fingerprints.extend(0, row.token_ids[:start])[-1])
        tokens = row.token_ids[start : end - len(drafts)] + drafts
        if count == 1:
            # Decode, most of the time: without arrays.
            block, offset = divmod(start, self._memory.block_size)
            slots = [row.table[block] * self._memory.block_size + offset]
            chain = [self._fingerprints.append(row.fingerprint, tokens[0])]
        else:
            slots = self._memory.slots(row.table, start, end).tolist()
            chain = self._fingerprints.extend(row.fingerprint, tokens).tolist()
        batch.add(slots, chain, tokens, start)
        row.last_step_seq = step_seq
        return chain

    def _distrust(self, changed_blocks: list[int]) -> None:
        """Rows that have these blocks are verified again. The writer is among them; that costs little."""
        for block in changed_blocks:
            for row in self._rows.values():
                if block in row.table:
                    row.is_verified = False

    def _verify(self, number: int, row: _Row) -> None:
        """Every slot before this step's tokens must hold the row's own prefix. Raises StepFailed."""
        row.is_verified = True
        if not row.num_computed or self._script.verify == "off":
            return
        expected = self._fingerprints.extend(0, row.token_ids[: row.num_computed])
        position = self._memory.first_mismatch(row.table, expected)
        if position is None:
            return
        block = row.table[position // self._memory.block_size]
        found = self._memory.at(row.table, position)
        if found is None:
            holds = "nothing that was ever written"
        else:
            holds = f"token {found.token} of position {found.position}, written in step {found.step_seq}"
            if (found.token, found.position) == (row.token_ids[position], position):
                holds += ", behind another prefix"
        raise StepFailed(
            f"{self._name(number)}: position {position} must hold token {row.token_ids[position]}, but block {block} "
            f"holds {holds}"
        )


def _split(step: Step) -> list[list[int]]:
    """The drafts of each row of the step."""
    if not len(step.num_drafts):
        return [[]] * len(step.rows)
    drafts, result, start = step.draft_token_ids.tolist(), [], 0
    for count in step.num_drafts.tolist():
        result.append(drafts[start : start + count])
        start += count
    return result


def _advance(row: _Row, count: int, drafts: list[int], chain: list[int]) -> list[int]:
    """Take a row's tokens as computed and sample behind them: nothing while known ones remain, else one token and one
    more for every draft that was foreseen rightly."""
    computed = row.num_computed + count - len(drafts)
    outputs: list[int] = []
    if computed == len(row.token_ids):
        for draft in drafts:
            outputs.append(row.source.sample())
            if outputs[-1] != draft:
                break
        else:
            outputs.append(row.source.sample())
        row.token_ids.extend(outputs)
    num_accepted = max(len(outputs) - 1, 0)
    row.num_computed = computed + num_accepted
    row.fingerprint = chain[count - len(drafts) + num_accepted - 1]
    return outputs


def _falsify(output: StepOutput, kind: FaultKind) -> StepOutput:
    ids, counts = output.sampled_token_ids, output.sampled_counts
    if kind is FaultKind.MISSING_ROW:
        ids = ids[:-1]
    elif kind is FaultKind.OUT_OF_RANGE and len(ids):
        ids = np.concatenate([np.array([VOCAB_SIZE], np.int32), ids[1:]])
    return replace(output, sampled_token_ids=ids, sampled_counts=counts)
