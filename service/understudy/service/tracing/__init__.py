"""Traces by OpenTelemetry, with ``--tracing``. Imports its SDK, so the service imports it only then."""
