"""The page of a report: one HTML file that needs nothing else.

Its drift comes from ``understudy drift --json``, or ``drift.json`` of a service with ``--drift-reference``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.command_errors import CommandError
from understudy.cli.output import UNDEFINED, ComparabilityNotes, counted, notes_of
from understudy.service.figures import SHADES, output_sections, shown, table

if TYPE_CHECKING:
    from understudy.clients import Evaluation, ExampleList, Flips


_LISTED = 100
"""So many examples are listed at most."""

_STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d1d9e0;--accent:9 105 218;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;
--accent:88 166 255}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#333;--line:#999;--accent:9 105 218;color-scheme:light}
details::details-content{content-visibility:visible;block-size:auto;opacity:1}summary{list-style:none}
.scroll{overflow:visible}figure,tr{break-inside:avoid}thead{display:table-header-group}}
body{margin:0 auto;padding:1.5rem;max-width:75rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1,h2,h3{line-height:1.25}h2{border-bottom:1px solid var(--line);margin-top:2.5rem}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1.5rem}
.scroll{overflow-x:auto;margin:.5rem 0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding:.25rem 0}
th,td{border:1px solid var(--line);padding:.2rem .55rem;text-align:right;max-width:20rem;overflow-wrap:break-word}
th[scope=row],thead th:first-child{text-align:left}
figure{margin:0 0 1rem}figcaption{font-weight:600}svg{width:100%;max-width:32rem;height:auto}
.frame{fill:none;stroke:var(--line)}.tick,.label{fill:var(--soft);font-size:11px}
.guide{fill:none;stroke:var(--soft);stroke-dasharray:4 4}.line{fill:none;stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0;margin:.25rem 0}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.c0{--c:#0969da}.c1{--c:#bf3989}.c2{--c:#1a7f37}.c3{--c:#bc4c00}.c4{--c:#8250df}.c5{--c:#9a6700}.c6{--c:#cf222e}
.c7{--c:#57606a}
@media screen and (prefers-color-scheme:dark){.c0{--c:#58a6ff}.c1{--c:#f778ba}.c2{--c:#3fb950}.c3{--c:#f0883e}
.c4{--c:#bc8cff}.c5{--c:#d29922}.c6{--c:#ff7b72}.c7{--c:#8b949e}}
.line{stroke:var(--c)}.bar{fill:var(--c)}.key{background:var(--c);print-color-adjust:exact}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SHADES = "".join(
    f".shade{one}{{background:rgb(var(--accent)/{0.75 * one / SHADES:.3f})}}" for one in range(SHADES + 1)
)

Content = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportedVersion:
    """One version: its evaluation, and the tables that were recorded with it."""

    evaluation: Evaluation
    content: Content


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The examples that a version and its baseline decide differently, or why they are not known."""

    newly_wrong: ExampleList | None = None
    newly_right: ExampleList | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page shows: one version, or two or more beside each other on one dataset; and drift, if it is known.

    Attributes:
        model_name: The model.
        versions: The versions, each with its evaluation.
        changes: The examples that are decided differently.
        notes: What is left out, and why.
        drift: What `understudy drift` found; None if it is not shown.
    """

    model_name: str
    versions: Sequence[ReportedVersion]
    changes: Changes
    notes: Sequence[str] = ()
    drift: Content | None = None


def page(report: Report) -> str:
    """Return the page."""
    first = report.versions[0].evaluation
    steps = " and ".join(f"step {one.evaluation.step}" for one in report.versions)
    title = f"{report.model_name}: {steps} on {first.dataset}"
    body = "".join(_sections(report))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_SHADES}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    versions = report.versions
    yield _evaluations(versions)
    yield f"<h2>Metrics</h2>{_metrics(versions)}"
    if any(one.evaluation.slices for one in versions):
        yield f"<h2>Slices</h2>{_beside(versions, _slices)}"
    if any(one.content["slices"] for one in versions):
        yield _beside(versions, _slice_tables)
    for name in dict.fromkeys(name for one in versions for name in one.content["outputs"]):
        yield from output_sections(name, [(f"step {one.evaluation.step}", one.content) for one in versions])
    yield from _changes(report.changes)
    yield f"<h2>Hardest examples</h2>{_beside(versions, _hardest)}"
    if report.drift is not None:
        yield from drift_section(report.drift)
    comparability = ComparabilityNotes()
    entries = sorted((one.evaluation for one in versions), key=lambda entry: entry.sequence)
    notes = dict.fromkeys([*report.notes, *(note for entry in entries for note in comparability.of(entry))])
    notes |= dict.fromkeys(note for one in versions for note in (*notes_of(one.evaluation), *one.content["notes"]))
    if notes:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _evaluations(versions: Sequence[ReportedVersion]) -> str:
    rows = [
        (
            f"step {one.evaluation.step}",
            one.evaluation.examples,
            f"{one.evaluation.recorded_at:%Y-%m-%d %H:%M:%S} UTC",
            one.evaluation.checkpoint_digest[:12],
        )
        for one in versions
    ]
    return table(("version", "examples", "scored", "checkpoint"), rows, caption="What was scored")


def _metrics(versions: Sequence[ReportedVersion]) -> str:
    names = sorted(
        {name for one in versions for name in (*one.evaluation.metrics, *one.evaluation.undefined)},
        key=lambda name: (name != "loss", name),
    )
    headings = ["metric", *(f"step {one.evaluation.step}" for one in versions)]
    rows = [(name, *(_with_interval(one.evaluation, name) for one in versions)) for name in names]
    confidence = next((one.evaluation.confidence for one in versions if one.evaluation.resamples), None)
    with_intervals = "" if confidence is None else f", with {confidence:.0%} intervals"
    return table(headings, rows, caption=f"The loss and every metric{with_intervals}")


def _with_interval(scored: Any, name: str) -> str:
    """Return a metric of an evaluation or a slice, with its interval if there is one."""
    if name not in scored.metrics:
        return UNDEFINED if name in scored.undefined else shown(None)
    interval = scored.intervals.get(name)
    bounds = "" if interval is None else f" [{interval.low:.6g}, {interval.high:.6g}]"
    return f"{scored.metrics[name]:.6g}{bounds}"


def _slices(one: ReportedVersion) -> str:
    slices = one.evaluation.slices
    names = sorted(
        {name for each in slices for name in (*each.metrics, *each.undefined)}, key=lambda name: (name != "loss", name)
    )
    notes = {each.name: "; ".join(notes_of(each)) for each in slices}
    last = ["notes"] if any(notes.values()) else []
    rows = [
        (each.name, each.examples, *(_with_interval(each, name) for name in names), *(notes[each.name] for _ in last))
        for each in slices
    ]
    return table(("slice", "examples", *names, *last), rows, caption=f"Slices of step {one.evaluation.step}")


def _slice_tables(one: ReportedVersion) -> str:
    """Return a table for each output, with what its tables say about each slice, in the order of their scores."""
    places = {each.name: place for place, each in enumerate(one.evaluation.slices)}
    slices = sorted(one.content["slices"], key=lambda each: places.get(each["name"], len(places)))
    names = dict.fromkeys(name for each in slices for name in each["outputs"])
    return "".join(_slice_table(name, slices, f"step {one.evaluation.step}") for name in names)


def _slice_table(output: str, slices: Sequence[Content], version: str) -> str:
    having = [each for each in slices if output in each["outputs"]]
    caption = f"Slices: {output}, {version}"
    if having[0]["outputs"][output]["task"] == "regression":
        measures = ("mean", "mean_absolute", "root_mean_square")
        errors = [(each["name"], *(each["outputs"][output][one] for one in measures)) for each in having]
        return table(("slice", *(measure.replace("_", " ") for measure in measures)), errors, caption=caption)
    rows = [(each["name"], *_quality(each["outputs"][output])) for each in having]
    return table(("slice", "right", "items", "mean area under the ROC", "calibration error"), rows, caption=caption)


def _quality(tables: Content) -> tuple[Any, ...]:
    """Return how many items are right, of how many, the mean area of the labels, and the calibration error."""
    areas = [label["auc"] for label in tables["labels"] if label["auc"] is not None]
    of = tables.get("confidence") or (tables["labels"][0] if len(tables["labels"]) == 1 else {})
    return tables["right"], tables["items"], sum(areas) / len(areas) if areas else None, of.get("ece")


def _beside(versions: Sequence[ReportedVersion], draw: Callable[[ReportedVersion], str]) -> str:
    return f'<div class="beside">{"".join(f"<div>{draw(one)}</div>" for one in versions)}</div>'


def _hardest(one: ReportedVersion) -> str:
    hardest = one.content["hardest"][:_LISTED]
    outputs = list(hardest[0]["outputs"]) if hardest else []
    headings = ["example", "loss", *(f"{name}: {kind}" for name in outputs for kind in ("actual", "predicted"))]
    rows = [
        (
            each["index"],
            each["loss"],
            *(listed(each["outputs"][name][kind]) for name in outputs for kind in ("actual", "predicted")),
        )
        for each in hardest
    ]
    return table(headings, rows, caption=f"The greatest losses of step {one.evaluation.step}; examples count from 0")


def listed(values: Sequence[Any]) -> str:
    """Return the classes or numbers of an example as text."""
    return ", ".join(map(shown, values)) or "none"


def _changes(changes: Changes) -> Iterator[str]:
    if changes.newly_wrong is None or changes.newly_right is None or changes.newly_wrong.flips is None:
        if changes.reason:
            yield f"<h2>Changed examples</h2><p>{escape(changes.reason)}</p>"
        return
    after, before = changes.newly_wrong.evaluation, changes.newly_wrong.baseline
    flips = changes.newly_wrong.flips
    baseline = "the baseline" if before is None else f"step {before.step}"
    yield f"<h2>Changed examples: step {after.step} against {baseline}</h2><p>{escape(summary_of(flips))}</p>"
    rows = [
        (f"{baseline} right", flips.both_right, flips.newly_wrong),
        (f"{baseline} wrong", flips.newly_right, flips.both_wrong),
    ]
    yield table(("", f"step {after.step} right", f"step {after.step} wrong"), rows, caption="Examples")
    for name, found in (("newly wrong", changes.newly_wrong), ("newly right", changes.newly_right)):
        rest = found.total - len(found.indices)
        places = ", ".join(map(str, found.indices)) or "none"
        yield f"<h3>Examples that are {name}</h3><p>{places}{f' and {rest} more' if rest else ''}</p>"
        yield _predictions(found, f"What was predicted for examples that are {name}", baseline)


def _predictions(found: ExampleList, caption: str, baseline: str) -> str:
    """Return a table of what both versions predicted for the first examples; empty if that is not known."""
    outputs = list(found.described[0].get("outputs", {})) if found.described else []
    if not outputs:
        return ""
    kinds = {"actual": "actual", "baseline": baseline, "predicted": f"step {found.evaluation.step}"}
    headings = ["example", *(f"{name}: {title}" for name in outputs for title in kinds.values())]
    rows = [
        (index, *(listed(described["outputs"][name][kind]) for name in outputs for kind in kinds))
        for index, described in list(zip(found.indices, found.described, strict=True))[:_LISTED]
    ]
    return table(headings, rows, caption=caption)


def summary_of(flips: Flips) -> str:
    """Return what the changes between two versions say, as a sentence."""
    return (
        f"{counted(flips.newly_wrong)} {'is' if flips.newly_wrong == 1 else 'are'} newly wrong and {flips.newly_right} "
        "newly right; so uneven a number of changes has the probability "
        f"{flips.p_value:.3g} if both versions are equally good (McNemar's exact test)."
    )


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
    return sorted((each for part in _parts(content) for each in part["features"]), key=lambda each: -float(each["psi"]))


def _parts(content: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [content] if "features" in content else [content["inputs"], content["scores"]]


def drift_section(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of drift."""
    features = features_of(content)
    live = "" if "dataset" not in content else f" of {content['examples']} live examples from {content['dataset']}"
    yield f"<h2>Drift{escape(live)}</h2>"
    headings = ("feature", "kind", "stability index", "by chance", "Kolmogorov-Smirnov", "values", "of the reference")
    columns = ("name", "kind", "psi", "psi_by_chance", "ks", "count", "reference_count")
    rows = [[each[column] for column in columns] for each in features]
    yield table(headings, rows, caption="How far each distribution is from the reference's, the furthest first")
    for name, count in ((name, count) for part in _parts(content) for name, count in part.get("pooled", {}).items()):
        yield f"<p>The {count} values of {escape(name)} are one feature together.</p>"
    for each in features[:DETAILED]:
        bins = [(one["label"], _percent(one["reference"]), _percent(one["share"])) for one in each["bins"]]
        caption = f"The {each['kind']} {each['name']}, stability index {shown(each['psi'])}"
        yield table(("bin", "reference", "share"), bins, caption=caption)


def _percent(share: float) -> str:
    return f"{share:.1%}"
