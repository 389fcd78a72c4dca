"""Makes ``python -m understudy.cli`` run ``understudy``."""

from __future__ import annotations

from understudy.cli.main import main

if __name__ == "__main__":
    main(prog_name="understudy")
