"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.rules import DEFAULT, VLLM_0_25_1, Fence


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens"),
        ({"max_inflight_steps": 0}, "max_inflight_steps"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"max_preemptions": -1}, "max_preemptions"),
        ({"prefill_schedule_interval": 0}, "prefill_schedule_interval"),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": -0.1}, "watermark"),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 101}, "every running request needs one token a step"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 200, "max_model_len": 201}, "chunked prefill"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**settings)


def test_the_differences_between_default_and_reference_are_the_listed_ones() -> None:
    default, reference = SchedulerConfig(), SchedulerConfig.reference()
    differing = {name for name in default.__slots__ if getattr(default, name) != getattr(reference, name)}
    assert differing == {
        "rules", "max_preemptions", "watermark",
        # What the reference has no counterpart for, switched off.
        "max_fruitless_epochs", "max_queued_requests", "max_queued_tokens",
    }  # fmt: skip
    assert (default.rules, reference.rules) == (DEFAULT, VLLM_0_25_1)
    differing = {name for name in DEFAULT.__slots__ if getattr(DEFAULT, name) != getattr(VLLM_0_25_1, name)}
    assert differing == {
        "fence", "waits_for_fence", "refuse_infeasible", "resume_settled", "refuse_empty_rows",
        "reset_over_parked", "serve_loaded_first",
        # Where drafts come from.
        "proposes_drafts",
    }  # fmt: skip
    assert (DEFAULT.fence, VLLM_0_25_1.fence) == (Fence.ALWAYS, Fence.TRANSFERS)
    assert (default.max_preemptions, reference.max_preemptions) == (3, None)
    assert (default.watermark, reference.watermark) == (0.02, 0.0)


def test_derived_settings() -> None:
    config = SchedulerConfig(max_num_seqs=5, max_inflight_steps=3, max_num_scheduled_tokens=100)
    assert (config.num_rows, config.step_budget) == (20, 100)
    assert SchedulerConfig(max_num_batched_tokens=300).step_budget == 300
    assert SchedulerConfig(num_speculative_tokens=2).proposes_drafts
    assert not SchedulerConfig.reference(num_speculative_tokens=2).proposes_drafts


def test_rules_are_changed_one_by_one() -> None:
    config = SchedulerConfig.reference(block_size=4).with_rules(fence=Fence.ALWAYS)
    assert config.block_size == 4 and config.rules.fence is Fence.ALWAYS
    assert config.with_rules(fence=Fence.TRANSFERS) == SchedulerConfig.reference(block_size=4)
