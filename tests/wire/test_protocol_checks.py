"""`make check` refuses what breaks callers of the protocol, and accepts what does not."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BUF = Path(sysconfig.get_path("scripts")) / "buf"
SECONDS = 60


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of the protocol."""
    shutil.copy2(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("*.py*"))
    return tmp_path


def complaints(folder: Path, *command: str) -> list[str]:
    done = subprocess.run([BUF, *command], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def change(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / "proto" / "understudy" / "v1" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def breaking(folder: Path) -> list[str]:
    return complaints(folder, "breaking", "--against", "proto/baseline.binpb")


def test_the_protocol_is_tidy_and_breaks_no_caller(copy: Path) -> None:
    assert complaints(copy, "lint") == []
    assert breaking(copy) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("prediction.proto", "  int64 step = 2;", "  int64 training_step = 2;", 'from "step" to "training_step"'),
        ("prediction.proto", "  int64 step = 2;", "  int64 step = 7;", 'field "2" with name "step"'),
        ("prediction.proto", "  int64 step = 2;", "  int32 step = 2;", 'from "int64" to "int32"'),
        ("evaluation.proto", "  optional int32 resamples = 5;", "  int32 resamples = 5;", "cardinality"),
        ("model.proto", "  PROMOTE_ACTION_UNPIN = 2;", "", 'enum value "2" on enum "PromoteAction"'),
        ("model.proto", "  rpc Promote(PromoteRequest) returns (PromoteResponse);", "", "Promote"),
    ],
)
def test_a_change_that_breaks_callers_is_refused(copy: Path, file: str, old: str, new: str, words: str) -> None:
    change(copy, file, old, new)

    assert words in "\n".join(breaking(copy))


def test_a_new_field_is_accepted_if_it_says_what_it_is(copy: Path) -> None:
    last = "  // The step of the checkpoint that computed all examples.\n  int64 step = 2;\n"
    change(copy, "prediction.proto", last, f"{last}  double seconds = 3;\n")

    assert breaking(copy) == []
    assert any('Field "seconds" should have a non-empty comment' in complaint for complaint in complaints(copy, "lint"))
