"""The rollout that is under way, and its file, with which a restart or another evaluator goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.rollout_plan import RolloutPlan, ShadowPlan
from understudy.evaluator.serving.shadow_health import ShadowCounts, shadow_counts
from understudy.evaluator.types import CheckpointKey

ROLLOUT_FILE: Final = "rollout.json"
"""In the state folder: the rollout that is under way, with the time that it has taken."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningRollout:
    """A rollout that is under way.

    Attributes:
        number: Identifies it in the state folder.
        step: The step of the new version.
        digest: The digest of its checkpoint.
        servers: The names of the servers that serve it; none if it only computes requests once more.
        followers: How many servers there were when it began.
        elapsed_seconds: For how long one of them has served it, or has had it loaded to compute requests once more.
        after_seconds: After how long all serve it.
        shadow: What came of the requests that it computed once more; None for a canary.
        shadow_servers: The last report of each server that is counted in it; None if they are not known.
        least_requests: How many of them it takes besides the time.
    """

    number: int
    step: int
    digest: str
    servers: tuple[str, ...]
    followers: int
    elapsed_seconds: float
    after_seconds: float
    shadow: ShadowCounts | None = None
    shadow_servers: Mapping[str, ShadowCounts] | None = None
    least_requests: int = 0

    @property
    def key(self) -> CheckpointKey:
        """The step and digest of the new version."""
        return self.step, self.digest

    @property
    def is_over(self) -> bool:
        """Whether the time is over, and the requests are enough."""
        compared = 0 if self.shadow is None else self.shadow.compared
        return self.elapsed_seconds >= self.after_seconds and compared >= self.least_requests


class RolloutFile:
    """Keeps the rollout that is under way. For one thread at a time.

    Args:
        directory: The state folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / ROLLOUT_FILE

    def write(self, running: RunningRollout) -> None:
        """Write a rollout.

        Raises:
            OSError: It cannot be written.
        """
        write_json(self._path, asdict(running))

    def remove(self) -> bool:
        """Forget the rollout; return whether there was one."""
        there = self._path.exists()
        self._path.unlink(missing_ok=True)
        return there

    def read(self, plan: RolloutPlan) -> RunningRollout | None:
        """Return the rollout with the time of the present plan; None if there is none, or it is of another kind."""
        try:
            values = json.loads(self._path.read_bytes())
            shadow, servers = values.get("shadow"), values.get("shadow_servers")
            is_shadow = isinstance(plan, ShadowPlan)
            if (shadow is not None) != is_shadow:
                _log.warning("the rollout that was under way is of another kind than the setting; it begins anew")
                return None
            return RunningRollout(
                number=int(values["number"]),
                step=int(values["step"]),
                digest=str(values["digest"]),
                servers=tuple(map(str, values["servers"])),
                followers=int(values["followers"]),
                elapsed_seconds=float(values["elapsed_seconds"]),
                after_seconds=plan.after_seconds,
                shadow=None if shadow is None else shadow_counts(shadow),
                shadow_servers=None
                if servers is None
                else {str(name): shadow_counts(counts) for name, counts in servers.items()},
                least_requests=plan.least_requests if isinstance(plan, ShadowPlan) else 0,
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("cannot read the rollout of an earlier process; it begins anew", extra={"reason": str(error)})
            return None
