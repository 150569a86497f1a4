"""The model this scheduler serves: the first rank's (D44), its description and tokenizer kept as bytes (D41)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from scheduler_svc.errors import Failure, RankUnfit
from scheduler_svc.workers.codec import ModelFacts, TokenizerPiece

log = logging.getLogger(__name__)


class ServedModel:
    """Decides which ranks fit together and remembers what front ends ask for.

    The first rank that opens names the model; others must agree with it. It is given up only when nothing stands behind
    it any more, that is when `is_in_use` says no: then the next rank that opens may bring another one.
    """

    def __init__(self, is_in_use: Callable[[], bool], on_change: Callable[[ModelFacts], None]) -> None:
        self._is_in_use = is_in_use
        self._on_change = on_change
        self._facts: ModelFacts | None = None
        self._pieces: tuple[TokenizerPiece, ...] | None = None
        # Why there never will be any.
        self._tokenizer_refused: Failure | None = None
        self._fetched = asyncio.Event()

    @property
    def facts(self) -> ModelFacts | None:
        """The model, once a rank has joined."""
        return self._facts

    def check(self, offered: ModelFacts) -> None:
        """Raises RankUnfit when a rank with this model may not join."""
        served = self._facts
        if served is None or not self._is_in_use():
            return
        for (what, mine), (_, theirs) in zip(served.identity(), offered.identity(), strict=True):
            if mine != theirs:
                raise RankUnfit(f"its {what} is {theirs!r}, the other ranks' is {mine!r}")

    def adopt(self, offered: ModelFacts) -> None:
        """A rank with this model joins. Raises RankUnfit as check() does."""
        self.check(offered)
        served = self._facts
        if served is not None and served.identity() == offered.identity():
            return
        self._facts = offered
        self._pieces = None
        self._tokenizer_refused = None
        self._fetched = asyncio.Event()
        self._on_change(offered)

    # --- tokenizer ---

    def wants_tokenizer(self, offered: ModelFacts) -> bool:
        """Whether a rank with this model should be asked for its tokenizer."""
        served = self._facts
        return (
            self._pieces is None
            and self._tokenizer_refused is None
            and served is not None
            and bool(served.tokenizer_digest)
            and served.tokenizer_digest == offered.tokenizer_digest
        )

    def keep_tokenizer(self, offered: ModelFacts, pieces: tuple[TokenizerPiece, ...]) -> None:
        """Remember the tokenizer of a rank, unless the model changed meanwhile."""
        if self.wants_tokenizer(offered):
            self._pieces = pieces
            self._fetched.set()

    def refuse_tokenizer(self, offered: ModelFacts, failure: Failure) -> None:
        """The tokenizer of a rank cannot be passed on, now or later: front ends are answered this, unless the model
        changed meanwhile."""
        if self.wants_tokenizer(offered):
            self._tokenizer_refused = failure
            self._fetched.set()

    async def tokenizer(self, timeout_s: float) -> tuple[TokenizerPiece, ...] | Failure | None:
        """The tokenizer's pieces, or why they cannot be passed on; waits up to timeout_s for them to arrive, then
        None."""
        fetched = self._fetched
        try:
            async with asyncio.timeout(timeout_s):
                await fetched.wait()
        except TimeoutError:
            return None
        return self._pieces if self._tokenizer_refused is None else self._tokenizer_refused
