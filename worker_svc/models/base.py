"""What a model is to the runner, and what a decoder is made of: `ModelConfig` with one `LayerSpec` a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from worker_svc.attention.base import AttentionBackend, AttentionSpec
from worker_svc.attention.paged_kv import KvShape, PagedKv
from worker_svc.models.fields import ConfigFields
from worker_svc.runner.base import GenerationDefaults


class Weights(Protocol):
    """The tensors of a checkpoint, as stored (any floating dtype). Raises BrokenModel for a missing name or another
    shape than asked for."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name, the caller's own."""

    def lend(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The tensors of these names one behind the other along the first axis, all other axes equal. The caller may
        change it, and must have copied what it keeps before it asks for the next one."""


class Activation(Enum):
    """Of the gate in a gated MLP. GELU is the exact one, GELU_TANH its approximation by tanh."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


class QkNorm(Enum):
    """Whether queries and keys are normed before they are rotated: each head by itself, or all heads as one vector."""

    NONE = "none"
    PER_HEAD = "per head"
    WHOLE = "whole"


class RopeKind(Enum):
    """How rotation frequencies are stretched.

    LINEAR: every frequency divided by factor. DYNAMIC: from original_max_position_embeddings on, a larger base for
    every further position. LLAMA3: long wavelengths divided by factor, short ones kept, a ramp between. YARN: the same
    with a ramp over dimensions. LONGROPE: frequency i divided by short_factors[i], or by long_factors[i] when sequences
    may be longer than original_max_position_embeddings. FACTORS: frequency i divided by short_factors[i] at any length
    (GGUF files store the llama3 rule like this, evaluated).
    """

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Parameters of a RopeKind; those that the kind does not use have no meaning.

    attention_factor: cos and sin are multiplied by it. truncate: the ends of YaRN's ramp are whole dimensions.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions of a layer. rotary_dim: numbers at the beginning of each head that are rotated; None: all."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None

    @property
    def num_rotated(self) -> int:
        """Numbers of a head that are rotated, an even number."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, slots=True)
class Biases:
    """Which of a layer's linear maps have one."""

    qkv: bool = False
    out: bool = False
    gate_up: bool = False
    down: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's MLP: a router chooses num_per_token experts for each token.

    normalised: the weights of the chosen experts are divided by their sum.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalised: bool


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a checkpoint calls the tensors of a layer, behind `model.layers.N.` and before `.weight` and `.bias`.

    Several names for one map: their rows are joined in this order. None: the layer does not have that norm. `{}` in a
    name of an expert's map stands for the expert's number.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    norm_before_attention: str | None = "input_layernorm"
    norm_behind_attention: str | None = None
    norm_before_mlp: str | None = "post_attention_layernorm"
    norm_behind_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: (norm,) attention, (norm,) sum, (norm,) gated MLP or experts, (norm,) sum.

    names says which norms there are. residual_scale: factor of what attention and MLP add to the residual.
    """

    attention: AttentionSpec
    rope: RopeSpec
    intermediate_size: int
    activation: Activation = Activation.SILU
    biases: Biases = Biases()
    qk_norm: QkNorm = QkNorm.NONE
    residual_scale: float = 1.0
    experts: ExpertsSpec | None = None
    names: LayerNames = LayerNames()

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.attention.num_heads * self.attention.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.attention.num_kv_heads * self.attention.head_dim

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in the layer's linear maps."""
        attention = hidden_size * (2 * self.q_size + 2 * self.kv_size)
        if self.experts is None:
            return attention + 3 * hidden_size * self.intermediate_size
        experts = self.experts
        return attention + hidden_size * experts.num_experts * (1 + 3 * experts.intermediate_size)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, as its files describe it.

    max_position_embeddings: the context unless a setting says otherwise, in tokens. max_extended_len: the longest
    context that a setting may ask for, where rope scaling reaches further (0: max_position_embeddings). norm_offset:
    added to the stored weights of norms (Gemma stores w - 1). embedding_scale: factor of the embedded tokens.
    logit_scale: factor of the logits; logit_soft_cap: logits x then become cap * tanh(x / cap).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_extended_len: int = 0
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def max_len(self) -> int:
        """The longest context that a setting may ask for, in tokens."""
        return max(self.max_position_embeddings, self.max_extended_len)

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
        self, config: ModelConfig, weights: Weights, *, max_len: int, dtype: torch.dtype, device: torch.device
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
    has it, for files that name no architecture. parse: the fields of config.json to a ModelConfig, all but its ends and
    its generation defaults; raises UnsupportedModel or BrokenModel. defaults: values of fields that config.json leaves
    out, which are those of transformers' configuration class. build: weights to a Model.
    """

    names: Sequence[str]
    model_type: str
    parse: Callable[[ConfigFields], ModelConfig]
    build: BuildModel
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufArchitecture | None = None
