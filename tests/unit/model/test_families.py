"""Every family against transformers in float32: small random models, logits of every position and greedy tokens.

`make test` runs each family once as it is usually configured and once with an odd shape; all shapes, rope variants and
ties together are `long`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import OracleEntry, greedy_entry
from tests.support.step_loop import LoopRequest, StepLoop
from tests.unit.model.families import FAMILIES, Bench, reference_logits, tiny
from tests.unit.model.tiny import Settings
from worker_svc.runner.model_runner import ModelRunner

MAX_DELTA = 1e-4
LENGTH = 100
TOKENS = [(i * i * 7 + 13 * i) % 290 + 3 for i in range(LENGTH)]

# GQA groups of 1, 3, 4 and 8, and every head width that kernels treat apart.
SHAPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "1 x 64": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "3 x 80": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80, "hidden_size": 96},
    "4 x 96": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 96},
    "8 x 128": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    "1 x 256": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256},
}
TIES: dict[str, dict[str, Any]] = {"separate": {"tie_word_embeddings": False}, "tied": {"tie_word_embeddings": True}}


@dataclass(frozen=True, slots=True)
class Rope:
    """A variant of rotary positions. parameters: of the rope object, {dim} numbers for each list. max_len: what the
    worker is started with. one_by_one_from, length: of the reference."""

    parameters: Mapping[str, Any]
    config: Mapping[str, Any]
    max_len: int | None = None
    one_by_one_from: int | None = None
    length: int = LENGTH


# All are changed within the 100 tokens that are compared.
_LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 40}
ROPES: dict[str, Rope] = {
    "default": Rope({"rope_type": "default", "rope_theta": 500.0}, {}),
    "linear": Rope({"rope_type": "linear", "factor": 3.0}, {}),
    "llama3": Rope(
        {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {},
    ),
    # The ramp begins and ends between two dimensions.
    "yarn": Rope(
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
        },
        {},
    ),
    "yarn by its scales": Rope(
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
            "beta_fast": 3.0,
            "beta_slow": 0.6,
            "truncate": False,
        },
        {},
        max_len=128,
    ),
    "dynamic": Rope(
        {"rope_type": "dynamic", "factor": 4.0},
        {"max_position_embeddings": 40},
        max_len=160,
        one_by_one_from=40,
    ),
    "longrope, long": Rope(_LONG, {"max_position_embeddings": 160, "original_max_position_embeddings": 40}, 160),
    "longrope, short": Rope(_LONG, {"max_position_embeddings": 160, "original_max_position_embeddings": 40}, length=40),
}


def rope_changes(family: str, name: str, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of a configuration makes the variant; None: the family has no such variant."""
    rope = ROPES[name]
    parameters = {"rope_theta": 10000.0, **rope.parameters}
    head_dim = shape.get("head_dim", 16)
    if family == "Phi3":
        if parameters["rope_type"] not in ("default", "longrope"):
            return None
        # transformers' check of the lists takes the width of heads from the hidden size.
        if "longrope" in name and shape.get("hidden_size", 64) // shape.get("num_attention_heads", 4) != head_dim:
            return None
        parameters["partial_rotary_factor"] = 0.75
        head_dim = head_dim * 3 // 4
    if parameters["rope_type"] == "longrope":
        parameters["short_factor"] = [1.0 + 0.05 * i for i in range(head_dim // 2)]
        parameters["long_factor"] = [1.5 + 0.3 * i for i in range(head_dim // 2)]
    config = dict(rope.config)
    if family == "Gemma3Text":
        if parameters["rope_type"] in ("longrope", "dynamic"):  # transformers has them for one rope per model only
            return None
        parameters.pop("truncate", None)  # refused, since transformers does not find it there
        local = {"rope_type": "default", "rope_theta": 300.0}
        return config | {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if family != "Phi3":
        config.pop("original_max_position_embeddings", None)
    return config | {"rope_parameters": parameters}


def check_logits(family: str, directory: Path, rope: Rope, **changes: Any) -> None:
    """Prefill, chunks of several sizes, decodes, and steps that hold all of it, against one pass of transformers."""
    model = tiny(family, **changes)
    model.save_pretrained(directory)
    tokens = TOKENS[: rope.length]
    expected = reference_logits(model, tokens, rope.one_by_one_from)
    assert expected.std() > 0.5, "the logits say nothing"
    bench = Bench(directory, max_len=rope.max_len)
    for chunk in (len(tokens), 33, 7, 1):
        delta = (bench.run(tokens, chunk) - expected).abs().max()
        assert delta <= MAX_DELTA, f"chunks of {chunk}: {delta}"
    _check_mixed(bench, tokens, expected)


def _check_mixed(bench: Bench, tokens: Sequence[int], expected: torch.Tensor) -> None:
    """One step with a prefill, a chunk behind a prefix, a decode, drafts, and a sequence on another's blocks."""
    first, second, third, fourth = (bench.begin(tokens) for _ in range(4))
    bench.step([(first, 17), (second, 11), (third, 30), (fourth, 1)])
    shared = bench.share(third, 24, tokens)
    bench.step([(shared, len(tokens) - shared.computed), (first, 1), (second, 20), (third, 5), (fourth, 1)])
    bench.step([(first, 1), (fourth, 5), (third, 1), (second, 1)])
    for sequence in (first, second, third, fourth):
        got = torch.cat(sequence.logits)
        assert (got - expected[: len(got)]).abs().max() <= MAX_DELTA
    assert (torch.cat(shared.logits) - expected[24:]).abs().max() <= MAX_DELTA


# One odd shape and one rope variant for each family.
_ODD = dict(
    zip(
        FAMILIES,
        zip(itertools.cycle(list(SHAPES)[1:]), itertools.cycle(list(ROPES)[1:]), strict=False),
        strict=False,
    )
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    check_logits(family, tmp_path, Rope({}, {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_an_odd_shape_equal_transformers(tmp_path: Path, family: str) -> None:
    shape, rope = _ODD[family]
    changes = rope_changes(family, rope, SHAPES[shape])
    if changes is None:
        rope, changes = "default", rope_changes(family, "default", SHAPES[shape])
        assert changes is not None
    check_logits(family, tmp_path, ROPES[rope], **(SHAPES[shape] | TIES["tied"] | changes))


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_variant_equals_transformers(tmp_path: Path, name: str) -> None:
    changes = rope_changes("Llama", name, {})
    assert changes is not None
    check_logits("Llama", tmp_path, ROPES[name], **changes)


@pytest.mark.parametrize("length", ["long", "short"])
def test_longrope_of_partly_rotated_heads_equals_transformers(tmp_path: Path, length: str) -> None:
    changes = rope_changes("Phi3", f"longrope, {length}", {})
    assert changes is not None
    check_logits("Phi3", tmp_path, ROPES[f"longrope, {length}"], **changes)


@pytest.mark.long
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_and_rope_of_every_family(tmp_path: Path, family: str, shape: str, rope: str, tie: str) -> None:
    changes = rope_changes(family, rope, SHAPES[shape])
    if changes is None:
        pytest.skip("the family has no such variant")
    check_logits(family, tmp_path, ROPES[rope], **(SHAPES[shape] | TIES[tie] | changes))


# --- greedy tokens ---------------------------------------------------------------------------------------------------

GREEDY_LENGTH = 128
PROMPTS = (TOKENS[:60], TOKENS[:47], TOKENS[20:90], TOKENS[:1])
# A near tie may go either way.
NEAR_TIE = 1e-4


def assert_ids_equal(got: Sequence[int], entry: OracleEntry) -> int:
    """Equal as far as no near tie was met; how far that is."""
    reach = next((i for i, gap in enumerate(entry.gaps) if gap < NEAR_TIE), len(entry.ids))
    assert list(got[:reach]) == list(entry.ids[:reach])
    return reach


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers(tmp_path: Path, family: str) -> None:
    """128 tokens, with cache hits, preemptions, chunks, and drafts of which some are right."""
    model = tiny(family, max_position_embeddings=256)
    model.save_pretrained(tmp_path)
    runner = ModelRunner.load(Settings(str(tmp_path), num_blocks=900))
    entries = [greedy_entry(model, prompt, GREEDY_LENGTH) for prompt in PROMPTS]

    loop = StepLoop(runner, block_size=8, budget=40, max_model_len=256, prefix_cache=True)
    requests = [loop.add(prompt, GREEDY_LENGTH) for prompt in PROMPTS]
    loop.run(after_step=_preempt_now_and_then)
    assert requests[1].num_hit > 0, "no cache hit"
    _check_all(requests, entries)

    answers = {tuple(prompt): entry.ids for prompt, entry in zip(PROMPTS, entries, strict=True)}

    def propose(request: LoopRequest) -> list[int]:
        at = len(request.outputs)
        drafts = list(answers[tuple(request.prompt)][at : at + 4])
        if at % 3 == 1 and len(drafts) > 2:
            drafts[2] = (drafts[2] + 1) % 290
        return drafts

    loop = StepLoop(runner, block_size=8, budget=64, max_model_len=256, propose=propose)
    requests = [loop.add(prompt, GREEDY_LENGTH) for prompt in PROMPTS]
    loop.run()
    assert all(request.num_accepted_drafts > 20 for request in requests)
    _check_all(requests, entries)


def _preempt_now_and_then(loop: StepLoop) -> None:
    if len(loop.steps) % 29 == 0 and loop.running:
        victim = loop.running[len(loop.steps) % len(loop.running)]
        if victim.awaited == 0:
            loop.preempt(victim)


def _check_all(requests: Sequence[LoopRequest], entries: Sequence[OracleEntry]) -> None:
    reach = 0
    for request, entry in zip(requests, entries, strict=True):
        assert len(request.outputs) == GREEDY_LENGTH
        reach += assert_ids_equal(request.outputs, entry)
    assert reach > 0.8 * GREEDY_LENGTH * len(entries), "near ties ended the comparison early"


def test_positions_beyond_the_context_of_dynamic_rope_continue_like_transformers(tmp_path: Path) -> None:
    """A prompt within the original context, and an output that goes far beyond it; preempted on the way, so that tokens
    beyond the context are computed again in one chunk."""
    changes = rope_changes("Llama", "dynamic", {})
    assert changes is not None
    model = tiny("Llama", **changes)
    model.save_pretrained(tmp_path)
    runner = ModelRunner.load(Settings(str(tmp_path), num_blocks=200, max_model_len=160))
    loop = StepLoop(runner, block_size=8, budget=64, max_model_len=160)
    prompts = [TOKENS[:30], TOKENS[5:12]]
    requests = [loop.add(prompt, GREEDY_LENGTH) for prompt in prompts]
    loop.run(after_step=_preempt_now_and_then)
    _check_all(requests, [greedy_entry(model, prompt, GREEDY_LENGTH) for prompt in prompts])


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_not_far_from_float32(tmp_path: Path, family: str, tiles: bool) -> None:
    """As far as transformers in bfloat16 is, or half as far again. tiles: as on CPUs without AMX."""
    model = tiny(family)
    model.save_pretrained(tmp_path)
    expected = reference_logits(model, TOKENS)
    allowed = 1.5 * (reference_logits(model.to(torch.bfloat16), TOKENS) - expected).square().mean().sqrt()
    assert allowed < 0.2 * expected.std()
    bench = Bench(tmp_path, dtype=torch.bfloat16)
    bench.attention._tiles = tiles
    for chunk in (LENGTH, 33, 7):
        assert (bench.run(TOKENS, chunk) - expected).square().mean().sqrt() <= allowed


def test_experts_are_chosen_token_by_token(tmp_path: Path) -> None:
    """More experts than tokens, one expert a token, and all experts for every token."""
    for index, (num, per_token) in enumerate([(40, 1), (4, 4)]):
        folder = tmp_path / str(index)
        check_logits("Mixtral", folder, Rope({}, {}), num_local_experts=num, num_experts_per_tok=per_token)
