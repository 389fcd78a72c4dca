"""Pictures and tables of what was recorded with an evaluation, for the page and for ``understudy report``."""
