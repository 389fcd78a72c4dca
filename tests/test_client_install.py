"""The client alone, installed from the built wheel into an empty environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from testkit.peer_server import STEP, Peer

ROOT = Path(__file__).parent.parent
INSTALL_SECONDS = 280
RUN_SECONDS = 60
PARTS = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*_pb2*")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment that has the client's wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("client")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        shutil.copy2(ROOT / part, source / part)
    for room in ROOT.glob("*/understudy"):
        shutil.copytree(room, source / room.parent.name / "understudy", ignore=NOT_SOURCE)
    venv.create(folder / "venv")
    programs = folder / "venv" / "bin"
    constraints = str(ROOT / "constraints.txt")
    install = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet"]
    completed = subprocess.run(
        [*install, "--constraint", constraints, "--build-constraint", constraints, str(source)],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return programs


def output_of(*command: str | Path) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False, env={})
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_nothing_of_the_server_is_installed_or_loaded(environment: Path) -> None:
    program = """
import importlib.util, json, sys
import understudy.clients
names = ("tensorflow", "keras", "starlette", "prometheus_client", "structlog")
print(json.dumps({
    "installed": [name for name in names if importlib.util.find_spec(name)],
    "loaded": sorted({name.partition(".")[0] for name in sys.modules} & {*names, "click", "rich", "ml_dtypes"}),
}))
"""
    found = json.loads(output_of(environment / "python", "-I", "-c", program))

    assert found == {"installed": [], "loaded": []}


def test_the_client_and_its_commands_reach_a_server(environment: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.npy"
    with Peer() as peer:
        program = f"""
import numpy, ml_dtypes
from understudy.clients import Client
numpy.save({str(rows)!r}, numpy.ones((2, 4), numpy.float32))
with Client({peer.target!r}) as client:
    print(client.predict({{"image": numpy.ones((2, 4), ml_dtypes.bfloat16)}}).output.dtype)
"""
        assert output_of(environment / "python", "-I", "-c", program) == "bfloat16\n"
        understudy = environment / "understudy"
        assert output_of(understudy, "health", "--target", peer.target) == "SERVING\n"
        answer = json.loads(output_of(understudy, "predict", rows, "--target", peer.target, "--json"))
        assert answer["step"] == STEP


def test_commands_explain_themselves_and_those_of_the_server_say_what_to_install(environment: Path) -> None:
    understudy = environment / "understudy"

    assert "--target" in output_of(understudy, "predict", "--help")
    completed = subprocess.run(
        [understudy, "serve", "--run-dir", "run"], capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert completed.returncode == 1
    assert "pip install 'understudy[server]'" in completed.stderr
    assert completed.stderr.count("\n") == 1
