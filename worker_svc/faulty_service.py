"""A worker's service that answers wrongly where a script says so: for tests of schedulers, with the scripted runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from worker_svc import codec
from worker_svc.epoch import Epoch
from worker_svc.service import WorkerService
from worker_svc.step import StepAnswer

# Turns one answer into those that are really given: none, another one, several, in another order.
Distortion = Callable[[StepAnswer], Iterable[StepAnswer]]


class FaultyWorkerService(WorkerService):
    """As WorkerService; `distort` stands between the executor's answers and the scheduler."""

    def __init__(self, *arguments: Any, distort: Distortion, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._distort: Final = distort

    def _deliver(self, epoch: Epoch, answer: StepAnswer) -> None:
        for given in self._distort(answer):
            if given.step_seq == answer.step_seq and epoch.answer(answer.step_seq) is None:
                super()._deliver(epoch, given)
            elif self._stream is not None:
                # Out of order, or once more: nothing that the epoch would remember.
                self._stream.push(codec.encode_answer(given))
