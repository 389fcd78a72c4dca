"""Finds the settings that suit the served model, behind the requests, and remembers them."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Final

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.compat.error_texts import first_line
from understudy.devices.host import available_memory_bytes, usable_cores
from understudy.evaluator.evaluator_errors import EvaluatorError, TrialError
from understudy.evaluator.threads import Promotion, PromotionThread
from understudy.evaluator.tuning.choice import FoundSettings, Measurement, Threads, choose, gain
from understudy.evaluator.tuning.trial import TrialRequest, run_trial
from understudy.evaluator.tuning.tuning_file import TuningFile

_log = logging.getLogger(__name__)

TUNING_SETTLING_SECONDS: Final = 20.0
"""How long a model must have been serving before trials begin: a restart or another model may follow at once."""

MOST_TRIALS: Final = 8
MOST_SECONDS: Final = 300.0
"""How many trials there are, and how long they may take together."""

MOST_ATTEMPTS: Final = 3
"""How often it is tried to find settings for a model, each time with another checkpoint."""

_QUIET, _QUIET_SHARE = 1.25, 0.25
"""The shortest call takes at most this multiple of the mean CPU time, but for a share of the sizes."""

_SPARE_MEMORY = 2
"""There must be this many times the memory of this process for another process with the same model."""


@dataclass(frozen=True, kw_only=True)
class TunedModel:
    """The serving version.

    Attributes:
        architecture: The fingerprint of the model.
        lease: Leases its files.
    """

    architecture: str
    lease: Callable[[], AbstractContextManager[LocalCheckpoint]]


Trial = Callable[[TrialRequest, Callable[[], bool]], Measurement | None]
"""Measures with some threads, as `run_trial` does."""


class SelfTuner:
    """Applies what was found for each serving version, and finds it if it is unknown. Thread-safe.

    One thread runs one trial at a time. Another model or the end of the service ends a trial at once. What the trials
    find is applied as far as a running process can change it, and remembered for the next start.

    Args:
        file: What was found before.
        serving: Returns the version of a step, or raises EvaluatorError if it is not loaded any more.
        apply: Called with what was found, on the tuner's thread.
        request: The trial of the default threads; the files of the model are filled in.
        given: The threads that the user chose, which no trial changes.
        in_effect: TensorFlow's threads in this process.
        replicas: The number of replicas.
        trial: Runs a trial.
        settling_seconds: How long a model must have been serving.
    """

    def __init__(
        self,
        *,
        file: TuningFile,
        serving: Callable[[int], TunedModel],
        apply: Callable[[FoundSettings], None],
        request: Callable[[LocalCheckpoint, Threads], TrialRequest],
        given: Threads,
        in_effect: Threads,
        replicas: int,
        trial: Trial = run_trial,
        settling_seconds: float,
    ) -> None:
        self._file = file
        self._serving = serving
        self._apply = apply
        self._request = request
        self._given = given
        self._in_effect = in_effect
        self._replicas = replicas
        self._trial = trial
        self._settling_seconds = settling_seconds
        self._applied_to = ""
        self._failures: Counter[str] = Counter()
        self._thread = PromotionThread("understudy-tune", self._follow)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def promoted(self, step: int) -> None:
        """Apply or find the settings of this version. Does not block."""
        self._thread.promoted(step)

    def close(self, timeout_seconds: float) -> None:
        """End the trial and the thread. Idempotent.

        Raises:
            TimeoutError: The thread did not end in time.
        """
        self._thread.close(timeout_seconds, error="a trial of settings did not end within")

    def _follow(self, promotion: Promotion) -> None:
        try:
            model = self._serving(promotion.step)
        except EvaluatorError:  # it is unloaded already
            return
        if self._is_open(model.architecture):
            self._tune(model)

    def _is_open(self, architecture: str) -> bool:
        """Whether settings of another model are in effect, and those of this one may still be found."""
        return architecture != self._applied_to and self._failures[architecture] < MOST_ATTEMPTS

    def _is_wanted(self, model: TunedModel) -> bool:
        """Whether a version of this model is still serving."""
        return self._newest(model) is not None

    def _newest(self, model: TunedModel) -> TunedModel | None:
        """Return the version that is serving now, if it is of this model: those before may be deleted."""
        newest = self._thread.newest
        try:
            serving = None if newest is None else self._serving(newest.step)
        except EvaluatorError:
            return None
        return serving if serving is not None and serving.architecture == model.architecture else None

    def _tune(self, model: TunedModel) -> None:
        """Apply what was found for a model, or find it."""
        try:
            found = self._file.find(model.architecture)
            if found is not None:
                self._file.remember(model.architecture, found)  # as the last, whose threads the next start takes
                self._adopt(model, found, "found before")
            elif self._thread.has_settled(lambda: self._is_wanted(model), self._settling_seconds) and (
                newest := self._newest(model)
            ):
                self._find(newest)
        except Exception as error:  # noqa: BLE001 - the service goes on with its present settings
            self._failures[model.architecture] += 1
            _log.warning("cannot find settings for the model", extra={"reason": first_line(error)})

    def _find(self, model: TunedModel) -> None:
        """Run the trials, choose, remember and apply."""
        began = time.monotonic()
        measured: list[Measurement] = []
        with model.lease() as checkpoint:
            for threads in _candidates(self._given, usable_cores(), replicas=self._replicas):
                if len(measured) >= MOST_TRIALS or time.monotonic() - began > MOST_SECONDS:
                    break
                _check_memory()
                measurement = self._trial(self._request(checkpoint, threads), lambda: self._is_wanted(model))
                if measurement is None:
                    return
                measured.append(measurement)
        _check_quiet(measured)
        found = choose(measured, cores=usable_cores())
        self._file.remember(model.architecture, found)
        self._adopt(model, found, _reasons(measured, seconds=time.monotonic() - began))

    def _adopt(self, model: TunedModel, found: FoundSettings, why: str) -> None:
        self._apply(found)
        self._applied_to = model.architecture
        waits = [
            name for name, value in asdict(found.threads).items() if value not in (None, getattr(self._in_effect, name))
        ]
        _log.info(
            "settings for this model and machine",
            extra={
                "intra_op_threads": found.threads.intra_op or "default",
                "inter_op_threads": found.threads.inter_op or "default",
                "max_batch_size": found.max_batch_size,
                "gathering_ms": round(1000 * found.gathering_seconds, 3),
                "concurrent_batches": found.concurrent_batches,
                "at_next_start": waits,
                "cores": usable_cores(),
                "because": why,
            },
        )


def _candidates(given: Threads, cores: int, *, replicas: int) -> Iterator[Threads]:
    """Yield the given threads first, then others where none are given: powers of two, and one at a time.

    Several replicas need a thread each for operations at the same time.
    """
    yield given
    if given.intra_op is None:
        yield from (Threads(intra_op=1 << power, inter_op=given.inter_op) for power in range(cores.bit_length() - 1))
    if given.inter_op is None and cores > 1 and replicas == 1:
        yield Threads(intra_op=given.intra_op or 1, inter_op=1)


def _check_memory() -> None:
    used = _resident_bytes()
    available = available_memory_bytes()
    if available < _SPARE_MEMORY * used:
        raise TrialError(
            f"{available >> 20} MiB of memory are available, and a trial may need {_SPARE_MEMORY * used >> 20} MiB"
        )


def _check_quiet(measured: Sequence[Measurement]) -> None:
    """Check that the calls did not wait for a core: they use CPU time for as long as they take."""
    for one in measured:
        waited = sum(call.wall_seconds > _QUIET * call.cpu_seconds for call in one.calls.values())
        if waited > _QUIET_SHARE * len(one.calls):
            raise TrialError("the machine was too busy to measure on; it is tried again with another checkpoint")


def _reasons(measured: Sequence[Measurement], *, seconds: float) -> str:
    """Return the figures behind a choice."""
    usual = measured[0]
    calls = ", ".join(f"{size}: {1e6 * cost.wall_seconds:.0f}" for size, cost in usual.calls.items())
    gains = ", ".join(map(_shown, measured, itertools.repeat(usual)))
    return (
        f"µs of a call by examples {{{calls}}}; answered with other threads, and with two batches at a time with each "
        f"load, in proportion {{{gains}}}; {seconds:.0f} s"
    )


def _shown(one: Measurement, usual: Measurement) -> str:
    threads, alone = one.threads, gain(one, usual, cores=usable_cores())
    loads = "/".join(f"{statistics.geometric_mean(turns):.2f}" for turns in one.gains_of_two) or "not measured"
    return f"{threads.intra_op or 'default'}/{threads.inter_op or 'default'}: {alone:.2f} and {loads}"


def _resident_bytes() -> int:
    from understudy.evaluator.model.devices import device_memory

    return device_memory().get(("CPU", "current"), 0)
