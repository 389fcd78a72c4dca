"""Chooses settings by what calls of a model cost. Arithmetic alone; docs/decisions/self-tuning.md has its figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE

MIN_GAIN = 1.05
"""Less than this is not worth settings other than the usual ones."""

MIN_GAIN_OF_TWO = 1.05
"""How much more two batches at the same time must answer than one, in the geometric mean over the loads."""

MIN_GAIN_OF_EACH_LOAD = 0.95
"""The same with each load."""

SIZES = (1, 2, 8, 32, 64, 128, 256, 512, 1024)
"""The examples of a call on each replica that are measured, as far as they are sensible."""

LONGEST_CALL_SECONDS = 0.1
"""A call that takes longer keeps small requests waiting for too long; larger ones are neither measured nor chosen."""

REQUEST_SECONDS = 150e-6
"""The CPU time of a request outside of the model, about, of which each batch brings one for every eight examples."""

BATCH_SECONDS = 100e-6
"""The time of a batch outside of the model, about: the handover between threads."""

BRIEF_SECONDS = 1e-3
"""Batches that take less do not run beside one another, and wait for no others."""

_SMALLEST_LARGEST_BATCH = 32
_NEAR = 1.03
_ALONE = (1, 8, 32)
"""The examples of one request that finds the device idle."""
_TOGETHER = (8, 32, 128)
"""The examples of several requests that come at the same time."""
_EXAMPLES_OF_A_REQUEST = 8
_LONGEST_GATHERING_SECONDS = 0.005
_MOST_THREADS = 4096
_MOST_CONCURRENT = 2
_STUDENT = {5: 2.571}
"""Student's t distribution at 0.975, by the degrees of freedom of the turns of a trial."""


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
        gains_of_two: With each load, and in each turn, how many times as much two batches at the same time answered as
            one; empty if the model does not allow that, or its batches are brief.
    """

    threads: Threads
    calls: Mapping[int, CallCost]
    gains_of_two: Sequence[Sequence[float]] = ()


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
    if not 1 <= found.concurrent_batches <= _MOST_CONCURRENT:
        raise ValueError(f"{found.concurrent_batches} batches at the same time, expected 1 to {_MOST_CONCURRENT}")


def choose(measurements: Sequence[Measurement], *, cores: int) -> FoundSettings:
    """Return the settings under which the model costs least. The first measurement is of the default threads.

    Other threads must be better by `MIN_GAIN`. For two batches at the same time see `gain_of_two`: they count for the
    requests that come together, half of what is judged.

    Args:
        measurements: What was measured; at least one.
        cores: How many cores there are for the model and the transport together.
    """
    usual = measurements[0]
    best, together = max(measurements, key=lambda found: gain(found, usual, cores=cores)), 1
    if gain(best, usual, cores=cores) < MIN_GAIN:
        best = usual
    least = gain(best, usual, cores=cores)
    for found in measurements:
        if (more := gain_of_two(found)) > 1.0 and (
            reached := gain(found, usual, cores=cores) * math.sqrt(more)
        ) > least:
            best, together, least = found, _MOST_CONCURRENT, reached
    return FoundSettings(
        threads=best.threads,
        max_batch_size=largest_batch(best.calls),
        gathering_seconds=gathering_seconds(best.calls),
        concurrent_batches=together,
    )


def gain(found: Measurement, usual: Measurement, *, cores: int) -> float:
    """Return how many times as much is answered as with the usual threads, with one batch at a time.

    It is a geometric mean over requests that come alone and requests that come together. Batches share the cores with
    the transport. So they take the longer of their elapsed time and of all CPU time, divided by the cores. More threads
    shorten the first and add to the second.
    """
    logs = [
        math.log(_one_batch(usual, size, cores) / _one_batch(found, size, cores))
        for size in (*_ALONE, *_TOGETHER)
        if size in found.calls and size in usual.calls
    ]
    return math.exp(sum(logs) / len(logs))


def gain_of_two(found: Measurement) -> float:
    """Return how many times as much two batches at the same time answer as one; 1 unless that is beyond doubt.

    The mean over the loads must be at least `MIN_GAIN_OF_TWO`, with an interval of 95 % above 1, and that of each load
    at least `MIN_GAIN_OF_EACH_LOAD`.
    """
    logs = [[math.log(ratio) for ratio in turns] for turns in found.gains_of_two]
    if not logs or min(map(statistics.fmean, logs)) < math.log(MIN_GAIN_OF_EACH_LOAD):
        return 1.0
    turns = [statistics.fmean(turn) for turn in zip(*logs, strict=True)]
    mean = statistics.fmean(turns)
    error = _STUDENT[len(turns) - 1] * statistics.stdev(turns) / math.sqrt(len(turns))
    return math.exp(mean) if mean >= math.log(MIN_GAIN_OF_TWO) and mean - error > 0.0 else 1.0


def _one_batch(measured: Measurement, size: int, cores: int) -> float:
    """Return how long one batch of this many examples takes."""
    call = measured.calls[size]
    return max(call.wall_seconds + BATCH_SECONDS, (call.cpu_seconds + _transport(size)) / cores)


def _transport(size: int) -> float:
    return REQUEST_SECONDS * math.ceil(size / _EXAMPLES_OF_A_REQUEST)


def largest_batch(calls: Mapping[int, CallCost]) -> int:
    """Return the smallest size that costs about as little for each example as the best."""
    costs = {
        size: (call.wall_seconds + BATCH_SECONDS) / size
        for size, call in calls.items()
        if size >= _SMALLEST_LARGEST_BATCH and call.wall_seconds <= LONGEST_CALL_SECONDS
    }
    least = min(costs.values(), default=0.0)
    return min((size for size, cost in costs.items() if cost <= _NEAR * least), default=_SMALLEST_LARGEST_BATCH)


def gathering_seconds(calls: Mapping[int, CallCost]) -> float:
    """Return half of what a call costs whatever its size: a batch may wait so long to save another batch."""
    one, pair = calls[1], calls.get(2)
    if pair is None or one.wall_seconds < BRIEF_SECONDS:
        return 0.0
    fixed = 2 * one.wall_seconds - pair.wall_seconds
    return min(max(0.0, fixed / 2), _LONGEST_GATHERING_SECONDS)
