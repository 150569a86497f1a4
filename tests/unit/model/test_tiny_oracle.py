"""Every variant of the family, small and random, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.oracle import assert_greedy_equal, greedy_entry
from tests.support.step_loop import StepLoop
from tests.unit.model.tiny import load_runner, tiny_llama

PROMPTS = [[5, 77, 30, 201, 8, 8, 130], [9], [i * 7 % 290 + 3 for i in range(100)], [i * 11 % 280 for i in range(33)]]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "nine-over-three": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    "wide-heads": {"head_dim": 48},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "llama3-rope": {"rope_parameters": LLAMA3},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "other-eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("budget", [2048, 7])
def test_greedy_ids_equal_transformers(tmp_path: Path, variant: str, budget: int) -> None:
    model = tiny_llama(**VARIANTS[variant])
    runner = load_runner(model, tmp_path)
    loop = StepLoop(runner, block_size=8, budget=budget, max_model_len=256)
    requests = [loop.add(prompt, 20) for prompt in PROMPTS]
    loop.run()
    for request in requests:
        assert len(request.outputs) == 20
        assert_greedy_equal(request.outputs, greedy_entry(model, request.prompt, 20))


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_any_block_size_gives_the_same_tokens(tmp_path: Path, block_size: int) -> None:
    model = tiny_llama()
    runner = load_runner(model, tmp_path, num_blocks=600)
    loop = StepLoop(runner, block_size=block_size, budget=40, max_model_len=256, depth=2)
    requests = [loop.add(prompt, 20) for prompt in PROMPTS]
    loop.run()
    for request in requests:
        assert_greedy_equal(request.outputs, greedy_entry(model, request.prompt, 20))
