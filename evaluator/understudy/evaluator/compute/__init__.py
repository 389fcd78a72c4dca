"""Runs models: the devices, the slots that hold variables and traced functions, exact scoring, and the batcher."""
