"""The destinations that the settings name: posts to webhooks, and exporters.

Posts are CloudEvents, signed after the specification Standard Webhooks (https://www.standardwebhooks.com).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import httpx
from standardwebhooks import Webhook as Signer

from understudy.evaluator.records.events import EventType
from understudy.evaluator.records.outbox import Subscription
from understudy.service.events.exporter import (
    DeliveryError,
    Event,
    Exporter,
    ExporterContext,
    MakeExporter,
    load_exporter,
)
from understudy.service.events.webhook_settings import Secrets, destination_name, secrets_from
from understudy.service.service_errors import SettingsError
from understudy.service.settings import ServeSettings

TIMEOUT_SECONDS: Final = 10.0
"""How long one attempt may take in all."""


def cloud_event(event: Event, source: str) -> dict[str, Any]:
    """Return an event in CloudEvents' JSON format (structured mode, version 1.0)."""
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": source,
        "type": f"understudy.checkpoint.{event.type.value}",
        "subject": str(event.step),
        "time": datetime.fromtimestamp(event.occurred_at, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {"step": event.step, "checkpoint_digest": event.checkpoint_digest, **event.data},
    }


def source_of(model_name: str) -> str:
    """Return the source of the events about a model."""
    return f"/understudy/{quote(model_name, safe='')}"


class Webhook:
    """An `understudy.service.events.exporter.Exporter` that posts to a URL. For one thread.

    Any status other than 2xx is a failure, also a redirect. Of the response only the status is read. A user and a
    password in the URL are sent as basic authentication. HTTPS is verified with the system's authorities, or those of
    the variable ``SSL_CERT_FILE``.

    Args:
        url: Where to post to.
        source: The source of the events.
        secrets: Returns the secrets; each request has a signature by each, so that a receiver may have either.
        timeout_seconds: How long an attempt may take in all.
    """

    def __init__(self, url: str, *, source: str, secrets: Secrets, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._url = url
        self._source = source
        self._secrets = secrets
        self._timeout_seconds = timeout_seconds
        self._verify: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https") else True
        for name in ("httpx", "httpcore"):  # they log the URL
            logging.getLogger(name).setLevel(logging.WARNING)

    def export(self, event: Event) -> None:
        """Post an event.

        Raises:
            DeliveryError: It was not accepted.
        """
        body = json.dumps(cloud_event(event, self._source), allow_nan=False, separators=(",", ":"))
        now = datetime.now(UTC)
        try:
            signatures = [Signer(secret).sign(event.id, now, body) for secret in self._secrets()]
        except SettingsError as error:
            raise DeliveryError(str(error)) from error
        headers = {
            "content-type": "application/cloudevents+json; charset=UTF-8",
            "user-agent": "understudy",
            "webhook-id": event.id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                status = runner.run(self._post(body.encode(), headers))
        except TimeoutError as error:
            raise DeliveryError(f"no answer within {self._timeout_seconds:g} s") from error
        except httpx.ConnectError as error:
            raise DeliveryError(f"cannot connect: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise DeliveryError(f"the request failed: {type(error).__name__}") from error
        if httpx.codes.is_redirect(status):
            raise DeliveryError(f"status {status}, and redirects are not followed")
        if not httpx.codes.is_success(status):
            raise DeliveryError(f"status {status}")

    def close(self) -> None:
        """See `understudy.service.events.exporter.Exporter`."""

    async def _post(self, body: bytes, headers: dict[str, str]) -> int:
        """Post, and return the status."""
        async with (
            asyncio.timeout(self._timeout_seconds),
            httpx.AsyncClient(verify=self._verify, follow_redirects=False, timeout=self._timeout_seconds) as client,
            client.stream("POST", self._url, content=body, headers=headers) as response,
        ):
            return response.status_code


class _Loop(asyncio.SelectorEventLoop):
    """Resolves names on threads that are not waited for, as a resolver that hangs cannot be interrupted."""

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """See `asyncio.AbstractEventLoop`."""
        addresses: Future[Any] = Future()
        addresses.set_running_or_notify_cancel()

        def resolve() -> None:
            try:
                addresses.set_result(socket.getaddrinfo(host, port, **options))
            except (OSError, UnicodeError) as error:
                addresses.set_exception(error)

        threading.Thread(target=resolve, name="understudy-resolve", daemon=True).start()
        return await asyncio.wrap_future(addresses)


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
