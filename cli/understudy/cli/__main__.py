"""Lets ``python -m understudy.cli`` stand for ``understudy``."""

from __future__ import annotations

from understudy.cli.main import main

if __name__ == "__main__":
    main(prog_name="understudy")
