"""The parameters a request is sampled with, as one table: a field of `Sampling` is a field of proto ResolvedSampling, a
column of the persistent batch, and what the sampler reads. A further parameter is a field here and its use in
`sampler.py`. No torch, no protobuf."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]


# Temperatures below this are 0.
_GREEDY_BELOW: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of every row. is_valid: of the value on the wire. as_kept: from the wire to the column."""

    name: str
    dtype: type[np.generic]
    default: float
    is_valid: Callable[[float], bool]
    as_kept: Callable[[Any], Any]


def _number(
    default: float,
    dtype: type[np.generic],
    is_valid: Callable[[float], bool] = lambda value: True,
    as_kept: Callable[[Any], Any] = lambda value: value,
) -> Any:
    metadata = {"dtype": dtype, "default": default, "is_valid": is_valid, "as_kept": as_kept}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one request."""

    # 0 = greedy; so is what is so small that no other token has a chance.
    temperature: float = _number(
        0.0,
        np.float32,
        lambda value: math.isfinite(value) and 0 <= value <= 100,
        lambda value: value if value >= _GREEDY_BELOW else 0.0,
    )
    # 1 = off. Not 0: so a request whose parameters were left out is noticed, and not taken for a greedy one.
    top_p: float = _number(1.0, np.float32, lambda value: 0 < value <= 1)
    # 0 = off; -1 on the wire means the same.
    top_k: int = _number(0, np.int32, lambda value: value >= -1, lambda value: max(value, 0))
    # 0 = off.
    min_p: float = _number(0.0, np.float32, lambda value: 0 <= value <= 1)
    # masked_token_ids are not sampled while the output index is below this.
    min_tokens: int = _number(0, np.int64)
    seed: int = _number(0, np.uint64)
    # Which choice of one client request; with seed and output index it is the key of the random numbers.
    choice_index: int = _number(0, np.int64)
    # All EOS and stop ids.
    masked_token_ids: tuple[int, ...] = ()


PARAMETERS: Final = tuple(Parameter(name=entry.name, **entry.metadata) for entry in fields(Sampling) if entry.metadata)


class SamplingTable:
    """The parameters of every row of the batch, one column each."""

    def __init__(self, num_rows: int) -> None:
        self._columns: dict[str, Column] = {
            parameter.name: np.full(num_rows, parameter.default, parameter.dtype) for parameter in PARAMETERS
        }
        self.masked_token_ids: list[tuple[int, ...]] = [()] * num_rows

    def __getitem__(self, name: str) -> Column:
        """The column of one parameter."""
        return self._columns[name]

    def put(self, row: int, sampling: Sampling) -> None:
        """A request enters the row."""
        for name, column in self._columns.items():
            column[row] = getattr(sampling, name)
        self.masked_token_ids[row] = sampling.masked_token_ids

    def take(self, rows: npt.NDArray[np.int64]) -> Mapping[str, Column]:
        """The parameters of these rows, in this order; a row may be named several times."""
        return {name: column[rows] for name, column in self._columns.items()}
