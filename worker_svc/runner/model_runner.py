"""The runner that holds a real model: loads it, owns KV pool and persistent batch, executes steps. One device, one
thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_svc import memory
from worker_svc.attention.base import AttentionBackend, RaggedBatch
from worker_svc.attention.paged_kv import KvShape, PagedKv
from worker_svc.attention.select import select_backend
from worker_svc.cores import num_usable_cores
from worker_svc.models.base import ForwardInput, Model, ModelConfig
from worker_svc.models.decoder import num_weights
from worker_svc.models.loader import load_model, locate_model, model_name, tokenizer_files
from worker_svc.models.registry import read_model_config
from worker_svc.models.rope import length_warning
from worker_svc.runner.base import DeviceFailed, Geometry, RunnerCapabilities, StepFailed
from worker_svc.runner.input_batch import InputBatch
from worker_svc.runner.inputs import StepInputs, accept_drafts, build_inputs
from worker_svc.sampler import INVALID, sample
from worker_svc.step import RowFailure, Step, StepOutput

logger = logging.getLogger(__name__)

# Drafts per row it verifies in one step. A bound on row width, not on the method.
MAX_NUM_DRAFTS = 16
_MAX_THREADS = 8
_NO_TOKENS = np.empty(0, np.int32)


class RunnerSettings(Protocol):
    """What of the worker's settings the runner reads."""

    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def kv_memory(self) -> int | None: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _KvBudget:
    """How the pool is sized: a number of blocks, or bytes, or a share of the device's memory."""

    num_blocks: int | None
    kv_memory: int | None
    gpu_memory_utilization: float

    def check_fits(self, config: ModelConfig, dtype: torch.dtype, smallest: int, block_size: int | None = None) -> None:
        """Raise NotEnoughMemory when weights and pool are more than this process may hold on the CPU. block_size None:
        the scheduler has not chosen one yet, so that num_blocks means no less than blocks of the `smallest` size."""
        weights = num_weights(config) * dtype.itemsize
        remedy = "set dtype to bfloat16" if dtype is torch.float32 else ""
        parts = [memory.Part(f"of weights (dtype = {_name(dtype)})", weights, remedy)]
        if self.num_blocks is None:
            pool = self.kv_memory or memory.DEFAULT_CPU_KV_BYTES
        else:
            pool = self.num_blocks * config.kv_shape(block_size or smallest, dtype).bytes_per_block
        tokens = f" of {block_size} tokens" if block_size else " of one token or more"
        parts.append(memory.kv_part(pool, kv_memory=self.kv_memory, num_blocks=self.num_blocks, tokens=tokens))
        memory.check(parts, memory.memory_limit())


class ModelRunner:
    """Runner over a model of the registry. See worker_svc.runner.base for the contract of its methods."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        directory: Path,
        *,
        max_model_len: int,
        budget: _KvBudget,
        threads: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._directory = directory
        self._max_model_len = max_model_len
        self._budget = budget
        self._threads = threads
        self._geometry: Geometry | None = None
        self._kv: PagedKv | None = None
        self._batch: InputBatch | None = None
        self._last_tokens = torch.empty(0, dtype=torch.int64)

    @classmethod
    def load(cls, settings: RunnerSettings) -> ModelRunner:
        """Load the model that the settings name. Raises ValueError (settings, broken or unsupported model, more than a
        CPU's memory holds) or FetchFailed."""
        device = _device(settings.device)
        dtype = resolve_dtype(settings.dtype, device)
        threads = settings.threads or min(num_usable_cores(), _MAX_THREADS)
        torch.set_num_threads(threads)
        directory = locate_model(settings.model)
        budget = _KvBudget(settings.num_blocks, settings.kv_memory, settings.gpu_memory_utilization)
        architecture, config = read_model_config(directory)
        if settings.max_model_len is not None and settings.max_model_len > config.max_len:
            raise ValueError(f"max_model_len {settings.max_model_len} is beyond the model's {config.max_len}")
        attention = select_backend(config.attention_specs, dtype, device)
        if device.type == "cpu":
            budget.check_fits(config, dtype, attention.block_size_multiple)
        with torch.inference_mode():
            model = load_model(
                directory,
                max_len=settings.max_model_len,
                dtype=dtype,
                device=device,
                read=(architecture, config),
            )
        max_model_len = settings.max_model_len or config.max_position_embeddings
        if (warning := length_warning(config, max_model_len)) is not None:
            logger.warning("%s", warning)
        return cls(model, attention, directory, max_model_len=max_model_len, budget=budget, threads=threads)

    @property
    def capabilities(self) -> RunnerCapabilities:
        """See RunnerCapabilities."""
        config: ModelConfig = self._model.config
        return RunnerCapabilities(
            model_name=model_name(self._directory),
            vocab_size=config.vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=config.eos_token_ids,
            block_size_multiple=self._attention.block_size_multiple,
            runner="model",
            device=self._model.device.type,
            dtype=_name(self._model.dtype),
            generation_defaults=config.generation_defaults,
            max_num_drafts=MAX_NUM_DRAFTS,
            verifies_sampled_drafts=True,
            launches_ahead=self._model.device.type == "cuda",
        )

    def tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        """Name and bytes of each tokenizer file of the model's directory."""
        return tokenizer_files(self._directory)

    def open(self, geometry: Geometry) -> int:
        """No rows, unused pool; returns num_blocks. Raises ValueError when the geometry does not fit."""
        self._check(geometry)
        # OpenMP keeps the number per calling thread, and steps may come from another one than load() did.
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            self._batch = InputBatch(geometry)
            self._last_tokens = torch.zeros(geometry.num_rows, dtype=torch.int64, device=self._model.device)
            if self._kv is None or self._geometry is None or self._kv.shape.block_size != geometry.block_size:
                self._kv = None  # give the old pool back before asking for the new one
                config, dtype = self._model.config, self._model.dtype
                shape = config.kv_shape(geometry.block_size, dtype)
                if self._model.device.type == "cpu" and self._budget.num_blocks is not None:
                    smallest = self._attention.block_size_multiple
                    self._budget.check_fits(config, dtype, smallest, geometry.block_size)
                self._kv = self._attention.new_kv(shape, self._num_blocks(shape, geometry))
        self._geometry = geometry
        return self._kv.num_blocks

    def _check(self, geometry: Geometry) -> None:
        multiple = self._attention.block_size_multiple
        if geometry.block_size < 1 or geometry.block_size % multiple:
            raise ValueError(f"block size {geometry.block_size} must be a multiple of {multiple}")
        if geometry.max_model_len > self._max_model_len:
            raise ValueError(f"max_model_len {geometry.max_model_len} is beyond this worker's {self._max_model_len}")

    def _num_blocks(self, shape: KvShape, geometry: Geometry) -> int:
        if self._budget.num_blocks is not None:
            num_blocks = self._budget.num_blocks
        elif self._budget.kv_memory is not None or self._model.device.type == "cpu":
            num_blocks = (self._budget.kv_memory or memory.DEFAULT_CPU_KV_BYTES) // shape.bytes_per_block
        else:
            num_blocks = self._profiled_bytes(shape, geometry) // shape.bytes_per_block
        if num_blocks < 2:
            raise ValueError(
                f"the KV pool would hold {num_blocks} blocks of {shape.bytes_per_block} bytes, 2 are needed "
                "(one is the null block): give it more memory or choose a smaller block size"
            )
        return num_blocks

    def _profiled_bytes(self, shape: KvShape, geometry: Geometry) -> int:
        """Device memory left for KV after the largest step: a forward pass of max_num_batched_tokens is run and
        measured."""
        device = self._model.device
        num_tokens = min(geometry.max_num_batched_tokens, geometry.max_model_len)
        num_blocks = -(-num_tokens // shape.block_size) + 1
        kv = self._attention.new_kv(shape, num_blocks)
        torch.cuda.reset_peak_memory_stats(device)
        positions = torch.arange(num_tokens, device=device)
        table = np.arange(1, num_blocks, dtype=np.int32)[None]
        ragged = RaggedBatch(np.array([0, num_tokens], np.int32), np.array([num_tokens], np.int32), table)
        step = ForwardInput(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            slots=positions + shape.block_size,
            logit_tokens=torch.zeros(min(geometry.num_rows, num_tokens), dtype=torch.int64, device=device),
            attention_plan=self._attention.plan(ragged, shape.block_size),
        )
        self._model.forward(step, kv, self._attention)
        torch.cuda.synchronize(device)
        used = torch.cuda.max_memory_allocated(device) - num_blocks * shape.bytes_per_block
        del kv, step
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * self._budget.gpu_memory_utilization) - used

    def launch(self, step: Step) -> _Launched:
        """Apply the step and start it."""
        batch, kv = self._batch, self._kv
        if batch is None or kv is None:
            raise StepFailed("no epoch is open")
        try:
            batch.apply(step)
            if len(step.rows) == 0:
                return _Launched(StepOutput(_NO_TOKENS, None, batch.num_rows_held))
            with torch.inference_mode():
                return self._execute(batch, kv, step)
        except torch.AcceleratorError as error:
            raise DeviceFailed(str(error)) from error
        except (RuntimeError, ValueError, IndexError) as error:
            logger.exception("step %d failed", step.step_seq)
            raise StepFailed(f"{type(error).__name__}: {error}") from error

    def _execute(self, batch: InputBatch, kv: PagedKv, step: Step) -> _Launched:
        inputs = build_inputs(batch, step, self._attention.row_order)
        tokens = self._forward(inputs, kv, batch.block_size)
        if len(step.draft_token_ids) == 0:
            batch.num_computed[step.rows] += step.num_tokens
            if len(inputs.sampling_rows):
                # A row without a token is not fed to a later step that counts: its request ends. But it must not spoil
                # the steps that are on their way.
                self._last_tokens.index_copy_(0, self._put(inputs.sampling_rows), tokens.clamp_min(0))
            return _Launched(None, tokens, inputs, batch.num_rows_held)
        return self._settle_drafts(batch, step, inputs, tokens.cpu().numpy())

    def _forward(self, inputs: StepInputs, kv: PagedKv, block_size: int) -> torch.Tensor:
        token_ids = self._put(inputs.token_ids)
        if len(inputs.fed_rows):
            fed = self._last_tokens.index_select(0, self._put(inputs.fed_rows))
            token_ids.index_copy_(0, self._put(inputs.fed_tokens), fed)
        step = ForwardInput(
            token_ids=token_ids,
            positions=self._put(inputs.positions),
            slots=self._put(inputs.slots),
            logit_tokens=self._put(inputs.logit_tokens),
            attention_plan=self._attention.plan(inputs.ragged, block_size),
        )
        logits = self._model.forward(step, kv, self._attention)
        return sample(logits, inputs.sampling)

    def _settle_drafts(
        self, batch: InputBatch, step: Step, inputs: StepInputs, sampled: npt.NDArray[np.int64]
    ) -> _Launched:
        """How many drafts held decides where the row goes on, so this one step waits for its tokens."""
        counts, holds = accept_drafts(sampled, inputs.num_logits, inputs.draft_token_ids)
        failed = _rows_with_invalid(sampled, holds, inputs.num_logits)
        batch.num_computed[step.rows] += step.num_tokens
        # Of n + 1 logits, `counts` tokens hold: n + 1 - counts drafts were computed in vain.
        batch.num_computed[inputs.sampling_rows] -= (inputs.num_logits - counts).astype(np.int32)
        last = sampled[holds][np.cumsum(counts) - 1]
        self._last_tokens.index_copy_(0, self._put(inputs.sampling_rows), self._put(np.maximum(last, 0)))
        holds &= ~np.repeat(failed, inputs.num_logits)
        per_row = np.zeros(len(step.rows), np.int32)
        per_row[inputs.samples] = np.where(failed, 0, counts)
        errors = _row_errors(inputs.sampling_rows[failed])
        return _Launched(StepOutput(sampled[holds].astype(np.int32), per_row, batch.num_rows_held, errors))

    def _put(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def close(self) -> None:
        """Drop model, pool and batch."""
        self._kv = self._batch = self._geometry = None
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


class _Launched:
    """A step whose tokens may still be on their way from the device."""

    __slots__ = ("_copied", "_inputs", "_num_rows_held", "_output", "_tokens")

    def __init__(
        self,
        output: StepOutput | None,
        tokens: torch.Tensor | None = None,
        inputs: StepInputs | None = None,
        num_rows_held: int = 0,
    ) -> None:
        self._output = output
        self._inputs = inputs
        self._num_rows_held = num_rows_held
        self._tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens is not None and tokens.device.type == "cuda":
            # Into pinned memory, so that the copy waits on the device and not here; read only after the event.
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()

    def collect(self) -> StepOutput:
        """The output, once the device has it."""
        if self._output is None:
            assert self._tokens is not None and self._inputs is not None
            if self._copied is not None:
                try:
                    self._copied.synchronize()
                except torch.AcceleratorError as error:
                    raise DeviceFailed(str(error)) from error
            self._output = _one_token_each(self._tokens.numpy().astype(np.int32), self._inputs, self._num_rows_held)
            self._inputs = None
        return self._output


def _one_token_each(tokens: npt.NDArray[np.int32], inputs: StepInputs, num_rows_held: int) -> StepOutput:
    """The output of a step without drafts."""
    failed = tokens == INVALID
    if not failed.any():
        counts = None if bool(inputs.samples.all()) else inputs.samples.astype(np.int32)
        return StepOutput(tokens, counts, num_rows_held)
    per_row = inputs.samples.astype(np.int32)
    per_row[np.flatnonzero(inputs.samples)[failed]] = 0
    return StepOutput(tokens[~failed], per_row, num_rows_held, _row_errors(inputs.sampling_rows[failed]))


def _rows_with_invalid(
    sampled: npt.NDArray[np.int64], holds: npt.NDArray[np.bool_], num_logits: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which sampling rows have an INVALID among the tokens that hold, [rows]. One behind a wrong draft does not count:
    what it was computed from is not part of the text."""
    row = np.repeat(np.arange(len(num_logits)), num_logits)
    invalid = row[holds & (sampled == INVALID)]
    failed: npt.NDArray[np.bool_] = np.bincount(invalid, minlength=len(num_logits)) > 0
    return failed


def _row_errors(rows: npt.NDArray[np.int64]) -> tuple[RowFailure, ...]:
    return tuple(RowFailure(row, "the model gave logits that are not finite") for row in rows.tolist())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device here (is it the CPU build of torch?)")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 or bfloat16 as asked; auto is bfloat16 on CUDA and where the CPU multiplies bfloat16 natively, else
    float32."""
    if name == "auto":
        fast = device.type == "cuda" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
