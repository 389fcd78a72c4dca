"""The trace context of the caller's program, for the server to continue its trace."""

from __future__ import annotations

import sys


def current_trace_context() -> tuple[tuple[str, str], ...]:
    """Return the metadata of the current span, by OpenTelemetry's propagators; none outside of spans.

    OpenTelemetry is no dependency: a program without it has no current span, and one that has not imported it neither.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return ()
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return tuple((name.lower(), value) for name, value in headers.items())
