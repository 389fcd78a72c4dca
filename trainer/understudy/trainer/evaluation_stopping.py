"""A Keras callback that stops a user's own ``fit`` by an evaluator's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from understudy.trainer.stopping import ResultsWatch, StopMode, parse_stop_rule


class EvaluationStopping(keras.callbacks.Callback):
    """Stops ``fit`` at the end of an epoch when an evaluator's score has not improved for so many evaluations.

    What `keras.callbacks.EarlyStopping` does with the validation of ``fit`` itself, this does with the scores of an
    evaluator that runs beside it, and costs the training nothing. The evaluator is behind the training by the time an
    evaluation takes, so ``fit`` goes on for that much longer.

    Args:
        stop_when: ``DATASET/METRIC:N``, such as ``validation/loss:5``.
        state_dir: The evaluator's state folder: ``RUN/evaluator``, or what ``understudy serve --state-dir`` was given.
        mode: ``min`` or ``max``, whether less or more of the metric is better; may be left out for a loss.

    Attributes:
        reason: Why it stopped ``fit``, or None if it did not.

    Raises:
        ValueError: ``stop_when`` has another form, or ``mode`` is missing.
    """

    def __init__(self, stop_when: str, *, state_dir: str | Path, mode: StopMode | None = None) -> None:
        super().__init__()
        try:
            rule = parse_stop_rule(stop_when, mode)
        except ValueError as error:
            raise ValueError(f"stop_when {error}") from error
        self._watch = ResultsWatch(rule, Path(state_dir))
        self.reason: str | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget what was before."""
        del logs
        self.reason = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop if it is time to; raise StopRuleError if the evaluator does not score what the rule names."""
        del epoch, logs
        self.reason = self._watch.reason_to_stop(int(self.model.optimizer.iterations.numpy()))
        if self.reason is not None:
            self.model.stop_training = True
