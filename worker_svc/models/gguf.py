"""GGUF files, converted once into a Hugging Face directory that loads in about a second.

Which architectures: those that `registry.py` knows GGUF names for. Weights are dequantised to float32, exactly as
gguf's own `dequantize` gives them; rows that llama.cpp stores interleaved for its rope are put back.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from worker_svc import memory
from worker_svc.models import registry
from worker_svc.models.base import Architecture, GgufArchitecture
from worker_svc.models.cache import locked
from worker_svc.models.config import BrokenModel, UnsupportedModel, write_json
from worker_svc.models.gguf_cache import CONVERTER_VERSION, converted_directory
from worker_svc.models.gguf_tokenizer import tokenizer_config, write_tokenizer

_ROPE_FACTORS = "rope_freqs.weight"


def convert_gguf(source: Path, cache: Path, *, key: str | None = None, name: str | None = None) -> Path:
    """The converted directory of a GGUF file below `cache`, made when it is not there yet.

    The directory appears complete or not at all, also when two processes convert at once. It is named after the file
    and `key`; without one, after size, time and place of the file. `name` is what clients will call the model.
    Raises BrokenModel (not a GGUF file, truncated), UnsupportedModel (architecture, tokenizer, quantisation) or
    NotEnoughMemory: all of it is held at once.
    """
    name = name or source.stem.lower()
    target = converted_directory(cache, name, key or _file_key(source))
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{target.name}.lock"):
        if target.is_dir():
            return target
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=cache))
        try:
            _convert_into(source, partial, name)
            partial.chmod(0o755)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def _file_key(source: Path) -> str:
    stat = source.stat()
    return hashlib.sha256(f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _convert_into(source: Path, target: Path, name: str) -> None:
    reader = open_gguf(source)
    fields = _Fields(source, reader)
    architecture, names = _architecture(source, fields)
    config = _config(fields, reader, architecture, names.name)
    num_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    part = memory.Part(f"of weights in float32, to convert {source.name} (once)", num_bytes)
    memory.check([part], memory.memory_limit())
    tensors = dict(_tensors(source, reader, config, names))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # it is written for its owner only
    write_tokenizer(fields, target / "tokenizer.json")
    write_json(target / "tokenizer_config.json", tokenizer_config(fields, int(config["max_position_embeddings"])))
    write_json(target / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    write_json(target / "generation_config.json", ends)
    write_json(target / "stepfence.json", {"name": name, "source": source.name, "converter": CONVERTER_VERSION})


def _architecture(source: Path, fields: _Fields) -> tuple[Architecture, GgufArchitecture]:
    name = fields.text("general.architecture")
    known = registry.find_gguf(name)
    if known is None or known.gguf is None:
        supported = ", ".join(one.gguf.name for one in registry.ARCHITECTURES if one.gguf is not None)
        raise UnsupportedModel(f"{source}: architecture {name!r}; supported GGUF architectures: {supported}")
    if fields.get(f"{name}.expert_count"):
        raise UnsupportedModel(f"{source}: a mixture of experts; supported GGUF architectures: dense {name}")
    return known, known.gguf


def open_gguf(source: Path) -> gguf.GGUFReader:
    """A reader over a complete file. Raises BrokenModel when it is not GGUF, of another version, or cut short."""
    try:
        with source.open("rb") as handle:
            if handle.read(4) != b"GGUF":
                raise BrokenModel(f"{source} is not a GGUF file")
        reader = gguf.GGUFReader(source)
    except BrokenModel:
        raise
    except Exception as error:  # the reader raises whatever numpy does on a short or strange file
        raise BrokenModel(f"{source} cannot be read as GGUF; it may be cut short ({error})") from error
    size = source.stat().st_size
    end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    if end > size:
        raise BrokenModel(f"{source} is cut short: {size} bytes, its tensors need {end}")
    return reader


class _Fields(Mapping[str, Any]):
    """The metadata of a file by key."""

    def __init__(self, source: Path, reader: gguf.GGUFReader) -> None:
        self._source = source
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise BrokenModel(f"{self._source} has no {key}")
        return self._fields[key].contents()

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._fields else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def text(self, key: str) -> str:
        """A string value."""
        return str(self[key])


def _config(
    fields: Mapping[str, Any], reader: gguf.GGUFReader, architecture: Architecture, prefix: str
) -> dict[str, Any]:
    """config.json as transformers reads it too."""
    names = {t.name for t in reader.tensors}
    heads = int(fields[f"{prefix}.attention.head_count"])
    hidden = int(fields[f"{prefix}.embedding_length"])
    theta = _short(fields.get(f"{prefix}.rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": [architecture.names[0]],
        "model_type": architecture.model_type,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields[f"{prefix}.feed_forward_length"]),
        "num_hidden_layers": int(fields[f"{prefix}.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get(f"{prefix}.attention.head_count_kv", heads)),
        "head_dim": int(fields.get(f"{prefix}.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(fields[f"{prefix}.context_length"]),
        "rms_norm_eps": _short(fields[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    scaling = fields.get(f"{prefix}.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_parameters"] |= {"rope_type": "linear", "factor": _short(fields[f"{prefix}.rope.scaling.factor"])}
    elif scaling != "none":
        raise UnsupportedModel(f"GGUF rope scaling {scaling!r}; supported: none, linear, stored factors")
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            config["rope_freq_factors"] = [float(f) for f in _dequantised(tensor).reshape(-1)]
    config |= _special_ids(fields)
    return config


def _special_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if "tokenizer.ggml.bos_token_id" in fields:
        ids["bos_token_id"] = int(fields["tokenizer.ggml.bos_token_id"])
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ends = sorted({int(fields[key]) for key in keys if key in fields})
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if "tokenizer.ggml.padding_token_id" in fields:
        ids["pad_token_id"] = int(fields["tokenizer.ggml.padding_token_id"])
    return ids


def _short(value: float) -> float:
    """A float32 as the decimal people wrote: 9.999999747e-06 is 1e-05."""
    return float(f"{float(value):.7g}")


def _tensors(
    source: Path, reader: gguf.GGUFReader, config: Mapping[str, Any], names: GgufArchitecture
) -> Iterator[tuple[str, torch.Tensor]]:
    num_heads = {
        "attention.head_count": int(config["num_attention_heads"]),
        "attention.head_count_kv": int(config["num_key_value_heads"]),
    }
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        data = np.ascontiguousarray(_dequantised(tensor), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        if tensor.name.startswith("blk.") and kind in names.interleaved:
            data = _undo_interleaving(data, num_heads[names.interleaved[kind]])
        yield _target_name(source, tensor.name, names), torch.from_numpy(data.copy())


def _target_name(source: Path, name: str, names: GgufArchitecture) -> str:
    if name in names.model_tensors:
        return names.model_tensors[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in names.layer_tensors:
        return f"model.layers.{int(parts[1])}.{names.layer_tensors[parts[2]]}"
    raise UnsupportedModel(f"{source} holds a tensor {name!r} that the architecture {names.name} has no place for")


def _dequantised(tensor: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
    """float32 values, (out, in). Raises UnsupportedModel for a quantisation that gguf cannot undo."""
    try:
        values: npt.NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise UnsupportedModel(f"tensor {tensor.name} is quantised as {kind}, which cannot be converted") from error
    return values


def _undo_interleaving(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp stores the two halves of each head interleaved row by row; transformers one after the other."""
    pairs = weight.shape[0] // num_heads // 2
    rows = weight.reshape(num_heads, pairs, 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))
