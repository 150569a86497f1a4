"""Prefill throttle of one rank (D19): while requests decode there, prefills start only in every n-th step."""

from __future__ import annotations


class Throttle:
    """When a rank leaves prefills out of a step."""

    __slots__ = ("capacity_bound", "interval", "num_steps")

    def __init__(self, interval: int) -> None:
        # Prefills start in every interval-th step; 1 = always.
        self.interval = interval
        # Steps with tokens since the last moment at which all ranks were idle.
        self.num_steps = 0
        # Whether the last step that did not defer left a request waiting. True switches the throttle off: to defer
        # prefills would then only leave the rank emptier.
        self.capacity_bound = False

    def is_between(self) -> bool:
        """Whether the next step is one of those between the steps in which prefills start."""
        return self.interval > 1 and self.num_steps % self.interval != 0

    def defers_prefills(self, num_decodes: int) -> bool:
        """Whether the next step leaves prefills out. num_decodes: running requests whose last row was not a partial
        prefill; without any, no decode would profit."""
        return self.is_between() and not self.capacity_bound and num_decodes > 0
