"""Opens the ledger and all that is derived from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from understudy.checkpoints.layout import RESULTS_DIR
from understudy.evaluator.assembly.component_options import ScoringPlan
from understudy.evaluator.assembly.evaluator_inputs import EvaluatorInputs
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.ledger_file import LEDGER_FILE
from understudy.evaluator.records.life_log import LIFE_FILE, LifeLog
from understudy.evaluator.records.outbox import Outbox
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles, TableFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

SUMMARIES_DIR = "tensorboard"
TABLES_DIR = "tables"


@dataclass(frozen=True, kw_only=True)
class Records:
    """The results so far, and the objects that record them."""

    ledger: Ledger
    recorder: Recorder
    ranking: Ranking
    tables: TableFiles
    life: LifeLog
    outbox: Outbox | None
    events: EventBuffer


def open_records(inputs: EvaluatorInputs, plan: ScoringPlan, wake: Callable[[], None], stack: ExitStack) -> Records:
    """Open the ledger and the files derived from it, and rank the scores that it holds."""

    def written(record: EvaluationRecord) -> None:
        if record.outcome is EvaluationOutcome.SCORED:
            wake()

    settings = inputs.settings
    ranking = Ranking(plan.monitor, plan.monitored_content)
    path = settings.state_dir / LEDGER_FILE
    outbox = Outbox(path, inputs.subscriptions) if inputs.subscriptions else None
    ledger = Ledger(path, outbox=outbox)
    stack.callback(ledger.close)
    life = LifeLog(settings.state_dir / LIFE_FILE)
    stack.callback(life.close)
    if outbox is not None:
        stack.callback(outbox.close)
    tables = TableFiles(settings.state_dir / TABLES_DIR)
    recorder = Recorder(
        ledger=ledger,
        keep=settings.keep_evaluations,
        results=ResultFiles(settings.state_dir / RESULTS_DIR),
        summaries=Summaries(settings.state_dir / SUMMARIES_DIR, ledger.curves),
        tables=tables,
        datasets=plan.datasets,
        observer=inputs.observer,
        listener=lambda record: ranking.observe([record]),
        on_written=written,
    )
    stack.callback(recorder.close)
    recorder.start_recovering()
    if plan.monitor is not None:
        ranking.observe(ledger.scored(plan.monitor.dataset))
    events = EventBuffer(None if outbox is None else ledger, wake=wake)
    stack.callback(events.close)
    return Records(
        ledger=ledger, recorder=recorder, ranking=ranking, tables=tables, life=life, outbox=outbox, events=events
    )
