"""Which traces are sampled: the SDK decides, and this says beforehand when it is sure to decide against one."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from understudy.service.sample_gaps import SampleGaps

DEFAULT_SHARE: Final = 0.01

_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]([0-9a-f])")
"""A valid ``traceparent`` of the present version; the propagator judges all others."""
_SHARES: Final = {
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": None,
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,
}
"""The samplers of OpenTelemetry's specification: the share of new traces, which for None is OTEL_TRACES_SAMPLER_ARG."""

_TRACE_ID: ContextVar[int | None] = ContextVar("trace_id", default=None)


class Sampling:
    """The decisions about calls. An unsampled call costs a look at a header and a subtraction. Not thread-safe.

    Args:
        share: The share of new traces to sample, where a caller's own decision goes first; None for the sampler of
            OTEL_TRACES_SAMPLER, and without it for `DEFAULT_SHARE`.

    Attributes:
        sampler: The sampler for the SDK; None for the one that it finds in the environment itself.
    """

    def __init__(self, share: float | None) -> None:
        name = os.environ.get(OTEL_TRACES_SAMPLER, "").strip().lower()
        if share is None and not name:
            share = DEFAULT_SHARE
        self.sampler: Sampler | None = None
        self._heeds_parent = True
        if share is not None:
            self.sampler = ParentBased(TraceIdRatioBased(share))
        elif name in _SHARES:
            self._heeds_parent = name.startswith("parentbased")
            share = _SHARES[name]
            share = _share_of_environment() if share is None else share
        else:  # another package's: it decides on every call
            self._heeds_parent = False
            share = 1.0
        self._bound = TraceIdRatioBased.get_bound_for_rate(share)
        self._gaps = SampleGaps(share)
        self._others = self._gaps.draw()

    def excludes_child(self, parent: str) -> bool:
        """Return whether a call with this ``traceparent`` is not sampled."""
        if not self._heeds_parent:
            return False
        match = _PARENT.fullmatch(parent)
        return match is not None and not int(match[1], 16) & 1

    def draw(self) -> int | None:
        """Return the id of a new trace, for `starting`, or None if it is not sampled."""
        if self._others > 0:
            self._others -= 1
            return None
        self._others = self._gaps.draw()
        kept = random.randrange(1, max(self._bound, 2))  # noqa: S311 - an id, of those that the sampler keeps
        return random.getrandbits(64) << 64 | kept


def _share_of_environment() -> float:
    """Return the share as the SDK reads it: all if it cannot be read."""
    try:
        share = float(os.environ.get(OTEL_TRACES_SAMPLER_ARG, ""))
    except ValueError:
        return 1.0
    return share if 0 <= share <= 1 else 1.0


class DrawnIds(RandomIdGenerator):
    """Gives new traces the id of `starting`; on one that `Sampling.draw` has drawn the SDK's sampler decides again."""

    def generate_trace_id(self) -> int:
        """See `RandomIdGenerator`."""
        return _TRACE_ID.get() or super().generate_trace_id()


@contextmanager
def starting(trace_id: int) -> Iterator[None]:
    """Give the traces that begin in this block an id."""
    token = _TRACE_ID.set(trace_id)
    try:
        yield
    finally:
        _TRACE_ID.reset(token)
