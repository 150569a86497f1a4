"""Prefill throttle (D19): when decodes run, prefills start only in every n-th step of a rank.

The flag is easily read backwards: `capacity_bound` is true when the last aligned step could *not* admit everybody, and
true switches the throttle *off*, since deferring prefills would then only leave the rank emptier."""

from __future__ import annotations


def is_throttled(interval: int, num_nonempty_steps: int) -> bool:
    """Whether the rank's next step is one of those between aligned ones. Counted from the group's last idle moment."""
    return interval > 1 and num_nonempty_steps % interval != 0


def defers_prefills(throttled: bool, capacity_bound: bool, num_decodes: int) -> bool:
    """Whether this step leaves prefills out: throttled, everybody was admitted last time, and some decode would
    wait."""
    return throttled and not capacity_bound and num_decodes > 0
