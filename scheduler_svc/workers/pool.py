"""All ranks: from the addresses an operator named to one running client each.

HOST:PORT is one rank for good, whenever its process comes and goes. dns:///HOST:PORT is asked every second, and every
address it has is a rank. One that disappears from the name keeps its rank as long as its stream lives. A name server
may take many seconds to say that it does not know a name: the next question does not wait for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from scheduler_svc.workers.client import RankClient
from scheduler_svc.workers.session import RankState
from scheduler_svc.workers.transport import AddressResolver

log = logging.getLogger(__name__)

_DNS_PREFIX: Final = "dns:///"
_RESOLVE_PERIOD_S: Final = 1.0
# Questions about one name that wait for their answers at the same time.
_MAX_QUESTIONS: Final = 12


class WorkerPool:
    """Runs until cancelled; any failure in it is a bug and ends run() with it."""

    def __init__(
        self, targets: tuple[str, ...], resolver: AddressResolver, make_client: Callable[[str], RankClient]
    ) -> None:
        self._targets = targets
        self._resolver = resolver
        self._make_client = make_client
        self._clients: dict[str, RankClient] = {}
        # Which name gave an address; static addresses have none.
        self._names: dict[str, str] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._unresolved = {target: "not resolved yet" for target in targets if target.startswith(_DNS_PREFIX)}
        self._failure: asyncio.Future[None] | None = None

    @property
    def clients(self) -> tuple[RankClient, ...]:
        """All ranks, known or once known and not given up, in the order they were found."""
        return tuple(self._clients.values())

    @property
    def has_joined_rank(self) -> bool:
        """Whether any rank has an epoch."""
        return any(client.has_epoch for client in self._clients.values())

    @property
    def is_ready(self) -> bool:
        """Whether a rank is up: joined, within reach and not about to leave."""
        return any(client.state is RankState.UP for client in self._clients.values())

    def not_ready_cause(self) -> str:
        """Why no rank is up, naming each; "" when one is."""
        if self.is_ready:
            return ""
        causes = [f"{client.rank} {client.state.value}: {client.cause}" for client in self._clients.values()]
        causes += [f"{name}: {cause}" for name, cause in self._unresolved.items()]
        return "no worker is up (" + "; ".join(causes or ["none is configured, see --worker"]) + ")"

    async def run(self) -> None:
        """Keep every rank's client running."""
        self._failure = asyncio.get_running_loop().create_future()
        for target in self._targets:
            if target.startswith(_DNS_PREFIX):
                self._start(self._follow(target), target)
            elif target not in self._clients:
                self._start_client(target)
        try:
            await self._failure
        finally:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)

    def _start_client(self, address: str) -> None:
        client = self._make_client(address)
        self._clients[address] = client
        self._start(client.run(), address)

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return
        self._clients.pop(name, None)
        self._names.pop(name, None)
        log.info("rank given up", extra={"rank": name})

    async def _follow(self, target: str) -> None:
        questions: deque[asyncio.Task[tuple[str, ...] | Exception]] = deque()
        try:
            while True:
                if len(questions) < _MAX_QUESTIONS:
                    questions.append(asyncio.create_task(self._ask(target), name=f"resolve {target}"))
                await asyncio.wait(questions, timeout=_RESOLVE_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
                newest = next((index for index in reversed(range(len(questions))) if questions[index].done()), None)
                if newest is None:
                    continue
                self._answered(target, questions[newest].result())
                # Whoever was asked before, and has not answered yet, knows nothing newer.
                for _ in range(newest + 1):
                    questions.popleft().cancel()
                await asyncio.sleep(_RESOLVE_PERIOD_S)
        finally:
            for question in questions:
                question.cancel()

    async def _ask(self, target: str) -> tuple[str, ...] | Exception:
        host, _, port = target.removeprefix(_DNS_PREFIX).rpartition(":")
        try:
            return await self._resolver.resolve(host.strip("[]"), int(port))
        except Exception as error:
            # Whatever it is, such as that no thread can be started: the name is not resolved now.
            return error

    def _answered(self, target: str, answer: tuple[str, ...] | Exception) -> None:
        if isinstance(answer, Exception):
            # Not known now: whoever was there is taken to be there still.
            self._note_unresolved(target, f"cannot be resolved: {answer}")
            return
        self._note_unresolved(target, "" if answer else "has no address")
        self._adjust(target, answer)

    def _note_unresolved(self, target: str, cause: str) -> None:
        if cause and self._unresolved.get(target) != cause:
            log.warning("worker name", extra={"worker": target, "cause": cause})
        if cause:
            self._unresolved[target] = cause
        else:
            self._unresolved.pop(target, None)

    def _adjust(self, target: str, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            if address not in self._clients:
                self._names[address] = target
                self._start_client(address)
                log.info("worker found", extra={"rank": address, "worker": target})
        for address, name in self._names.items():
            if name == target:
                self._clients[address].is_orphaned = address not in addresses
