"""Layers depend one way, and the client's half needs no TensorFlow."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from understudy.cli.main import main

ROOT = Path(__file__).parent.parent
PATIENCE_SECONDS = 60

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "proto": frozenset(),
    "clients": frozenset({"proto"}),
    "checkpoints": frozenset(),
    "experiments": frozenset(),
    "trainer": frozenset({"checkpoints", "experiments"}),
    "evaluator": frozenset({"checkpoints", "experiments"}),
    "service": frozenset({"evaluator", "proto", "clients"}),
    "cli": frozenset({"proto", "clients", "checkpoints", "experiments", "trainer", "evaluator", "service"}),
}
"""The diagram of docs/architecture.md: each layer, and those that it may import."""

EVALUATOR = ROOT / "evaluator" / "understudy" / "evaluator"

EVALUATOR_PACKAGES: Mapping[str, frozenset[str]] = {
    "batching": frozenset(),
    "datasets": frozenset(),
    "model": frozenset(),
    "tuning": frozenset({"batching", "model"}),
    "records": frozenset({"datasets"}),
    "serving": frozenset({"datasets", "records"}),
    "evaluation": frozenset({"batching", "datasets", "model", "records", "serving"}),
    "sharding": frozenset({"batching", "datasets", "evaluation", "model", "serving"}),
    "assembly": frozenset({"batching", "datasets", "evaluation", "model", "records", "serving", "sharding", "tuning"}),
}
"""The packages of the evaluator, and the other packages that each may import."""

EVALUATOR_ASSEMBLY = frozenset({"__init__", "evaluator", "evaluator_state", "factory", "lifecycle"})
"""The modules of the evaluator that import its packages; the other modules are imported by all of them."""

MAY_NOT_IMPORT: Mapping[str, frozenset[str]] = {
    "proto": frozenset({"tensorflow", "keras"}),
    "clients": frozenset({"tensorflow", "keras"}),
    "evaluator": frozenset({"grpc", "prometheus_client", "opentelemetry"}),
}
"""Libraries that a layer is kept free of."""

FRONT_END = frozenset({"addresses", "calls", "front_end", "listening_settings", "service_errors", "settings", "tls"})
"""What a front end of the service may import."""

ROOMS_OF_THE_SERVICE: Mapping[str, frozenset[str]] = {
    "callers": frozenset({"addresses", "calls", "refreshed_files", "service_errors", "tls"}),
    "calls": frozenset(),
    "handlers": frozenset({"calls", "served_model", "readiness"}),
    "fleet": frozenset({"calls", "readiness", "served_model", "service_errors"}),
    "templates": frozenset({"calls", "handlers", "services"}),
    "traffic": frozenset({"calls", "sample_gaps"}),
    "tracing": frozenset({"calls", "sample_gaps", "service_errors"}),
    "events": frozenset({"addresses", "refreshed_files", "service_errors", "settings"}),
    "exporters": frozenset({"events"}),
    "rest": frozenset({"addresses", "calls", "handlers", "readiness", "served_model"}),
    "page": frozenset({"calls", "live_numbers", "figures", "fleet", "readiness", "rest", "served_model"}),
    "grpcio": FRONT_END,
    "envoy": FRONT_END | {"logging", "readiness"},
}
"""The packages of the service, and which of its packages and modules each may import."""

CLIENT_COMMANDS = ("predict", "evaluate", "rescore", "compare", "status", "top", "watch", "promote", "health")


@functools.cache
def sources(layer: str) -> tuple[Path, ...]:
    files = (path for path in sorted((ROOT / layer / "understudy").rglob("*.py")) if "_pb2" not in path.name)
    return tuple(files)


@functools.cache
def imported_modules(file: Path) -> tuple[str, ...]:
    modules: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))):
        if isinstance(node, ast.Import):
            modules += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively; say the whole name"
            modules += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(modules)


def layer_of(module: str) -> str | None:
    """Return the layer of one of this project's modules."""
    top, _, rest = module.partition(".")
    if top != "understudy":
        return None
    package = rest.partition(".")[0]
    return next((layer for layer in MAY_IMPORT if (ROOT / layer / "understudy" / package).is_dir()), package)


def evaluator_part_of(module: str) -> str | None:
    """Return the package of the evaluator that a module belongs to, or its name directly in the evaluator."""
    names = module.split(".")
    return names[2] if names[:2] == ["understudy", "evaluator"] and len(names) > 2 else None


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_from_the_layers_it_may(layer: str) -> None:
    violations = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sources(layer)
        for module in imported_modules(file)
        if (other := layer_of(module)) is not None and other not in {layer, *MAY_IMPORT[layer]}
    ]

    assert sources(layer)
    assert not violations


@pytest.mark.parametrize("layer", MAY_NOT_IMPORT)
def test_a_layer_is_kept_free_of_libraries(layer: str) -> None:
    violations = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sources(layer)
        for module in imported_modules(file)
        if module.partition(".")[0] in MAY_NOT_IMPORT[layer]
    ]

    assert not violations


@pytest.mark.parametrize("package", EVALUATOR_PACKAGES)
def test_a_package_of_the_evaluator_imports_from_the_packages_it_may(package: str) -> None:
    files = [file for file in sources("evaluator") if file.is_relative_to(EVALUATOR / package)]
    violations = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imported_modules(file)
        if (other := evaluator_part_of(module)) in EVALUATOR_PACKAGES.keys() | EVALUATOR_ASSEMBLY
        and other not in {package, *EVALUATOR_PACKAGES[package]}
    ]

    assert files
    assert not violations


def test_the_shared_modules_of_the_evaluator_import_none_of_its_packages() -> None:
    violations = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in EVALUATOR.glob("*.py")
        if file.stem not in EVALUATOR_ASSEMBLY
        for module in imported_modules(file)
        if evaluator_part_of(module) in EVALUATOR_PACKAGES.keys() | EVALUATOR_ASSEMBLY
    ]

    assert {folder.parent.name for folder in EVALUATOR.glob("*/__init__.py")} == set(EVALUATOR_PACKAGES)
    assert not violations


def rooms_of_the_service(file: Path) -> Iterator[str]:
    """Yield the packages and modules of the service that a file imports."""
    for module in imported_modules(file):
        top, _, rest = module.partition("understudy.service.")
        if not top and rest:
            yield rest.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS_OF_THE_SERVICE)
def test_a_room_of_the_service_imports_from_the_rooms_it_may(room: str) -> None:
    files = [file for file in sources("service") if file.is_relative_to(ROOT / "service/understudy/service" / room)]
    violations = [
        f"{file.relative_to(ROOT)} imports {other}"
        for file in files
        for other in rooms_of_the_service(file)
        if other not in {room, *ROOMS_OF_THE_SERVICE[room]}
    ]

    assert files
    assert not violations


@pytest.mark.parametrize(
    ("room", "importers"),
    [
        ("grpcio", []),
        ("envoy", []),
        ("exporters", []),
        ("templates", ["service/understudy/service/server.py"]),
        ("page", ["service/understudy/service/server.py"]),
        ("tracing", ["service/understudy/service/features.py"]),
    ],
)
def test_front_ends_are_imported_by_nothing_and_the_fast_path_the_page_and_traces_by_one_module(
    room: str, importers: list[str]
) -> None:
    package = ROOT / "service/understudy/service" / room
    found = [
        str(file.relative_to(ROOT))
        for layer in MAY_IMPORT
        for file in sources(layer)
        if not file.is_relative_to(package) and room in rooms_of_the_service(file)
    ]

    assert package.is_dir()
    assert found == importers


def test_every_room_of_the_service_is_in_the_table() -> None:
    folders = {file.parent.name for file in (ROOT / "service/understudy/service").glob("*/__init__.py")}

    assert folders == set(ROOMS_OF_THE_SERVICE)


def test_every_layer_is_in_the_table() -> None:
    assert {folder.parent.name for folder in ROOT.glob("*/understudy")} == set(MAY_IMPORT)


def test_the_layers_share_one_namespace() -> None:
    assert not list(ROOT.glob("*/understudy/__init__.py"))


@pytest.mark.parametrize("layer", [layer for layer in MAY_IMPORT if layer != "proto"])
def test_what_a_layer_makes_public_is_there(layer: str) -> None:
    package = importlib.import_module(f"understudy.{layer}")

    missing = [name for name in getattr(package, "__all__", []) if not hasattr(package, name)]

    assert not missing


def loaded_after(program: str) -> set[str]:
    """Run a program in a fresh interpreter and return the top-level modules it loaded."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    completed = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return set(completed.stdout.splitlines()[-1].split())


def test_importing_the_client_loads_no_tensorflow() -> None:
    loaded = loaded_after("import understudy.clients")

    assert "understudy" in loaded
    assert not loaded & {"tensorflow", "keras", "h5py", "click", "rich"}


def test_no_command_loads_tensorflow_before_it_runs() -> None:
    names = main.list_commands(click.Context(main))
    loaded_after(f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module("understudy.cli." + name)
    assert not {{"tensorflow", "keras"}} & sys.modules.keys(), name
""")


def test_help_for_the_client_s_commands_loads_neither_tensorflow_nor_grpc() -> None:
    commands = [[], *([name] for name in CLIENT_COMMANDS)]
    loaded_after(f"""
import sys
from understudy.cli.main import main
for command in {commands!r}:
    main([*command, "--help"], standalone_mode=False)
    assert not {{"tensorflow", "keras", "grpc", "numpy"}} & sys.modules.keys(), command
""")
