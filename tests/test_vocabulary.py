"""Words that were replaced stay out of code, help, logs, protos and docs.

`docs/glossary.md` explains the ones in use.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SUFFIXES = frozenset({".py", ".md", ".proto", ".toml", ".yml", ".yaml", ".sh"})
SKIPPED = re.compile(r"^(benchmarks/results/|tests/test_vocabulary\.py$|tools/peers/)")

REPLACED: tuple[tuple[str, str], ...] = (
    (
        r"\bon stage\b|\bon_stage\b|\bStage(Director|Change)\b|\bthe stage\b",
        "serving, ServingController, ServingChange",
    ),
    (r"\b(Shelf|shelf|on_shelf)\b", "CheckpointStore"),
    (r"\bTakenCheckpoint\b|\bopen_taken\b|\btake_once\b|\btaken_along\b", "LocalCheckpoint, fetch, restore"),
    (r"\bclass Hold\b|\bpinned/|\bPINNED_DIR\b", "Lease, leases/"),
    (r"\b[Ff]ollower\b|\bpoke[ds]?\b|\b[Gg]lance\b", "CheckpointWatcher, wake, peek"),
    (r"\b[Ee]xaminer\b", "EvaluationWorker"),
    (r"\b\w*Plane\b|\bdataplane\b|\bdata plane\b", "handlers"),
    (r"\b(Rest)?Door\b|\b[Dd]oors?\b", "GrpcAsgiApp, RestApp, endpoint"),
    (r"\b[Vv]igil\b|\b[Ss]urroundings\b|\bbecome_envoy\b", "DisconnectMonitor, EndpointContext, exec_envoy"),
    (r"\bBell\b|\bring_from_thread\b", "Notifier"),
    (r"\b[Rr]ecognizers?\b|\bRecognized\w+\b|\b[Ss]trangers?\b", "RequestTemplateCache"),
    (r"\bReplyForm\b|\bclass Replies\b", "ResponseSpec, ResponseTemplateCache"),
    (
        r"\bclass (Turns|Pace)\b|\bcheck_room\b|\bgive_way\b|\bGathering\b",
        "BatchScheduler, LatencyEstimator, check_admission",
    ),
    (r"\bclass Line\b|\bLoadedWork\b|\bLoadHistory\b", "LoadQueue, ServableExecutor, VersionStateMonitor"),
    (r"\b[Cc]ontest\b|\bclass Wanted\b|\b[Gg]uests?\b", "ComparisonRun, CancellationToken, on-demand version"),
    (r"\bStepBook\b", "StepRegistry"),
    (
        r"\b[Vv]erdict\b|\bEndOfTraining\b|\bstart_parts\b|\bopen_evaluator\b",
        "ServiceExit, TrainingEndMonitor, start_components",
    ),
    (r"\bDeadlineError\b", "DeadlineExceededError"),
    (r"(?<!\w)--policy\b|(?<!\w)--serve\b|\bUNDERSTUDY_(POLICY|SERVE)\b", "--evaluation-policy, --version-policy"),
    (r"\bmax[_-](batch|queue)[_-]rows\b|\bevaluation[_-]batch[_-]rows\b", "max_batch_size, max_queue_examples"),
    (r"\bunderstudy_(batch|queue)_rows\w*\b|\bbatch_rows\b|\b(without_)?row_losses\b", "examples, batch_size"),
    (r"\b(blameless|BLAMELESS|hopeless|HOPELESS)\b", "transient, permanent"),
    (
        r"\bparse_apart\b|\bApartCodec\b|\btake_apart\b|\brun_apart\b",
        "parse_zero_copy, ZeroCopyCodec, uncompile, run_limited",
    ),
    (
        r"\b(Call|Body)Share\b|\bclass (Places|Patience)\b",
        "CallUsage, BodyReservation, ConcurrencyLimit, WorkerTimeouts",
    ),
    (r"\btell_(idle|evaluator)\b|\blook_again\b|\bis_dear\b", "notify_idle, report_to_evaluator, refresh, needs_copy"),
    (r"(?<![A-Za-z])([Tt]heatre|[Bb]ackstage|[Ff]inale|[Nn]arrat(or|ion)|trespass(es)?)\b", "a plain name"),
)
"""Patterns of words, and what to say instead."""

ALLOWED: tuple[tuple[str, str], ...] = (
    (r"^benchmarks/speed/peers/kserve_server\.py$", "DataPlane|dataplane"),  # KServe's own name
    (r"^tests/evaluator/model/test_slot\.py$", "the stage"),  # words in a test's vocabulary
    (r"^tests/cli/test_options\.py$", "--policy|--serve|UNDERSTUDY_POLICY|UNDERSTUDY_SERVE"),  # settings of its own
    (
        r"^CHANGELOG\.md$",  # lists the renames
        "--policy|--serve|max-(batch|queue)-rows|evaluation-batch-rows|understudy_(batch|queue)_rows|DeadlineError",
    ),
)
"""Files, and the words that they may hold all the same."""


def texts() -> Iterator[tuple[str, str]]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no work tree of git, which says what belongs to the project")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and not SKIPPED.match(name) and path.is_file():
            yield name, path.read_text(encoding="utf-8")


def replaced_words(name: str, text: str) -> Iterator[str]:
    allowed = [re.compile(words) for files, words in ALLOWED if re.search(files, name)]
    for pattern, instead in REPLACED:
        for match in re.finditer(pattern, text):
            if not any(words.fullmatch(match.group()) for words in allowed):
                yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}; say {instead}"


def test_replaced_words_stay_out() -> None:
    found = [line for name, text in texts() for line in replaced_words(name, text)]

    assert not found, "\n".join(found)


def test_no_file_is_named_by_a_replaced_word() -> None:
    found = [line for name, _ in texts() for line in replaced_words(name, re.sub(r"[/_.]", " ", name))]

    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["the version on stage", "--policy latest", "understudy_queue_rows", "class InferencePlane:"]
)
def test_a_replaced_word_is_found(text: str) -> None:
    assert list(replaced_words("docs/page.md", text))


@pytest.mark.parametrize(
    "text", ["--evaluation-policy latest", "a staging folder", "understudy_queue_examples", "in a row"]
)
def test_an_ordinary_word_is_no_replaced_one(text: str) -> None:
    assert not list(replaced_words("docs/page.md", text))
