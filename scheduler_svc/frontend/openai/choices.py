"""Several generations as one: the choices of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from scheduler_svc.frontend.calls import Accepted, Delta, Finished, GenerateCall
from scheduler_svc.frontend.engine import FrontEnd
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.usage import Usage

Event = Accepted | Delta | Finished


@contextlib.asynccontextmanager
async def started(front_end: FrontEnd, calls: Sequence[GenerateCall]) -> AsyncIterator[Choices]:
    """The calls as running generations, all of them or none. Leaving the block ends what still runs. Raises
    RequestError."""
    with contextlib.ExitStack() as entered:
        generations = []
        for call in calls:
            generation = await front_end.start(call, lambda: None)
            generations.append(entered.enter_context(generation))
            # Others get their turn between two of them.
            await asyncio.sleep(0)
        choices = Choices(generations)
        try:
            yield choices
        finally:
            choices.stop()


class Choices:
    """The events of some generations, as they come. A generation is asked for its next event only after its last one
    was taken, so a slow client is seen as one."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        # What `next` gives, or raises.
        self._come: asyncio.Queue[tuple[int, asyncio.Task[Event | None]] | Exception] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[Event | None]] = {}
        for index in range(len(generations)):
            self._ask(index)

    @property
    def request_id(self) -> str:
        """The id of the first of them."""
        return self._generations[0].request_id

    async def next(self) -> tuple[int, Event] | None:
        """The index of a choice and its next event; None when all have finished. Raises RequestError when one of them
        ends without success, with the usage of that one, and what it was interrupted with. Cancelled, it loses
        nothing."""
        while self._tasks:
            come = await self._come.get()
            if isinstance(come, Exception):
                raise come
            index, task = come
            del self._tasks[index]
            event = task.result()
            if event is not None:
                self._ask(index)
                return index, event
        return None

    def interrupt(self, error: Exception) -> None:
        """Have `next` raise this, after what has come so far."""
        self._come.put_nowait(error)

    def stop(self) -> None:
        """Ask for nothing more."""
        for task in self._tasks.values():
            task.cancel()

    def _ask(self, index: int) -> None:
        task = asyncio.ensure_future(self._generations[index].next())
        task.add_done_callback(lambda done: self._come.put_nowait((index, done)))
        self._tasks[index] = task


def total(usages: Sequence[Usage]) -> Usage:
    """What some requests cost together; their times added."""
    return Usage(**{name: sum(getattr(usage, name) for usage in usages) for name in Usage.__dataclass_fields__})
