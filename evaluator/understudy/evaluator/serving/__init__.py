"""Checkpoints in the evaluator: discovered, loaded, served, and unloaded."""
