"""What a model is to the runner, and what a decoder is made of: `ModelConfig` with one `LayerSpec` a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from worker_svc.attention.base import AttentionBackend, AttentionSpec
from worker_svc.attention.paged_kv import KvShape, PagedKv
from worker_svc.runner.base import GenerationDefaults

# name -> tensor, as stored (any floating dtype). Raises BrokenModel for a missing name or another shape than asked for.
TakeWeight = Callable[[str, tuple[int, ...]], torch.Tensor]


class Activation(Enum):
    """Of the gate in a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotation frequencies are stretched beyond the base: `kind` is "linear", "llama3" or "factors".

    linear: every frequency divided by factor. llama3: long wavelengths divided by factor, short ones kept, a ramp
    between. factors: frequency i divided by factors[i] (how GGUF stores the llama3 rule, already evaluated).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions of a layer."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Biases:
    """Which of a layer's linear maps have one."""

    qkv: bool = False
    out: bool = False
    gate_up: bool = False
    down: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm, attention, (norm,) sum, norm, gated MLP, (norm,) sum.

    has_qk_norms: queries and keys are normed per head, before they are rotated. has_post_norms: the outputs of
    attention and MLP are normed before they are added to the residual.
    """

    attention: AttentionSpec
    rope: RopeSpec
    intermediate_size: int
    activation: Activation = Activation.SILU
    biases: Biases = Biases()
    has_qk_norms: bool = False
    has_post_norms: bool = False

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.attention.num_heads * self.attention.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.attention.num_kv_heads * self.attention.head_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, as its files describe it. norm_offset: added to the stored weights of norms (Gemma stores w - 1).
    embedding_scale: factor of the embedded tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    norm_offset: float = 0.0
    embedding_scale: float = 1.0

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The distinct ones, in the order of layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    def kv_shape(self, block_size: int, dtype: torch.dtype) -> KvShape:
        """What a block of this model's KV holds. All layers have the same KV heads (the registry refuses others)."""
        first = self.layers[0].attention
        return KvShape(len(self.layers), block_size, first.num_kv_heads, first.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step on the device. T tokens, flat; S rows of logits."""

    # [T] int64 each: token, its position in its sequence, and the KV slot it is written to.
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    # [S] int64: tokens whose logits are wanted.
    logit_tokens: torch.Tensor
    attention_plan: Any


class Model(Protocol):
    """Weights on a device, and one ragged forward pass."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def forward(self, step: ForwardInput, kv: PagedKv, attention: AttentionBackend) -> torch.Tensor:
        """Run T tokens through the network, writing their KV; logits of step.logit_tokens as float32 [S, vocab]."""


class BuildModel(Protocol):
    """Takes every weight it needs and makes the model. max_len: the longest sequence, in tokens."""

    def __call__(
        self, config: ModelConfig, take: TakeWeight, *, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> Model: ...


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How GGUF files store an architecture.

    name: `general.architecture`, and the prefix of its metadata. layer_tensors, model_tensors: GGUF names to the
    checkpoint's, the former behind `blk.N.` and `model.layers.N.`. interleaved: maps whose rows are stored for
    llama.cpp's rope and must be put back, with the metadata key (behind the prefix) of their number of heads.
    """

    name: str
    layer_tensors: Mapping[str, str]
    model_tensors: Mapping[str, str]
    interleaved: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models: a file of its own under `models/` and one line in `registry.py`.

    names: in config.json's `architectures`; the first is what a converted GGUF file gets. model_type: as config.json
    has it, for files that name no architecture. parse: config.json and generation_config.json to a ModelConfig; raises
    UnsupportedModel or BrokenModel. build: weights to a Model.
    """

    names: Sequence[str]
    model_type: str
    parse: Callable[[Mapping[str, Any], Mapping[str, Any], str], ModelConfig]
    build: BuildModel
    gguf: GgufArchitecture | None = None
