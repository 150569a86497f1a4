"""What the client of a call learns of its cost."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost; times in nanoseconds."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    queued_ns: int = 0
    preempted_ns: int = 0


class UsageSoFar:
    """What one request cost over several schedulers. Each of them counts what happened on its own stream; the time
    between two streams is counted here, as preempted. Times in seconds of the event loop's clock."""

    def __init__(self) -> None:
        # On earlier streams, and what the present one said last.
        self._before = Usage()
        self._last = Usage()
        # Whether it had output when the stream before was lost: its first admission lies on an earlier stream then.
        self._had_output = False
        # Since when it stands still, as far as no scheduler counts it.
        self._stands_since: float | None = None

    def changed(self, usage: Usage, now: float) -> None:
        """The scheduler says what it has cost on the present stream."""
        self._stands_since = now if usage.num_preemptions > self._last.num_preemptions else None
        self._last = usage

    def stream_lost(self, now: float, *, has_outputs: bool) -> None:
        """The present stream is over. Without an output the wait for the first admission begins again."""
        total = self.total(self._last)
        if has_outputs:
            self._before = total
            self._stands_since = now if self._stands_since is None else self._stands_since
        else:
            self._before = Usage(
                num_preemptions=total.num_preemptions, num_recomputed_tokens=total.num_recomputed_tokens
            )
            self._stands_since = None
        self._had_output = has_outputs
        self._last = Usage()

    def resumed(self, now: float) -> None:
        """It is submitted again; from now on the scheduler counts."""
        self._before = replace(self._before, preempted_ns=self._before.preempted_ns + self._stands_ns(now))
        self._stands_since = None

    def total(self, usage: Usage) -> Usage:
        """With what earlier streams cost. usage: of the present one."""
        before = self._before
        return replace(
            usage,
            num_cached_tokens=before.num_cached_tokens if self._had_output else usage.num_cached_tokens,
            num_preemptions=before.num_preemptions + usage.num_preemptions,
            num_recomputed_tokens=before.num_recomputed_tokens + usage.num_recomputed_tokens,
            queued_ns=before.queued_ns if self._had_output else usage.queued_ns,
            preempted_ns=before.preempted_ns + usage.preempted_ns,
        )

    def known(self, num_prompt_tokens: int, num_completion_tokens: int, now: float) -> Usage:
        """As far as it is known without a scheduler."""
        total = self.total(self._last)
        return replace(
            total,
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=num_completion_tokens,
            preempted_ns=total.preempted_ns + self._stands_ns(now),
        )

    def _stands_ns(self, now: float) -> int:
        return 0 if self._stands_since is None else round((now - self._stands_since) * 1e9)
