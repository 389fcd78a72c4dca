"""Chooses settings by what calls of a model cost. Arithmetic alone; docs/decisions/self-tuning.md has its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE

MIN_GAIN = 1.05
"""Less than this is not worth settings other than the usual ones."""

MIN_GAIN_OF_TWO = 1.15
"""How much more two batches at the same time must answer than the best of one at a time: they cost more CPU time."""

_PAIR = 2
SIZES = (1, _PAIR, 8, 32, 64, 128, 256, 512, 1024)
"""The examples of a call on each replica that are measured, as far as they are sensible."""

LONGEST_CALL_SECONDS = 0.1
"""A call that takes longer keeps small requests waiting for too long; larger ones are neither measured nor chosen."""

REQUEST_SECONDS = 150e-6
"""The CPU time of a request outside of the model, about, of which each batch brings one for every eight examples."""

BATCH_SECONDS = 100e-6
"""The time of a batch outside of the model, about: the handover between threads."""

HALVES = (4, 16, 64)
"""The examples of each of two calls at the same time that are measured, on each replica."""

_SMALLEST_LARGEST_BATCH = 32
_NEAR = 1.03
_ALONE = (1, 8, 32)
"""The examples of one request that finds the device idle."""
_TOGETHER = (8, 32, 128)
"""The examples of several requests that come at the same time: those of two calls of `HALVES`, or of one call."""
_EXAMPLES_OF_A_REQUEST = 8
_LONGEST_GATHERING_SECONDS = 0.005
_BRIEF_SECONDS = 1e-3
_MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class Threads:
    """TensorFlow's threads: within an operation, and for operations at the same time; None for the default."""

    intra_op: int | None = None
    inter_op: int | None = None


@dataclass(frozen=True, kw_only=True)
class CallCost:
    """What a call costs: elapsed seconds, and CPU seconds of all threads."""

    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What calls cost with some threads, by the number of examples on each replica.

    Attributes:
        threads: The threads.
        calls: The cost of one call at a time. It always has size 1.
        pairs: The cost of each of two calls at the same time; empty if the model does not allow that.
    """

    threads: Threads
    calls: Mapping[int, CallCost]
    pairs: Mapping[int, CallCost] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FoundSettings:
    """Settings that suit a model and a machine.

    Attributes:
        threads: TensorFlow's threads.
        max_batch_size: Examples that one call takes at most on each replica.
        gathering_seconds: How long a batch waits for requests like those of the batch before.
        concurrent_batches: How many batches run at the same time.
    """

    threads: Threads = Threads()
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    gathering_seconds: float = 0.0
    concurrent_batches: int = 1


def check_bounds(found: FoundSettings) -> None:
    """Raise ValueError if settings are out of the bounds of what is chosen."""
    threads = [number for number in (found.threads.intra_op, found.threads.inter_op) if number is not None]
    if not all(1 <= number <= _MOST_THREADS for number in threads):
        raise ValueError(f"{threads} threads, expected 1 to {_MOST_THREADS}")
    if not 1 <= found.max_batch_size <= max(SIZES):
        raise ValueError(f"batches of {found.max_batch_size}, expected 1 to {max(SIZES)}")
    if not 0.0 <= found.gathering_seconds <= _LONGEST_GATHERING_SECONDS:
        raise ValueError(f"a wait of {found.gathering_seconds} s, expected 0 to {_LONGEST_GATHERING_SECONDS}")
    if not 1 <= found.concurrent_batches <= _PAIR:
        raise ValueError(f"{found.concurrent_batches} batches at the same time, expected 1 to {_PAIR}")


def choose(measurements: Sequence[Measurement], *, cores: int) -> FoundSettings:
    """Return the settings under which the model costs least. The first measurement is of the default threads.

    Other threads must be better by `MIN_GAIN`, and two batches at the same time by `MIN_GAIN_OF_TWO`.

    Args:
        measurements: What was measured; at least one.
        cores: How many cores there are for the model and the transport together.
    """
    usual = measurements[0]
    best, together = max(measurements, key=lambda found: gain(found, usual, cores=cores)), 1
    if gain(best, usual, cores=cores) < MIN_GAIN:
        best = usual
    least = MIN_GAIN_OF_TWO * gain(best, usual, cores=cores)
    for found in measurements:
        if found.pairs and (reached := gain(found, usual, cores=cores, together=_PAIR)) >= least:
            best, together, least = found, _PAIR, reached
    return FoundSettings(
        threads=best.threads,
        max_batch_size=_largest_batch(best.calls),
        gathering_seconds=_gathering_seconds(best.calls),
        concurrent_batches=together,
    )


def gain(found: Measurement, usual: Measurement, *, cores: int, together: int = 1) -> float:
    """Return how many times as much is answered as with the usual threads and one batch at a time.

    It is a geometric mean over requests that come alone and requests that come together. Batches share the cores with
    the transport. So they take the longer of their elapsed time and of all CPU time, divided by the cores. More threads
    shorten the first and add to the second.

    Args:
        found: The measurement to judge.
        usual: The measurement to compare with.
        cores: How many cores there are.
        together: How many batches run at the same time with ``found``.
    """
    logs = [
        math.log(_one_batch(usual, size, cores) / _one_batch(found, size, cores))
        for size in _ALONE
        if size in found.calls and size in usual.calls
    ]
    for size in _TOGETHER:
        if size in usual.calls and size in found.calls and (together == 1 or size // _PAIR in found.pairs):
            seconds = _one_batch(found, size, cores) if together == 1 else _two_batches(found, size, cores)
            logs.append(math.log(_one_batch(usual, size, cores) / seconds))
    return math.exp(sum(logs) / len(logs))


def _one_batch(measured: Measurement, size: int, cores: int) -> float:
    """Return how long one batch of this many examples takes."""
    call = measured.calls[size]
    return max(call.wall_seconds + BATCH_SECONDS, (call.cpu_seconds + _transport(size)) / cores)


def _two_batches(measured: Measurement, size: int, cores: int) -> float:
    """Return how long two batches take that share this many examples and run at the same time."""
    call = measured.pairs[size // _PAIR]
    return max(call.wall_seconds + BATCH_SECONDS, (_PAIR * call.cpu_seconds + _transport(size)) / cores)


def _transport(size: int) -> float:
    return REQUEST_SECONDS * math.ceil(size / _EXAMPLES_OF_A_REQUEST)


def _largest_batch(calls: Mapping[int, CallCost]) -> int:
    """Return the smallest size that costs about as little for each example as the best."""
    costs = {
        size: (call.wall_seconds + BATCH_SECONDS) / size
        for size, call in calls.items()
        if size >= _SMALLEST_LARGEST_BATCH and call.wall_seconds <= LONGEST_CALL_SECONDS
    }
    least = min(costs.values(), default=0.0)
    return min((size for size, cost in costs.items() if cost <= _NEAR * least), default=_SMALLEST_LARGEST_BATCH)


def _gathering_seconds(calls: Mapping[int, CallCost]) -> float:
    """Return half of what a call costs whatever its size: a batch may wait so long to save another batch."""
    one, pair = calls[1], calls.get(_PAIR)
    if pair is None or one.wall_seconds < _BRIEF_SECONDS:
        return 0.0
    fixed = 2 * one.wall_seconds - pair.wall_seconds
    return min(max(0.0, fixed / 2), _LONGEST_GATHERING_SECONDS)
