"""Runs comparisons on dedicated threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.bootstrap import BootstrapOptions
from understudy.evaluator.evaluation.comparison_batches import ReplayableBatches
from understudy.evaluator.evaluation.comparison_result import Comparison
from understudy.evaluator.evaluation.comparison_run import CancellationToken, ComparisonRun
from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.types import MetricSpec

MIN_VERSIONS = 2
MAX_VERSIONS = 16
"""Bounds the memory of a comparison."""

_THREADS = 4


class Comparer:
    """Compares versions. Thread-safe.

    Args:
        store: The known checkpoints.
        manager: Loads them and provides handles.
        engine: Runs the batches.
        on_open: Called with each stream, to close it when the evaluator is closed.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        manager: ServableManager,
        engine: Engine,
        on_open: Callable[[EvaluationStream], None],
    ) -> None:
        self._store = store
        self._manager = manager
        self._engine = engine
        self._on_open = on_open
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="understudy-compare")
        self._closing = False

    def submit(
        self,
        steps: Sequence[int],
        batches: ReplayableBatches,
        *,
        metrics: Sequence[MetricSpec],
        bootstrap: BootstrapOptions,
        deadline: float | None,
    ) -> Future[Comparison]:
        """Compare versions with the first one. Cancelling the future aborts the comparison.

        Raises:
            InvalidInputError: There are too few or too many versions.
            VersionNotFoundError: There is no such checkpoint.
        """
        if not MIN_VERSIONS <= len(steps) <= MAX_VERSIONS:
            raise InvalidInputError(
                f"got {len(steps)} versions; {MIN_VERSIONS} to {MAX_VERSIONS} can be compared with one another"
            )
        for step in steps:
            self._check_exists(step)
        outcome: Future[Comparison] = Future()
        cancellation = CancellationToken(lambda: not (self._closing or outcome.cancelled()))
        outcome.add_done_callback(lambda done: cancellation.stop() if done.cancelled() else None)
        comparison_run = ComparisonRun(
            manager=self._manager,
            engine=self._engine,
            on_open=self._on_open,
            metrics=metrics,
            bootstrap=bootstrap,
            deadline=deadline,
            cancellation=cancellation,
        )
        self._executor.submit(_settle, outcome, lambda: comparison_run.run(steps, batches))
        return outcome

    def stop(self) -> None:
        """Tell all comparisons that their results are no longer wanted."""
        self._closing = True

    def close(self) -> None:
        """Wait for all comparisons to end. Call this after `stop`, when the engine and the manager are closed."""
        self._executor.shutdown(wait=True)

    def _check_exists(self, step: int) -> None:
        try:
            self._manager.borrow(step).release()
        except VersionNotFoundError:
            self._store.info(step)


def _settle(outcome: Future[Comparison], run: Callable[[], Comparison]) -> None:
    """Run a comparison and set its outcome on a future that may be cancelled meanwhile."""
    if outcome.cancelled():
        return
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - the future carries it
        if outcome.set_running_or_notify_cancel():
            outcome.set_exception(error)
        return
    if outcome.set_running_or_notify_cancel():
        outcome.set_result(result)
