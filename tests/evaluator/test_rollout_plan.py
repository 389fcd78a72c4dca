"""The setting of rollouts, and the part of the servers that it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.rollout_plan import CanaryPlan, ShadowPlan, in_words, parse_rollout
from understudy.evaluator.settings import EvaluatorSettings


@pytest.mark.parametrize(
    ("text", "share", "seconds"),
    [
        ("canary=10%,after=15m", 0.1, 900.0),
        ("after=90s, canary=2.5%", 0.025, 90.0),
        ("canary=50%,after=1.5h", 0.5, 5400.0),
        ("canary=1%", 0.01, 900.0),
    ],
)
def test_a_plan_is_read_from_words(text: str, share: float, seconds: float) -> None:
    plan = parse_rollout(text)
    assert isinstance(plan, CanaryPlan)
    assert (plan.share, plan.after_seconds) == pytest.approx((share, seconds))


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("shadow=5%", ShadowPlan(share=0.05, after_seconds=900.0)),
        (
            "shadow=100%,after=2h,requests=500,disagreement=0.5%,tolerance=10%",
            ShadowPlan(share=1.0, after_seconds=7200.0, least_requests=500, most_disagreement=0.005, tolerance=0.1),
        ),
        ("after=1s,disagreement=0%,shadow=1%", ShadowPlan(share=0.01, after_seconds=1.0, most_disagreement=0.0)),
    ],
)
def test_a_shadow_is_read_from_words(text: str, plan: ShadowPlan) -> None:
    assert parse_rollout(text) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shadow=0%", "give a share of the requests of more than 0% and at most 100%"),
        ("shadow=101%", "give a share of the requests of more than 0% and at most 100%"),
        ("shadow=5%,requests=19", "19 requests are too few to compare versions; give 20 or more"),
        ("shadow=5%,disagreement=100%", "no version exceeds a disagreement of 100%"),
        ("shadow=5%,requests=many", "give canary=SHARE%"),
        ("shadow=5", "give canary=SHARE%"),
        ("canary=10%,requests=50", "give canary=SHARE%"),
        ("", "give canary=SHARE%"),
        ("10%", "give canary=SHARE%"),
        ("after=15m", "give canary=SHARE%"),
        ("canary=0.1", "give canary=SHARE%"),
        ("canary=10%,after=15", "give canary=SHARE%"),
        ("canary=10%,canary=20%", "give canary=SHARE%"),
        ("canary=10%,shadow=5%", "give canary=SHARE%"),
        ("canary=0%", "at 0% no server would serve the new version"),
        ("canary=100%", "at 100% no server would be left to compare with"),
        ("canary=10%,after=0s", "give a time of more than 0 s"),
        ("canary=10%,after=200h", "at most 604800 s"),
    ],
)
def test_what_is_no_plan_is_refused_with_what_to_give(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EvaluatorSettings(state_dir=Path("state"), rollout=text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version_policy": 10}, "^rollout goes with version_policy latest or best; step 10 is served anyhow"),
        ({"follow": "127.0.0.1:8500"}, "^rollout goes without follow, with which another evaluator decides"),
    ],
)
def test_a_rollout_where_nothing_is_decided_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EvaluatorSettings(state_dir=Path("state"), rollout="canary=10%", **settings)


@given(st.sets(st.text(), min_size=2, max_size=30), st.floats(0.001, 0.999))
def test_the_part_is_one_server_at_least_never_all_and_depends_only_on_the_names(names: set[str], share: float) -> None:
    plan = CanaryPlan(share=share, after_seconds=1)
    part = plan.part_of(names)
    assert 1 <= len(part) < len(names)
    assert set(part) < names
    assert abs(len(part) - share * len(names)) <= 1
    assert plan.part_of(sorted(names, reverse=True)) == part


def test_times_are_written_as_an_operator_writes_them() -> None:
    assert [in_words(seconds) for seconds in (0.5, 90, 900, 5400)] == ["0.5 s", "1.5 m", "15 m", "1.5 h"]
