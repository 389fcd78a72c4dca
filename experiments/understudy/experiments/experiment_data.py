"""The datasets and slices of an experiment, as its code gives them; a mistake there becomes a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from understudy.experiments.contract import Experiment
from understudy.experiments.experiment_errors import ExperimentError, error_of_code

if TYPE_CHECKING:
    import tensorflow as tf

    from understudy.experiments.arrays import IndexedExamples
    from understudy.experiments.records import RecordExamples

    TrainingData: TypeAlias = tf.data.Dataset | IndexedExamples | RecordExamples
    """The return type of ``training_data()``."""


def training_data(experiment: Experiment) -> TrainingData:
    """Return an experiment's training data.

    Raises:
        ExperimentError: Its code raises, or returns something else.
    """
    import tensorflow as tf

    from understudy.experiments.arrays import IndexedExamples
    from understudy.experiments.records import RecordExamples

    data: TrainingData = _returned(experiment, "training_data")
    if not isinstance(data, tf.data.Dataset | IndexedExamples | RecordExamples):
        raise _another(experiment, "training_data()", data, "a tf.data.Dataset of single examples (x, y)")
    return data


def evaluation_data(experiment: Experiment) -> Mapping[str, tf.data.Dataset]:
    """Return an experiment's evaluation datasets by name, in its order.

    Raises:
        ExperimentError: Its code raises, or returns something else.
    """
    import tensorflow as tf

    datasets: Mapping[str, tf.data.Dataset] = _returned(experiment, "evaluation_data")
    by_name = "a dictionary of datasets by name, such as {'test': dataset}"
    if not isinstance(datasets, Mapping):
        raise _another(experiment, "evaluation_data()", datasets, by_name)
    for name, data in datasets.items():
        if not isinstance(name, str):
            raise _another(experiment, f"evaluation_data() with the name {name!r},", name, by_name)
        if not isinstance(data, tf.data.Dataset):
            raise _another(
                experiment, f"evaluation_data()[{name!r}]", data, "a tf.data.Dataset of single examples (x, y)"
            )
    return datasets


def slices_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the parts of the datasets that an experiment has scored; none if it says nothing of them.

    Raises:
        ExperimentError: They are no sequence of texts.
    """
    slices = getattr(experiment, "slices", None)
    if slices is None:
        return ()
    if not isinstance(slices, list | tuple) or not all(isinstance(text, str) for text in slices):
        raise ExperimentError(
            f"{experiment.name}: slices is {slices!r}; expected a sequence of texts, such as ['label']"
        )
    return tuple(slices)


def _returned(experiment: Experiment, method: str) -> Any:
    try:
        return getattr(experiment, method)()
    except Exception as error:
        raise error_of_code(experiment.name, f"{method}()", error) from error


def _another(experiment: Experiment, what: str, found: Any, expected: str) -> ExperimentError:
    return ExperimentError(f"{experiment.name}: {what} is of the type {type(found).__name__}; expected {expected}")
