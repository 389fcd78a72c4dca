"""The registry of servers: how to start each with one model on one port. Add an entry for another server."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speed.models import BATCHES, INPUT, OUTPUT, BenchmarkModel
from benchmarks.speed.processes import BenchmarkError, Launch, free_port
from understudy.evaluator.tuning.tuning_file import TUNING_FILE

LONG_QUEUE_ROWS = 64 * max(BATCHES)
"""Long enough that the requests of 64 connections are not refused; the other servers' queues are unbounded."""

ROOT = Path(__file__).parents[2]

_PEERS = ROOT / ".tools" / "peers"
_PROGRAMS = Path(__file__).parent / "peers"
_LARGEST_BATCH = max(BATCHES)
_TRITON_TYPES = {"BYTES": "STRING"}


@dataclass(frozen=True, kw_only=True)
class Site:
    """The parameters of a server's start: a model and its file, a gRPC port on 127.0.0.1, and an empty folder."""

    model: BenchmarkModel
    model_file: Path
    port: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server to be measured. One that echoes returns empty messages, so that neither values nor the model matter."""

    name: str
    launch: Callable[[Site], Launch]
    echoes: bool = False


def serve_command(site: Site, *options: str) -> Sequence[str]:
    """Return the command of ``understudy serve``, without the model."""
    ports = ("--host", "127.0.0.1", "--grpc-port", str(site.port), "--http-port", "0")
    places = ("--state-dir", str(site.folder / "state"), "--model-name", site.model.name, "--log-level", "warning")
    return (sys.executable, "-m", "understudy.cli", "serve", *ports, *places, "--no-self-tuning", *options)


def has_envoy() -> bool:
    """Return whether the Envoy front end is installed."""
    return importlib.util.find_spec("pyvoy") is not None


def own(*options: str, found: Path | None = None) -> list[Server]:
    """Return this project's front ends with these options, and with the settings that an earlier server found."""
    names = ("understudy grpcio", "understudy envoy") if has_envoy() else ("understudy grpcio",)
    return [Server(name=name, launch=_understudy(name, *options, found=found)) for name in names]


def tuning() -> Server:
    """Return this project's server as it finds its settings."""
    launch = _understudy("understudy grpcio", "--self-tuning", "--log-level", "info")
    return Server(name="understudy, tuning itself", launch=launch)


def found_settings(site_folder: Path) -> Path:
    """Return where a server of this project writes the settings that it finds."""
    return site_folder / "state" / TUNING_FILE


def peer_versions() -> dict[str, str]:
    """Return the versions of the other servers that are installed."""
    lines = [line for held in _PEERS.glob("*/.holds") for line in held.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    return {name: pins[name] for name in ("nvidia-pytriton", "kserve", "mlserver") if name in pins}


def frontend_options(name: str) -> Sequence[str]:
    """Return the options of ``understudy serve`` for the front end of this name."""
    return ("--frontend", name.split()[1]) if has_envoy() else ()


def floor() -> list[Server]:
    """Return the servers that only carry messages, one for each front end."""
    servers = [Server(name="echo grpc.aio", launch=_echo, echoes=True)]
    if has_envoy():
        servers.append(Server(name="echo envoy", launch=_echo_in_envoy, echoes=True))
    return servers


def peers() -> list[Server]:
    """Return the other projects' servers; raise BenchmarkError if one of them is not installed."""
    for name in ("triton", "kserve", "mlserver"):
        if not (_PEERS / name / ".holds").exists():
            raise BenchmarkError(f"{name} is not installed; tools/fetch_peers.sh installs it")
    return [
        *tritons(),
        Server(name="pytriton", launch=_pytriton),
        Server(name="kserve", launch=_kserve),
        Server(name="mlserver", launch=_mlserver),
    ]


def tritons() -> list[Server]:
    """Return Triton with one and with two instances of the model."""
    return [Server(name="triton 1 instance", launch=_triton(1)), Server(name="triton 2 instances", launch=_triton(2))]


def _understudy(name: str, *options: str, found: Path | None = None) -> Callable[[Site], Launch]:
    """Return how to start ``understudy serve`` on a folder that holds the model, with the settings that were found."""

    def launch(site: Site) -> Launch:
        checkpoints = site.folder / "checkpoints"
        checkpoints.mkdir()
        shutil.copyfile(site.model_file, checkpoints / "model_1.keras")
        chosen = (*frontend_options(name), *site.model.serve_options, *options)
        if found is not None:
            found_settings(site.folder).parent.mkdir()
            shutil.copyfile(found, found_settings(site.folder))
            chosen = (*chosen, "--self-tuning")
        return Launch(command=serve_command(site, "--checkpoints", str(checkpoints), *chosen))

    return launch


def _echo(site: Site) -> Launch:
    return Launch(command=(sys.executable, "-m", "benchmarks.speed.programs.echo", str(site.port)))


def _echo_in_envoy(site: Site) -> Launch:
    application = "benchmarks.speed.programs.echo_asgi:app"
    program = str(Path(sys.executable).with_name("pyvoy"))
    command = (program, application, "--address", "127.0.0.1", "--port", str(site.port))
    return Launch(command=(*command, "--no-lifespan"), environ={"PYTHONPATH": str(ROOT)})


def _triton(instances: int) -> Callable[[Site], Launch]:
    """Return how to start Triton with its Python backend and dynamic batching."""

    def launch(site: Site) -> Launch:
        packages = next((_PEERS / "triton" / "lib").glob("python3.*/site-packages"))
        home = packages / "pytriton" / "tritonserver"
        _lay_out_backend(home, site.folder / "backends" / "python")
        _lay_out_model(site, site.folder / "models" / site.model.name, instances, packages)
        command = (
            str(home / "bin" / "tritonserver"),
            f"--model-repository={site.folder / 'models'}",
            f"--backend-directory={site.folder / 'backends'}",
            "--disable-auto-complete-config",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={site.port}",
            "--allow-http=false",
            "--allow-metrics=false",
        )
        return Launch(command=command, environ={"LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs")})

    return launch


def _lay_out_backend(home: Path, target: Path) -> None:
    """Copy the Python backend beside its stub for the system's Python 3.11."""
    shutil.copytree(home / "backends" / "python", target)
    shutil.copy(home / "python_backend_stubs" / "3.11" / "triton_python_backend_stub", target)


def _lay_out_model(site: Site, target: Path, instances: int, packages: Path) -> None:
    """Write the model's folder. The backend's interpreter ignores PYTHONPATH, so the model adds its module paths."""
    version = target / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(f"""import site

site.addsitedir("{packages}")
site.addsitedir("{_PROGRAMS}")

from triton_model import TritonPythonModel
""")
    datatype = _TRITON_TYPES.get(site.model.datatype, site.model.datatype)
    dims = ", ".join(str(length or -1) for length in site.model.input_shape)
    output_dims = ", ".join(map(str, site.model.output_shape))
    (target / "config.pbtxt").write_text(f"""name: "{site.model.name}"
backend: "python"
max_batch_size: {_LARGEST_BATCH}
dynamic_batching {{ }}
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
input [ {{ name: "{INPUT}" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]
output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {output_dims} ] }} ]
parameters {{ key: "model_file" value: {{ string_value: "{site.model_file}" }} }}
""")


def _pytriton(site: Site) -> Launch:
    program = str(_PROGRAMS / "pytriton_server.py")
    ports = [str(port) for port in (site.port, free_port(), free_port())]
    command = (str(_PEERS / "triton/bin/python"), program, site.model.name, str(site.model_file), *ports)
    return Launch(command=command, environ={"PYTRITON_HOME": str(site.folder)})


def _kserve(site: Site) -> Launch:
    program = (str(_PEERS / "kserve/bin/python"), str(_PROGRAMS / "kserve_server.py"))
    return Launch(command=(*program, site.model.name, str(site.model_file), str(site.port)))


def _mlserver(site: Site) -> Launch:
    settings = {
        "debug": False,
        "host": "127.0.0.1",
        "http_port": free_port(),
        "grpc_port": site.port,
        "metrics_endpoint": None,
        "parallel_workers": 0,
    }
    model = {
        "name": site.model.name,
        "implementation": "mlserver_model.Net",
        "parameters": {"uri": str(site.model_file)},
    }
    (site.folder / "settings.json").write_text(json.dumps(settings))
    (site.folder / "model-settings.json").write_text(json.dumps(model))
    command = (str(_PEERS / "mlserver" / "bin" / "mlserver"), "start", str(site.folder))
    return Launch(command=command, environ={"PYTHONPATH": str(_PROGRAMS)})
