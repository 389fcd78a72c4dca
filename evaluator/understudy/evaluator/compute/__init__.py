"""Runs models: devices, slots that hold variables and traced functions, exact scoring, and batching."""
