"""What an evaluator serves: a file in its state folder, and its reader in servers that serve the same."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.succession import newest_first, read_replaced, write_replaced
from understudy.evaluator.types import CheckpointKey

DECISION_FILE = "serving.json"

_log = logging.getLogger(__name__)

OnDecision = Callable[["ServingDecision"], None]


@dataclass(frozen=True, kw_only=True)
class Canary:
    """Another checkpoint, which a part of the servers that follow serves.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
        servers: The names of those servers.
    """

    step: int
    digest: str
    servers: tuple[str, ...]

    @property
    def key(self) -> CheckpointKey:
        """The step and digest, which identify the checkpoint."""
        return self.step, self.digest


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """A checkpoint with which servers compute a sample of the requests once more, after they have answered them.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
        share: The share of the requests.
        tolerance: By how much numbers may differ, relative to the largest one of their output.
    """

    step: int
    digest: str
    share: float
    tolerance: float

    @property
    def key(self) -> CheckpointKey:
        """The step and digest, which identify the checkpoint."""
        return self.step, self.digest


@dataclass(frozen=True, kw_only=True)
class ServingDecision:
    """The checkpoint that an evaluator serves.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
        sequence: The number of the decision, from 1 on; 0 if an earlier version of this program wrote it.
        evaluator_id: Identifies the evaluator's state folder; empty if an earlier version of this program wrote it.
        replaces: The evaluators, by their ids, whose state folders were where this one is; newest first.
        canary: What a part of the servers that follow serves instead; None if all serve the same.
        shadow: What all servers compute a sample of the requests with once more; None for nothing.
    """

    step: int
    digest: str
    sequence: int = 0
    evaluator_id: str = ""
    replaces: tuple[str, ...] = ()
    canary: Canary | None = None
    shadow: Shadow | None = None

    def of(self, server: str) -> ServingDecision:
        """Return the decision for the servers of one name."""
        canary = self.canary
        if canary is None or server not in canary.servers:
            return replace(self, canary=None)
        return replace(self, step=canary.step, digest=canary.digest, canary=None)

    @property
    def key(self) -> CheckpointKey:
        """The step and digest, which identify the checkpoint."""
        return self.step, self.digest


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """What a server that follows serves.

    Attributes:
        step: The serving step; None before the first.
        digest: The digest of that checkpoint; empty before the first.
        reason: Why it does not serve what was decided; empty if it does, or is about to.
    """

    step: int | None
    digest: str
    reason: str


class FollowedEvaluator(Protocol):
    """What another evaluator decides."""

    @property
    def current(self) -> ServingDecision | None:
        """The decision to follow; None until there has been one. Thread-safe."""

    @property
    def problem(self) -> str:
        """Why the decided checkpoint is not here; empty if that is not known. Thread-safe."""

    def refresh(self) -> bool:
        """Return whether there is a new decision since the last call. For one thread at a time."""

    def report(self, report: ServingReport) -> None:
        """Report what this server serves to the evaluator, if there is a connection. Thread-safe; does not block."""


class DecisionFile:
    """Writes ``serving.json`` into the state folder. Thread-safe.

    The numbers of the decisions go on after a restart.

    Args:
        directory: The state folder.
        replaces: The id of an evaluator that this one replaces by an operator's decision; empty for none.
    """

    def __init__(self, directory: Path, *, replaces: str = "") -> None:
        self._path = directory / DECISION_FILE
        self._lock = threading.Lock()
        self._written = self._current = _left_by_earlier_process(self._path)
        self._id = self._current.evaluator_id if self._current is not None else ""
        known = self._current.replaces if self._current is not None else ()
        self._replaces = newest_first([replaces], read_replaced(directory), known)
        self._failed = False
        self._listeners: list[OnDecision] = []

    @property
    def current(self) -> ServingDecision | None:
        """The last decision, also that of an earlier process; None before the first."""
        return self._current

    def listen(self, listener: OnDecision) -> None:
        """Call back with the present decision, if numbered, and with each later one; it must be quick and not raise."""
        with self._lock:
            self._listeners.append(listener)
            if self._current is not None and self._current.evaluator_id:
                listener(self._current)

    def publish(self, serving: Callable[[], CheckpointKey | None], *, followed: FollowedEvaluator | None) -> None:
        """Write what is serving, unless it is the last decision that was written. Call it again if the disk was full.

        A canary or shadow of this checkpoint ends with it; another one stays.

        Args:
            serving: Returns the serving checkpoint, or None. It is called under the lock of this file, so that of
                several threads the last one writes what is serving then.
            followed: The evaluator that decides for this server, if there is one. Its decision is passed on once it is
                carried out, with its number and identity: servers may follow either.
        """
        with self._lock:
            if (key := serving()) is None:
                return
            if followed is not None:
                decision = followed.current
                if decision is not None and decision.key == key:
                    self._announce(replace(decision, canary=None, shadow=None))
                return
            step, digest = key
            current = self._current
            canary, shadow = (None, None) if current is None else (current.canary, current.shadow)
            if canary is not None and canary.key == (step, digest):
                canary = None
            if shadow is not None and shadow.key == (step, digest):
                shadow = None
            self._decide(step, digest, canary, shadow)

    def hand_over(self) -> None:
        """Have the evaluator that starts next at the path of this state folder, which is gone, replace this one."""
        with self._lock:
            write_replaced(self._path.parent, [self._id, *self._replaces])

    def set_trial(self, trial: Canary | Shadow | None) -> None:
        """Have servers serve another checkpoint, or compute requests with it, from now on; None for none.

        Without a decision before, nothing changes.
        """
        with self._lock:
            if self._current is not None:
                canary = trial if isinstance(trial, Canary) else None
                shadow = trial if isinstance(trial, Shadow) else None
                self._decide(*self._current.key, canary, shadow)

    def _decide(self, step: int, digest: str, canary: Canary | None, shadow: Shadow | None) -> None:
        before = self._current
        decided = step, digest, canary, shadow, self._replaces
        same = before is not None and (*before.key, before.canary, before.shadow, before.replaces) == decided
        if before is not None and before.evaluator_id and same:
            self._announce(before)
            return
        self._id = self._id or uuid.uuid4().hex
        sequence = 1 + (0 if before is None else before.sequence)
        self._announce(
            ServingDecision(
                step=step,
                digest=digest,
                sequence=sequence,
                evaluator_id=self._id,
                replaces=self._replaces,
                canary=canary,
                shadow=shadow,
            )
        )

    def _announce(self, decision: ServingDecision) -> None:
        is_new = decision != self._current
        self._current = decision
        self._write(decision)
        if is_new:
            for listener in self._listeners:
                listener(decision)

    def _write(self, decision: ServingDecision) -> None:
        if decision == self._written:
            return
        try:
            write_json(self._path, asdict(decision))
        except OSError as error:
            if not self._failed:
                _log.warning("cannot write what other servers are to serve", extra={"reason": str(error)})
            self._failed = True
        else:
            self._written, self._failed = decision, False


def decode_decision(content: bytes) -> ServingDecision:
    """Return the decision in a file.

    Raises:
        ValueError: It holds something else.
    """
    try:
        values: Any = json.loads(content)
        return ServingDecision(
            step=int(values["step"]),
            digest=str(values["digest"]),
            sequence=int(values.get("sequence", 0)),
            evaluator_id=str(values.get("evaluator_id", "")),
            replaces=newest_first(map(str, values.get("replaces", ()))),
            canary=_canary(values.get("canary")),
            shadow=_shadow(values.get("shadow")),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a decision: {error!r}") from error


def _canary(values: Any) -> Canary | None:
    if values is None:
        return None
    return Canary(step=int(values["step"]), digest=str(values["digest"]), servers=tuple(map(str, values["servers"])))


def _shadow(values: Any) -> Shadow | None:
    if values is None:
        return None
    return Shadow(
        step=int(values["step"]),
        digest=str(values["digest"]),
        share=float(values["share"]),
        tolerance=float(values["tolerance"]),
    )


def _left_by_earlier_process(path: Path) -> ServingDecision | None:
    try:
        return decode_decision(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("cannot read the last decision, so servers that follow have to be started again: %s", error)
        return None


class FollowedDecision:
    """The last decision that was read from another evaluator's state folder. It stays when the folder is gone.

    It is a `FollowedEvaluator` that receives no reports.

    Args:
        directory: The other evaluator's state folder, which need not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / DECISION_FILE
        self._content = b""
        self._complaint = ""
        self._current: ServingDecision | None = None
        self.refresh()

    @property
    def current(self) -> ServingDecision | None:
        """See `FollowedEvaluator`."""
        return self._current

    @property
    def problem(self) -> str:
        """See `FollowedEvaluator`. Before the first decision, it says why there is none."""
        return self._complaint if self._current is None else ""

    def report(self, report: ServingReport) -> None:
        """See `FollowedEvaluator`."""

    def refresh(self) -> bool:
        """Read the file, and return whether there is a new decision. What cannot be read changes nothing."""
        try:
            content = self._path.read_bytes()
            if content == self._content:
                return False
            decision = decode_decision(content)
        except FileNotFoundError:
            self._complain("the evaluator to follow has decided nothing yet")
            return False
        except (OSError, ValueError) as error:
            self._complain(f"cannot read the decision of the evaluator to follow: {error!r}")
            return False
        changed = decision != self._current
        if self._current is not None and self._current.evaluator_id not in ("", decision.evaluator_id):
            _log.warning("the evaluator to follow has lost its state, with scores and pins, and decides anew")
        self._content, self._current, self._complaint = content, decision, ""
        return changed

    def _complain(self, text: str) -> None:
        """Log a complaint once."""
        if text != self._complaint:
            _log.warning(text, extra={"file": str(self._path)})
        self._complaint = text
