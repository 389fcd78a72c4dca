"""The distributions as a release has them: a wheel from each sdist, installed into empty environments."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

from testkit.peer_server import STEP, Peer

ROOT = Path(__file__).parent.parent
INSTALL_SECONDS = 200
RUN_SECONDS = 60
MEGABYTE = 1_000_000
CLIENT_PACKAGES = {
    "understudy-client",
    "grpcio",
    "grpcio-health-checking",
    "googleapis-common-protos",
    "ml-dtypes",
    "numpy",
    "protobuf",
    "typing-extensions",  # grpcio's
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Install = Callable[[str], Path]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what `make dist` builds."""
    folder = tmp_path_factory.mktemp("dist")
    _run(str(ROOT / "tools" / "build_dist.sh"), str(folder))
    return folder


@pytest.fixture(scope="module")
def install(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Return a function that installs a wheel with its dependencies into an empty environment."""

    def install(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (wheel,) = dist.glob(f"{name}-*.whl")
        _uv("venv", str(folder))
        constraints = str(ROOT / "constraints.txt")
        _uv("pip", "install", "--python", str(folder), "-c", constraints, "--find-links", str(dist), str(wheel))
        return folder / "bin"

    return install


@pytest.fixture(scope="module")
def client_programs(install: Install) -> Path:
    return install("understudy_client")


@pytest.fixture(scope="module")
def programs(install: Install) -> Path:
    return install("understudy")


def _uv(*arguments: str) -> None:
    _run("bash", "-c", 'source tools/uv_index.sh && "$uv" "$@"', "uv", "--quiet", *arguments)


def _run(*command: str) -> None:
    completed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, env=os.environ
    )
    assert completed.returncode == 0, completed.stderr


def output_of(*command: str | Path) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False, env={})
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def installed(python: Path) -> dict[str, list[str]]:
    """Return the files of each distribution of an environment."""
    program = """
import importlib.metadata, json
found = importlib.metadata.distributions()
print(json.dumps({each.name.lower().replace("_", "-"): [str(file.locate()) for file in each.files] for each in found}))
"""
    files: dict[str, list[str]] = json.loads(output_of(python, "-I", "-c", program))
    return files


def modules_of(files: list[str]) -> list[str]:
    """Return the paths of the modules of the project but generated ones, from ``understudy/`` on."""
    paths = (PurePath(file).parts for file in files if file.endswith(".py") and "_pb2" not in file)
    return ["/".join(parts[len(parts) - parts[::-1].index("understudy") - 1 :]) for parts in paths]


def version_of(project: Path) -> str:
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def test_the_client_needs_little_and_is_little(client_programs: Path) -> None:
    python = client_programs / "python"
    files = installed(python)
    assert set(files) == CLIENT_PACKAGES
    output_of(python, "-m", "compileall", "-q", *files["understudy-client"])
    folders = {Path(file).parent for file in files["understudy-client"]}
    sizes = [file.stat().st_size for folder in folders for file in (*folder.iterdir(), *folder.glob("__pycache__/*"))]
    assert 100_000 < sum(sizes) <= MEGABYTE


def test_what_few_calls_need_is_loaded_by_those_calls(client_programs: Path) -> None:
    program = """
import json, sys
import understudy.clients
print(json.dumps(sorted({"grpc_health.v1.health_pb2", "google.rpc.error_details_pb2", "ml_dtypes"} & set(sys.modules))))
"""
    assert json.loads(output_of(client_programs / "python", "-I", "-c", program)) == []


def test_the_client_calls_a_server(client_programs: Path) -> None:
    with Peer() as peer:
        program = f"""
import numpy, ml_dtypes
from understudy.clients import Client
with Client({peer.target!r}) as client:
    assert client.is_serving()
    print(client.predict({{"image": numpy.ones((2, 4), ml_dtypes.bfloat16)}}).output.dtype)
"""
        assert output_of(client_programs / "python", "-I", "-c", program) == "bfloat16\n"


def test_both_distributions_have_one_version_and_no_file_in_common(programs: Path) -> None:
    version = version_of(ROOT)
    assert version_of(ROOT / "clients") == version
    assert output_of(programs / "understudy", "--version") == f"understudy, version {version}\n"
    files = installed(programs / "python")
    assert not set(files["understudy"]) & set(files["understudy-client"])
    modules = [modules_of(files[name]) for name in ("understudy", "understudy-client")]
    rooms = [str(file) for file in ROOT.glob("*/understudy/**/*.py") if "_pb2" not in file.name]
    assert sorted([*modules[0], *modules[1]]) == sorted(modules_of(rooms))
    assert "understudy/clients/client.py" in modules[1]


def test_the_commands_reach_a_server(programs: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.npy"
    understudy = programs / "understudy"
    with Peer() as peer:
        output_of(programs / "python", "-c", f"import numpy; numpy.save({str(rows)!r}, numpy.ones((2, 4), 'float32'))")
        assert output_of(understudy, "health", "--target", peer.target) == "SERVING\n"
        answer = json.loads(output_of(understudy, "predict", rows, "--target", peer.target, "--json"))
        assert answer["step"] == STEP


def test_commands_explain_themselves_and_those_of_the_server_say_what_to_install(programs: Path) -> None:
    understudy = programs / "understudy"

    assert "--target" in output_of(understudy, "predict", "--help")
    completed = subprocess.run(
        [understudy, "serve", "--run-dir", "run"], capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert completed.returncode == 1
    assert "pip install 'understudy[server]'" in completed.stderr
    assert completed.stderr.count("\n") == 1
