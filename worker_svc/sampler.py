"""From logits to tokens. Every draw is keyed by (seed, choice index, output index), never by the order of draws, so a
request samples the same tokens whatever runs beside it and however often it is recomputed (D33).

The draw is Gumbel-max: argmax(logits / temperature + g), where g comes from a counter-based integer generator that
gives the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.sampling import Column

_MASK64 = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its finaliser.
_GOLDEN, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Largest float32 below 1: -log1p of it is finite.
_BELOW_ONE = 1.0 - 2.0**-24
# Candidates looked at before a top-p row is sorted whole: nearly all of the mass is usually in fewer.
_TOP_P_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to sample S rows of logits. Host arrays of length S; parameters: those of `sampling.PARAMETERS`, by name."""

    parameters: Mapping[str, Column]
    output_index: npt.NDArray[np.int64]
    # (row, token ids that must not be sampled there).
    masked: Sequence[tuple[int, tuple[int, ...]]] = ()


# Instead of a token, where the logits of a row are not finite.
INVALID: Final = -1


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token per row, [S] int64 on the device of logits [S, vocab] float32 (overwritten); INVALID for a row whose
    logits are not finite.

    Order: masks, temperature, min-p, top-k, top-p, draw. Temperature 0 is argmax. At least one token is always kept.
    """
    for row, token_ids in rows.masked:
        logits[row, torch.tensor(token_ids, device=logits.device)] = -torch.inf
    drawn = np.flatnonzero(rows.parameters["temperature"] > 0)
    if len(drawn) == 0:
        return _best(logits)
    if len(drawn) == len(logits):
        return _draw(logits, rows, drawn)
    tokens = _best(logits)
    index = torch.from_numpy(drawn).to(logits.device)
    return tokens.index_copy_(0, index, _draw(logits.index_select(0, index), rows, drawn))


def _best(scores: torch.Tensor) -> torch.Tensor:
    """The token with the highest score of each row. A NaN counts as highest, and so does an infinity, so that the score
    of the winner shows every row that has one."""
    tokens = scores.argmax(dim=-1)
    winners = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens.masked_fill_(~winners.isfinite(), INVALID)


def _draw(logits: torch.Tensor, rows: SamplingRows, drawn: npt.NDArray[np.intp]) -> torch.Tensor:
    device = logits.device
    # With the largest at 0 no quotient overflows, however small the temperature: what is not finite then was so before.
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    logits.div_(torch.from_numpy(rows.parameters["temperature"][drawn]).to(device).unsqueeze(1))
    for name, keep_likely in _FILTERS:
        keep_likely(logits, rows.parameters[name][drawn])
    choices = rows.parameters["choice_index"][drawn]
    keys = stream_keys(rows.parameters["seed"][drawn], rows.output_index[drawn], choices)
    return _best(logits.add_(gumbel(keys, logits.shape[1], device)))


def _apply_min_p(logits: torch.Tensor, min_p: npt.NDArray[np.float32]) -> None:
    """Drop tokens less probable than min_p times the most probable one."""
    if not (min_p > 0).any():
        return
    with np.errstate(divide="ignore"):
        distance = torch.from_numpy(np.log(min_p)).to(logits.device).unsqueeze(1)
    logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + distance, -torch.inf)


def _apply_top_k(logits: torch.Tensor, top_k: npt.NDArray[np.int32]) -> None:
    """Keep the k largest; ties with the k-th stay."""
    wanted = np.flatnonzero((top_k > 0) & (top_k < logits.shape[1]))
    if len(wanted) == 0:
        return
    index = torch.from_numpy(wanted).to(logits.device)
    picked = logits.index_select(0, index)
    largest = picked.topk(int(top_k[wanted].max()), dim=-1).values
    last = torch.from_numpy(top_k[wanted].astype(np.int64) - 1).to(logits.device).unsqueeze(1)
    logits.index_copy_(0, index, picked.masked_fill_(picked < largest.gather(1, last), -torch.inf))


def _apply_top_p(logits: torch.Tensor, top_p: npt.NDArray[np.float32]) -> None:
    """Keep the most probable tokens until their mass reaches p; ties with the last one stay."""
    wanted = np.flatnonzero(top_p < 1)
    if len(wanted) == 0:
        return
    index = torch.from_numpy(wanted).to(logits.device)
    picked = logits.index_select(0, index)
    p = torch.from_numpy(top_p[wanted]).to(logits.device).unsqueeze(1)
    threshold = _top_p_threshold(picked, p)
    logits.index_copy_(0, index, picked.masked_fill_(picked < threshold, -torch.inf))


# In the order in which they are applied, each to what the ones before it have left.
_FILTERS: Final = (("min_p", _apply_min_p), ("top_k", _apply_top_k), ("top_p", _apply_top_p))


def _top_p_threshold(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Smallest logit that top-p keeps, [S, 1]."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    num = logits.shape[1]
    if logits.device.type == "cpu" and num > _TOP_P_CANDIDATES:
        # Sorting a whole vocabulary costs milliseconds a row; nearly always the first few hundred tokens decide.
        ordered = logits.topk(_TOP_P_CANDIDATES, dim=-1).values
        if bool(((ordered - total).exp_().sum(dim=-1, keepdim=True) >= p).all()):
            return _threshold_among(ordered, total, p)
    return _threshold_among(logits.sort(dim=-1, descending=True).values, total, p)


def _threshold_among(ordered: torch.Tensor, total: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    mass = (ordered - total).exp_()
    # A token is kept while the mass before it is below p; the first always is.
    kept = (mass.cumsum(dim=-1).sub_(mass) < p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, kept - 1)


# -- the generator


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK64
    return value ^ (value >> 31)


def stream_keys(
    seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.int64], choice_indices: npt.NDArray[np.int64]
) -> list[int]:
    """The 64-bit key of each draw."""
    return [
        _mix(_mix(_mix(int(seed) + _GOLDEN & _MASK64) + int(choice) + 1 & _MASK64) + int(index) + 1 & _MASK64)
        for seed, index, choice in zip(seeds, output_indices, choice_indices, strict=True)
    ]


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return value - (1 << 64) if value >> 63 else value


def random_bits(keys: Sequence[int], num: int, device: torch.device) -> torch.Tensor:
    """[S, num] int64 in 0 .. 2^32 - 1: number i of a key is half of word i // 2 of SplitMix64 started there. The same
    bits on every device: only wrapping 64-bit products, sums, xors and shifts."""
    words = (num + 1) // 2
    counter = torch.arange(1, words + 1, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN))
    state = torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device).unsqueeze(1) + counter
    # Shifts of int64 drag the sign along; the mask makes them logical.
    state = state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_MIX_A))
    state = state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MIX_B))
    state = state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))
    halves = torch.stack((state.bitwise_and(0xFFFFFFFF), (state >> 32).bitwise_and_(0xFFFFFFFF)), dim=-1)
    return halves.view(len(keys), 2 * words)[:, :num]


def gumbel(keys: Sequence[int], num: int, device: torch.device) -> torch.Tensor:
    """[S, num] float32 of standard Gumbel noise, -log(-log(1 - v)) for v uniform in (0, 1) in steps of 2^-32.

    Small v keep their resolution in float32, so the large values, which decide, are exact up to 22.9."""
    v = random_bits(keys, num, device).float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()
