"""From a path or a known name to a model directory, and from a directory to a model on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from worker_svc.models.base import Architecture, Model, ModelConfig
from worker_svc.models.cache import cache_root, explained
from worker_svc.models.config import BrokenModel, read_json
from worker_svc.models.registry import read_model_config
from worker_svc.models.weight_files import WeightFiles

# What a front end needs of a tokenizer, in the order it is sent.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def locate_model(model: str) -> Path:
    """The directory that holds `model`: a Hugging Face directory as it is, a GGUF file converted, a known name fetched.

    Raises BrokenModel or UnsupportedModel with a message for people; fetching raises FetchFailed.
    """
    from worker_svc.fetch_model import KNOWN_MODELS, fetch_model
    from worker_svc.models.gguf import convert_gguf
    from worker_svc.models.progress import LogReport

    # A path below a home directory that is not known stays as it is, and then nothing is there.
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if path.is_file():
        try:
            return convert_gguf(path, cache_root() / "models")
        except OSError as error:
            raise BrokenModel(f"model {model!r} cannot be converted: {explained(error)}") from error
    if model in KNOWN_MODELS:
        return fetch_model(model, LogReport())
    if os.sep in model or model.lower().endswith(".gguf"):
        raise BrokenModel(f"model {model!r}: nothing is there; inside a container it must lie on the worker's volume")
    known = ", ".join(sorted(KNOWN_MODELS))
    raise BrokenModel(f"model {model!r} is neither a directory, nor a GGUF file, nor a known name ({known})")


def model_name(directory: Path) -> str:
    """The name clients use: as written when the model was converted, else the directory's own, in lower case."""
    info = directory / "stepfence.json"
    if info.exists():
        name = read_json(info).get("name")
        if isinstance(name, str) and name:
            return name
    return directory.resolve().name.lower()


def tokenizer_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each tokenizer file that is there; nothing without a tokenizer.json."""
    if (directory / "tokenizer.json").exists():
        for name in TOKENIZER_FILES:
            if (directory / name).exists():
                yield name, (directory / name).read_bytes()


def load_model(
    directory: Path,
    *,
    max_len: int | None,
    dtype: torch.dtype,
    device: torch.device,
    read: tuple[Architecture, ModelConfig] | None = None,
) -> Model:
    """Load a Hugging Face directory. max_len None: the model's own. read: what read_model_config gave, where it was
    called before.

    Raises BrokenModel (a file missing, truncated, or of other shapes than config.json says) or UnsupportedModel.
    """
    architecture, config = read or read_model_config(directory)
    with ExitStack() as stack:
        weights = WeightFiles(directory, stack)
        if config.tie_word_embeddings:
            weights.ignore("lm_head.weight")  # some store a copy all the same
        model = architecture.build(
            config,
            weights,
            max_len=min(max_len or config.max_position_embeddings, config.max_len),
            dtype=dtype,
            device=device,
        )
        weights.check_all_taken()
    return model
