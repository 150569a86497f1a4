"""Sampling: the distribution is right, keys alone decide, and neighbours do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from worker_svc.sampler import SamplingRows, gumbel, random_bits, sample, stream_keys
from worker_svc.sampling import PARAMETERS

CPU = torch.device("cpu")


def _rows(num: int, **columns: Any) -> SamplingRows:
    """Row i at temperature 1 with seed i, unless columns say otherwise."""
    masked, output_index = columns.pop("masked", ()), columns.pop("output_index", 0)
    given: dict[str, Any] = {"temperature": 1.0, "seed": np.arange(num)} | columns
    parameters = {
        parameter.name: np.broadcast_to(given.get(parameter.name, parameter.default), (num,)).astype(parameter.dtype)
        for parameter in PARAMETERS
    }
    return SamplingRows(parameters, np.broadcast_to(output_index, (num,)).astype(np.int64), masked)


def _frequencies(logits: list[float], num: int = 20_000, **columns: Any) -> torch.Tensor:
    drawn = sample(torch.tensor(logits).repeat(num, 1), _rows(num, **columns))
    return torch.bincount(drawn, minlength=len(logits)) / num


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def test_splitmix64_gives_its_published_numbers() -> None:
    """First outputs for seed 1234567, as other implementations print them: the bits are the generator's, not just
    random."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    bits = random_bits([1234567], 8, CPU)[0].tolist()
    assert [bits[i] + (bits[i + 1] << 32) for i in range(0, 8, 2)] == expected


def test_greedy_is_argmax() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits.clone(), _rows(50, temperature=0.0)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(torch.tensor(LOGITS) / temperature, -1)
    # Four standard deviations of a frequency over 20,000 draws.
    assert torch.allclose(_frequencies(LOGITS, temperature=temperature), expected, atol=4 * 0.5 / 20_000**0.5)


def test_frequencies_follow_the_softmax_over_output_indices_of_one_seed() -> None:
    found = _frequencies(LOGITS, seed=99, output_index=np.arange(20_000))
    assert torch.allclose(found, torch.softmax(torch.tensor(LOGITS), -1), atol=4 * 0.5 / 20_000**0.5)


def test_top_k_keeps_the_k_largest() -> None:
    found = _frequencies(LOGITS, top_k=3)
    assert torch.allclose(found[:3], torch.softmax(torch.tensor(LOGITS[:3]), -1), atol=0.015)
    assert found[3:].sum() == 0


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    mass = torch.softmax(torch.tensor(LOGITS), -1).cumsum(-1)
    assert mass[1] < 0.8 < mass[2]
    found = _frequencies(LOGITS, top_p=0.8)
    assert (found[:3] > 0).all()
    assert found[3:].sum() == 0
    assert _frequencies(LOGITS, num=500, top_p=1e-6)[0] == 1


def test_min_p_drops_what_is_far_below_the_best() -> None:
    probabilities = torch.softmax(torch.tensor(LOGITS), -1)
    kept = probabilities >= 0.2 * probabilities.max()
    found = _frequencies(LOGITS, min_p=0.2)
    assert torch.equal(found > 0, kept)


@pytest.mark.parametrize("vocab", [200, 5000])
def test_filters_agree_with_a_plain_computation(vocab: int) -> None:
    """Over random rows: the set of tokens that can be drawn is the one that sorting probabilities gives."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(12, vocab, generator=generator) * 2
    top_p = np.linspace(0.1, 0.999, 12)
    top_k = np.array([0, 5, 50, 199] * 3)
    for row in range(12):
        ordered, order = logits[row].sort(descending=True)
        if top_k[row]:
            ordered, order = ordered[: top_k[row]], order[: top_k[row]]
        probabilities = torch.softmax(ordered, -1)
        kept = order[(probabilities.cumsum(-1) - probabilities) < top_p[row]]
        num = 600
        rows = _rows(num, top_p=top_p[row], top_k=top_k[row])
        drawn = sample(logits[row].repeat(num, 1), rows)
        assert set(drawn.tolist()) <= set(kept.tolist())
        likely = kept[torch.softmax(logits[row][kept], -1) > 0.03]
        assert set(likely.tolist()) <= set(drawn.tolist())


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 1000, generator=generator) * 3
    columns = {
        "temperature": np.where(np.arange(64) % 5 == 0, 0.0, 0.3 + np.arange(64) / 40),
        "top_p": np.where(np.arange(64) % 3 == 0, 0.9, 1.0),
        "top_k": np.where(np.arange(64) % 4 == 0, 30, 0),
        "min_p": np.where(np.arange(64) % 7 == 0, 0.02, 0.0),
        "output_index": np.arange(64) * 3,
    }
    together = sample(logits.clone(), _rows(64, **columns))
    order = np.random.default_rng(1).permutation(64)
    shuffled = {name: values[order] for name, values in columns.items()}
    mixed = sample(logits[torch.from_numpy(order)].clone(), _rows(64, seed=order, **shuffled))
    assert torch.equal(mixed, together[torch.from_numpy(order)])
    for row in range(0, 64, 9):
        alone = {name: values[row] for name, values in columns.items()}
        assert sample(logits[row : row + 1].clone(), _rows(1, seed=row, **alone)).item() == together[row].item()


def _key(seed: int, output_index: int, choice_index: int = 0) -> int:
    (key,) = stream_keys(np.array([seed], np.uint64), np.array([output_index]), np.array([choice_index]))
    return key


def test_every_part_of_the_key_matters() -> None:
    base = _key(7, 3)
    others = {_key(8, 3), _key(7, 4), _key(7, 3, choice_index=1), _key(7 + 2**63, 3)}
    assert base not in others
    assert len(others) == 4
    assert 0 <= _key(2**64 - 1, 2**40) < 2**64


def test_choices_of_one_seed_differ_and_each_is_the_same_alone() -> None:
    logits = torch.zeros(3, 500)
    together = sample(logits.clone(), _rows(3, seed=11, choice_index=np.arange(3))).tolist()
    assert len(set(together)) == 3
    alone = [sample(logits[:1].clone(), _rows(1, seed=11, choice_index=index)).item() for index in range(3)]
    assert together == alone


def test_gumbel_noise_is_finite_and_has_its_mean_and_variance() -> None:
    zeros = np.zeros(40, np.int64)
    noise = gumbel(stream_keys(np.arange(40, dtype=np.uint64), zeros, zeros), 49_999, CPU)
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.02)
    assert noise.max() > 12


def test_masked_ids_are_not_sampled_greedily_or_otherwise() -> None:
    logits = torch.tensor(LOGITS).repeat(400, 1)
    temperature = np.where(np.arange(400) % 2 == 0, 0.0, 1.0)
    masked = [(row, (0, 2)) for row in range(0, 400, 4)] + [(row, (0,)) for row in range(1, 400, 4)]
    drawn = sample(logits, _rows(400, temperature=temperature, masked=masked))
    assert (drawn[0::4] == 1).all()
    assert (drawn[2::4] == 0).all()
    assert (drawn[1::4] != 0).all()
    assert (drawn[3::4] == 0).any()


def test_at_least_one_token_is_always_kept() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, -1.0]]).repeat(200, 1)
    drawn = sample(logits, _rows(200, top_p=1e-9, top_k=1, min_p=1.0, temperature=0.01))
    assert set(drawn.tolist()) <= {1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-37, 1e-38, 1e-40, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_f103_the_smallest_temperatures_are_greedy_and_no_row_error(
    temperature: float, filters: dict[str, float]
) -> None:
    """A quotient that overflows would be taken for logits that are not finite (D51)."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3)) * 40
    assert torch.equal(sample(logits.clone(), _rows(50, temperature=temperature, **filters)), logits.argmax(-1))
    (kept,) = [each.as_kept for each in PARAMETERS if each.name == "temperature"]
    assert kept(temperature) == (temperature if temperature >= 1e-5 else 0)
