"""How fast the torch runner is on a CPU, beside transformers' padded batch, in one run.

    python -m tests.bench.cpu_engine [--dtype bfloat16] [--threads 2] [--repeats 3] [--only offline] [--no-transformers]

Workloads (SmolLM2-135M, greedy, end-of-sequence ids ignored, no prefix cache):
  offline   32 requests at once, 64 to 256 random prompt tokens (4,833 in all), 64 outputs each; output tokens / wall
  decode    one request, 16-token prompt; 128 / (time for 129 new tokens - time for 1)
  prefill   one request of 1,024 tokens; 1,024 / time for 1 new token

Runs of the engines alternate; the table shows medians. The CPU share is CPU seconds / (wall * threads): a run that did
not get its cores says so, and an OpenMP team that loses one for a moment stalls whole. Where the machine is busy,
compare tokens per CPU second at --threads 1: time spent waiting for a core is not in it. The last line is JSON.

Threads wait for each other as in a worker (worker_svc/openmp.py), so torch is imported only when that is settled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.support.oracle import model_directory
from tests.support.step_loop import StepLoop
from worker_svc import openmp

NUM_REQUESTS, OUTPUTS, PROMPT_TOKENS = 32, 64, 4833
DECODED, DECODE_PROMPT, PREFILLED = 128, 16, 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """What ModelRunner.load reads."""

    model: str
    dtype: str
    threads: int | None
    device: str = "cpu"
    num_blocks: int | None = None
    kv_memory: int | None = 512 << 20
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = 2048


class Engine(Protocol):
    """Continues every prompt by `outputs` tokens, all at once."""

    def generate(self, prompts: Sequence[Sequence[int]], outputs: int) -> list[list[int]]: ...


class Stepfence:
    """ModelRunner driven by the page-long scheduler of the tests."""

    def __init__(self, dtype: str, threads: int) -> None:
        from worker_svc.runner.model_runner import ModelRunner

        self._runner = ModelRunner.load(Settings(str(model_directory()), dtype, threads))

    def generate(self, prompts: Sequence[Sequence[int]], outputs: int) -> list[list[int]]:
        """As the real scheduler would: decodes first, 2,048 tokens a step."""
        loop = StepLoop(self._runner, max_model_len=2048)
        requests = [loop.add(prompt, outputs) for prompt in prompts]
        loop.run()
        return [request.outputs for request in requests]


class Transformers:
    """model.generate on a left-padded batch."""

    def __init__(self, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=getattr(torch, dtype))
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Sequence[int]], outputs: int) -> list[list[int]]:
        """Every row runs for `outputs` tokens."""
        import torch

        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=outputs, do_sample=False, pad_token_id=0
            )
        rows: list[list[int]] = out[:, width:].tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second, tokens per second of CPU time, and the share of its cores the process had."""

    rate: float
    cpu_rate: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class _Time:
    wall: float
    cpu: float

    def __sub__(self, other: _Time) -> _Time:
        return _Time(self.wall - other.wall, self.cpu - other.cpu)

    def measured(self, tokens: int, threads: int) -> Measured:
        """Rates of `tokens` tokens in this time."""
        return Measured(tokens / self.wall, tokens / self.cpu, self.cpu / (self.wall * threads))


def _now() -> _Time:
    return _Time(time.perf_counter(), time.process_time())


def _timed(work: Callable[[], object]) -> _Time:
    start = _now()
    work()
    return _now() - start


def _ids(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(100, 49_000) for _ in range(num)]


def offline_prompts() -> list[list[int]]:
    """32 prompts of 64 to 256 tokens, 4,833 in all."""
    rng = random.Random(20261130)
    lengths = [rng.randint(64, 256) for _ in range(NUM_REQUESTS)]
    while (missing := PROMPT_TOKENS - sum(lengths)) != 0:
        at = rng.randrange(NUM_REQUESTS)
        lengths[at] = min(256, max(64, lengths[at] + missing))
    return [_ids(rng, length) for length in lengths]


def offline(engine: Engine, threads: int) -> Measured:
    """Output tokens per second of the whole batch."""
    prompts = offline_prompts()
    return _timed(lambda: engine.generate(prompts, OUTPUTS)).measured(NUM_REQUESTS * OUTPUTS, threads)


def decode(engine: Engine, threads: int) -> Measured:
    """Tokens per second of one stream."""
    prompt = _ids(random.Random(2), DECODE_PROMPT)
    first = _timed(lambda: engine.generate([prompt], 1))
    return (_timed(lambda: engine.generate([prompt], DECODED + 1)) - first).measured(DECODED, threads)


def prefill(engine: Engine, threads: int) -> Measured:
    """Prompt tokens per second."""
    prompt = _ids(random.Random(3), PREFILLED)
    return _timed(lambda: engine.generate([prompt], 1)).measured(PREFILLED, threads)


WORKLOADS = {"offline": offline, "decode": decode, "prefill": prefill}


def measure(engines: dict[str, Engine], names: Sequence[str], threads: int, repeats: int) -> dict[str, Any]:
    """Every workload on every engine, alternating, after one unmeasured round."""
    runs: dict[tuple[str, str], list[Measured]] = {(w, e): [] for w in names for e in engines}
    for repeat in range(repeats + 1):
        for workload in names:
            for name, engine in engines.items():
                measured = WORKLOADS[workload](engine, threads)
                if repeat:
                    runs[workload, name].append(measured)
    return {
        f"{workload}/{name}": {
            "tokens_per_s": round(statistics.median(m.rate for m in found), 1),
            "lowest": round(min(m.rate for m in found), 1),
            "highest": round(max(m.rate for m in found), 1),
            "tokens_per_cpu_s": round(statistics.median(m.cpu_rate for m in found), 1),
            "cpu_share": round(statistics.median(m.cpu_share for m in found), 2),
        }
        for (workload, name), found in runs.items()
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=sorted(WORKLOADS), action="append")
    parser.add_argument("--no-transformers", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    arguments = _arguments()
    openmp.limit_spinning(os.environ)
    import torch

    names = arguments.only or list(WORKLOADS)
    engines: dict[str, Engine] = {"stepfence": Stepfence(arguments.dtype, arguments.threads)}
    if not arguments.no_transformers:
        engines["transformers"] = Transformers(arguments.dtype, arguments.threads)
    results = measure(engines, names, arguments.threads, arguments.repeats)
    heads = ("tokens/s", "lowest", "highest", "per CPU s", "CPU share")
    print(f"{'workload':10} {'engine':14}" + "".join(f" {head:>9}" for head in heads))
    for key, row in results.items():
        workload, _, name = key.partition("/")
        print(f"{workload:10} {name:14}" + "".join(f" {value:9.1f}" for value in list(row.values())[:-1]), end="")
        print(f" {row['cpu_share']:9.2f}")
    facts = {"dtype": arguments.dtype, "threads": arguments.threads, "torch": torch.__version__, "cpu": _cpu_name()}
    facts |= {name: os.environ[name] for name in openmp.SET_BY_PEOPLE if name in os.environ}
    print(json.dumps(facts | {"repeats": arguments.repeats, "results": results}))


if __name__ == "__main__":
    main()
