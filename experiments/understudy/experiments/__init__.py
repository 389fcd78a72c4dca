"""The user's part: a model and its data."""

from understudy.experiments.contract import Experiment
from understudy.experiments.experiment_errors import ExperimentError
from understudy.experiments.loading import check_spec, load_experiment

__all__ = ["Experiment", "ExperimentError", "check_spec", "load_experiment"]
