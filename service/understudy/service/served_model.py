"""The served model, as handlers see it: its name, its versions and outputs as text, and work that it began."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.types import Arrays, Prediction, Version, VersionLabel, VersionState
from understudy.service.calls.status import UnknownModelError

LABELS: tuple[VersionLabel, ...] = ("serving", "latest", "best")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The one model of this server.

    Attributes:
        name: The name the model is served under.
        evaluator: Runs the model.
    """

    name: str
    evaluator: Evaluator

    def check_name(self, name: str) -> None:
        """Raise UnknownModelError unless this is the model's name."""
        if name != self.name:
            raise UnknownModelError(f"there is no model {name!r}; this server serves {self.name!r}")

    def check_optional_name(self, name: str) -> None:
        """Raise UnknownModelError unless this is the model's name, or empty."""
        if name:
            self.check_name(name)

    def loaded_steps(self) -> list[int]:
        """Return the loaded steps, in ascending order."""
        return sorted(status.step for status in self.evaluator.status() if status.state is VersionState.AVAILABLE)

    def step_of(self, version: Version) -> int:
        """Return the step of a version.

        Raises:
            VersionNotFoundError: The label has no step yet.
        """
        if isinstance(version, int):
            return version
        evaluator = self.evaluator
        steps = {"serving": evaluator.serving_step, "latest": evaluator.latest_step, "best": evaluator.best_step}
        step = steps[version]
        if step is None:
            raise VersionNotFoundError(f"no version is {version!r} yet; the loaded ones are {self.loaded_steps()}")
        return step


def label_of(text: str) -> VersionLabel:
    """Return a version's label.

    Raises:
        InvalidInputError: There is no such label.
    """
    for label in LABELS:
        if text == label:
            return label
    raise InvalidInputError(f"the version label {text!r} is unknown; give {', '.join(LABELS)}")


def version_of(text: str) -> Version:
    """Return the version that a text names: a step or a label; the serving version if it is empty.

    Raises:
        InvalidInputError: It is neither.
    """
    if not text:
        return "serving"
    if text.isascii() and text.isdigit() and len(text) < len(str(2**63)):
        return int(text)
    try:
        return label_of(text)
    except InvalidInputError:
        raise InvalidInputError(
            f"the version is {text!r}; give a step as a number from 0 up, or {', '.join(LABELS)}"
        ) from None


def wanted_outputs(prediction: Prediction, names: tuple[str, ...]) -> Arrays:
    """Return the requested outputs, in that order, or all.

    Raises:
        InvalidInputError: The model has no such output.
    """
    if not names:
        return prediction.outputs
    unknown = [name for name in names if name not in prediction.outputs]
    if unknown:
        known = ", ".join(map(repr, prediction.outputs))
        raise InvalidInputError(f"there is no output {unknown[0]!r}; there is {known}")
    return {name: prediction.outputs[name] for name in names}


_T = TypeVar("_T")


async def begun(executor: Executor, begin: Callable[[], Future[_T]]) -> asyncio.Future[_T]:
    """Start work on an executor, since starting may block; if the caller disconnects first, cancel the work."""
    beginning = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        return asyncio.wrap_future(await asyncio.shield(beginning))
    except asyncio.CancelledError:
        beginning.add_done_callback(_cancel_begun)
        raise


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancel work that has not begun, and ignore its outcome."""
    future.add_done_callback(_retrieve_exception)
    future.cancel()


def _cancel_begun(beginning: asyncio.Future[Future[Any]]) -> None:
    if beginning.exception() is None:
        beginning.result().cancel()


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
