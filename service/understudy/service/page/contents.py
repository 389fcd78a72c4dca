"""The parts of the overview and of the page of a checkpoint, and when each has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

from understudy.evaluator.evaluation.training_end import TrainingWatch
from understudy.evaluator.evaluator import Evaluator
from understudy.service.live_numbers import LiveReader
from understudy.service.page.acts import Act
from understudy.service.page.operations import Operations
from understudy.service.page.parts import Part
from understudy.service.page.rendering import Renderer
from understudy.service.page.views import Views

TRAFFIC_SECONDS: Final = 10.0
"""How often the traffic is updated."""


class Contents:
    """Makes parts, which are rendered later, one at a time.

    Args:
        evaluator: The evaluator.
        views: Reads what is shown about checkpoints.
        operations: Reads what is shown about other programs.
        live: Reads the numbers of the traffic.
        training: Reads the journal of the training; None if there is none.
        renderer: Renders the parts.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        views: Views,
        operations: Operations,
        live: LiveReader,
        training: TrainingWatch | None,
        renderer: Renderer,
    ) -> None:
        self._evaluator = evaluator
        self._views = views
        self._operations = operations
        self._live = live
        self._training = training
        self._renderer = renderer

    def fingerprints(self) -> Mapping[str, object]:
        """Return a value for each part, by its name, which changes when the part does. Blocks."""
        traffic = int(monotonic() / TRAFFIC_SECONDS)
        numbers = {"traffic": traffic, "readiness": self._renderer.readiness()}
        return {**self._views.fingerprints(), **self._operations.fingerprints(), **numbers}

    def overview(self, root: str, acts: frozenset[Act], *, before: int | None, first: int) -> Sequence[Part]:
        """Return the parts of the overview.

        Args:
            root: The path under which a proxy serves the page.
            acts: What the caller may do.
            before: The step before which the table of checkpoints begins; None for the newest.
            first: The first chart.
        """
        return [
            self._readiness(),
            self._part("state", self._state, root, acts),
            self._part("letters", self._letters, root, acts & {Act.RESEND, Act.DROP}),
            self._part("fleet", self._fleet, root),
            self._part("traffic", self._traffic, root),
            self._part("curves", self._curves, root, first),
            self._part("checkpoints", self._checkpoints, root, before),
        ]

    def life(self, root: str, acts: frozenset[Act], step: int) -> Sequence[Part]:
        """Return the parts of the page of a checkpoint."""
        return [self._readiness(), self._part("life", self._life, root, acts, step)]

    def _readiness(self) -> Part:
        return self._part("readiness", self._renderer.readiness, "")

    def _part(self, name: str, read: Any, root: str, *values: object) -> Part:
        return Part(name=name, key=(name, root, *values), render=partial(self._render, name, read, root, *values))

    def _render(self, name: str, read: Any, root: str, *values: object) -> str:
        return self._renderer.part(f"{name}.html", {"root": root, **read(*values)})

    def _state(self, acts: frozenset[Act]) -> Mapping[str, Any]:
        self._views.catch_up()
        return {"served": self._views.served(), "next": self._views.next(), "acts": acts}

    def _letters(self, acts: frozenset[Act]) -> Mapping[str, Any]:
        return {"letters": self._operations.letters(), "acts": acts}

    def _fleet(self) -> Mapping[str, Any]:
        return {"fleet": self._operations.fleet()}

    def _traffic(self) -> Mapping[str, Any]:
        return {"live": self._live.read(), "training": self._training and self._training.read()}

    def _curves(self, first: int) -> Mapping[str, Any]:
        self._views.catch_up()
        return {"curves": self._views.curves(first)}

    def _checkpoints(self, before: int | None) -> Mapping[str, Any]:
        return {"checkpoints": self._views.checkpoints(before)}

    def _life(self, acts: frozenset[Act], step: int) -> Mapping[str, Any]:
        return {"view": self._views.checkpoint(step), "acts": acts, "serving": self._evaluator.serving_step}
