"""What an evaluator serves: a file in its state folder, and its reader in servers that serve the same."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.atomic import write_json

DECISION_FILE = "serving.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServingDecision:
    """The checkpoint that an evaluator serves.

    Attributes:
        step: Its step.
        digest: The SHA-256 that identifies its content.
    """

    step: int
    digest: str


class DecisionFile:
    """Writes ``serving.json`` into the state folder. For one thread at a time.

    Args:
        directory: The state folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / DECISION_FILE
        self._written: ServingDecision | None = None
        self._failed = False

    def publish(self, decision: ServingDecision) -> None:
        """Write a decision, unless it is the last one that was written. Call it again if the disk was full."""
        if decision == self._written:
            return
        try:
            write_json(self._path, {"step": decision.step, "digest": decision.digest})
        except OSError as error:
            if not self._failed:
                _log.warning("cannot tell other servers what to serve", extra={"reason": str(error)})
            self._failed = True
        else:
            self._written, self._failed = decision, False


class FollowedDecision:
    """The last decision that was read from another evaluator's state folder. It stays when the folder is gone.

    `refresh` is for one thread at a time, `current` is thread-safe.

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
        """The decision to follow; None until there has been one."""
        return self._current

    def refresh(self) -> bool:
        """Read the file, and return whether there is a new decision. What cannot be read changes nothing."""
        try:
            content = self._path.read_bytes()
            if content == self._content:
                return False
            values = json.loads(content)
            decision = ServingDecision(step=int(values["step"]), digest=str(values["digest"]))
        except FileNotFoundError:
            self._complain("the evaluator to follow has decided nothing yet")
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._complain(f"cannot read the decision of the evaluator to follow: {error!r}")
            return False
        changed = decision != self._current
        self._content, self._current, self._complaint = content, decision, ""
        return changed

    def _complain(self, text: str) -> None:
        """Log a complaint once."""
        if text != self._complaint:
            _log.warning(text, extra={"file": str(self._path)})
        self._complaint = text
