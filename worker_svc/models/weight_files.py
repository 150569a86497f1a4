"""The safetensors files of a model directory, read into memory of their own.

Tensors are not views of the mapped files: a file that is cut short or replaced while the worker runs (or loads) would
end the process with SIGBUS. And only what is being converted is held twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.models.config import read_json
from worker_svc.models.fields import BrokenModel, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Written by older checkpoints, computed here.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies: dtype as the file names it, shape, and bytes of the file."""

    path: Path
    file: BufferedReader
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class WeightFiles:
    """The tensors of a directory, each taken once. Files stay open until `stack` is closed.

    Raises BrokenModel for files that are missing, cut short or not safetensors.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stored: dict[str, _Stored] = {}
        self._lent = torch.empty(0, dtype=torch.uint8)
        for path in _weight_files(directory):
            self._stored.update(_read_header(path, stack))
        self._left = {name for name in self._stored if not name.endswith(_IGNORED_SUFFIXES)}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See Weights. Raises BrokenModel also for a file that is cut short, and UnsupportedModel for another dtype
        than float32, float16 or bfloat16."""
        part = self._find(name, shape)
        data = torch.empty(part.num_bytes, dtype=torch.uint8)
        _read(part, data)
        self._left.discard(name)
        return data.view(_DTYPES[part.dtype]).view(shape)

    def lend(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """See Weights. Each is read into its place, in memory that is in use already: taking new memory from the
        system costs more than reading. Raises as take, and UnsupportedModel for unequal dtypes."""
        parts = [self._find(name, shape) for name, shape in zip(names, shapes, strict=True)]
        for name, part in zip(names, parts, strict=True):
            if part.dtype != parts[0].dtype:
                raise UnsupportedModel(
                    f"{part.path}: {name} is {part.dtype}; supported: {parts[0].dtype}, as {names[0]} is"
                )
        num_bytes = sum(part.num_bytes for part in parts)
        if self._lent.numel() < num_bytes:
            self._lent = torch.empty(num_bytes, dtype=torch.uint8)
        start = 0
        for part in parts:
            _read(part, self._lent[start : start + part.num_bytes])
            start += part.num_bytes
        self._left.difference_update(names)
        return self._lent[:num_bytes].view(_DTYPES[parts[0].dtype]).view(-1, *shapes[0][1:])

    def _find(self, name: str, shape: tuple[int, ...]) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise BrokenModel(f"the weights hold no {name}")
        if stored.shape != shape:
            raise BrokenModel(f"{stored.path}: {name} is {stored.shape}, config.json says {shape}")
        if stored.dtype not in _DTYPES:
            raise UnsupportedModel(f"{stored.path}: {name} is {stored.dtype}; supported: {', '.join(_DTYPES)}")
        return stored

    def ignore(self, name: str) -> None:
        """Do not expect this one to be taken."""
        self._left.discard(name)

    def check_all_taken(self) -> None:
        """Raises UnsupportedModel when tensors are left over: the network is not the one config.json names."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise UnsupportedModel(
                f"the weights hold {len(self._left)} tensors that the architecture has no place for ({some})"
            )


def _read(stored: _Stored, into: torch.Tensor) -> None:
    try:
        stored.file.seek(stored.start)
        complete = stored.file.readinto(into.numpy().data) == stored.num_bytes
    except OSError as error:
        raise BrokenModel(f"{stored.path} cannot be read: {error}") from error
    if not complete:
        raise BrokenModel(f"{stored.path} was cut short while it was read")


def _read_header(path: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Where each tensor of a file lies. The library checks that header and size of the file fit each other."""
    try:
        with safe_open(path, framework="np"):
            pass
        file = stack.enter_context(path.open("rb"))
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
    stored = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            stored[name] = _Stored(path, file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, end - first)
    return stored


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).exists():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BrokenModel(f"{directory / _INDEX} has no weight_map")
        names = sorted(set(map(str, weight_map.values())))
        if any(Path(name).name != name for name in names):
            raise BrokenModel(f"{directory / _INDEX} names files outside its directory")
        paths = [directory / name for name in names]
    else:
        paths = [directory / _SINGLE]
    for path in paths:
        if not path.exists():
            raise BrokenModel(f"{path} is missing")
    return paths
