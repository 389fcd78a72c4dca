"""The exceptions of experiments."""

from __future__ import annotations

import re
import traceback
from typing import Final

from understudy.experiments.users_code import place_of

_STYLES: Final = re.compile(r"\x1b\[[0-9;]*m")
"""What Keras writes into its errors, so that terminals print parts of them bold."""


class ExperimentError(Exception):
    """An experiment cannot be found or is invalid.

    The text says what was given, what was expected and what to do. If a user's own code raised, its exception is the
    cause (``__cause__``).
    """


class ExampleError(Exception):
    """Arrays of examples cannot be read, or do not fit a model. The text says where, what was found and expected."""


def error_of_code(experiment: str, doing: str, error: Exception) -> ExperimentError:
    """Return the error that says what the user's own code raised, and where.

    Args:
        experiment: The experiment.
        doing: What raised.
        error: The exception, which the caller makes the cause.
    """
    frames = traceback.extract_tb(error.__traceback__)
    says_line = isinstance(error, SyntaxError)
    place = "" if says_line else place_of((frame.filename, frame.lineno) for frame in frames)
    said = _STYLES.sub("", str(error))
    return ExperimentError(f"{experiment}: {doing} raised {type(error).__name__}: {said}{place}")
