"""Synthetic traces: who arrives when, with which prompt, and how much it will say. Seeded; the same seed, the same
trace."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

# Ids below are special; the first of them ends a sequence.
END_TOKEN = 2
_FIRST_TOKEN = 100
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """arrival_s from the start of the trace; num_output is what it says before its end token, which the scheduler
    cannot know; max_tokens is what its client allows."""

    request_id: str
    arrival_s: float
    prompt: array[int]
    num_output: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What traces are drawn from. Lengths are log-normal around their median and clipped; a share of the prompts
    begins with one of a few common prefixes (system prompts). Arrivals are Poisson; for a part of each period they come
    faster by `burst_factor`. A rate of 0: all at once."""

    num_requests: int = 600
    # Requests per second, averaged over a period.
    rate: float = 20.0
    period_s: float = 10.0
    # Share of the period that is a burst.
    burst_share: float = 0.2
    burst_factor: float = 3.0
    prompt_median: int = 200
    prompt_sigma: float = 0.9
    prompt_max: int = 2000
    output_median: int = 150
    output_sigma: float = 0.8
    # max_tokens of every request; longer outputs are cut there.
    output_max: int = 1000
    shared_share: float = 0.5
    num_prefixes: int = 4
    prefix_tokens: int = 256

    def trace(self, seed: int) -> list[TracedRequest]:
        """Requests in order of arrival."""
        rng = random.Random(seed)
        prefixes = [_tokens(rng, self.prefix_tokens) for _ in range(self.num_prefixes)]
        now_s = 0.0
        requests = []
        for number in range(self.num_requests):
            if self.rate:
                now_s += rng.expovariate(self._rate_at(now_s))
            prompt = array("i", rng.choice(prefixes)) if rng.random() < self.shared_share else array("i")
            prompt.extend(_tokens(rng, _length(rng, self.prompt_median, self.prompt_sigma, self.prompt_max)))
            num_output = _length(rng, self.output_median, self.output_sigma, self.output_max)
            requests.append(TracedRequest(f"r{number}", now_s, prompt, num_output, self.output_max))
        return requests

    def _rate_at(self, now_s: float) -> float:
        calm = self.rate / (1 + self.burst_share * (self.burst_factor - 1))
        bursts = now_s % self.period_s >= self.period_s * (1 - self.burst_share)
        return calm * self.burst_factor if bursts else calm


def output_token(request_number: int, index: int) -> int:
    """The token a request says at an output index: its own, and never the end token."""
    return _FIRST_TOKEN + (request_number * 7919 + index * 104_729) % (VOCAB_SIZE - _FIRST_TOKEN)


def _length(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0.0, sigma))))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]
