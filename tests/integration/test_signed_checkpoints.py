"""A server that requires signatures, as its operator starts it: what is not signed is recorded, and never served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from integration.conftest import Run

from testkit.certificates import replace
from testkit.checkpoints import Chief, ones, step_model
from testkit.in_process import RunningService, until
from testkit.preloading import preloaded
from testkit.served import serving
from understudy.checkpoints import RunDir, Signer, SigningKey
from understudy.checkpoints.layout import step_name
from understudy.checkpoints.signing import public_file, write_key_pair
from understudy.cli.main import main
from understudy.clients import Client

pytestmark = pytest.mark.long

EVALUATOR = {"load_attempts": 2, "load_retry_seconds": 0.05}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    write_key_pair(tmp_path / "trainer.key")
    return tmp_path / "trainer.key"


def signing(tmp_path: Path, key: Path | None, run: str = "run") -> Chief:
    signer = None if key is None else Signer(key=SigningKey.read(key), run=run)
    return Chief(tmp_path / run, signer=signer)


def reason_of(service: RunningService, step: int) -> str:
    """Wait until a checkpoint is recorded; return why it failed."""
    client = service.client()

    def recorded() -> list[str]:
        return [entry.reason for entry in client.list_evaluations() if entry.step == step]

    until(lambda: bool(recorded()))
    return recorded()[0]


def test_only_signed_checkpoints_of_this_run_and_step_are_served(run_service: Run, tmp_path: Path, key: Path) -> None:
    other = tmp_path / "other.key"
    write_key_pair(other)
    run, another = RunDir(tmp_path / "run"), RunDir(tmp_path / "another")
    signing(tmp_path, key).publish(1)
    service = run_service(evaluator={**EVALUATOR, "require_signature": (public_file(other), public_file(key))})
    assert service.wait_ready() == 1

    signing(tmp_path, None).publish(2)
    shutil.copytree(run.checkpoint(1), run.checkpoint(3))
    signing(tmp_path, key, "another").publish(4)
    another.checkpoint(4).rename(run.checkpoint(4))
    unknown = tmp_path / "unknown.key"
    write_key_pair(unknown)
    signing(tmp_path, unknown).publish(5)
    signing(tmp_path, key, "another").publish(6)
    with (another.checkpoint(6) / "manifest.json").open("ab") as manifest:
        manifest.write(b" ")
    another.checkpoint(6).rename(run.checkpoint(6))

    assert "is not signed" in reason_of(service, 2)
    assert "is the manifest of step 1" in reason_of(service, 3)
    assert "signed for the run 'another', accepted is 'run'" in reason_of(service, 4)
    assert "is signed with the key" in reason_of(service, 5)
    assert "it was altered" in reason_of(service, 6)
    client = service.client()
    assert client.predict(ones(2)).step == 1
    signing(tmp_path, other).publish(7)
    until(lambda: client.predict(ones(2)).step == 7)


def test_keys_are_added_and_removed_while_the_service_runs(run_service: Run, tmp_path: Path, key: Path) -> None:
    new = tmp_path / "new.key"
    write_key_pair(new)
    accepted = tmp_path / "accepted.pem"
    replace(accepted, public_file(key).read_bytes())
    signing(tmp_path, key).publish(1)
    service = run_service(evaluator={**EVALUATOR, "require_signature": (accepted,)})
    assert service.wait_ready() == 1
    client = service.client()
    signing(tmp_path, new).publish(2)
    assert "is signed with the key" in reason_of(service, 2)

    replace(accepted, public_file(key).read_bytes() + public_file(new).read_bytes())
    until(lambda: client.predict(ones(2)).step == 2)

    def is_current() -> float:
        return service.metric("understudy_last_reload_successful", files="signature_keys")

    replace(accepted, b"damaged")
    until(lambda: is_current() == 0)
    signing(tmp_path, new).publish(3)
    until(lambda: client.predict(ones(2)).step == 3)

    replace(accepted, public_file(key).read_bytes())
    until(lambda: is_current() == 1)
    until(lambda: client.predict(ones(2)).step == 1)  # what the removed key signed is not served any more
    signing(tmp_path, new).publish(4)
    assert "is signed with the key" in reason_of(service, 4)
    assert client.predict(ones(2)).step == 1


def test_a_file_exchanged_before_the_load_is_not_loaded(run_service: Run, tmp_path: Path, key: Path) -> None:
    chief = signing(tmp_path, key)
    chief.publish(1)
    service = run_service(evaluator={**EVALUATOR, "require_signature": (public_file(key),)})
    assert service.wait_ready() == 1
    other = tmp_path / "other.keras"
    step_model(9).save(other)

    chief.publish_damaged(2, lambda model: shutil.copyfile(other, model))

    reason = reason_of(service, 2)
    assert "SHA-256" in reason or "bytes, its manifest says" in reason
    assert service.client().predict(ones(1)).step == 1


def test_a_folder_of_another_program_is_served_with_signatures_beside_its_files(
    run_service: Run, tmp_path: Path, key: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    step_model(1).save(theirs / "model-1.keras")
    signed = CliRunner().invoke(main, ["sign", str(theirs / "model-1.keras"), "--sign-key", str(key)])
    assert signed.exit_code == 0, signed.output
    service = run_service(
        {"checkpoints": theirs}, {**EVALUATOR, "require_signature": (public_file(key),), "run_name": "theirs"}
    )
    assert service.wait_ready() == 1
    step_model(3).save(theirs / "model-3.keras")
    assert "there is no model-3.keras.sig" in reason_of(service, 3)
    assert service.client().predict(ones(1)).step == 1


def test_a_checkpoint_that_an_earlier_process_took_over_unsigned_is_refused_after_a_restart(
    tmp_path: Path, key: Path
) -> None:
    """With real processes: the keys are made, the run is signed, exported and served by commands."""
    run = tmp_path / "run"
    signing(tmp_path, None).publish(1)
    with serving(run, "model", environ=preloaded()) as served, Client(served.grpc) as client:
        assert client.predict(ones(1)).step == 1
    assert (RunDir(run).leases / step_name(1)).exists()
    shutil.rmtree(RunDir(run).checkpoint(1))
    signing(tmp_path, key).publish(2)

    flags = ("--require-signature", str(public_file(key)))
    with serving(run, "model", *flags, environ=preloaded()) as served, Client(served.grpc) as client:
        assert client.predict(ones(1)).step == 2
        assert not (RunDir(run).leases / step_name(1)).exists()
    command = [sys.executable, "-m", "understudy.cli", "export", "--run-dir", str(run), "--step"]
    exported = subprocess.run(
        [*command, "2", "--output", str(tmp_path / "out.keras"), *flags],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "out.keras").exists()


def test_an_export_of_an_unsigned_checkpoint_is_refused(tmp_path: Path, key: Path) -> None:
    signing(tmp_path, None).publish(1)
    arguments = ["export", "--run-dir", str(tmp_path / "run"), "--step", "1", "--output", str(tmp_path / "out.keras")]
    refused = CliRunner().invoke(main, [*arguments, "--require-signature", str(public_file(key))])
    assert refused.exit_code == 1
    assert "is not signed" in refused.output
    assert not (tmp_path / "out.keras").exists()


def test_a_key_that_cannot_be_used_ends_the_start_with_a_sentence(tmp_path: Path, key: Path) -> None:
    command = [sys.executable, "-m", "understudy.cli", "serve", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--grpc-port", "0", "--http-port", "0", "--require-signature", str(key)],
        env={**os.environ, **preloaded()},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 1
    assert "is a private key, which belongs to the trainer alone" in ended.stderr


def test_the_commands_make_keys_and_sign(tmp_path: Path) -> None:
    signing(tmp_path, None).publish(1)
    folder = RunDir(tmp_path / "run").checkpoint(1)
    run = CliRunner().invoke
    made = run(main, ["keygen", str(tmp_path / "my.key")])
    assert made.exit_code == 0, made.output
    assert "identifier: " in made.output
    assert run(main, ["keygen", str(tmp_path / "my.key")]).exit_code == 1
    signed = run(main, ["sign", str(folder), "--sign-key", str(tmp_path / "my.key")])
    assert signed.exit_code == 0, signed.output
    assert json.loads((folder / "manifest.json").read_bytes())["run"] == "run"
    refused = run(main, ["sign", str(tmp_path / "nothing"), "--sign-key", str(tmp_path / "my.key")])
    assert refused.exit_code == 1
    assert "is no checkpoint" in refused.output
