"""The interface of exporters, which are found through entry points.

A package adds an exporter by an entry point of the group ``understudy.exporters``. Its name is the value for
``--exporter``, and it refers to a `MakeExporter`, such as a class. The value may also be ``package.module:object``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Protocol

from understudy.evaluator.records.events import Event as Event  # noqa: PLC0414 - re-exported for exporters
from understudy.evaluator.records.events import EventType as EventType  # noqa: PLC0414 - re-exported for exporters
from understudy.service.service_errors import SettingsError

ENTRY_POINTS: Final = "understudy.exporters"
"""The group of the entry points."""


class Exporter(Protocol):
    """Takes events one after the other, on one thread of its own."""

    def export(self, event: Event) -> None:
        """Deliver an event. May block: nothing else waits for it.

        Events of a checkpoint come in their order. An event comes again, with the same id, if this raised or if the
        process ended before the success was recorded; so an exporter must do no harm by taking it twice.

        Raises:
            Exception: The event was not delivered. Its text is logged and kept, so it must hold no secret.
        """

    def close(self) -> None:
        """Release everything; called once, on the same thread, after the last event."""


@dataclass(frozen=True, kw_only=True)
class ExporterContext:
    """What an exporter may want to know.

    Attributes:
        model_name: The name the model is served under.
        evaluator_id: Identifies the evaluator's state folder, so it is the same after a restart.
        checkpoint_uri: Returns where the checkpoint of a step is; it may no longer exist.
    """

    model_name: str
    evaluator_id: str
    checkpoint_uri: Callable[[int], str]


MakeExporter = Callable[[ExporterContext], Exporter]
"""Creates an exporter, on the thread that it will have. It is tried again later if it raises."""


class DeliveryError(Exception):
    """An event was not delivered. The text holds no secret."""


def metrics_of(event: Event) -> dict[str, float]:
    """Return the metrics of an event that a checkpoint was scored, by ``DATASET/METRIC``.

    The name of the dataset has an addition where a value cannot be compared with the first ones: on other examples, or
    of a metric that is configured otherwise. So no curve mixes them.
    """
    dataset, curves = event.data["dataset"], event.data.get("curves", {})
    return {f"{curves.get(name, dataset)}/{name}": float(value) for name, value in event.data["metrics"].items()}


def load_exporter(name: str) -> MakeExporter:
    """Return the exporter of a name.

    Raises:
        SettingsError: No package has an exporter of this name, or what it needs is not installed.
    """
    found = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS)}
    if ":" in name:
        found[name] = metadata.EntryPoint(name, name, ENTRY_POINTS)
    if name not in found:
        raise SettingsError(
            f"exporter is {name!r}; give package.module:object, or one of {', '.join(sorted(found)) or 'none'}"
        )
    try:
        make: Any = found[name].load()
    except (ImportError, AttributeError) as error:
        advice = "" if ":" in name else f"; install what it needs, such as understudy[{name}]"
        raise SettingsError(f"exporter {name!r} cannot be loaded: {error}{advice}") from error
    chosen: MakeExporter = make
    return chosen
