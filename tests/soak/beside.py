"""An evaluator beside a training whose tasks are killed: it scores every published checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from understudy.checkpoints import RunDir
from understudy.checkpoints.layout import RESULTS_DIR, step_name

_SCORE_SECONDS = 300.0
_END_SECONDS = 60.0
_POLL_SECONDS = 0.2


class EvaluatorBeside:
    """``understudy serve`` on a run folder, from its creation to the end of the context.

    Args:
        run_dir: The run folder; created if missing.
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
        """Wait until every checkpoint in the run folder is settled; return those without a score.

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
        """Read the result files, as the running evaluator owns the ledger."""
        published = self._run.committed_steps()
        files = {step: self._run.evaluator / RESULTS_DIR / f"{step_name(step)}.json" for step in published}
        results = {step: json.loads(file.read_bytes()) for step, file in files.items() if file.exists()}
        return {
            "missing": [step for step in published if step not in results or not results[step]["settled"]],
            "failed": [
                [result["step"], r["reason"]]
                for result in results.values()
                for r in result["records"]
                if r["outcome"] == "failed"
            ],
            "scored": sum(any(r["outcome"] == "scored" for r in result["records"]) for result in results.values()),
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
