"""The destinations that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from understudy.evaluator.records.events import EventType
from understudy.evaluator.records.outbox import Subscription
from understudy.service.events.exporter import Exporter, ExporterContext, MakeExporter, load_exporter
from understudy.service.events.webhook_settings import destination_name, secrets_from
from understudy.service.settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """Who receives events.

    Attributes:
        subscriptions: The destinations, and which events each receives.
        exporters: Creates the exporter of each destination.
    """

    subscriptions: tuple[Subscription, ...]
    exporters: Mapping[str, MakeExporter]

    def makers(self, context: ExporterContext) -> Mapping[str, Callable[[], Exporter]]:
        """Return the functions that create each exporter."""
        return {name: partial(make, context) for name, make in self.exporters.items()}


def destinations_of(settings: ServeSettings) -> Destinations:
    """Return the destinations of the settings, with their code imported. Blocks.

    Raises:
        SettingsError: The secret of the webhooks is missing or cannot be used, or there is no such exporter.
    """
    exporters: dict[str, MakeExporter] = {}
    subscriptions = []
    if settings.webhook:
        exporters |= _webhooks(settings)
        types = frozenset(map(EventType, settings.webhook_events)) or frozenset(EventType)
        subscriptions = [Subscription(destination=name, types=types) for name in exporters]
    for name in settings.exporter:
        exporters[name] = load_exporter(name)
        subscriptions.append(Subscription(destination=name))
    return Destinations(subscriptions=tuple(subscriptions), exporters=exporters)


def _webhooks(settings: ServeSettings) -> dict[str, MakeExporter]:
    from understudy.service.events.webhook import Webhook, source_of  # imports httpx

    urls = {destination_name(url): url for url in settings.webhook}
    secrets = secrets_from(settings.webhook_secret_file, list(urls))

    def make(name: str, context: ExporterContext) -> Exporter:
        return Webhook(urls[name], source=source_of(context.model_name), secrets=secrets[name])

    return {name: partial(make, name) for name in urls}
