"""Sampling parameters are one table: what the wire has, the batch keeps, and the sampler reads."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from stepfence.v1 import sampling_pb2
from worker_svc.sampling import PARAMETERS, Sampling, SamplingTable


def test_every_parameter_is_a_field_of_the_wire() -> None:
    wire = {name for name in sampling_pb2.ResolvedSampling.DESCRIPTOR.fields_by_name}
    assert {parameter.name for parameter in PARAMETERS} <= wire
    # max_tokens is the scheduler's; the lists of ids become masked_token_ids.
    assert wire - {parameter.name for parameter in PARAMETERS} == {"max_tokens", "eos_token_ids", "stop_token_ids"}


def test_every_field_but_the_masked_ids_is_a_parameter() -> None:
    assert {entry.name for entry in fields(Sampling)} - {parameter.name for parameter in PARAMETERS} == {
        "masked_token_ids"
    }


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_default_is_valid_and_fits_its_column(parameter: object) -> None:
    (found,) = [one for one in PARAMETERS if one is parameter]
    assert found.is_valid(found.default)
    assert found.dtype(found.default) == found.default
    assert getattr(Sampling(), found.name) == found.default


def test_rows_keep_their_own_values_to_the_last_bit() -> None:
    table = SamplingTable(4)
    first = Sampling(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, min_tokens=3, seed=2**64 - 1, masked_token_ids=(7,)
    )
    table.put(2, first)
    table.put(0, Sampling(seed=5))
    taken = table.take(np.array([2, 0, 2, 1]))
    assert taken["seed"].tolist() == [2**64 - 1, 5, 2**64 - 1, 0]
    assert taken["top_k"].tolist() == [40, 0, 40, 0]
    assert taken["temperature"].tolist() == [np.float32(0.7), 0, np.float32(0.7), 0]
    assert taken["top_p"].tolist() == [np.float32(0.9), 1, np.float32(0.9), 1]
    assert table.masked_token_ids[2] == (7,)
    # The next request in the row has nothing of it.
    table.put(2, Sampling())
    assert {name: column.tolist() for name, column in table.take(np.array([2])).items()} == {
        parameter.name: [parameter.default] for parameter in PARAMETERS
    }
