"""The settings that were found: a file in the state folder, read before TensorFlow starts. Imports no TensorFlow."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from understudy.checkpoints.atomic import write_json
from understudy.devices.host import usable_cores
from understudy.evaluator.libraries import library_version
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.tuning.choice import FoundSettings, Threads, check_bounds

TUNING_FILE = "tuning.json"

_FORMAT = 2
_MOST_ENTRIES = 32
_LIBRARIES = ("tensorflow", "keras", "understudy")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What found settings depend on, the model aside: the machine, the versions, and the settings that are given."""

    digest: str

    @classmethod
    def of(cls, settings: EvaluatorSettings) -> Conditions:
        """Return the conditions of this process."""
        versions = [library_version(name) for name in _LIBRARIES]
        given = (
            settings.devices,
            settings.logical_cpus,
            settings.intra_op_threads,
            settings.inter_op_threads,
            settings.concurrent_batches,
            bool(settings.frozen_memory_mib),
        )
        values = (platform.machine(), _cpu_model(), usable_cores(), versions, given)
        return cls(digest=hashlib.sha256(repr(values).encode()).hexdigest())


class TuningFile:
    """Settings by model and conditions. One process writes at a time, the one that holds the state folder's lock.

    A file that cannot be read counts as empty: what it held is found again.

    Args:
        directory: The state folder.
        conditions: The conditions of this process.
    """

    def __init__(self, directory: Path, conditions: Conditions) -> None:
        self._path = directory / TUNING_FILE
        self._conditions = conditions

    def last(self) -> FoundSettings | None:
        """Return what was found last under these conditions: most likely the same model is served again."""
        found = [entry for entry in self._entries() if entry["conditions"] == self._conditions.digest]
        return _settings(found[-1]) if found else None

    def find(self, architecture: str) -> FoundSettings | None:
        """Return what was found for a model under these conditions."""
        found = [entry for entry in self._entries() if self._is_of(entry, architecture)]
        return _settings(found[-1]) if found else None

    def remember(self, architecture: str, found: FoundSettings) -> None:
        """Write what was found, as the last; raise OSError if it cannot be written."""
        others = [entry for entry in self._entries() if not self._is_of(entry, architecture)]
        entry = {"architecture": architecture, "conditions": self._conditions.digest, **asdict(found)}
        write_json(self._path, {"format": _FORMAT, "found": [*others, entry][-_MOST_ENTRIES:]})

    def _is_of(self, entry: dict[str, Any], architecture: str) -> bool:
        return (entry["architecture"], entry["conditions"]) == (architecture, self._conditions.digest)

    def _entries(self) -> list[dict[str, Any]]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["format"] != _FORMAT:
                return []
            entries: list[dict[str, Any]] = document["found"]
            for entry in entries:
                _settings(entry)
                str(entry["architecture"] + entry["conditions"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError) as error:
            _log.warning(
                "cannot read the settings that were found", extra={"file": str(self._path), "reason": str(error)}
            )
            return []
        return entries


@dataclass(frozen=True, kw_only=True)
class TuningStart:
    """What a service starts with.

    Attributes:
        file: What was found, and is found from now on.
        found: What was found last.
        experiment: What `understudy.experiments.load_experiment` loads the experiment by; None if there is none.
    """

    file: TuningFile
    found: FoundSettings | None
    experiment: str | None

    @classmethod
    def read(cls, settings: EvaluatorSettings, experiment: str | None) -> TuningStart | None:
        """Read what was found; return None if the settings rule out self-tuning. Call it before TensorFlow starts."""
        if not settings.self_tuning:
            return None
        file = TuningFile(settings.state_dir, Conditions.of(settings))
        return cls(file=file, found=file.last(), experiment=experiment)


def _settings(entry: dict[str, Any]) -> FoundSettings:
    """Return the settings of an entry; raise ValueError, among others, if no search can have found them."""
    threads = {name: None if value is None else int(value) for name, value in entry["threads"].items()}
    found = FoundSettings(
        threads=Threads(**threads),
        max_batch_size=int(entry["max_batch_size"]),
        gathering_seconds=float(entry["gathering_seconds"]),
        concurrent_batches=int(entry["concurrent_batches"]),
    )
    check_bounds(found)
    return found


def _cpu_model() -> str:
    """Return the name of the processor's model; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
