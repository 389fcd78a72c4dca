"""An evaluator beside a training that is disturbed: whatever becomes of the tasks, it scores all that they publish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from understudy.checkpoints import RunDir
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import EvaluationOutcome

_SCORE_SECONDS = 300.0
_END_SECONDS = 60.0
_POLL_SECONDS = 0.2
_EVERYTHING = 1_000_000


class EvaluatorBeside:
    """``understudy serve`` on a run folder, from the moment it is made to the end of the context.

    Args:
        run_dir: The run folder; made if it is missing.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = RunDir(run_dir)
        self._log = run_dir / "serve.log"
        command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(run_dir), "--experiment", "digits"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--grpc-port=0", "--http-port=0", "--logical-cpus=1", "--poll-interval-seconds=0.1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            )

    def unscored(self) -> dict[str, Any]:
        """Wait until every checkpoint in the run folder is settled; return those that have no score.

        Raises:
            RuntimeError: The evaluator ended.
        """
        ends = time.monotonic() + _SCORE_SECONDS
        while (found := self._compare())["missing"] and time.monotonic() < ends:
            if self._process.poll() is not None:
                raise RuntimeError(f"the evaluator ended by itself with {self._process.returncode}; see {self._log}")
            time.sleep(_POLL_SECONDS)
        return found

    def _compare(self) -> dict[str, Any]:
        published = self._run.committed_steps()
        file = self._run.evaluator / "ledger.sqlite"
        if not file.exists():
            return {"missing": published, "failed": [], "scored": 0}
        ledger = Ledger(file)
        try:
            records = ledger.page(limit=_EVERYTHING)
        finally:
            ledger.close()
        outcomes = Counter((record.step, record.outcome) for record in records)
        steps = {record.step for record in records}
        return {
            "missing": [step for step in published if step not in steps],
            "failed": [
                [record.step, record.reason] for record in records if record.outcome is EvaluationOutcome.FAILED
            ],
            "scored": sum(1 for step in published if outcomes[step, EvaluationOutcome.SCORED]),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
