"""The coverage of the intervals: in how many simulated evaluations they contain the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testkit.coverage import EXAMPLES, count_covered

if TYPE_CHECKING:
    from soak.trial import Trial

DRAWS = 1000
BOUNDS = (0.92, 0.97)


def run(trial: Trial) -> None:
    """Simulate as many evaluations as requested, with 95 % intervals of 400 resamples."""
    draws = trial.count(DRAWS)
    covered = count_covered(trial.seed, draws)
    shares = {name: round(count / draws, 3) for name, count in sorted(covered.items())}
    held = all(BOUNDS[0] <= share <= BOUNDS[1] for share in shares.values())
    trial.report(held=held, evaluations=draws, examples=EXAMPLES, confidence=0.95, resamples=400, coverage=shares)
    trial.finish()
