"""Every field of a config.json that changes the numbers is computed as transformers computes it, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.unit.model.families import FAMILIES, Bench, reference_logits, tiny
from tests.unit.model.tiny import Settings, tiny_llama
from worker_svc.models.fields import BrokenModel, ConfigFields, UnsupportedModel
from worker_svc.models.registry import read_model_config
from worker_svc.models.rope import length_warning
from worker_svc.runner.model_runner import ModelRunner

TOKENS = [(i * i * 7 + 13 * i) % 290 + 3 for i in range(40)]

# Fields of transformers' configuration classes that change nothing of a forward pass, or only while training.
_HARMLESS = {
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "model_type"),
    *("is_encoder_decoder", "id2label", "label2id", "problem_type", "use_cache", "_name_or_path", "output_attentions"),
    *("initializer_range", "pretraining_tp", "chunk_size_feed_forward", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"),
    *("output_router_logits", "router_aux_loss_coef", "_sliding_window_pattern"),
}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
# Other values for each of the rest, with what belongs to them.
_CHANGES: Mapping[str, list[dict[str, Any]]] = {
    "vocab_size": [{"vocab_size": 310}],
    "hidden_size": [{"hidden_size": 128}],
    "intermediate_size": [{"intermediate_size": 72}],
    "num_hidden_layers": [{"num_hidden_layers": 7}],
    "num_attention_heads": [{"num_attention_heads": 8}],
    "num_key_value_heads": [{"num_key_value_heads": 1}, {"num_key_value_heads": None}],
    "head_dim": [{"head_dim": 32}],
    "hidden_act": [{"hidden_act": "gelu"}, {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}],
    "hidden_activation": [{"hidden_activation": "gelu"}, {"hidden_activation": "silu"}, {"hidden_activation": "relu"}],
    "max_position_embeddings": [{"max_position_embeddings": 300}],
    "rms_norm_eps": [{"rms_norm_eps": 0.1}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}],
    "rope_parameters": [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}],
    "attention_bias": [{"attention_bias": True}],
    "mlp_bias": [{"mlp_bias": True}],
    "sliding_window": [{"sliding_window": 9}, {"sliding_window": None}],
    "use_sliding_window": [_WINDOWED | {"max_window_layers": 1}],
    "max_window_layers": [_WINDOWED | {"max_window_layers": 0}, _WINDOWED | {"max_window_layers": 3}],
    "layer_types": [_WINDOWED | {"layer_types": _ALTERNATING}, {"layer_types": ["full_attention"] * 3}],
    "use_bidirectional_attention": [{"use_bidirectional_attention": True}],
    "query_pre_attn_scalar": [{"query_pre_attn_scalar": 5}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": 0.5}, {"attn_logit_softcapping": None}],
    "final_logit_softcapping": [{"final_logit_softcapping": 0.5}, {"final_logit_softcapping": None}],
    "original_max_position_embeddings": [{"original_max_position_embeddings": 64}],
    "num_experts_per_tok": [{"num_experts_per_tok": 1}],
    "num_local_experts": [{"num_local_experts": 4}],
    "norm_topk_prob": [{"norm_topk_prob": False}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2, "mlp_only_layers": []}],
    "mlp_only_layers": [{"mlp_only_layers": [0, 2]}],
    "moe_intermediate_size": [{"moe_intermediate_size": 24}],
    "attention_multiplier": [{"attention_multiplier": 0.5}],
    "residual_multiplier": [{"residual_multiplier": 0.2}],
    "embedding_multiplier": [{"embedding_multiplier": 0.2}],
    "logits_scaling": [{"logits_scaling": 3.0}],
}
# What of it is refused; everything else must be computed.
_REFUSED = [{"hidden_act": "relu"}, {"hidden_activation": "relu"}, {"use_bidirectional_attention": True}]
# Null values that a family's class of transformers does not take.
_NOT_TAKEN = {
    *((family, "num_key_value_heads") for family in ("Mistral", "Mixtral", "Gemma2", "Gemma3Text", "Qwen3Moe")),
    *(("Gemma2", "sliding_window"), ("Gemma3Text", "sliding_window")),
}


def _fields(family: str) -> set[str]:
    return set(getattr(transformers, f"{family}Config")().to_dict()) - _HARMLESS


def _cases() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (family, field, changes)
        for family in FAMILIES
        for field in sorted(_fields(family) & set(_CHANGES))
        for changes in _CHANGES[field]
        if changes[field] is not None or (family, field) not in _NOT_TAKEN
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_reference_is_known_here(family: str) -> None:
    """Fails when a version of transformers has a field that these tests do not judge."""
    assert _fields(family) - set(_CHANGES) == set()


@pytest.mark.parametrize("family, field, changes", _cases())
def test_a_changed_field_changes_the_logits_as_in_transformers(
    tmp_path: Path, family: str, field: str, changes: dict[str, Any]
) -> None:
    if family == "Gemma3Text" and field == "rope_parameters":
        changes = {"rope_parameters": {"full_attention": changes["rope_parameters"], "sliding_attention": None}}
        changes["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 20.0}
    if family != "Qwen2" and family != "Qwen3" and field == "layer_types":
        changes = {"layer_types": changes["layer_types"]}
    model = tiny(family, **changes)
    model.save_pretrained(tmp_path)
    if changes in _REFUSED or (family == "Gemma3Text" and changes.get("attn_logit_softcapping")):
        with pytest.raises(UnsupportedModel, match=rf"config\.json: {field} "):
            read_model_config(tmp_path)
        return
    bench = Bench(tmp_path)
    expected = reference_logits(model, TOKENS)
    for chunk in (len(TOKENS), 7):
        assert (bench.run(TOKENS, chunk) - expected).abs().max() <= 1e-4


# --- files as other versions wrote them ------------------------------------------------------------------------------

_LONG_LISTS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]}
_LONG_LENGTHS = {"max_position_embeddings": 160, "original_max_position_embeddings": 20}
_OLD: dict[str, tuple[str, dict[str, Any]]] = {
    "a base": ("Llama", {"rope_theta": 50.0}),
    "a null beside it": ("Llama", {"rope_theta": 50.0, "rope_scaling": None}),
    "linear": ("Llama", {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "both ways at once": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "rope_scaling": {"type": "linear", "factor": 3},
        },
    ),
    "llama3 without its context": (
        "Llama",
        {
            "max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    "yarn as for long inputs of Qwen 2.5": (
        "Qwen2",
        {
            "max_position_embeddings": 20,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20},
        },
    ),
    "the base of Mixtral is left out": ("Mixtral", {}),
    "Qwen 2 with windows from a layer on": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "Gemma 2 with a window in every other layer": ("Gemma2", {"sliding_window": 9}),
    "the lengths of windows are left out": ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "Phi 3 as su": (
        "Phi3",
        _LONG_LENGTHS
        | {
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "su", "original_max_position_embeddings": 20, **_LONG_LISTS},
        },
    ),
    "Phi 3 as yarn": (
        "Phi3",
        _LONG_LENGTHS | {"partial_rotary_factor": 0.75, "rope_scaling": {"rope_type": "yarn", **_LONG_LISTS}},
    ),
    "Gemma 3 with two bases": (
        "Gemma3Text",
        {
            "rope_theta": 400.0,
            "rope_local_base_freq": 30.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "Gemma 3 as it was first": ("Gemma3Text", {"sliding_window_pattern": 3}),
}


@pytest.mark.parametrize("case", _OLD)
def test_a_config_as_older_versions_wrote_it_is_read_as_transformers_reads_it(tmp_path: Path, case: str) -> None:
    family, written = _OLD[case]
    tiny(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types"):
        raw.pop(name, None)
    path.write_text(json.dumps(raw | written))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    bench = Bench(tmp_path, max_len=40)
    assert (bench.run(TOKENS, 9) - reference_logits(model, TOKENS)).abs().max() <= 1e-4


def test_fields_that_are_left_out_have_the_values_of_the_reference(tmp_path: Path) -> None:
    """A config.json with shapes only."""
    for family in FAMILIES:
        name = getattr(transformers, f"{family}Config").model_type
        shapes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        raw = {"model_type": name, "num_attention_heads": 32, **shapes}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        _, config = read_model_config(tmp_path)
        reference = transformers.AutoConfig.from_pretrained(tmp_path)
        spec = config.layers[0].attention
        assert spec.num_kv_heads == reference.num_key_value_heads, family
        assert spec.head_dim == (getattr(reference, "head_dim", None) or 2), family
        assert spec.window == (None if name.startswith("qwen") else getattr(reference, "sliding_window", None)), family
        assert spec.soft_cap == getattr(reference, "attn_logit_softcapping", None), family
        assert config.logit_soft_cap == getattr(reference, "final_logit_softcapping", None), family
        assert config.rms_norm_eps == reference.rms_norm_eps, family
        assert config.max_position_embeddings == reference.max_position_embeddings, family
        assert config.tie_word_embeddings == reference.tie_word_embeddings, family
        parameters = reference.rope_parameters
        theta = parameters["sliding_attention"]["rope_theta"] if "gemma3" in name else parameters["rope_theta"]
        assert config.layers[0].rope.theta == theta, family


# --- what is refused -------------------------------------------------------------------------------------------------


def _refusal(directory: Path, family: str, **changes: Any) -> str:
    path = directory / "config.json"
    if not path.exists():
        tiny(family).save_pretrained(directory)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises((UnsupportedModel, BrokenModel)) as raised:
        read_model_config(directory)
    text = str(raised.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


_UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"hidden_act": "relu2"}, "hidden_act 'relu2'; supported: silu"),
    ("Llama", {"hidden_act": None}, "hidden_act None; supported: silu"),
    ("Llama", {"sliding_window": 4096}, "sliding_window is 4096, which changes what the model computes"),
    ("Llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ("Llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("Llama", {"num_local_experts": 8}, "num_local_experts is 8"),
    ("Llama", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("Llama", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers is"),
    ("Llama", {"logit_scale": 0.0625}, "logit_scale is 0.0625"),
    ("Llama", {"rope_interleaved": True}, "rope_interleaved is True"),
    ("Mistral", {"attention_bias": True}, "attention_bias is True"),
    ("Mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types is"),
    ("Qwen2", {"mlp_bias": True}, "mlp_bias is True"),
    (
        "Qwen3",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types holds 'linear_att",
    ),
    ("Qwen3", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention'], a list of 3 names"),
    ("Qwen3Moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
    ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("Gemma2", {"sliding_window": None}, "sliding_window is None, a positive integer is needed"),
    ("Qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is False, what layer_types asks for"),
    ("Gemma3Text", {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters.rope_theta is 3.0, a field unknown here"),
    (
        "Gemma3Text",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
        "rope_scaling.truncate False; supported: true",
    ),
    ("Olmo2", {"clip_qkv": 3.0}, "clip_qkv is 3.0"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "proportional"}},
        "rope_parameters.rope_type 'proportional'; supported",
    ),
    ("Llama", {"rope_parameters": {"mrope_section": [2, 3, 3]}}, "rope_parameters.mrope_section is [2, 3, 3], a field"),
    ("Llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}, a field unknown"),
    ("Llama", {"rope_parameters": {"rope_type": 7}}, "rope_parameters.rope_type 7; supported"),
    ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor 0.5"),
    ("Phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type 'linear'; supported"),
    ("Phi3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type 'dynamic'; supported"),
    ("Llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised weights"),
    ("Llama", {"quantization": {"bits": 4}}, "quantization: quantised weights"),
]


@pytest.mark.parametrize("family, changes, said", _UNSUPPORTED)
def test_what_changes_the_numbers_and_is_not_computed_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    assert _refusal(tmp_path, family, **changes).startswith(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": None},
        {"sliding_window": None, "use_sliding_window": False},
        {"partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"] * 3},
        {"num_experts": 0, "residual_multiplier": 1, "rope_interleaved": False, "clip_qkv": None},
        {"pretraining_tp": 2, "unsloth_fixed": True, "transformers.js_config": {"dtype": "q4"}},
    ],
)
def test_values_that_change_nothing_are_not_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _, before = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert read_model_config(tmp_path)[1] == before


_BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"rms_norm_eps": None}, "rms_norm_eps is None, a number above 0 is needed"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear', a JSON object is needed"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None, a number above 0 is needed"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is None"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor is [1.0], a list of 8"),
    ({"rope_theta": True}, "rope_theta is True"),
    ({"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters.rope_theta is 0.5, a number above 1"),
    ({"max_position_embeddings": -5}, "max_position_embeddings is -5, a positive integer"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, a positive integer"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"num_attention_heads": 3, "head_dim": None}, "hidden_size 64 is no multiple of num_attention_heads 3"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim is 7, an even number is needed"),
    ({"attention_bias": "yes"}, "attention_bias is 'yes', true or false is needed"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, true or false"),
]


@pytest.mark.parametrize("changes, said", _BROKEN)
def test_f93_a_value_that_a_field_cannot_have_is_refused_naming_file_and_field(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    if "rope_scaling" in changes or "rope_theta" in changes:
        changes = changes | {"rope_parameters": None}
    assert _refusal(tmp_path, "Llama", **changes).startswith(said)


def test_f93_more_experts_chosen_than_there_are(tmp_path: Path) -> None:
    assert _refusal(tmp_path, "Mixtral", num_experts_per_tok=6).startswith("num_experts_per_tok is 6, but")


# --- how long a context may be ---------------------------------------------------------------------------------------


def _read(tmp_path: Path, **changes: Any) -> Any:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 100},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    return read_model_config(tmp_path)[1]


def test_the_context_is_the_one_for_which_every_sequence_is_exact(tmp_path: Path) -> None:
    plain = _read(tmp_path)
    assert (plain.max_position_embeddings, plain.max_len) == (100, 100)
    dynamic = _read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.5})
    assert (dynamic.max_position_embeddings, dynamic.max_len) == (100, 250)
    yarn = _read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100})
    assert (yarn.max_position_embeddings, yarn.max_len) == (100, 400)
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = _read(tmp_path, rope_scaling={"type": "longrope", "original_max_position_embeddings": 30, **lists})
    assert (long.max_position_embeddings, long.max_len) == (30, 100)
    assert length_warning(plain, 100) is None
    assert "max_model_len may be up to 100" in str(length_warning(long, 30))
    assert "every sequence is computed with long_factor, also a short one" in str(length_warning(long, 31))


def test_a_worker_says_which_factors_of_longrope_it_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    lengths = {"max_position_embeddings": 160, "original_max_position_embeddings": 40}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **lists}
    tiny("Phi3", rope_parameters=scaling, **lengths).save_pretrained(tmp_path)
    assert ModelRunner.load(Settings(str(tmp_path))).capabilities.max_model_len == 40
    assert "the context is 40 tokens, for which short_factor is right" in caplog.text
    caplog.clear()
    assert ModelRunner.load(Settings(str(tmp_path), max_model_len=100)).capabilities.max_model_len == 100
    assert "max_model_len 100 is beyond the model's original_max_position_embeddings 40" in caplog.text


def test_a_longer_context_than_the_scaling_reaches_is_refused(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    tiny("Llama", max_position_embeddings=64, rope_parameters=parameters).save_pretrained(tmp_path)
    assert ModelRunner.load(Settings(str(tmp_path))).capabilities.max_model_len == 64
    assert ModelRunner.load(Settings(str(tmp_path), max_model_len=128)).capabilities.max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len 129 is beyond the model's 128"):
        ModelRunner.load(Settings(str(tmp_path), max_model_len=129))


def test_numbers_of_a_file_are_shown_short() -> None:
    fields = ConfigFields({"rope_freq_factors": list(range(1000))}, "config.json")
    with pytest.raises(UnsupportedModel) as raised:
        fields.refuse_unread()
    assert len(str(raised.value)) < 250
