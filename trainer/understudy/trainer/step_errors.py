"""What fails inside a step of the training, on its data or in its model, as a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import tensorflow as tf

from understudy.compat.error_texts import first_line
from understudy.experiments.users_code import place_of
from understudy.trainer.cluster import is_of_lost_peer
from understudy.trainer.trainer_errors import DataError, StepError

_DAMAGED: Final = "record at"  # after "corrupted" or "truncated"
_WRONG_SIZE: Final = "Input dataset was expected to contain"
_OF_DATA_OR_MODEL: Final = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)
_LONGEST: Final = 200
"""The most characters of TensorFlow's sentence, which may list all labels of a batch."""

_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')


@contextmanager
def step_watched(step: int) -> Iterator[None]:
    """Convert TensorFlow's errors about the data or the model while steps run after a step.

    Raises:
        DataError: The training data are damaged, or fewer or more than stated.
        StepError: Anything else that the data or the model made fail.
    """
    try:
        yield
    except tf.errors.DataLossError as error:
        raise DataError(f"a file of the training data is damaged: {_line(error, _DAMAGED)}") from error
    except tf.errors.FailedPreconditionError as error:
        if _WRONG_SIZE not in error.message:
            raise
        reason = _line(error, _WRONG_SIZE)
        raise DataError(f"the training data does not hold the stated number of examples: {reason}") from error
    except _OF_DATA_OR_MODEL as error:
        if is_of_lost_peer(error):
            raise
        reason = first_line(error)[:_LONGEST]
        place = place_of((file, int(line)) for file, line in _FRAME.findall(error.message))
        raise StepError(f"a step after step {step} failed: {reason}{place}; {_remedy(error)}") from error


def _line(error: tf.errors.OpError, words: str) -> str:
    """Return the line of TensorFlow's long message that contains these words."""
    return next((line.strip() for line in error.message.splitlines() if words in line), "no reason given")


def _remedy(error: tf.errors.OpError) -> str:
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return "lower global_batch_size, or use more replicas"
    return "look at what training_data() gives, and at the loss and the layers of the model"
