"""Runs steps in a thread of their own, so that the next one is planned while this one computes.

Layer: kernel and runtime. It adds a thread to an executor and nothing else: steps run one at a time, in the order in
which they were submitted, and after one that failed none runs any more.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from dataplane.errors import IntegrityError
from dataplane.scheduling.plan import Executor, Plan, StepResult


@dataclass(frozen=True, slots=True)
class PendingHandle:
    """A step that waits, runs, or is done."""

    future: Future[StepResult]

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised; IntegrityError when an earlier one had failed."""
        return self.future.result()


class StepThread:
    """An executor whose `submit` returns at once.

    The thread ends with `close`, with this object, or with the process, after the steps that were submitted.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        self._failed = False

    def submit(self, plan: Plan) -> PendingHandle:
        """Queue a step. Raises RuntimeError after `close`."""
        return PendingHandle(self._thread.submit(self._run, plan))

    def close(self) -> None:
        """Finish what was submitted and end the thread. A second call does nothing."""
        self._thread.shutdown(wait=True)

    def _run(self, plan: Plan) -> StepResult:
        """In the thread. A step that raised leaves rows and blocks half written, which no later one may use."""
        if self._failed:
            raise IntegrityError("an earlier step failed; its successors cannot run")
        self._failed = True
        result = self._executor.submit(plan).result()
        self._failed = False
        return result
