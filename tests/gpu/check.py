"""One short check for a machine with a CUDA device: the same tokens as on the CPU, and how long steps take.

    python -m tests.gpu.check [--model DIRECTORY_OR_GGUF]

Ends with 0 and one line where there is no CUDA. With a device: a small random Llama, and the default model (or --model)
when it is on this machine, greedily in float32 on both; then decode and prefill rates in bfloat16. Needs no network.
Takes under two minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.step_loop import StepLoop
from worker_svc.fetch_model import KNOWN_MODELS
from worker_svc.models.cache import cache_root
from worker_svc.models.gguf_cache import converted_directory
from worker_svc.runner.base import Geometry
from worker_svc.runner.model_runner import ModelRunner

PROMPTS = [
    [5, 77, 30, 201, 8, 8, 130],
    [9],
    [i * 7 % 290 + 3 for i in range(100)],
    [i * 11 % 280 + 3 for i in range(33)],
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What ModelRunner.load reads."""

    model: str
    device: str
    dtype: str = "float32"
    num_blocks: int | None = None
    kv_memory: int | None = 256 << 20
    gpu_memory_utilization: float = 0.5
    max_model_len: int | None = None
    threads: int | None = None


def _continue(runner: ModelRunner, prompts: Sequence[Sequence[int]], outputs: int, budget: int) -> list[list[int]]:
    loop = StepLoop(runner, budget=budget, max_model_len=512, depth=3 if runner.capabilities.launches_ahead else 1)
    requests = [loop.add(prompt, outputs) for prompt in prompts]
    loop.run()
    return [request.outputs for request in requests]


def same_tokens(model: str, name: str) -> bool:
    """Greedy float32 tokens on both devices, whole prompts and chunks of 16."""
    on_cpu = ModelRunner.load(Settings(model, "cpu"))
    on_cuda = ModelRunner.load(Settings(model, "cuda"))
    good = True
    for budget in (2048, 16):
        cpu, cuda = (_continue(runner, PROMPTS, 32, budget) for runner in (on_cpu, on_cuda))
        equal = sum(a == b for a, b in zip(cpu, cuda, strict=True))
        print(f"{name}: {equal} of {len(PROMPTS)} continuations equal with {budget} tokens a step")
        # One may part at a near tie; most must not.
        good &= equal >= len(PROMPTS) - 1
    on_cuda.close()
    return good


def rates(model: str, name: str) -> None:
    """Decode and prefill in bfloat16, and what the profiling pass says about memory."""
    runner = ModelRunner.load(Settings(model, "cuda", "bfloat16", kv_memory=None))
    num_blocks = runner.open(Geometry(16, 64, 2048, 512, 2))
    print(f"{name}: {num_blocks} blocks of 16 in half of the device's memory")
    for batch in (1, 32):
        prompts = [[(i * 13 + j) % 290 + 3 for j in range(64)] for i in range(batch)]
        _continue(runner, prompts, 4, 2048)
        start = time.perf_counter()
        _continue(runner, prompts, 64, 2048)
        print(f"{name}: {batch * 64 / (time.perf_counter() - start):.0f} tokens/s in a batch of {batch}")
    runner.close()


def main() -> int:
    """0: nothing to check, or everything agrees. 1: something does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory or GGUF file; default: the default model if it is here")
    model = parser.parse_args().model
    if not torch.cuda.is_available():
        print("no CUDA device (or a CPU build of torch): nothing to check")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    from tests.unit.model.tiny import tiny_llama

    good = True
    with tempfile.TemporaryDirectory() as directory:
        tiny_llama().save_pretrained(directory)
        good &= same_tokens(directory, "small random Llama")
    known = KNOWN_MODELS["smollm2"]
    default = converted_directory(cache_root() / "models", known.name, known.sha256[:12])
    if model is None and default.is_dir():
        model = str(default)
    if model is not None:
        good &= same_tokens(model, Path(model).name)
        rates(model, Path(model).name)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
