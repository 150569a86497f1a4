"""The default model, loaded once per dtype and shared by the tests of this directory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.oracle import OracleEntry, OraclePrompt, model_directory, oracle, prompts
from worker_svc.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Settings:
    """What ModelRunner.load reads."""

    model: str
    dtype: str
    device: str = "cpu"
    num_blocks: int | None = None
    kv_memory: int | None = 256 << 20
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = 2048
    # One: a team of two waits for its slower member some 200 times a step, and on a busy machine that is forever.
    threads: int | None = 1


@pytest.fixture(scope="session")
def float32_runner() -> ModelRunner:
    return ModelRunner.load(Settings(str(model_directory()), "float32"))


@pytest.fixture(scope="session")
def bfloat16_runner() -> ModelRunner:
    return ModelRunner.load(Settings(str(model_directory()), "bfloat16"))


@pytest.fixture(scope="session")
def expected() -> list[tuple[OraclePrompt, OracleEntry]]:
    return list(zip(prompts(), oracle(prompts()), strict=True))
