"""Answers of one checkpoint to the batches of a stream, apart from live requests."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.servable_stream import ServableStream
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.types import Arrays, OutputTask


class ReplayStream(ServableStream):
    """Runs the model on batches, after the predictions that wait. Thread-safe. A context manager that closes it.

    Args:
        handle: The checkpoint, borrowed for the duration of the stream.
        engine: Runs the batches.

    Attributes:
        signature: The names, dtypes and shapes of the inputs and outputs.
        output_tasks: What each output is for, by its name.
    """

    def __init__(self, handle: Handle, engine: Engine) -> None:
        super().__init__(handle, engine)
        self.signature = handle.slot.signature
        self.output_tasks: Mapping[str, OutputTask] = handle.slot.output_tasks

    def add(self, inputs: Arrays, deadline: float | None = None) -> Future[Arrays]:
        """Queue a batch, and return its outputs by name, each ``[examples, ...]``.

        Args:
            inputs: Every input by name, ``[examples, ...]``. Do not change them until the future is done.
            deadline: On the `time.monotonic` clock.

        Raises:
            InvalidInputError: The batch does not fit the model. The stream may continue.
            OverloadedError: Too many examples wait. The stream may continue.
            DeadlineExceededError: The deadline has passed.
            DrainingError: The evaluator is shutting down.
            CancelledError: The stream was closed. If it was closed with a reason, that error is raised instead.
        """
        examples = self._handle.slot.check_inputs(inputs)
        return self._run(lambda: self._outputs(inputs, examples), examples=examples, deadline=deadline)

    def _outputs(self, inputs: Arrays, examples: int) -> Arrays:
        pieces: list[Arrays] = []
        size = self._engine.settings.max_batch_size
        for start in range(0, examples, size):
            if pieces:
                self._between_pieces()
            piece = {name: array[start : start + size] for name, array in inputs.items()}
            with self._handle.slot.keeping_variables():
                pieces.append(self._handle.slot.forward(piece))
        if len(pieces) == 1:
            return pieces[0]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
