"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from understudy.checkpoints import RunDir
from understudy.clients import AsyncClient, Client

_ROOT = Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", _README, re.DOTALL)


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Write the README's experiment and the three files it reads."""
    (block,) = (block for block in _python_blocks() if block.startswith("# flowers.py"))
    (tmp_path / "flowers.py").write_text(block)
    generator = np.random.default_rng(7)
    for name in ("train", "validation", "test"):
        images = generator.random((128, 32, 32, 3), np.float32)
        np.savez(tmp_path / f"{name}.npz", x=images, y=generator.integers(0, 5, 128))
    return tmp_path


def test_the_experiment_of_the_readme_trains(flowers: Path) -> None:
    command = [sys.executable, "-m", "understudy.cli", "train", "flowers.py:Flowers", "--run-dir", "runs/flowers"]
    command += ["--steps", "2", "--checkpoint-every", "2", "--strategy", "mirrored", "--logical-cpus", "2"]
    completed = subprocess.run(command, cwd=flowers, capture_output=True, text=True, timeout=100, check=False)
    assert completed.returncode == 0, completed.stderr
    assert RunDir(flowers / "runs" / "flowers").committed_steps() == [2]


def test_the_python_of_the_readme_is_python() -> None:
    blocks = _python_blocks()
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_client_methods_of_the_readme_exist() -> None:
    (block,) = (block for block in _python_blocks() if "understudy.clients import Client" in block)
    methods = set(re.findall(r"client\.(\w+)\(", block))
    assert methods >= {"predict", "evaluate", "watch_evaluations"}
    for method in methods:
        assert callable(getattr(Client, method))
        assert callable(getattr(AsyncClient, method))


def test_every_file_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", _README) if "://" not in link]
    assert links
    assert [link for link in links if not (_ROOT / link).exists()] == []
