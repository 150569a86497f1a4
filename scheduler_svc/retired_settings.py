"""Settings people bring from other systems, or look for in the wrong service, and what to use here instead (D18).

Names are in the spelling of fields (lower case, underscores); flags and environment variables are brought to it first.
"""

from __future__ import annotations

from typing import Final

_RECOMPUTE: Final = (
    "a preempted request is always recomputed; give the pool more room with the worker's kv_memory or num_blocks"
)
_ONE_DEVICE: Final = (
    "not there yet: a model must fit into the memory of one device; more workers serve more requests, each with the "
    "whole model"
)
_NO_PREFIX_CACHING: Final = (
    "use --no-enable-prefix-caching, in the environment and in files enable_prefix_caching = false"
)
_DRAFTS: Final = "use num_speculative_tokens: the scheduler proposes n-gram drafts itself"

REPLACEMENTS: Final[dict[str, str]] = {
    "swap_space": _RECOMPUTE,
    "cpu_offload_gb": _ONE_DEVICE,
    "preemption_mode": _RECOMPUTE,
    "num_scheduler_steps": "steps are kept in flight instead: use max_inflight_steps",
    "multi_step_stream_outputs": "tokens are sent as each step is acknowledged; there is nothing to set",
    "async_scheduling": "use max_inflight_steps: 1 is synchronous, 2 and more is asynchronous",
    "use_v2_block_manager": "there is one block manager; leave it out",
    "delay_factor": "use prefill_schedule_interval",
    "scheduler_delay_factor": "use prefill_schedule_interval",
    "max_paddings": "steps are not padded; bound them with max_num_batched_tokens",
    "max_num_partial_prefills": "use long_prefill_token_threshold",
    "max_long_partial_prefills": "use long_prefill_token_threshold",
    "scheduling_policy": "use policy",
    "schedule_policy": "use policy",
    "schedule_conservativeness": "use watermark",
    "chunked_prefill_size": "use max_num_batched_tokens",
    "max_running_requests": "use max_num_seqs",
    "max_prefill_tokens": "use max_num_batched_tokens",
    "max_total_tokens": "use the worker's kv_memory or num_blocks",
    "num_gpu_blocks_override": "use the worker's num_blocks",
    "mem_fraction_static": "use the worker's gpu_memory_utilization",
    "page_size": "use block_size",
    "context_length": "use max_model_len",
    "disable_radix_cache": _NO_PREFIX_CACHING,
    "no_prefix_caching": _NO_PREFIX_CACHING,
    "speculative_model": _DRAFTS,
    "speculative_config": _DRAFTS,
    "model_path": "use the worker's model",
    "tokenizer": "the tokenizer comes from the worker's model; leave it out",
    "host": "use listen, HOST:PORT",
    "port": "use listen, HOST:PORT",
    "api_key": (
        "clients are not authenticated yet: keep the port in a trusted network; between the parts use "
        "cluster_secret_file"
    ),
    "log_level": "use log_format for the form of logs; the level is fixed",
    "bind": "use listen, HOST:PORT",
    "target": "it belongs to the commands that call a server, such as `stepfence generate` and `stepfence status`",
    "tensor_parallel_size": _ONE_DEVICE,
    "data_parallel_size": "start more workers: each is a rank of its own",
    "pipeline_parallel_size": _ONE_DEVICE,
}

# Settings of the worker, which the scheduler's and the front end's settings do not have. A test compares them with the
# worker's own.
WORKER_SETTINGS: Final[frozenset[str]] = frozenset(
    {
        "listen",
        "model",
        "runner",
        "device",
        "dtype",
        "num_blocks",
        "kv_memory",
        "gpu_memory_utilization",
        "max_model_len",
        "threads",
        "served_model_name",
        "script",
        "cluster_secret_file",
        "tls_dir",
        "drain_deadline_s",
        "log_format",
    }
)
