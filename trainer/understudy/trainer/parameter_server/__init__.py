"""Asynchronous training: the chief schedules steps on the workers, and the variables live on the parameter servers."""
