"""How this process reaches workers, as narrow as it can be (D48): gRPC stands behind it in production, a simulated
network in the simulation. Messages travel as the bytes of their proto, so both codecs are at work wherever a step
travels.

Time-outs are the caller's: it cancels what takes too long, and every method must bear being cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class StepStream(Protocol):
    """One call of WorkerService.RunSteps. One task sends, one receives."""

    async def send(self, frame: bytes) -> None:
        """Hand one RunStepsRequest to the transport; waits while it is full.

        Raises LinkLost or LinkRejected when the stream is over.
        """

    async def receive(self) -> bytes | None:
        """The next RunStepsResponse; None when the worker ended the stream in order.

        Raises LinkLost (cut) or LinkRejected (ended by the worker with an error).
        """

    def cancel(self) -> None:
        """Give the stream up. What is under way may or may not arrive. Idempotent."""


class WorkerLink(Protocol):
    """One connection to one worker address."""

    async def get_capabilities(self) -> bytes:
        """The bytes of a GetCapabilitiesResponse. Raises LinkLost, LinkRefused or LinkRejected."""

    def get_tokenizer(self) -> AsyncIterator[bytes]:
        """The bytes of every GetTokenizerResponse, in order. Iterating raises as above."""

    def run_steps(self) -> StepStream:
        """Start a stream; failures show when it is used."""

    async def close(self) -> None:
        """Let go of the connection and everything on it. Idempotent."""


class WorkerTransport(Protocol):
    """Makes connections."""

    def connect(self, address: str) -> WorkerLink:
        """A link to HOST:PORT. Does not wait; failures show when the link is used."""


class AddressResolver(Protocol):
    """Turns a name into addresses."""

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        """All addresses of a name now, as HOST:PORT, without repetition; empty when the name has none (any more).

        Raises when that cannot be said now: OSError, mostly; RuntimeError when no thread can be started.
        """
