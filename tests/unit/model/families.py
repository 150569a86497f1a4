"""Small random models of every family, and their logits position by position, whatever a step holds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from worker_svc.attention.base import RaggedBatch
from worker_svc.attention.sdpa import SdpaAttention
from worker_svc.models.base import ForwardInput
from worker_svc.models.loader import load_model

CPU = torch.device("cpu")

_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What a family's model needs to be small and to show what is its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "Gemma3Text": {"sliding_window": 24, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "Olmo2": {},
    "Granite": {
        "residual_multiplier": 0.6,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.7,
    },
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model of transformers, its norms and biases away from their neutral values."""
    torch.manual_seed(changes.pop("seed", 1))
    settings = _SHAPE | FAMILIES[family] | changes
    if family == "Granite":  # not far from the usual scale, or every softmax is one token's
        settings.setdefault("attention_multiplier", 1.3 * settings["head_dim"] ** -0.5)
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    name = family.removesuffix("Text") + "ForCausalLM"
    model = getattr(transformers, name)(config)
    model.train(False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def reference_logits(model: Any, token_ids: Sequence[int], one_by_one_from: int | None = None) -> torch.Tensor:
    """transformers' logits after each token of one sequence, [T, vocab], computed in one pass; one_by_one_from: the
    tokens from this one on come one at a time."""
    tokens = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        if one_by_one_from is None:
            return model(tokens, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
        # Newer versions have another name for it.
        cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        answer = model(tokens[:, :one_by_one_from], use_cache=True)
        logits = [answer.logits[0]]
        for position in range(one_by_one_from, len(token_ids)):
            kept = {cache: answer.past_key_values}
            answer = model(tokens[:, position : position + 1], use_cache=True, **kept)
            logits.append(answer.logits[0])
    return torch.cat(logits).float()


@dataclass
class Tracked:
    """One sequence on its way: its tokens, its blocks, how many are computed, and the logits so far."""

    token_ids: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Bench:
    """A loaded model over a pool of scattered blocks, driven step by step with given tokens."""

    def __init__(
        self,
        directory: Path,
        *,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 400,
    ) -> None:
        with torch.inference_mode():
            self.model = load_model(directory, max_len=max_len, dtype=dtype, device=CPU)
        self.attention = SdpaAttention(dtype, CPU)
        self.block_size = block_size
        shape = self.model.config.kv_shape(block_size, dtype)
        self._kv = self.attention.new_kv(shape, num_blocks)
        self._free = [int(one) + 1 for one in np.random.default_rng(3).permutation(num_blocks - 1)]

    def begin(self, token_ids: Sequence[int]) -> Tracked:
        """A sequence with the blocks it needs."""
        blocks = [self._free.pop() for _ in range(-(-len(token_ids) // self.block_size))]
        return Tracked(list(token_ids), blocks)

    def share(self, other: Tracked, num_tokens: int, token_ids: Sequence[int]) -> Tracked:
        """A sequence that begins with computed blocks of another one."""
        sequence = self.begin(token_ids)
        num_blocks = num_tokens // self.block_size
        sequence.blocks[:num_blocks] = other.blocks[:num_blocks]
        sequence.computed = num_blocks * self.block_size
        return sequence

    def step(self, rows: Sequence[tuple[Tracked, int]]) -> None:
        """Compute the next tokens of some sequences in one pass, with logits after each of them."""
        counts = np.array([count for _, count in rows], np.int64)
        computed = np.array([sequence.computed for sequence, _ in rows], np.int64)
        order = self.attention.row_order(computed, counts)
        rows = [rows[i] for i in order]
        seq_lens = (computed + counts)[order]
        table = np.zeros((len(rows), -(-int(seq_lens.max()) // self.block_size)), np.int32)
        positions: list[int] = []
        slots: list[int] = []
        token_ids: list[int] = []
        for row, (sequence, count) in enumerate(rows):
            used = sequence.blocks[: table.shape[1]]
            table[row, : len(used)] = used
            for position in range(sequence.computed, sequence.computed + count):
                positions.append(position)
                slots.append(
                    sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size
                )
                token_ids.append(sequence.token_ids[position])
        starts = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int32)
        batch = RaggedBatch(starts, seq_lens.astype(np.int32), table)
        with torch.inference_mode():
            plan = self.attention.plan(batch, self.block_size)
            everything = torch.arange(len(token_ids))
            step = ForwardInput(torch.tensor(token_ids), torch.tensor(positions), torch.tensor(slots), everything, plan)
            logits = self.model.forward(step, self._kv, self.attention)
        for (sequence, count), first in zip(rows, starts.tolist(), strict=False):
            sequence.logits.append(logits[first : first + count])
            sequence.computed += count

    def run(self, token_ids: Sequence[int], chunk: int) -> torch.Tensor:
        """All logits of one sequence in chunks of one size."""
        sequence = self.begin(token_ids)
        while sequence.computed < len(token_ids):
            self.step([(sequence, min(chunk, len(token_ids) - sequence.computed))])
        self._free += sequence.blocks
        return torch.cat(sequence.logits)
