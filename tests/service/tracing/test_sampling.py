"""What is decided before a span exists is what the SDK's sampler decides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from understudy.service.tracing.call_tracer import DEFAULT_SHARE, DrawnIds, Sampling, starting

SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
parents = st.from_regex(r"\A0[01]-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z") | st.text(max_size=60)


def starts(sampling: Sampling, parent: str | None) -> bool:
    """Return whether the SDK samples the span of a call with this header, or with a new trace."""
    provider = TracerProvider(sampler=sampling.sampler, id_generator=DrawnIds(), shutdown_on_exit=False)
    tracer = provider.get_tracer("test")
    headers = {} if parent is None else {"traceparent": parent}
    context = TraceContextTextMapPropagator().extract(headers, Context())
    is_recording: bool = tracer.start_span("call", context, SpanKind.SERVER).is_recording()
    return is_recording


@pytest.mark.parametrize("name", SAMPLERS)
@given(parent=parents)
@settings(max_examples=30)
def test_a_call_is_excluded_only_if_the_sampler_of_the_environment_drops_it(name: str, parent: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER", name)
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.0")
        sampling = Sampling(None)
        if sampling.excludes_child(parent):
            assert not starts(sampling, parent)


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_a_new_trace_is_drawn_as_often_as_the_share_and_the_sdk_agrees(share: float) -> None:
    sampling = Sampling(share)
    provider = TracerProvider(sampler=sampling.sampler, id_generator=DrawnIds(), shutdown_on_exit=False)
    tracer = provider.get_tracer("test")
    drawn = [trace_id for _ in range(20_000) if (trace_id := sampling.draw()) is not None]

    assert len(drawn) / 20_000 == pytest.approx(share, rel=0.5)
    for trace_id in drawn[:50]:
        with starting(trace_id):
            span = tracer.start_span("call", Context())
        assert span.is_recording()
        assert span.get_span_context().trace_id == trace_id


@pytest.mark.parametrize(
    ("variables", "share", "expected"),
    [
        ({}, None, DEFAULT_SHARE),
        ({}, 0.25, 0.25),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, None, 1.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, 0.0, 0.0),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, None, 0.0),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, None, 0.5),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "many"}, None, 1.0),
        ({"OTEL_TRACES_SAMPLER": "a_sampler_of_another_package"}, None, 1.0),
    ],
)
def test_the_share_is_the_setting_s_else_the_environment_s(
    variables: dict[str, str], share: float | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(share)
    drawn = sum(sampling.draw() is not None for _ in range(5000)) / 5000

    assert drawn == pytest.approx(expected, abs=0.05)
    assert isinstance(sampling.sampler, ParentBased) == (share is not None or not variables)
