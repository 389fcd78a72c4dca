"""Evaluation datasets: held in memory, read from files, or defined by an experiment."""
