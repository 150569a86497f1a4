"""Weights in memory of their own: what happens to the files afterwards does not matter."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.model.tiny import tiny_llama
from worker_svc.models.config import BrokenModel
from worker_svc.models.weight_files import WeightFiles

# Loads a model, cuts its file to nothing, and computes.
_CUT_AFTER_LOADING = """
import os, sys
from pathlib import Path
from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import Settings
from worker_svc.runner.model_runner import ModelRunner

directory = Path(sys.argv[1])
runner = ModelRunner.load(Settings(str(directory)))
os.truncate(directory / "model.safetensors", 0)
loop = StepLoop(runner, max_model_len=64)
request = loop.add(list(range(3, 40)), 8)
loop.run()
print(len(request.outputs), "tokens")
"""


@pytest.mark.parametrize("tied", [True, False])
def test_f114_a_file_that_is_cut_short_under_a_loaded_model_changes_nothing(tmp_path: Path, tied: bool) -> None:
    """In a process of its own: a mapped file that is cut short ends it by SIGBUS."""
    tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _CUT_AFTER_LOADING, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout == "8 tokens\n"


def test_f114_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    with ExitStack() as stack:
        weights = WeightFiles(tmp_path, stack)
        weights.take("lm_head.weight", (300, 64))
        path.write_bytes(path.read_bytes()[:100_000])
        with pytest.raises(BrokenModel, match=r"model\.safetensors was cut short while it was read"):
            weights.take("model.norm.weight", (64,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_what_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.randn(i + 1, 3, generator=generator).to(dtype) for i in range(5)}
    save_file(tensors | {"empty": torch.zeros(0, 4, dtype=dtype)}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = load_file(tmp_path / "model.safetensors")
    with ExitStack() as stack:
        weights = WeightFiles(tmp_path, stack)
        for name, tensor in expected.items():
            assert torch.equal(weights.take(name, tuple(tensor.shape)), tensor)
        weights.check_all_taken()
