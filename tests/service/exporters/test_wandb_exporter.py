"""The exporter to Weights & Biases, offline: the library writes a file that its own reader reads."""

from __future__ import annotations

import json
import struct
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from understudy.service.events.exporter import Event, EventType, ExporterContext, load_exporter

pytestmark = [  # the library takes long to import, so only the process that runs these tests does
    pytest.mark.skipif(find_spec("wandb") is None, reason="this environment is without the extra [wandb]"),
    pytest.mark.filterwarnings("ignore"),  # of the library's
]


def event(kind: EventType, step: int, **data: Any) -> Event:
    return Event(type=kind, step=step, checkpoint_digest=f"d{step}", occurred_at=1_700_000_000.0, data=data)


WAIT_SECONDS = 100.0
HEADER, BLOCK = 7, 32_768
"""The bytes before the file's first record and before each part of one, and the size of the file's blocks."""


def records_of(folder: Path) -> list[Any]:
    """Return what the library has written, in order: records in the format of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert content.startswith(b":W&B")
    records, begun, at = [], b"", HEADER
    while at < len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        if at + HEADER > len(content):
            break
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        if at + HEADER + length > len(content):
            break
        begun += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(begun))
            begun = b""
    return records


def all_records_of(folder: Path) -> list[Any]:
    """Return the records once the last one is there, as the library's own process writes them."""
    ends = time.monotonic() + WAIT_SECONDS
    while True:
        records = records_of(folder)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < ends, records
        time.sleep(0.05)


def test_scores_and_promotions_are_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "PROJECT": "tests"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.keras").write_text("model")
    context = ExporterContext(
        model_name="digits/a b",
        evaluator_id="0123456789abcdef",
        checkpoint_uri=lambda step: (checkpoint if step == 40 else tmp_path / "deleted").as_uri(),
    )
    exporter = load_exporter("wandb")(context)
    exporter.export(event(EventType.COMMITTED, 20))
    exporter.export(event(EventType.SCORED, 20, dataset="test", metrics={"loss": 0.5, "f1": "nan"}))
    exporter.export(event(EventType.PROMOTED, 40))
    exporter.export(event(EventType.ROLLED_BACK, 20))
    exporter.close()

    records = all_records_of(tmp_path)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_id, run.project, run.display_name) == ("0123456789abcdef", "tests", "digits/a b")
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    (scored,) = [row for row in rows if "test/loss" in row]
    assert (scored["step"], scored["test/loss"]) == (20, 0.5)
    assert "test/f1" in scored
    assert [(row["step"], row["serving_step"]) for row in rows if "serving_step" in row] == [(40, 40), (20, 20)]
    artifacts = [record.request.log_artifact.artifact for record in records if record.HasField("request")]
    artifacts += [record.artifact for record in records if record.HasField("artifact")]
    found = [each for each in artifacts if each.name]
    assert [(each.name, each.type) for each in found] == [("digits_a_b", "model")] * 2
    assert {*found[0].aliases} >= {"serving", "step-40"}
    assert {*found[1].aliases} >= {"serving", "step-20"}
    assert json.loads(found[0].metadata)["checkpoint_digest"] == "d40"
    assert [len(each.manifest.contents) for each in found] == [1, 0]
