"""The exporter to Weights & Biases: scores in a run, and the serving checkpoint as an artifact with an alias."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any, Final

from understudy.service.events.exporter import Event, EventType, ExporterContext, metrics_of

if importlib.util.find_spec("wandb") is None:  # it is imported late, as that takes seconds
    raise ModuleNotFoundError("the library of Weights & Biases is not installed")

ALIAS: Final = "serving"
"""The alias of the artifact version that serves."""

STEP: Final = "step"
"""The value that charts are drawn over, as scores may come out of order."""

SERVING_STEP: Final = "serving_step"

_DEFAULT_PROJECT: Final = "understudy"


class WandbExporter:
    """An `understudy.service.events.exporter.Exporter`. For one thread.

    It reads the library's own variables: ``WANDB_PROJECT`` (``understudy`` by default), ``WANDB_ENTITY``,
    ``WANDB_API_KEY``, ``WANDB_DIR`` and ``WANDB_MODE``, which may be ``offline``. An evaluator has one run, also over
    restarts. Each score is ``DATASET/METRIC`` over ``step``. A checkpoint that is promoted becomes a version of an
    artifact with the model's name that refers to its files, has the alias ``serving``, and is ``serving_step`` of the
    run.
    An event that comes twice is one more point at the same place.

    An event is delivered once the library has it; a process of the library's own writes and uploads it.

    Args:
        context: What is exported.

    Raises:
        wandb.Error: The run cannot be opened.
    """

    def __init__(self, context: ExporterContext) -> None:
        import wandb

        self._context = context
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT,
            id=context.evaluator_id,
            name=context.model_name,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def export(self, event: Event) -> None:
        """Write a score, or move the alias; other events are ignored.

        Raises:
            wandb.Error: The library refused.
        """
        if event.type is EventType.SCORED:
            self._run.log({STEP: event.step, **metrics_of(event)})
        elif event.type in (EventType.PROMOTED, EventType.ROLLED_BACK):
            self._move_alias(event)

    def close(self) -> None:
        """Finish the run; the next start resumes it."""
        self._run.finish()

    def _move_alias(self, event: Event) -> None:
        import wandb

        uri = self._context.checkpoint_uri(event.step)
        details = {STEP: event.step, "checkpoint_digest": event.checkpoint_digest, "uri": uri}
        name = "".join(each if each.isalnum() or each in "-_." else "_" for each in self._context.model_name)
        artifact = wandb.Artifact(name, "model", metadata=details)
        with contextlib.suppress(ValueError):  # the checkpoint is gone; the details say which it was
            artifact.add_reference(uri, checksum=False)
        self._run.log_artifact(artifact, aliases=[ALIAS, f"step-{event.step}"])
        self._run.log({STEP: event.step, SERVING_STEP: event.step})
        self._run.summary[SERVING_STEP] = event.step
