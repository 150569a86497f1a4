"""The linear map in its two forms, and the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from worker_svc.models import layers
from worker_svc.models.layers import Linear, rms_scale
from worker_svc.runner.model_runner import resolve_dtype

CPU = torch.device("cpu")


@pytest.fixture(params=["as the machine has it", "without oneDNN", "with a oneDNN that disagrees"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without oneDNN":
        monkeypatch.setattr(layers, "_reorder", None)
    if request.param == "with a oneDNN that disagrees":
        original: Any = layers._reorder
        monkeypatch.setattr(layers, "_reorder", lambda weight, rows: original(weight * 1.1, rows))
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_linear_map_is_a_linear_map(form: str, dtype: torch.dtype, biased: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(rows, 32, generator=generator)
    bias = torch.randn(48, generator=generator).to(dtype) if biased else None
    residual = torch.randn(rows, 48, generator=generator).to(dtype)
    weight, x = weight.to(dtype), x.to(dtype)
    with torch.inference_mode():
        linear = Linear(weight, bias)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        assert torch.allclose(linear(x).double(), expected, atol=tolerance)
        before = residual.clone()
        assert torch.allclose(linear.add_to(residual, x).double(), expected + before.double(), atol=tolerance)
        assert torch.equal(residual, before), "the residual is not ours to change"
    if form != "as the machine has it":
        assert not linear.is_packed


def test_a_map_of_lent_memory_keeps_its_numbers(form: str) -> None:
    weight, x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)), torch.ones(3, 32)
    with torch.inference_mode():
        linear = Linear(weight, copy=True)
        expected = linear(x).clone()
        weight.zero_()
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(rms_scale(x, 1e-5), exact.to(dtype)) or dtype == torch.float32
    assert torch.allclose(rms_scale(x, 1e-5).double(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_auto_is_bfloat16_only_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert resolve_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
