"""What is around a call, whatever its transport: its status, its context, metrics and log, and the table of methods."""
