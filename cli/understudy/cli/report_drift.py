"""Drift in a report: from ``understudy drift --json``, or ``drift.json`` of a service with ``--drift-reference``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from understudy.cli.command_errors import CommandError
from understudy.service.figures.figures import shown, table

DETAILED = 5
"""The distributions of so many features are shown: those with the largest indices."""

Features = Sequence[Mapping[str, Any]]


def read_drift(file: Path) -> dict[str, Any]:
    """Read a file of drift.

    Raises:
        CommandError: It cannot be read, or holds something else.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        list(drift_section(content))
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{file} holds no drift; give what `understudy drift --json` prints, or drift.json of the state folder"
        ) from error
    return content


def features_of(content: Mapping[str, Any]) -> Features:
    """Return the features, the largest index first."""
    parts = [content] if "features" in content else [content["inputs"], content["scores"]]
    return sorted((each for part in parts for each in part["features"]), key=lambda each: -float(each["psi"]))


def drift_section(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of drift."""
    features = features_of(content)
    live = "" if "dataset" not in content else f" of {content['examples']} live examples from {content['dataset']}"
    yield f"<h2>Drift{escape(live)}</h2>"
    headings = ("feature", "kind", "stability index", "by chance", "Kolmogorov-Smirnov", "values", "of the reference")
    columns = ("name", "kind", "psi", "psi_by_chance", "ks", "count", "reference_count")
    rows = [[each[column] for column in columns] for each in features]
    yield table(headings, rows, caption="How far each distribution is from the reference's, the furthest first")
    for each in features[:DETAILED]:
        bins = [(one["label"], _percent(one["reference"]), _percent(one["share"])) for one in each["bins"]]
        caption = f"The {each['kind']} {each['name']}, stability index {shown(each['psi'])}"
        yield table(("bin", "reference", "share"), bins, caption=caption)


def _percent(share: float) -> str:
    return f"{share:.1%}"
