"""Options derived from settings: where values come from, and what is said about bad ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from understudy.cli.options import settings_makers, settings_options


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    devices: tuple[str, ...] = field(default=(), metadata={"help": "Devices."})
    logical_cpus: int | None = field(default=None, metadata={"help": "Replicas.", "metavar": "N"})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    run_dir: Path = field(metadata={"help": "The run."})
    host: str = field(default="127.0.0.1", metadata={"help": "Address."})
    grpc_port: int = field(default=8500, metadata={"help": "Port."})
    delay_seconds: float = field(default=0.5, metadata={"help": "Delay."})
    reflection: bool = field(default=True, metadata={"help": "Reflection."})
    serve: int | Literal["latest", "best"] = field(default="latest", metadata={"help": "What to serve."})
    policy: str = field(default="every", metadata={"help": "Policy.", "choices": ("every", "latest")})
    eval_data: Mapping[str, Path] = field(default_factory=dict, metadata={"help": "Datasets."})
    compute: DeviceSettings = field(default_factory=DeviceSettings)
    conditions: tuple[str, ...] = field(default=(), metadata={"help": "Conditions.", "separator": ";"})

    def __post_init__(self) -> None:
        if not 0 <= self.grpc_port <= 65535:
            raise ValueError(f"grpc_port must be between 0 and 65535, not {self.grpc_port}")
        if self.policy == "latest" and self.serve == "best":
            raise ValueError("the best of the latest is the latest")


@dataclass(frozen=True, kw_only=True)
class PaintSettings:
    run_dir: Path = field(metadata={"help": "The run."})
    colour: str = field(default="red", metadata={"help": "Colour."})


@click.group()
def group() -> None:
    """A group."""


@group.command("serve")
@settings_options(settings=ServerSettings)
def serve(settings: ServerSettings) -> None:
    """Serve."""
    kept.append(settings)


@group.command("both")
@settings_options(server=ServerSettings, paint=PaintSettings)
def both(server: ServerSettings, paint: PaintSettings) -> None:
    """Serve and paint."""
    kept.extend([server, paint])


@group.command("either")
@settings_makers(server=ServerSettings, paint=PaintSettings, omit=("policy",))
def either(server: Callable[..., ServerSettings], paint: Callable[..., PaintSettings]) -> None:
    """Paint; the server's settings need not be valid."""
    kept.append(paint(colour="green"))
    if paint().colour == "blue":
        kept.append(server(policy="latest"))


kept: list[Any] = []


def invoke(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    kept.clear()
    return CliRunner().invoke(group, arguments, env=env)


def chosen(*arguments: str, env: Mapping[str, str] | None = None) -> ServerSettings:
    result = invoke("serve", "--run-dir", "RUN", *arguments, env=env)
    assert result.exit_code == 0, result.output
    (settings,) = kept
    assert isinstance(settings, ServerSettings)
    return settings


def toml(tmp_path: Path, text: str) -> str:
    file = tmp_path / "understudy.toml"
    file.write_text(text)
    return str(file)


def test_defaults_are_the_dataclass_own() -> None:
    assert chosen() == ServerSettings(run_dir=Path("RUN"))


def test_every_kind_of_field_is_parsed_from_flags() -> None:
    settings = chosen(
        *("--grpc-port", "0", "--delay-seconds", "1e-3", "--no-reflection", "--serve", "120", "--policy", "latest"),
        *("--eval-data", "a=a.npz,b=b.npz", "--eval-data", "c=c.npz"),
        *("--devices", "GPU:0,GPU:1", "--logical-cpus", "3"),
    )

    assert settings == ServerSettings(
        run_dir=Path("RUN"),
        grpc_port=0,
        delay_seconds=0.001,
        reflection=False,
        serve=120,
        policy="latest",
        eval_data={"a": Path("a.npz"), "b": Path("b.npz"), "c": Path("c.npz")},
        compute=DeviceSettings(devices=("GPU:0", "GPU:1"), logical_cpus=3),
    )


def test_every_kind_of_field_is_parsed_from_the_environment() -> None:
    environment = {
        "UNDERSTUDY_SERVE": "best",
        "UNDERSTUDY_REFLECTION": "false",
        "UNDERSTUDY_EVAL_DATA": "a=a.npz,b=b.npz",
        "UNDERSTUDY_DEVICES": "GPU:0,GPU:1",
    }

    settings = chosen(env=environment)

    assert settings.serve == "best"
    assert not settings.reflection
    assert settings.eval_data == {"a": Path("a.npz"), "b": Path("b.npz")}
    assert settings.compute.devices == ("GPU:0", "GPU:1")


def test_every_kind_of_field_is_parsed_from_a_file(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        """
        delay_seconds = 2
        devices = ["GPU:0", "GPU:1"]
        [serve]
        serve = 7
        reflection = false
        eval_data = { a = "a.npz" }
        """,
    )

    settings = chosen("--config", file)

    assert settings.delay_seconds == 2.0
    assert settings.compute.devices == ("GPU:0", "GPU:1")
    assert settings.serve == 7
    assert not settings.reflection
    assert settings.eval_data == {"a": Path("a.npz")}


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "grpc_port = 3\n")
    environment = {"UNDERSTUDY_GRPC_PORT": "2"}

    ports = [
        chosen("--config", file, "--grpc-port", "1", env=environment).grpc_port,
        chosen("--config", file, env=environment).grpc_port,
        chosen("--config", file).grpc_port,
        chosen().grpc_port,
    ]

    assert ports == [1, 2, 3, 8500]


def test_a_command_s_own_table_goes_before_the_top_of_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "grpc_port = 1\nhost = 'h'\n[serve]\ngrpc_port = 2\n")

    settings = chosen("--config", file)

    assert (settings.grpc_port, settings.host) == (2, "h")


def test_the_file_may_hold_what_other_commands_need(tmp_path: Path) -> None:
    file = toml(tmp_path, "colour = 'blue'\n[both]\ncolour = 'green'\n")

    assert chosen("--config", file).host == "127.0.0.1"


def test_the_file_itself_can_come_from_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, "run_dir = 'R'\n")

    result = invoke("serve", env={"UNDERSTUDY_CONFIG": file})

    assert result.exit_code == 0, result.output
    assert kept == [ServerSettings(run_dir=Path("R"))]


def test_several_settings_share_the_fields_they_have_in_common() -> None:
    result = invoke("both", "--run-dir", "R", "--colour", "blue", "--grpc-port", "1")

    assert result.exit_code == 0, result.output
    assert kept == [ServerSettings(run_dir=Path("R"), grpc_port=1), PaintSettings(run_dir=Path("R"), colour="blue")]


def test_a_command_that_needs_one_of_several_settings_leaves_the_others_unmade() -> None:
    painted = invoke("either", "--run-dir", "R", "--grpc-port", "70000")
    assert painted.exit_code == 0, painted.output
    assert kept == [PaintSettings(run_dir=Path("R"), colour="green")]

    served = invoke("either", "--run-dir", "R", "--grpc-port", "7", "--colour", "blue")
    assert served.exit_code == 0, served.output
    assert kept[1] == ServerSettings(run_dir=Path("R"), grpc_port=7, policy="latest")

    invalid = invoke("either", "--run-dir", "R", "--grpc-port", "70000", "--colour", "blue")
    assert "Invalid value for '--grpc-port'" in invalid.stderr
    assert "No such option '--policy'" in invoke("either", "--run-dir", "R", "--policy", "every").stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("grpc_prot = 1", "unknown key 'grpc_prot' at the top level; did you mean grpc_port?"),
        ("[serve]\ngrpc_prot = 1", "unknown key 'grpc_prot' at [serve]; did you mean grpc_port?"),
        ("[sevre]\ngrpc_port = 1", "unknown key 'sevre' at the top level; did you mean serve?"),
        ("[serve]\ncolour = 'red'", "unknown key 'colour' at [serve]"),
        ("both = 'best'", "unknown key 'both' at the top level"),
        ("grpc_port = [1]", "grpc_port takes one value, not an array"),
        ("grpc_port = ", "Invalid value (at end of document)"),
        (f"grpc_port = {'[' * 50_000}", "understudy.toml: it is nested too deeply"),
        (f"grpc_port = {'9' * 5000}", "understudy.toml: Exceeds the limit"),
        (r'run_dir = "a\u0000b"', "run_dir holds a zero byte, which no setting can have"),
        ("grpc_port = true", "'true' is not a valid integer. It came from the settings file."),
        ("[serve]\nserve = 'bets'", "'bets' is none of 'latest', 'best' or a value of type integer."),
    ],
)
def test_a_bad_file_is_refused_with_the_key_and_the_remedy(tmp_path: Path, text: str, complaint: str) -> None:
    result = invoke("serve", "--run-dir", "RUN", "--config", toml(tmp_path, text))

    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--grpc-port", "70000"], {}, "Invalid value for '--grpc-port': must be between 0 and 65535, not 70000"),
        (["--policy", "latest", "--serve", "best"], {}, "Error: the best of the latest is the latest"),
        (["--grpc-prot", "1"], {}, "No such option '--grpc-prot'. Did you mean '--grpc-port'?"),
        (["--eval-data", "a"], {}, "Invalid value for '--eval-data': 'a' is not of the form NAME=VALUE."),
        (["--eval-data", "a=1,a=2"], {}, "Invalid value for '--eval-data': 'a' is given twice"),
        (["--policy", "some"], {}, "'some' is not one of 'every', 'latest'."),
        (
            ["--delay-seconds", "inf"],
            {},
            "'--delay-seconds': inf is no finite number; to wait",
        ),
        (["--delay-seconds", "nan"], {}, "nan is no finite number"),
        (["--logical-cpus", str(2**64)], {}, f"{2**64} is too large; give at most {2**63 - 1}."),
        ([], {"UNDERSTUDY_GRPC_PORT": "x"}, "'x' is not a valid integer. It came from UNDERSTUDY_GRPC_PORT."),
    ],
)
def test_a_bad_value_is_refused_with_its_flag(
    arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    result = invoke("serve", "--run-dir", "RUN", *arguments, env=environment)

    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_a_setting_without_a_default_is_required() -> None:
    result = invoke("serve")

    assert result.exit_code == 2
    assert "Missing option '--run-dir'" in result.stderr


def test_help_shows_flags_metavars_choices_and_defaults() -> None:
    result = invoke("serve", "--help")

    text = " ".join(result.stdout.split())
    assert "--grpc-port INTEGER Port. [default: 8500]" in text
    assert "--reflection / --no-reflection" in text
    assert "--logical-cpus N" in text
    assert "--policy [every|latest]" in text
    assert "--config FILE" in text


def test_a_type_that_no_flag_can_give_is_a_mistake_of_the_programmer() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Impossible:
        loop: complex = field(default=1j, metadata={"help": "?"})

    with pytest.raises(TypeError, match="a setting cannot be of type <class 'complex'>"):
        settings_options(settings=Impossible)


def test_texts_with_commas_are_separated_by_another_character(tmp_path: Path) -> None:
    file = toml(tmp_path, 'conditions = ["a, b", "c"]')

    for settings in (
        chosen("--conditions", "a, b", "--conditions", "c"),
        chosen(env={"UNDERSTUDY_CONDITIONS": "a, b; c"}),
        chosen("--config", file),
    ):
        assert settings.conditions == ("a, b", "c")
