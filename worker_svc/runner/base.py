"""The interface every runner stands behind. No torch here: the contract side of the worker must run without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from worker_svc.step import Step, StepOutput


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's own recommendations; None: not stated."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class RunnerCapabilities:
    """What a loaded runner can do; goes into GetCapabilities as it stands."""

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size_multiple: int
    runner: str
    device: str
    dtype: str
    generation_defaults: GenerationDefaults = GenerationDefaults()
    # Most drafts per row it verifies; 0: none.
    max_num_drafts: int = 0
    verifies_sampled_drafts: bool = False
    # launch() returns while the step still runs: the next step is then launched before this one is collected, and
    # collect() is called from a thread of its own. False: collect() follows launch() at once, in the same thread.
    launches_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the scheduler fixes when it opens an epoch."""

    block_size: int
    num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    max_inflight_steps: int


class StepFailed(Exception):
    """The step could not be executed; the runner's state is void until the next open."""


class DeviceFailed(Exception):
    """The device is not to be trusted any more; the process must exit."""


class Launched(Protocol):
    """A step on its way. On a device it may still be running when the next one is launched."""

    def collect(self) -> StepOutput:
        """Wait for the tokens. Called once, in the order of launches, from the same thread or another one.

        Raises StepFailed or DeviceFailed.
        """


class Runner(Protocol):
    """Executes steps. Calls come from one executor thread, one at a time; steps are in order and fit the geometry and
    each other (the service has checked rows, ids, table sizes and budgets)."""

    @property
    def capabilities(self) -> RunnerCapabilities: ...

    def tokenizer_files(self) -> Iterator[tuple[str, bytes]]:
        """Names (without directories) and bytes of the tokenizer's files; nothing when there is no tokenizer."""

    def open(self, geometry: Geometry) -> int:
        """Start with no rows and an unused KV pool; returns num_blocks, null block 0 included. Keeps memory already
        held when the geometry is the same. Raises ValueError, with what to change, when the geometry does not fit."""

    def launch(self, step: Step) -> Launched:
        """Apply and start one step; tokens sampled by earlier launches feed back without leaving the runner.

        Raises StepFailed or DeviceFailed.
        """

    def close(self) -> None:
        """Give everything back."""
