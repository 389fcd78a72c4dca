"""The state that a process keeps when it becomes Envoy: its program and the prepared resources."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "_UNDERSTUDY_IN_ENVOY"
"""The environment variable that holds the state."""

_ADMIN_SOCKET: Final = "admin.sock"


@dataclass(frozen=True, kw_only=True)
class ReexecState:
    """A program to re-run inside Envoy.

    Attributes:
        module: The module it was started as with ``python -m``; None if it was started as a script.
        arguments: Its ``sys.argv``.
        executable: The Python that ran it.
        replaced: The original values of replaced environment variables; None for variables that were unset.
        port: The port that Envoy listens on.
        folder: A folder of this process that only this user can read.
    """

    module: str | None
    arguments: list[str]
    executable: str
    replaced: Mapping[str, str | None]
    port: int
    folder: str

    @classmethod
    def of_this_process(cls, *, replaced: Mapping[str, str | None], port: int, folder: Path) -> ReexecState:
        """Return the program that this process runs."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = None if spec is None else spec.name.removesuffix(".__main__")
        return cls(
            module=module,
            arguments=list(sys.argv),
            executable=sys.executable,
            replaced=replaced,
            port=port,
            folder=str(folder),
        )

    @classmethod
    def restore(cls) -> ReexecState:
        """Return the state from the environment, and restore the original environment.

        Raises:
            KeyError: `launch.exec_envoy` did not start this process.
        """
        program = cls(**json.loads(os.environ.pop(VARIABLE)))
        for name, value in program.replaced.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.executable = program.executable
        sys.argv[:] = program.arguments
        return program

    def to_text(self) -> str:
        """Return the value for `VARIABLE`."""
        return json.dumps(asdict(self))

    @property
    def admin_socket(self) -> Path:
        """The socket of Envoy's admin interface."""
        return Path(self.folder, _ADMIN_SOCKET)

    def run_and_exit(self) -> None:
        """Run the program and end the process with its exit status, regardless of other threads. Does not return."""
        status = self._run()
        sys.stdout.flush()
        sys.stderr.flush()
        self.clean_up()
        os._exit(status)

    def clean_up(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> int:
        try:
            if self.module is None:
                runpy.run_path(self.arguments[0], run_name="__main__")
            else:
                runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as ending:
            return _status_of(ending)
        except BaseException:  # noqa: BLE001 - as the interpreter handles it at the end of a program
            traceback.print_exc()
            return 1
        return 0


def _status_of(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    sys.stderr.write(f"{ending.code}\n")
    return 1
